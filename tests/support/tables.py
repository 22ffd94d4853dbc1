"""The golden tables of the published presets: weight decay, sharding, and optimizer state with its sharding.

`python -m tests.support.tables` writes them.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from pretrainax import models, zoo
from pretrainax.config import WORD_LENGTH
from pretrainax.optim import SM3, Adafactor, Muon, ScheduleFreeAdamW
from pretrainax.optim.decay import decay_mask
from pretrainax.sharding.optimizer_state import opt_state_specs
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import param_specs

PRESETS = (
    *("bert_base", "albert_base", "electra_base", "deberta_v3_base", "modernbert_base"),
    *("t5_base", "switch_base_8", "st_moe_l", "t5gemma_2b_2b", "bart_base"),
    *("gpt2_124m", "llama3_8b", "qwen2_7b", "qwen3_8b", "gemma2_2b", "phi2"),
)


# Optimizers whose state is larger than Adam's, and the presets of their tables.
OPTIMIZERS = {
    "adafactor": Adafactor(),
    "sm3": SM3(),
    "muon": Muon(),
    "schedule_free": ScheduleFreeAdamW(),
}
OPTIMIZED = ("gpt2_124m", "t5_base")


def example_shapes(config, batch_size=8, length=16):
    """Returns the shapes of a small batch, as the table of batch fields in the design describes it."""
    names = ["tokens", "segment_ids", "positions", "targets", "loss_weights"]
    if config.family == "encoder":
        names += ["token_types", "masked_positions"]
    if config.family == "recurrent":
        names += ["previous", "previous_weights"]
    if config.family == "encoder_decoder":
        names += ["encoder_tokens", "encoder_segment_ids", "encoder_positions"]
    masked = length // 4 if config.family == "encoder" else length
    others = {"pair_labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32)} if config.pair_head else {}
    if config.family == "recurrent":
        others["characters"] = jax.ShapeDtypeStruct((batch_size, length, WORD_LENGTH), jnp.int32)
    return others | {
        name: jax.ShapeDtypeStruct(
            (batch_size, masked if name in ("targets", "loss_weights", "masked_positions") else length),
            jnp.float32 if name.endswith("weights") else jnp.int32,
        )
        for name in names
    }


@functools.cache
def params(preset):
    return models.abstract_params(zoo.preset(preset))


def path(table, preset):
    return Path(__file__).parents[1] / "golden" / f"{table}_{preset}.txt"


def _lines(preset, column):
    shapes = params(preset)
    rows = zip(parameter_names(shapes), jax.tree.leaves(shapes), column(shapes), strict=True)
    return "".join(f"{name:<56} {'x'.join(map(str, x.shape)):<20} {value}\n" for name, x, value in rows)


def decay(preset):
    return _lines(preset, lambda shapes: ["decays" if d else "kept" for d in jax.tree.leaves(decay_mask(shapes))])


def specs(preset):
    return _lines(preset, lambda shapes: [str(tuple(s)) for s in jax.tree.leaves(param_specs(shapes))])


def state_specs(preset, name):
    """Returns the lines of `specs` for the optimizer's state."""
    shapes = params(preset)
    chosen = OPTIMIZERS[name].build(lambda step: step, shapes)
    state, found = jax.eval_shape(chosen.init, shapes), opt_state_specs(chosen, shapes)
    rows = zip(parameter_names(state), *map(jax.tree.leaves, (state, found)), strict=True)
    return "".join(f"{name:<108} {'x'.join(map(str, x.shape)):<20} {tuple(spec)}\n" for name, x, spec in rows)


if __name__ == "__main__":
    for preset in PRESETS:
        path("decay", preset).write_text(decay(preset))
        path("sharding", preset).write_text(specs(preset))
    for name in OPTIMIZERS:
        for preset in OPTIMIZED:
            path(name, preset).write_text(state_specs(preset, name))
