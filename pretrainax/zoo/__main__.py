"""Prints the table of published architectures: `python -m pretrainax.zoo [--only=gemma] [--markdown]`.

`jax.eval_shape` computes the parameter shapes, so that counting parameters allocates no arrays. parity.json records the
differences of logits and gradients from transformers, as measured by tests/support/parity.py.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from pretrainax import zoo
from pretrainax.config import ModelConfig, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting import tables

# The functions import JAX and the models. These imports take seconds, and --help must not wait for them.
COLUMNS = "family row config parameters layers width heads context objective paper logits gradients".split()
LEGEND = (
    "Config: the value of `--config` that trains the model; none: this repository has no config for it. The "
    "variants :tiny, :mini and :midi of configs are small models of this project, which no row describes. Parameters: "
    "a tied matrix counts once; the number in brackets is the parameters per token of a mixture of experts. Layers: of "
    "each stack. Width and heads: of each stack if the stacks differ. Heads: query heads / key heads if these differ. "
    "Logits: the largest difference from the logits of transformers, in float32, on tiny models with random weights. "
    "The reference is an implementation of the paper if transformers lacks the model. Gradients: the largest relative "
    "difference of a parameter's gradient of the pretraining loss. An empty cell: there is no reference."
)


def entries(only: str = "") -> Iterator[JsonObject]:
    """Yields the values of each preset whose name starts with `only`, by name.

    "active" is the number of parameters per token of a mixture of experts. Values of "layers", "width" and "heads" are
    strings, because the stacks of a model can differ. A "context" of None is unlimited.

    Args:
      only: prefix of the preset names; "" selects all presets.
    """
    from pretrainax.models.active import active_parameters

    differences = json.loads(Path(__file__).with_name("parity.json").read_text())
    for name, (family, variant) in zoo.PRESETS.items():
        if name.startswith(only):
            config = family.preset(variant)
            family_differences = differences.get(family.name, {})
            yield {
                "family": family.name,
                "preset": name,
                "config": family.configs.get(variant),
                "parameters": count(config),
                "active": active_parameters(config) if config.experts else None,
                "layers": config.format_size("num_layers"),
                "width": config.format_size("d_model"),
                "heads": " + ".join(map(_heads, config.sized.values())),
                "context": config.position.max_length,
                "objective": family.objective,
                "paper": family.paper,
                "logits": family_differences.get("logits"),
                "gradients": family_differences.get("gradient"),
            }


def rows(only: str = "") -> Iterator[tuple[str, ...]]:
    """Yields the values of `entries` as a table row, with one cell per column of COLUMNS."""
    for entry in entries(only):
        active = f" ({entry['active']:,})" if entry["active"] is not None else ""
        cells = entry | {
            "row": entry["preset"],
            "config": entry["config"] or "none",
            "parameters": f"{entry['parameters']:,}{active}",
            "context": "any" if entry["context"] is None else f"{entry['context']:,}",
        }
        cells |= {kind: "" if entry[kind] is None else f"{entry[kind]:.0e}" for kind in ("logits", "gradients")}
        yield tuple(cells[column] for column in COLUMNS)


def count(config: ModelConfig) -> int:
    """Counts the parameters of a model, excluding the generator of ELECTRA and DeBERTa v3, as the papers do."""
    import jax

    from pretrainax import models
    from pretrainax.models.electra import discriminator_config

    config = discriminator_config(config) if config.generator else config
    return sum(math.prod(x.shape) for x in jax.tree.leaves(models.abstract_params(config)))


def _heads(config: ModelConfig) -> str:
    return f"{config.num_heads}" if config.kv_heads == config.num_heads else f"{config.num_heads} / {config.kv_heads}"


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
        if not any(name.startswith(only.value) for name in zoo.PRESETS):
            raise UserError(f"--only={only.value}: no preset has a name with this prefix")
        import jax

        jax.config.update("jax_platforms", "cpu")  # nothing runs on a device
        if cli.prints_json():
            cli.print_json(list(entries(only.value)))
            return 0
        table = list(rows(only.value))
        print((markdown if as_markdown.value else format_table)(table), end="")
        return 0

    cli.run(run, has_json=True, run_flags=())


if __name__ == "__main__":
    main()
