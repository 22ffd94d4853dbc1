"""Captures intermediate values of a model: embeddings, hidden states, queries, keys, values, attention logits.

The models are unchanged. A Flax interceptor stores the values with `sow` inside the modules, so that scans over layers
stack the values, even with rematerialization.
"""

import functools
from typing import NamedTuple, Optional, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.data.batch import Batch
from pretrainax.layers.attention_mask import masked_logits
from pretrainax.layers.linear import Linear
from pretrainax.layers.multi_head import MultiHeadAttention, scale_of
from pretrainax.layers.norm import Norm
from pretrainax.models import Model, Outputs
from pretrainax.sharding.param_paths import PyTree, map_stacks

_KINDS = ("query", "key", "value")


class States(NamedTuple):
    """The intermediate values of one stack of L layers for B rows of T tokens."""

    embedded: jax.Array  # [B, T, D], input of the first layer
    hidden: jax.Array  # [L, B, T, D], outputs of the layers; the last one after the final norm, as the heads read it
    vectors: dict[str, jax.Array]  # {"query", "key", "value": [L, B, T, H, K]}; {} if not captured
    logits: Optional[jax.Array]  # [L, B, G, R, T, T] float32, of self-attention; None if not captured


def run_with_states(
    model: Model,
    params: PyTree,
    batch: Batch,
    *,
    vectors: bool,
    logits: bool,
    deterministic: bool,
    rngs: Optional[dict[str, jax.Array]] = None,
) -> tuple[Outputs, list[States]]:
    """Applies a model to a batch; returns the model outputs and the states of each stack, encoder first.

    Args:
      vectors: whether to capture queries, keys and values.
      logits: whether to capture attention logits.
    """
    with nn.intercept_methods(_StateRecorder(vectors, logits)):
        outputs, sown = model.apply(
            {"params": params}, batch, deterministic=deterministic, rngs=rngs, mutable=["intermediates"]
        )
    values = sown["intermediates"]
    names = [name for name in ("encoder", "decoder") if name in values]
    return cast(Outputs, outputs), [_states(values[n], x) for n, x in zip(names, values["embedded"], strict=True)]


def _states(stack: PyTree, embedded: jax.Array) -> States:
    """Collects the captured values of one stack; `embedded` is the input of the first layer."""

    def layers(rank: int, *path: str) -> jax.Array:
        """Returns the values captured at `path` in all layers, [L, …].

        Args:
          rank: number of axes of one layer's value. Layers with shared parameters store values as [L, 1, …].
        """

        def reshape_layers(blocks: PyTree) -> jax.Array:
            (sown,) = functools.reduce(dict.__getitem__, path, blocks)
            return sown.reshape(-1, *sown.shape[-rank:])

        return map_stacks(stack, reshape_layers)

    hidden, attention = layers(3, "hidden"), stack["blocks"].get("self_attention", {})
    sown = [kind for kind in _KINDS if f"{kind}_vectors" in attention]
    return States(
        embedded,
        jnp.concatenate([hidden[:-1], stack["output"][0][None].astype(hidden.dtype)]),
        {kind: layers(4, "self_attention", f"{kind}_vectors") for kind in sown},
        layers(5, "self_attention", "logits") if "logits" in attention else None,
    )


class _StateRecorder:
    """A Flax interceptor that captures states; Flax calls it in place of every module method."""

    def __init__(self, vectors: bool, logits: bool):
        self.vectors, self.logits = vectors, logits
        # outputs of the modules inside the current attention module, by name
        self.module_outputs: dict[str, jax.Array] = {}

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if isinstance(module, Model) and context.method_name == "embed":
            embedded = call(*args, **kwargs)
            module.sow("intermediates", "embedded", embedded)
            return embedded
        if context.method_name != "__call__" or not (self.vectors or self.logits):
            return call(*args, **kwargs)
        if isinstance(module, MultiHeadAttention) and module.name == "self_attention":
            return self._attention(module, call, *args, **kwargs)
        result = call(*args, **kwargs)
        if isinstance(module, (Linear, Norm)) and module.name is not None:
            # the first output, because positions may call the query projection again
            self.module_outputs.setdefault(module.name, result)
        return result

    def _attention(self, module: MultiHeadAttention, call, x, source, mask, positions, *cache_args):
        """Runs a self-attention module and captures the requested queries, keys, values and logits."""
        self.module_outputs = {}
        y, cache = call(x, source, mask, positions, *cache_args)
        for kind in _KINDS if self.vectors else ():
            module.sow("intermediates", f"{kind}_vectors", self.module_outputs[kind])
        if self.logits:
            config, scale = module.config, scale_of(module.config, positions)
            q, k = self.module_outputs["query"], self.module_outputs["key"]
            bias = positions.bias(config, q, k, None, None, scale)
            rotated, _ = positions.rotate(self.module_outputs.get("query_norm", q), k)
            keys, _ = cache.heads_last()
            logits = masked_logits(rotated, keys, mask, bias, scale, config.attention_logit_cap)
            module.sow("intermediates", "logits", logits)
        return y, cache
