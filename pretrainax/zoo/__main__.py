"""`python -m pretrainax.zoo [--only=gemma] [--markdown]`: every published architecture of this house.

Parameters are counted by `eval_shape`: nothing is allocated. The differences are measured by tests/support/parity.py.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax

from pretrainax import models, zoo
from pretrainax.config import ModelConfig, UserError
from pretrainax.models.active import active_parameters
from pretrainax.models.electra import discriminator_config
from pretrainax.reporting import tables

COLUMNS = "family row config parameters layers width heads context objective paper logits gradients".split()
LEGEND = (
    "Config: what trains it, --config=…; none: no config of this house does. Parameters count a tied matrix once; of "
    "a mixture of experts in brackets those that a token uses. "
    "Layers: of each stack, and so width and heads where these differ; heads: of queries, and of keys where they are "
    "fewer. Logits: the largest difference from transformers', or where it has no such model from a reference written "
    "of its paper, on tiny models of random weights, in float32; gradients: the largest relative difference of a "
    "parameter's gradient of the pretraining loss. An empty cell: there is neither."
)


def rows(only: str = "") -> Iterator[tuple[str, ...]]:
    """Yields the cells of COLUMNS for each preset whose name starts with `only`."""
    differences = json.loads(Path(__file__).with_name("parity.json").read_text())
    for name, (family, variant) in zoo.PRESETS.items():
        if name.startswith(only):
            config = family.preset(variant)
            measured = differences.get(family.name, {})
            yield (
                family.name,
                name,
                family.configs.get(variant, "none"),
                f"{count(config):,}" + (f" ({active_parameters(config):,})" if config.experts else ""),
                config.shown("num_layers"),
                config.shown("d_model"),
                " + ".join(map(_heads, config.sized.values())),
                _context(config),
                family.objective,
                family.paper,
                *(f"{measured[kind]:.0e}" if measured else "" for kind in ("logits", "gradient")),
            )


def count(config: ModelConfig) -> int:
    """Counts the trained numbers of a model; of one with a generator those that are kept, as papers count them."""
    config = discriminator_config(config) if config.generator else config
    return sum(math.prod(x.shape) for x in jax.tree.leaves(models.abstract_params(config)))


def _heads(config: ModelConfig) -> str:
    return f"{config.num_heads}" if config.kv_heads == config.num_heads else f"{config.num_heads} / {config.kv_heads}"


def _context(config: ModelConfig) -> str:
    return "any" if config.position.max_length is None else f"{config.position.max_length:,}"


def markdown(table: list[tuple[str, ...]]) -> str:
    """Returns the table as a page."""
    return f"# The zoo\n\n{LEGEND}\n\n" + tables.markdown(COLUMNS, table, padded=False)


def text(table: list[tuple[str, ...]]) -> str:
    """Returns the table in columns, for a terminal."""
    return f"{tables.text_table([COLUMNS, *table])}\n\n{LEGEND}\n"


def main() -> None:
    from absl import flags

    from pretrainax import cli  # defines flags, and stands above the zoo

    only = flags.DEFINE_string("only", "", "Start of the names of the rows to print: gemma, t5_v1_0")
    as_markdown = flags.DEFINE_bool("markdown", False, "Print docs/zoo.md")

    def run() -> int:
        table = list(rows(only.value))
        if not table:
            raise UserError(f"--only={only.value}: no row has a name that starts so")
        print((markdown if as_markdown.value else text)(table), end="")
        return 0

    cli.run(run)


if __name__ == "__main__":
    main()
