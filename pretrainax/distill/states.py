"""Takes out of a model what it computes on the way: embeddings, hidden states, queries, keys, values, logits.

No model knows of it. Flax calls what is here around its modules, where it sows what they compute beside what they sow
themselves; so a scan over layers stacks it, under rematerialisation too.
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
from pretrainax.sharding.param_paths import PyTree, over_parts

_KINDS = ("query", "key", "value")


class States(NamedTuple):
    """Holds what one stack of L layers computes for T tokens of B rows."""

    embedded: jax.Array  # [B, T, D], what the first layer reads
    hidden: jax.Array  # [L, B, T, D], after each layer; after the last one as the heads read it, normed
    vectors: dict[str, jax.Array]  # "query", "key", "value": [L, B, T, H, K]; empty where nobody asks
    logits: Optional[jax.Array]  # [L, B, G, R, T, T] float32, of self-attention; None where nobody asks


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
    """Returns what a model says of a batch, and the states of each of its stacks, the encoder's first.

    vectors, logits: whether these are taken.
    """
    with nn.intercept_methods(_Sower(vectors, logits)):
        outputs, sown = model.apply(
            {"params": params}, batch, deterministic=deterministic, rngs=rngs, mutable=["intermediates"]
        )
    found = sown["intermediates"]
    names = [name for name in ("encoder", "decoder") if name in found]
    return cast(Outputs, outputs), [_states(found[n], x) for n, x in zip(names, found["embedded"], strict=True)]


def _states(stack: PyTree, embedded: jax.Array) -> States:
    def layers(rank: int, *path: str) -> jax.Array:
        """Returns [L, …] of what all layers have sown; it is [L, 1, …] where they share their parameters."""

        def found(blocks: PyTree) -> jax.Array:
            (sown,) = functools.reduce(dict.__getitem__, path, blocks)
            return sown.reshape(-1, *sown.shape[-rank:])

        return over_parts(stack, found)

    hidden, attention = layers(3, "hidden"), stack["blocks"].get("self_attention", {})
    sown = [kind for kind in _KINDS if f"{kind}_vectors" in attention]
    return States(
        embedded,
        jnp.concatenate([hidden[:-1], stack["output"][0][None].astype(hidden.dtype)]),
        {kind: layers(4, "self_attention", f"{kind}_vectors") for kind in sown},
        layers(5, "self_attention", "logits") if "logits" in attention else None,
    )


class _Sower:
    """Called by Flax around each method of each module."""

    def __init__(self, vectors: bool, logits: bool):
        self.vectors, self.logits = vectors, logits
        self.inside: dict[str, jax.Array] = {}  # of the attention that is being computed

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
            self.inside.setdefault(module.name, result)  # a map of queries may be asked again, for positions
        return result

    def _attention(self, module: MultiHeadAttention, call, x, source, mask, positions, *of_cache):
        self.inside = {}
        y, kept = call(x, source, mask, positions, *of_cache)
        for kind in _KINDS if self.vectors else ():
            module.sow("intermediates", f"{kind}_vectors", self.inside[kind])
        if self.logits:
            config, scale = module.config, scale_of(module.config, positions)
            q, k = self.inside["query"], self.inside["key"]
            bias = positions.bias(config, q, k, None, None, scale)
            turned, _ = positions.rotate(self.inside.get("query_norm", q), k)
            seen, _ = kept.heads_last()
            logits = masked_logits(turned, seen, mask, bias, scale, config.attention_logit_cap)
            module.sow("intermediates", "logits", logits)
        return y, kept
