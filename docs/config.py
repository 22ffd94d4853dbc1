"""Writes docs/config.md: every field of a config, from the comments beside the fields.

`python docs/config.py` belongs to each change of a field.
"""

import pathlib

from pretrainax.reporting import config_reference

PAGE = pathlib.Path(__file__).with_name("config.md")

if __name__ == "__main__":
    PAGE.write_text(config_reference.page())
