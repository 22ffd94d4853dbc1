"""Writes the generated reference pages: docs/config.md, docs/batch.md and docs/commands.md.

Run `python docs/reference.py` after a change of a config field, of an array of a batch or of a command's flags.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

from pretrainax import models  # noqa: F401  registers the arrays of its families
from pretrainax.__main__ import MODULES
from pretrainax.data import objectives  # noqa: F401  registers the arrays of its objectives
from pretrainax.data.batch import FIELDS
from pretrainax.reporting import config_reference
from pretrainax.reporting.tables import markdown

FOLDER = pathlib.Path(__file__).parent
BATCH = """\
# The arrays of a batch

`pretrainax/data/batch.py` defines the arrays, and `check_batch` checks the first batch of every run. A family is an
architecture: encoder, decoder, encoder-decoder or recurrent. All arrays are int32 unless the table says float32.

Axes: B rows; T tokens per row; S tokens per row of the encoder of an encoder-decoder; N predictions per row (T, or
fewer if they are gathered); L labels per row; C characters per word.

"""
COMMANDS = """\
# Commands

`pretrainax COMMAND` and `python -m pretrainax.MODULE` are equivalent. A command exits with status 2 on an invalid
config or input and prints one line. `--help` prints the text below; with `--config=FILE` it also prints
[every field](config.md) of that config.
"""


def batch_page() -> str:
    """Returns docs/batch.md: a row for each array of a batch."""
    header, rows = ("name", "shape", "dtype", "families", "required", "meaning"), []
    for field in FIELDS:
        families = ", ".join(family.replace("_", "-") for family in field.families) or "all"
        shape, dtype = ", ".join(field.shape), field.dtype.__name__
        rows.append((f"`{field.name}`", shape, dtype, families, "no" if field.optional else "yes", field.meaning))
    rows.sort(key=lambda row: row[0].strip("`") if row[3] == "recurrent" else "")  # registered in the order of imports
    return BATCH + markdown(header, rows, padded=False)


def commands_page() -> str:
    """Returns docs/commands.md: the help of each command."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        helps = list(pool.map(help_of, MODULES))
    sections = (f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in zip(MODULES, helps, strict=True))
    return COMMANDS + "".join(sections)


def help_of(command: str) -> str:
    """Returns the output of `pretrainax COMMAND --help`, without paths of this machine."""
    words = [sys.executable, "-m", "pretrainax", command, "--help"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=True)
    return re.sub(r"^/.*/(pretrainax/[\w/]+\.py):$", r"\1:", done.stdout.strip(), flags=re.MULTILINE)


if __name__ == "__main__":
    (FOLDER / "config.md").write_text(config_reference.page())
    (FOLDER / "batch.md").write_text(batch_page())
    (FOLDER / "commands.md").write_text(commands_page())
