"""Writes the configs of README's table of architectures, which follow from the zoo: `python docs/architectures.py`."""

import pathlib
import re

from pretrainax import zoo
from pretrainax.config import ModelConfig

README = pathlib.Path(__file__).parents[1] / "README.md"
LABELS = {"encoder_decoder": "encoder-decoder"}  # of rows, where they are not the family
OF_NO_ROW = {"decoder": ["shakespeare_char"], "encoder_decoder": ["quickstart"]}  # configs of no published size


def kind(model: ModelConfig) -> str:
    return "encoder with a generator" if model.generator is not None else model.family


def table(text: str) -> str:
    """Returns README with the configs of each row as the zoo has them."""
    configs: dict[str, dict[str, None]] = {}
    for family in zoo.FAMILIES:
        for variant, config in family.configs.items():
            name = pathlib.Path(config.partition(":")[0]).stem
            configs.setdefault(kind(family.preset(variant)), {})[name] = None
    for of, names in configs.items():
        cell = " ".join(f"`{name}`" for name in [*names, *OF_NO_ROW.get(of, [])])
        row = rf"^(\| {LABELS.get(of, of)}(?:, [^|]*)? \|) [^|]* \|"
        text, count = re.subn(row, rf"\1 {cell} |", text, flags=re.MULTILINE)
        assert count == 1, f"README has {count} rows for {of}"
    return text


if __name__ == "__main__":
    README.write_text(table(README.read_text()))
