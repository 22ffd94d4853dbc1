"""Prompt tuning and prefix tuning: virtual tokens, which are positions with trained vectors before each document.

Each row of a batch gets virtual tokens on its left. The model predicts nothing there. Prompt tuning trains the
embeddings of the virtual tokens. Prefix tuning trains their keys and values in every layer; no layer reads their other
activations.
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

_STDDEV = 0.02  # standard deviation of initial keys and values, and of the initial layer that generates them


class _VirtualTokens(Tuning):
    """Base class of tunings with `length` virtual tokens before each document."""

    is_mergeable: ClassVar[bool] = False
    length: int

    @property
    def tokens(self) -> int:
        return self.length

    def sides(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the name prefixes of the batch arrays that get virtual tokens.

        "encoder_" is the prefix for the encoder of an encoder-decoder, "" for all other stacks.
        """
        raise NotImplementedError

    def extended(self, batch, config):
        longer = dict(batch)
        for side in self.sides(config):
            own = {name: batch[side + name] for name in _FRONT if side + name in batch}
            fronts = {name: _FRONT[name](own["segment_ids"], self.length).astype(x.dtype) for name, x in own.items()}
            own["positions"] = own["positions"] + self.length
            longer |= {side + name: jnp.concatenate([fronts[name], x], axis=1) for name, x in own.items()}
        return longer

    def interceptor(self, batch, training):
        of_linears = super().interceptor(batch, training)

        def intercept(call, args, kwargs, context):
            if isinstance(context.module, Model) and context.method_name == "head_outputs":
                x, side, _ = args
                x = x[:, self.length :] if "" in self.sides(context.module.config) else x
                return call(x, side, batch, **kwargs)
            return of_linears(call, args, kwargs, context)

        return intercept

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.length < 1:
            yield f"config.tuning.length is {self.length}, it must be at least 1"
        if experiment.model.generator is not None:
            yield f"config.tuning is {self}, which does not support config.model.generator: use LoRA"
        if reason := experiment.model.unsupported("virtual tokens"):
            yield f"config.tuning is {self}, but config.model {reason}: use LoRA"
        parts = [part for _, part in experiment.objective.components()]
        if not all(isinstance(experiment.data.packing or default_packing(part), OneEach) for part in parts):
            yield f"config.tuning is {self}, which needs one document per row: set config.data.packing to OneEach()"
        if several := next((part for part in parts if part.separates_rows), None):
            yield (
                f"config.tuning is {self}, whose tokens only the first document of a row would see, but "
                f"{type(several).__name__} has several in each row: set config.tuning to LoRA() or IA3()"
            )
        if experiment.model.reads_question:
            yield (
                f"config.tuning is {self}, whose tokens would be before the question, which "
                "config.model.sparse_attention makes global: set config.tuning to LoRA() or IA3()"
            )
        if experiment.mesh.sequence != 1:
            yield f"config.mesh.sequence is {experiment.mesh.sequence}, but with config.tuning {self} it must be 1"


# Values of the virtual tokens in each batch array: (segment ids [B, T], length P) -> [B, P].
_FRONT = {
    "tokens": lambda segments, length: jnp.zeros((len(segments), length), jnp.int32),
    "token_types": lambda segments, length: jnp.zeros((len(segments), length), jnp.int32),
    "prefix_mask": lambda segments, length: jnp.ones((len(segments), length), jnp.int32),
    "segment_ids": lambda segments, length: jnp.broadcast_to(segments[:, :1], (len(segments), length)),
    "positions": lambda segments, length: jnp.broadcast_to(jnp.arange(length)[None], (len(segments), length)),
}


def _at_the_left(trained: jax.Array, y: jax.Array) -> jax.Array:
    """Returns y [B, P + T, …] with the trained values [P, …] at its first P positions."""
    front = jnp.broadcast_to(trained[None].astype(y.dtype), (len(y), *trained.shape))
    return jnp.concatenate([front, y[:, len(trained) :]], axis=1)


@dataclasses.dataclass
class PromptTuning(_VirtualTokens):
    """Trains the embeddings of virtual tokens before each document (Lester et al. 2021, arXiv 2104.08691).

    In an encoder-decoder, only the encoder has virtual tokens. Their embeddings start as random rows of the token
    embedding (section 3.2). NOTE The paper samples from the 5,000 most common tokens; this class samples from the whole
    vocabulary.
    """

    length: int = 20  # tokens

    def sides(self, config):
        return ("encoder_",) if config.family == "encoder_decoder" else ("",)

    def added(self, params, key):
        table = params["token_embedding"]["embedding"]
        return {"token_embedding/prompt": jax.random.choice(key, table, (self.length,))}

    def interceptor(self, batch, training):
        of_heads, has_prompt = super().interceptor(batch, training), False

        def intercept(call, args, kwargs, context):
            nonlocal has_prompt
            if isinstance(context.module, Model) and context.method_name == "embed":
                has_prompt = not kwargs.get("side")  # not the decoder of an encoder-decoder
            if context.module.name == "token_embedding" and context.method_name == "__call__" and has_prompt:
                return _at_the_left(context.module.get_variable("params", "prompt"), call(*args, **kwargs))
            return of_heads(call, args, kwargs, context)

        return intercept


