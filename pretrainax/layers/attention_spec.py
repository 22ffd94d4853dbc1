"""Attention specs: the properties of an attention call that are known at trace time, and how they are collected.

The attention layer, the header of a run and the memory planner choose a backend from the same `AttentionSpec`.
Attention layers build the spec with `spec_of`; `collect_attention_specs` lists the specs of a traced model.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Optional

import jax
import numpy as np

from pretrainax.layers.attention_mask import Mask
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import TRITON_CAPABILITY, axis_size, gpu_capability


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The properties of an attention call that determine which backends support it, and how much work it is."""

    head_dim: int
    query_length: int
    key_length: int
    dtype: str  # dtype of queries, keys and values
    causal: bool
    bias: Literal["none", "shared", "by_row"]  # bias on the logits: none, one for all rows, or one per row
    window: Optional[int]  # as in `Mask`; None: no window. In a scan over layers, some layers may ignore the window.
    has_prefix: bool  # whether the mask has a prefix that the whole segment attends to
    has_positions: bool  # whether queries or keys have explicit indices, for example with a KV cache
    logit_cap: Optional[float]
    sequence: int  # number of shards of the sequence dimension
    dropout_rate: float = 0.0  # dropout rate of the attention weights in training
    has_sinks: bool = False  # whether the softmax has an additional logit per head
    blocks: Optional["KeyBlocks"] = None  # blocks of block-sparse attention; None: not block-sparse

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query_length, self.key_length


class KeyBlocks(NamedTuple):
    """Describes how many key blocks each query block attends to in block-sparse attention, for rows of any length."""

    size: int  # tokens per block
    sides: int  # number of neighbouring blocks that a query attends to, before and after its own block
    extra_blocks: int = 0  # additional key blocks that a query block attends to, anywhere in the row
    global_tokens: int = 0  # number of additional (global) queries and keys, each paired with all tokens of the row

    def pairs(self, length: int) -> int:
        """Returns the number of query-key pairs computed per head for a row of `length` tokens."""
        size = min(self.size, length)
        blocks = -(-length // size)
        blocks_per_query = 2 * self.sides + 1 + self.extra_blocks if blocks > 1 else 1
        return blocks * blocks_per_query * size**2 + self.global_tokens * length


class Work(NamedTuple):
    """The number of query-key pairs that a backend computes for one row and one head.

    In a training step, a backend computes PRODUCTS + `recomputed` matmuls over these pairs.
    """

    pairs: np.ndarray  # [sequence], number of pairs for the queries in each sequence shard
    recomputed: int = 0  # matmuls that the backward computes in addition to PRODUCTS


PRODUCTS = 6  # matmuls over the pairs: logits, weighted sum of values, and two in the backward of each


def kernel_obstacle(spec: AttentionSpec) -> Optional[str]:
    """Returns why no kernel of JAX supports this attention, phrased as a predicate, or None if nothing rules them out.

    NOTE Kernels with dropout (flash-attn, cuDNN itself) and kernels with sinks exist. The kernels that this package
    calls through JAX support neither; `tiled` supports both.
    """
    if spec.blocks is not None:
        return "does not support blocks, and config.model.sparse_attention is set"
    if spec.has_sinks:
        return "has no attention sinks, and config.model.attention_sinks is set"
    if spec.dropout_rate:
        return (
            f"has no dropout of attention weights, and config.model.attention_dropout_rate is {spec.dropout_rate} "
            "(set 0 to disable it)"
        )
    return None


def old_gpu_obstacle() -> Optional[str]:
    """Returns why this process's GPUs cannot run fused attention, phrased as a predicate, or None if they can."""
    if gpu_capability() >= TRITON_CAPABILITY:
        return None
    needed, found = ("{}.{}".format(*capability) for capability in (TRITON_CAPABILITY, gpu_capability()))
    return f"needs a GPU of compute capability {needed} or newer, and this one has {found}"


class Weights(NamedTuple):
    """Options that modify the attention weights: dropout, attention sinks and a cap of the logits."""

    drop: Optional[Callable[[jax.Array], jax.Array]] = None  # dropout for the weights [B, G, R, T, S]; None: no dropout
    sinks: Optional[jax.Array] = None  # [H], logit of an extra key with value 0 per head (gpt-oss); None: no sinks
    # If given, scaled logits x become cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2).
    logit_cap: Optional[float] = None


NO_OPTIONS = Weights()


class Backend(NamedTuple):
    """An implementation of attention: its function, the conditions under which it can run, and how much work it is."""

    kernel: Callable[..., jax.Array]  # (q, k, v, mask, bias, scale, logit_cap[, weights]) -> [B, T, H, K]
    # (spec, platform) -> why the backend cannot run, as a predicate ("needs a TPU"), or None if it can
    obstacle: Callable[[AttentionSpec, str], Optional[str]]
    work: Callable[[AttentionSpec], Work]


def spec_of(
    q: jax.Array,
    k: jax.Array,
    mask: Mask,
    bias: Optional[jax.Array],
    *,
    bias_by_row: bool,
    logit_cap: Optional[float],
    dropout_rate: float = 0.0,
    has_sinks: bool = False,
) -> AttentionSpec:
    """Builds the spec of an attention call under the current mesh (`jax.set_mesh`).

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; mask, bias, logit_cap: as in `attention`.
      bias_by_row: whether the bias differs between rows, because it depends on q and k. In a batch with a single row,
        its shape does not show this.
      dropout_rate: dropout rate of the attention weights.
      has_sinks: whether the softmax has an additional logit per head.
    """
    return AttentionSpec(
        head_dim=q.shape[3],
        query_length=q.shape[1],
        key_length=k.shape[1],
        dtype=q.dtype.name,
        causal=mask.causal,
        bias="none" if bias is None else "by_row" if bias_by_row else "shared",
        window=mask.window,
        has_prefix=mask.prefix is not None,
        has_positions=mask.has_positions,
        logit_cap=logit_cap,
        sequence=axis_size(LENGTH_AXIS),
        dropout_rate=dropout_rate,
        has_sinks=has_sinks,
    )


_COLLECTED: contextvars.ContextVar[Optional[list[AttentionSpec]]] = contextvars.ContextVar("collected", default=None)


@contextlib.contextmanager
def collect_attention_specs() -> Iterator[list[AttentionSpec]]:
    """Collects the distinct attention specs that are traced inside this context, in trace order.

    The yielded list grows during the trace. JAX does not trace a jitted function twice, so a function that has already
    been traced adds no spec. A spec does not contain the number of rows. Specs collected while tracing a single row, as
    `model.init` does anyway, are therefore valid for any batch with the same lengths.
    """
    specs: list[AttentionSpec] = []
    token = _COLLECTED.set(specs)
    try:
        yield specs
    finally:
        _COLLECTED.reset(token)


def report_attention(spec: AttentionSpec) -> None:
    """Adds a spec to the list of the enclosing `collect_attention_specs` context, unless the list already contains it.

    Outside a `collect_attention_specs` context, this function does nothing.
    """
    specs = _COLLECTED.get()
    if specs is not None and spec not in specs:
        specs.append(spec)
