"""Specs: all that is known of an attention when it is traced, and the record of those that a model has.

The layer, the header of a run and the plan of its memory choose by the same `AttentionSpec`: `MultiHeadAttention`
makes it with `spec_of`, and whoever wants to know collects it from a trace of the model.
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
    """Holds all that decides whether a backend can compute an attention."""

    head_dim: int
    query_length: int
    key_length: int
    dtype: str  # of queries, keys and values
    causal: bool
    bias: Literal["none", "shared", "by_row"]  # on the logits: the same one for all rows, or another one for each
    window: Optional[int]  # of `Mask`; in a scan over layers, some may do without
    has_prefix: bool  # a part of each segment is seen by the whole segment, though the mask is causal
    has_positions: bool  # queries or keys are not those of a row from its start, as with a cache of keys
    logit_cap: Optional[float]
    sequence: int  # parts that the mesh cuts the length into
    dropout_rate: float = 0.0  # of the weights, in training
    has_sinks: bool = False  # the softmax has a term more
    blocks: Optional["KeyBlocks"] = None  # that are multiplied; None: queries meet all keys

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query_length, self.key_length


class KeyBlocks(NamedTuple):
    """Says which pairs of a query and a key attention by blocks multiplies, whatever the length."""

    size: int  # tokens of a block
    sides: int  # blocks on each side of its own that a query meets
    more: int = 0  # blocks elsewhere
    whole: int = 0  # queries and keys beside those of blocks, each of which meets a whole row

    def pairs(self, length: int) -> int:
        """Counts those of a row of `length` tokens."""
        size = min(self.size, length)
        blocks = -(-length // size)
        met = 2 * self.sides + 1 + self.more if blocks > 1 else 1
        return blocks * met * size**2 + self.whole * length


class Work(NamedTuple):
    """Counts the pairs of a query and a key that are multiplied for one row and head, each PRODUCTS times."""

    pairs: np.ndarray  # [sequence], those of the queries of each part that the mesh cuts the length into
    again: int = 0  # products that the backward makes once more, beside PRODUCTS


PRODUCTS = 6  # logits and the sum of values, and two for the backward of each


def kernel_obstacle(spec: AttentionSpec) -> Optional[str]:
    """Says why a kernel that never holds the weights cannot compute an attention; None where it may.

    NOTE Kernels with dropout exist (flash-attn, and cuDNN's by itself), and with sinks; those that JAX calls here take
    neither.
    """
    if spec.blocks is not None:
        return "knows no blocks, and config.model.sparse_attention is set"
    if spec.has_sinks:
        return "has no attention sinks, and config.model.attention_sinks is set"
    if spec.dropout_rate:
        return (
            f"has no dropout of attention weights, and config.model.attention_dropout_rate is {spec.dropout_rate} "
            "(0 turns it off)"
        )
    return None


class Backend(NamedTuple):
    """An implementation of attention."""

    kernel: Callable[..., jax.Array]  # (q, k, v, mask, bias=, scale=, logit_cap=) -> [B, T, H, K]
    # (spec, platform) -> why it cannot run, as the end of a sentence that begins with its name; None if it can
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
    """Returns the spec of an attention under the mesh of `jax.set_mesh`.

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; mask, bias, logit_cap: as in `attention`.
      bias_by_row: the bias is made from q and k. Its shape does not say so in a batch of one row.
      dropout_rate: of the weights.
      has_sinks: the softmax has a term more.
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
    """Collects the specs of what is traced inside, each once, in the order of the trace.

    A jitted function that was traced before is not traced again, and adds nothing. The number of rows is in no spec, so
    that the trace of one row, which `model.init` needs anyway, gives those of every batch of its lengths.
    """
    specs: list[AttentionSpec] = []
    token = _COLLECTED.set(specs)
    try:
        yield specs
    finally:
        _COLLECTED.reset(token)


def report_attention(spec: AttentionSpec) -> None:
    """Adds a spec to those that `collect_attention_specs` collects; without it, does nothing."""
    specs = _COLLECTED.get()
    if specs is not None and spec not in specs:
        specs.append(spec)
