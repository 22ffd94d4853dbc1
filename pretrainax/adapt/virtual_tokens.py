"""Prompt tuning and prefix tuning: virtual tokens, which are positions with trained vectors before each document.

Virtual tokens are the first positions of each row. The model makes no predictions at these positions. Prompt tuning
trains the embeddings of virtual tokens. Prefix tuning trains the keys and values of virtual tokens in every layer; no
layer reads other activations of virtual tokens.
"""

import dataclasses
import zlib
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp

from pretrainax.adapt.matrices import Matrix, matrices_of
from pretrainax.adapt.tuning import Tuning
from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.packing import OneEach
from pretrainax.data.row_stream import default_packing
from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.layers.linear import Linear
from pretrainax.models.base import Model
from pretrainax.sharding.param_paths import Flat, PyTree
from pretrainax.sharding.rules import add_partition_rules

_STDDEV = 0.02  # standard deviation of the initial keys and values, and of the initial layer that generates prefixes


class _VirtualTokens(Tuning):
    """Base class of tuning methods with `length` virtual tokens before each document."""

    is_mergeable: ClassVar[bool] = False
    length: int

    @property
    def tokens(self) -> int:
        return self.length

    def virtual_tokens(self, config):
        sides = self.sides(config)
        return self.length, self.length if len(sides) > 1 else 0

    def sides(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the name prefixes of the batch arrays that get virtual tokens.

        "encoder_" is the prefix for the encoder of an encoder-decoder, "" for all other stacks.
        """
        raise NotImplementedError

    def extended(self, batch, config):
        extended_batch = dict(batch)
        for prefix in self.sides(config):
            arrays = {name: batch[prefix + name] for name in _VIRTUAL_VALUES if prefix + name in batch}
            virtual_values = {
                name: _VIRTUAL_VALUES[name](arrays["segment_ids"], self.length).astype(x.dtype)
                for name, x in arrays.items()
            }
            arrays["positions"] = arrays["positions"] + self.length
            extended_batch |= {
                prefix + name: jnp.concatenate([virtual_values[name], x], axis=1) for name, x in arrays.items()
            }
            if (lengths := batch.get(f"{prefix}text_lengths")) is not None:
                extended_batch[f"{prefix}text_lengths"] = jnp.where(lengths > 0, lengths + self.length, 0)
        return extended_batch

    def interceptor(self, batch, training):
        intercept_linear = super().interceptor(batch, training)

        def intercept(call, args, kwargs, context):
            if isinstance(context.module, Model) and context.method_name == "head_outputs":
                x, side_outputs, _ = args
                x = x[:, self.length :] if "" in self.sides(context.module.config) else x
                return call(x, side_outputs, batch, **kwargs)
            return intercept_linear(call, args, kwargs, context)

        return intercept

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.length < 1:
            yield f"config.tuning.length is {self.length}, it must be at least 1"
        if experiment.model.generator is not None:
            yield f"config.tuning is {self}, which does not support config.model.generator: use LoRA"
        if experiment.model.multi_token is not None:
            yield (
                f"config.tuning is {self}, which does not support the additional blocks of config.model.multi_token: "
                "set it to None, or use LoRA"
            )
        if reason := experiment.model.unsupported("virtual tokens"):
            yield f"config.tuning is {self}, but config.model {reason}: use LoRA"
        objectives = [objective for _, objective in experiment.objective.components()]
        if not all(
            isinstance(experiment.data.packing or default_packing(objective), OneEach) for objective in objectives
        ):
            yield f"config.tuning is {self}, which needs one document per row: set config.data.packing to OneEach()"
        if multi_document := next((objective for objective in objectives if objective.separates_rows), None):
            yield (
                f"config.tuning is {self}, whose tokens only the first document of a row would see, but "
                f"{type(multi_document).__name__} has several in each row: set config.tuning to LoRA() or IA3()"
            )
        if experiment.model.reads_question:
            yield (
                f"config.tuning is {self}, whose tokens would be before the question, which "
                "config.model.sparse_attention makes global: set config.tuning to LoRA() or IA3()"
            )
        if experiment.mesh.sequence != 1:
            yield f"config.mesh.sequence is {experiment.mesh.sequence}, but with config.tuning {self} it must be 1"


# Values of the virtual tokens in each batch array: (segment ids [B, T], length P) -> [B, P].
_VIRTUAL_VALUES = {
    "tokens": lambda segments, length: jnp.zeros((len(segments), length), jnp.int32),
    "token_types": lambda segments, length: jnp.zeros((len(segments), length), jnp.int32),
    "prefix_mask": lambda segments, length: jnp.ones((len(segments), length), jnp.int32),
    "segment_ids": lambda segments, length: jnp.broadcast_to(segments[:, :1], (len(segments), length)),
    "positions": lambda segments, length: jnp.broadcast_to(jnp.arange(length)[None], (len(segments), length)),
}


def _replace_first(trained: jax.Array, y: jax.Array) -> jax.Array:
    """Replaces the first P positions of y [B, P + T, …] with the trained values [P, …]."""
    virtual_values = jnp.broadcast_to(trained[None].astype(y.dtype), (len(y), *trained.shape))
    return jnp.concatenate([virtual_values, y[:, len(trained) :]], axis=1)


@dataclasses.dataclass
class PromptTuning(_VirtualTokens):
    """Trains the embeddings of virtual tokens before each document (Lester et al. 2021, arXiv 2104.08691).

    In an encoder-decoder, only the encoder has virtual tokens. The initial embeddings are random rows of the token
    embedding (section 3.2).

    NOTE The paper samples from the 5,000 most common tokens; this class samples from the whole vocabulary.
    """

    length: int = 20  # tokens

    def sides(self, config):
        return ("encoder_",) if config.family == "encoder_decoder" else ("",)

    def added(self, params, key):
        table = params["token_embedding"]["embedding"]
        return {"token_embedding/prompt": jax.random.choice(key, table, (self.length,))}

    def interceptor(self, batch, training):
        intercept_heads, has_prompt = super().interceptor(batch, training), False

        def intercept(call, args, kwargs, context):
            nonlocal has_prompt
            if isinstance(context.module, Model) and context.method_name == "embed":
                has_prompt = not kwargs.get("side")  # False in the decoder of an encoder-decoder
            if context.module.name == "token_embedding" and context.method_name == "__call__" and has_prompt:
                return _replace_first(context.module.get_variable("params", "prompt"), call(*args, **kwargs))
            return intercept_heads(call, args, kwargs, context)

        return intercept


@dataclasses.dataclass
class PrefixTuning(_VirtualTokens):
    """Trains the keys and values of virtual tokens in every layer (Li and Liang 2021, arXiv 2101.00190).

    An encoder-decoder has prefixes in the encoder, the decoder and the cross-attention. With `hidden`, a tanh layer of
    that width generates the prefixes from trained vectors (section 4.3). The layer is trained together with the
    vectors, and the exported model contains only the prefixes. Each kind of attention has its own tanh layer, as in the
    released code. The window of local layers must be large enough for the prefix and the row.

    NOTE Rotary embeddings rotate the prefix keys as if they were at positions 0, 1, …
    """

    length: int = 20  # tokens
    hidden: int = 0  # width of the layer that generates prefixes; 0: no layer

    def sides(self, config):
        return ("encoder_", "") if config.family == "encoder_decoder" else ("",)

    def limits(self, config):
        if "local" not in config.layer_pattern:
            return super().limits(config)
        masks = [Mask(stack.family == "decoder", window=stack.window) for stack in config.stacks.values()]
        return {**super().limits(config), "window": min(mask.reach[0] for mask in masks) + 1 - self.length}

    def added(self, params, key):
        added = {}
        for attention, (key_matrix, value_matrix) in _keys_and_values(params).items():
            keys = jax.random.split(jax.random.fold_in(key, zlib.crc32(attention.encode())), 4)
            sizes = {name: (m.layers, *m.outputs) for name, m in (("key", key_matrix), ("value", value_matrix))}
            if not self.hidden:
                for rng, (name, (layers, *heads)) in zip(keys, sizes.items(), strict=False):
                    prefix = _STDDEV * jax.random.normal(rng, (layers, self.length, *heads))
                    added[f"{attention}/{name}/prefix"] = prefix
                continue
            path, width = f"prefix/{attention.replace('/blocks/', '_')}", key_matrix.inputs[0]
            shapes = {"vectors": (self.length, width), "up": (width, self.hidden)}
            shapes |= {name: (self.hidden, *size) for name, size in sizes.items()}
            for rng, (name, shape) in zip(keys, shapes.items(), strict=True):
                added[f"{path}/{name}"] = _STDDEV * jax.random.normal(rng, shape)
            added[f"{path}/up_bias"] = jnp.zeros(self.hidden)
            added |= {f"{path}/{name}_bias": jnp.zeros(size) for name, size in sizes.items()}
        return added

    def expanded(self, params: Flat) -> Flat:
        expanded = dict(params)
        for path in [name.removesuffix("/vectors") for name in params if name.endswith("/vectors")]:
            generator = {name: expanded.pop(f"{path}/{name}") for name in _GENERATOR_AXES}
            hidden = jnp.tanh(generator["vectors"] @ generator["up"] + generator["up_bias"][None])  # [P, M]
            stack, _, attention = path.removeprefix("prefix/").partition("coder_")
            for name in ("key", "value"):
                prefix = jnp.einsum("PM,MLHK->LPHK", hidden, generator[name]) + generator[f"{name}_bias"][:, None]
                expanded[f"{stack}coder/blocks/{attention}/{name}/prefix"] = prefix
        return expanded

    def merged(self, params):
        return self.expanded(params)

    def apply_linear(self, linear: Linear, call, x, training):
        del training
        if not linear.has_variable("params", "prefix") or x.ndim != 3:  # inputs of disentangled positions are 2-D
            return call(x)
        return _replace_first(linear.get_variable("params", "prefix"), call(x))

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.hidden < 0:
            yield f"config.tuning.hidden is {self.hidden}, it must be at least 0"
        if experiment.model.latent_attention is not None:
            yield f"config.tuning is {self}, but keys of config.model.latent_attention are not a linear map: use LoRA"
        if experiment.model.sparse_attention is not None:
            yield f"config.tuning is {self}, but config.model.sparse_attention supports no additional keys: use LoRA"
        dense_layers, _ = layer_groups(experiment.model, experiment.model.num_layers)
        if self.hidden and dense_layers.numbers:
            yield (
                f"config.tuning.hidden is {self.hidden}, which needs layers of one kind, but config.model.experts has "
                "two kinds (first_dense, every): set config.tuning.hidden to 0"
            )


# Names and axes of the parameters that generate keys and values of one kind of attention.
_GENERATOR_AXES = {
    "vectors": "rows features",
    "up": "features rank",
    "up_bias": "rank",
    "key": "rank layers num_kv_heads head_dim",
    "key_bias": "layers num_kv_heads head_dim",
    "value": "rank layers num_kv_heads head_dim",
    "value_bias": "layers num_kv_heads head_dim",
}


def _keys_and_values(params: PyTree) -> dict[str, tuple[Matrix, Matrix]]:
    """Returns {path of an attention layer: (key matrix, value matrix)}."""
    matrices = {matrix.path: matrix for matrix in matrices_of(params)}
    attentions = [path.removesuffix("/key") for path in matrices if path.endswith("_attention/key")]
    return {path: (matrices[f"{path}/key"], matrices[f"{path}/value"]) for path in attentions}


add_partition_rules(
    [
        (r"token_embedding/prompt", "rows d_model"),
        *((rf"prefix/\w+/{name}", axes) for name, axes in _GENERATOR_AXES.items()),
    ]
)
