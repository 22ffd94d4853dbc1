"""Attention specs: the properties of an attention call that are known at trace time, and a record of them.

The attention layer, the header of a run and the memory planner choose a backend from the same `AttentionSpec`.
`MultiHeadAttention` builds it with `spec_of`; `collect_attention_specs` records the specs of a traced model.
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
from pretrainax.sharding.mesh import axis_size


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The properties of an attention call that decide whether a backend can compute it."""

    head_dim: int
    query_length: int
    key_length: int
    dtype: str  # of queries, keys and values
    causal: bool
    bias: Literal["none", "shared", "by_row"]  # of the logits: none, one for all rows, or one per row
    window: Optional[int]  # as in `Mask`; in a scan over layers, some layers may ignore it
    has_prefix: bool  # the mask is causal, but the whole segment sees a prefix of it
    has_positions: bool  # queries or keys have explicit indices, for example with a KV cache
    logit_cap: Optional[float]
    sequence: int  # number of parts that the mesh splits the length into
    dropout_rate: float = 0.0  # of the attention weights, in training
    has_sinks: bool = False  # the softmax has an additional term per head
    blocks: Optional["KeyBlocks"] = None  # blocks of block-sparse attention; None: queries attend to all keys

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query_length, self.key_length


class KeyBlocks(NamedTuple):
    """The query-key pairs that block-sparse attention multiplies, for any length."""

    size: int  # tokens per block
    sides: int  # neighbouring blocks on each side that a query attends to
    more: int = 0  # additional blocks elsewhere in the row
    whole: int = 0  # additional queries and keys outside the blocks, each paired with a whole row

    def pairs(self, length: int) -> int:
        """Returns the number of pairs in a row of `length` tokens."""
        size = min(self.size, length)
        blocks = -(-length // size)
        blocks_per_query = 2 * self.sides + 1 + self.more if blocks > 1 else 1
        return blocks * blocks_per_query * size**2 + self.whole * length


class Work(NamedTuple):
    """The number of query-key pairs for one row and head; each pair is multiplied PRODUCTS times."""

    pairs: np.ndarray  # [sequence], pairs of the queries in each part of the length
    again: int = 0  # additional products that the backward recomputes


PRODUCTS = 6  # logits and weighted sum of values; the backward of each has two products


def kernel_obstacle(spec: AttentionSpec) -> Optional[str]:
    """Returns the reason why a fused kernel cannot compute an attention, or None if it can.

    A fused kernel never holds the attention weights.

    NOTE Kernels with dropout (flash-attn, cuDNN itself) and kernels with sinks exist. The kernels that JAX calls here
    support neither.
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


class Backend(NamedTuple):
    """An implementation of attention."""

    kernel: Callable[..., jax.Array]  # (q, k, v, mask, bias=, scale=, logit_cap=) -> [B, T, H, K]
    # (spec, platform) -> the reason why it cannot run, as a predicate for its name; None if it can
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
    """Returns the spec of an attention call under the mesh of `jax.set_mesh`.

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; mask, bias, logit_cap: as in `attention`.
      bias_by_row: the bias depends on q and k. In a batch of one row, its shape does not show this.
      dropout_rate: of the attention weights.
      has_sinks: the softmax has an additional term per head.
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

    JAX does not trace a jitted function twice, so a function that is traced already adds no spec. A spec does not
    contain the number of rows. The trace of one row, which `model.init` needs anyway, gives the specs of any batch with
    the same lengths.
    """
    specs: list[AttentionSpec] = []
    token = _COLLECTED.set(specs)
    try:
        yield specs
    finally:
        _COLLECTED.reset(token)


def report_attention(spec: AttentionSpec) -> None:
    """Adds a spec to the list of `collect_attention_specs`; does nothing outside that context."""
    specs = _COLLECTED.get()
    if specs is not None and spec not in specs:
        specs.append(spec)