@dataclasses.dataclass
class PrefixTuning(_VirtualTokens):
    """Trains the keys and values of virtual tokens in every layer (Li and Liang 2021, arXiv 2101.00190).

    An encoder-decoder has prefixes in the encoder, the decoder and the cross-attention. With `hidden`, a tanh layer of
    that width generates the prefixes from vectors (section 4.3). This layer is trained together with the vectors, and
    the exported model contains only the prefixes. Each kind of attention has its own tanh layer, as in the released
    code. The window of local layers must be large enough for the prefix and the row.

    NOTE Rotary positions rotate prefix keys like keys at positions 0, 1, …
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
        made = {}
        for attention, (of_keys, of_values) in _keys_and_values(params).items():
            keys = jax.random.split(jax.random.fold_in(key, zlib.crc32(attention.encode())), 4)
            sizes = {name: (m.layers, *m.outputs) for name, m in (("key", of_keys), ("value", of_values))}
            if not self.hidden:
                for own, (name, (layers, *heads)) in zip(keys, sizes.items(), strict=False):
                    start = _STDDEV * jax.random.normal(own, (layers, self.length, *heads))
                    made[f"{attention}/{name}/prefix"] = start
                continue
            path, width = f"prefix/{attention.replace('/blocks/', '_')}", of_keys.inputs[0]
            shapes = {"vectors": (self.length, width), "up": (width, self.hidden)}
            shapes |= {name: (self.hidden, *size) for name, size in sizes.items()}
            for own, (name, shape) in zip(keys, shapes.items(), strict=True):
                made[f"{path}/{name}"] = _STDDEV * jax.random.normal(own, shape)
            made[f"{path}/up_bias"] = jnp.zeros(self.hidden)
            made |= {f"{path}/{name}_bias": jnp.zeros(size) for name, size in sizes.items()}
        return made

    def expanded(self, params: Flat) -> Flat:
        made = dict(params)
        for path in [name.removesuffix("/vectors") for name in params if name.endswith("/vectors")]:
            part = {name: made.pop(f"{path}/{name}") for name in _LAYER}
            hidden = jnp.tanh(part["vectors"] @ part["up"] + part["up_bias"][None])  # [P, M]
            stack, _, attention = path.removeprefix("prefix/").partition("coder_")
            for name in ("key", "value"):
                prefix = jnp.einsum("PM,MLHK->LPHK", hidden, part[name]) + part[f"{name}_bias"][:, None]
                made[f"{stack}coder/blocks/{attention}/{name}/prefix"] = prefix
        return made

    def merged(self, params):
        return self.expanded(params)

    def apply_linear(self, linear: Linear, call, x, training):
        del training
        if not linear.has_variable("params", "prefix") or x.ndim != 3:  # disentangled positions have 2-D inputs
            return call(x)
        return _at_the_left(linear.get_variable("params", "prefix"), call(x))

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.hidden < 0:
            yield f"config.tuning.hidden is {self.hidden}, it must be at least 0"
        if experiment.model.latent_attention is not None:
            yield f"config.tuning is {self}, but keys of config.model.latent_attention are not a linear map: use LoRA"
        if experiment.model.sparse_attention is not None:
            yield f"config.tuning is {self}, but config.model.sparse_attention supports no additional keys: use LoRA"
        others, _ = layer_groups(experiment.model, experiment.model.num_layers)
        if self.hidden and others.numbers:
            yield (
                f"config.tuning.hidden is {self.hidden}, which needs layers of one kind, but config.model.experts has "
                "two kinds (first_dense, every): set config.tuning.hidden to 0"
            )


# Names and axes of the parameters that generate keys and values of one kind of attention.
_LAYER = {
    "vectors": "rows features",
    "up": "features rank",
    "up_bias": "rank",
    "key": "rank layers num_kv_heads head_dim",
    "key_bias": "layers num_kv_heads head_dim",
    "value": "rank layers num_kv_heads head_dim",
    "value_bias": "layers num_kv_heads head_dim",
}


def _keys_and_values(params: PyTree) -> dict[str, tuple[Matrix, Matrix]]:
    """Returns the key matrix and the value matrix of each attention, by the path of the attention."""
    found = {matrix.path: matrix for matrix in matrices_of(params)}
    attentions = [path.removesuffix("/key") for path in found if path.endswith("_attention/key")]
    return {path: (found[f"{path}/key"], found[f"{path}/value"]) for path in attentions}


add_partition_rules(
    [
        (r"token_embedding/prompt", "rows d_model"),
        *((rf"prefix/\w+/{name}", axes) for name, axes in _LAYER.items()),
    ]
)
