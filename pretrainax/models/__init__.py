"""Builds the model of a config: a decoder, encoder, encoder-decoder, ELECTRA or recurrent model, from `layers`.

model = models.build(config, compute)
params = model.init(key, batch, deterministic=True)["params"]
outputs = model.apply({"params": params}, batch, deterministic=False, rngs={"dropout": key})
"""

from typing import cast

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.data.batch import FIELDS
from pretrainax.layers.compute import Compute
from pretrainax.models import decoder, electra, encoder, encoder_decoder, recurrent
from pretrainax.models.base import AnyFamily, AnyModel, Model, model_of, register_model
from pretrainax.models.outputs import Outputs
from pretrainax.sharding.param_paths import PyTree

__all__ = [
    "AnyFamily",
    "AnyModel",
    "Model",
    "Outputs",
    "abstract_params",
    "build",
    "decoder",
    "electra",
    "encoder",
    "encoder_decoder",
    "recurrent",
    "register_model",
]


def build(config: ModelConfig, compute: Compute) -> AnyModel:
    """Builds the model of a config. The model reads `config` at each call, so do not modify `config` afterwards."""
    return cast(AnyModel, model_of(config)(config, compute))  # Flax types `apply` as possibly returning a tuple


def abstract_params(config: ModelConfig) -> PyTree:
    """Computes the shapes and dtypes (`jax.ShapeDtypeStruct`) of the parameter tree of a config's model."""
    key = repr(config)  # keyed by value, because a config is mutable
    if key not in _abstract_params:  # cached, because tracing a model takes a second
        _abstract_params[key] = _trace_params(config)
    return jax.tree.map(lambda shape: shape, _abstract_params[key])  # a copy, which the caller may modify


_abstract_params: dict[str, PyTree] = {}


def _trace_params(config: ModelConfig) -> PyTree:
    names = ("tokens", "positions", "segment_ids", "encoder_tokens", "encoder_positions", "encoder_segment_ids")
    batch = {name: jax.ShapeDtypeStruct((1, 2), jnp.int32) for name in (*names, "question")}
    widths = {field.name: field.width for field in FIELDS if field.belongs_to(config.family) and field.width}
    batch |= {name: jax.ShapeDtypeStruct((1, 2, width), jnp.int32) for name, width in widths.items()}
    model = build(config, Compute(attention="xla"))
    init = lambda key, batch: model.init(key, batch, deterministic=True)["params"]  # noqa: E731
    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), batch)
