"""Prints the table of published architectures: `python -m pretrainax.zoo [--only=gemma] [--markdown]`.

`jax.eval_shape` computes the parameter shapes, so that counting parameters allocates no arrays. parity.json records how
much logits and gradients differ from those of transformers, as measured by tests/support/parity.py.
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
    "Config: the value of `--config` that trains the model; none: this repository has no config for it. Parameters: a "
    "tied matrix counts once; the number in brackets is the parameters per token of a mixture of experts. Layers: of "
    "each stack. Width and heads: of each stack if the stacks differ. Heads: query heads / key heads if these differ. "
    "Logits: the largest difference from the logits of transformers, in float32, on tiny models with random weights. "
    "The reference is an implementation of the paper if transformers lacks the model. Gradients: the largest relative "
    "difference of a parameter's gradient of the pretraining loss. An empty cell: there is no reference."
)


def rows(only: str = "") -> Iterator[tuple[str, ...]]:
    """Yields a table row, with one cell per column of COLUMNS, for each preset whose name starts with `only`.

    Args:
      only: prefix of the preset names; "" selects all presets.
    """
    differences = json.loads(Path(__file__).with_name("parity.json").read_text())
    for name, (family, variant) in zoo.PRESETS.items():
        if name.startswith(only):
            config = family.preset(variant)
            family_differences = differences.get(family.name, {})
            yield (
                family.name,
                name,
                family.configs.get(variant, "none"),
                f"{count(config):,}" + (f" ({active_parameters(config):,})" if config.experts else ""),
                config.format_size("num_layers"),
                config.format_size("d_model"),
                " + ".join(map(_heads, config.sized.values())),
                _context(config),
                family.objective,
                family.paper,
                *(f"{family_differences[kind]:.0e}" if family_differences else "" for kind in ("logits", "gradient")),
            )


def count(config: ModelConfig) -> int:
    """Counts the parameters of a model, excluding the generator of ELECTRA and DeBERTa v3, as the papers do."""
    config = discriminator_config(config) if config.generator else config
    return sum(math.prod(x.shape) for x in jax.tree.leaves(models.abstract_params(config)))


def _heads(config: ModelConfig) -> str:
    return f"{config.num_heads}" if config.kv_heads == config.num_heads else f"{config.num_heads} / {config.kv_heads}"


def _context(config: ModelConfig) -> str:
    return "any" if config.position.max_length is None else f"{config.position.max_length:,}"


def markdown(table: list[tuple[str, ...]]) -> str:
    """Formats the Markdown page docs/zoo.md: a title, LEGEND, and the rows of `table` with the header COLUMNS."""
    return f"# The zoo\n\n{LEGEND}\n\n" + tables.markdown(COLUMNS, table, padded=False)


def format_table(table: list[tuple[str, ...]]) -> str:
    """Formats a table for terminals: the rows of `table` with the header COLUMNS, followed by LEGEND."""
    return f"{tables.text_table([COLUMNS, *table])}\n\n{LEGEND}\n"


def main() -> None:
    from absl import flags

    from pretrainax import cli  # Imported here because it defines flags and depends on the zoo.

    only = flags.DEFINE_string("only", "", "Prefix of the names of the presets to print: gemma, t5_v1_0")
    as_markdown = flags.DEFINE_bool("markdown", False, "Print the table as the Markdown page docs/zoo.md")

    def run() -> int:
        table = list(rows(only.value))
        if not table:
            raise UserError(f"--only={only.value}: no preset has a name with this prefix")
        print((markdown if as_markdown.value else format_table)(table), end="")
        return 0

    cli.run(run)


if __name__ == "__main__":
    main()
