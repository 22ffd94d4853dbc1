"""Descriptions of attention masks, which become arrays only if a backend needs them, and masked logits."""

from typing import Optional

import chex
import flax.struct
import jax
import jax.numpy as jnp

# The logit of a masked query-key pair. It is finite, so that the output of a query without an allowed key is the mean
# of the values instead of NaN. It is half of the lowest float32 number, so that adding a bias does not overflow (cuDNN
# takes masks as biases).
FORBIDDEN = -0.5 * float(jnp.finfo(jnp.float32).max)
PADDING = -1  # segment id of tokens added to pad an array to a length; the segment ids of a batch are >= 0


@flax.struct.dataclass
class Mask:
    """Describes which keys each query may attend to.

    A query attends to keys of its own segment. If `causal`, it attends to later keys only if they are in the prefix.

    The padding of a batch is segment 0. Padding attends only to padding, so in self-attention every query has at least
    one key.

    The order of tokens follows from their indices in the row: 0 … T-1 for queries and 0 … S-1 for keys.
    `query_positions` and `key_positions` replace these indices, for example for a shard of a row, or for new queries
    with a KV cache. They differ from the `positions` of a batch, which restart at 0 in each segment.
    """

    causal: bool = flax.struct.field(pytree_node=False, default=False)
    query_segment_ids: Optional[jax.Array] = None  # [B, T] int32; None: all tokens are in one segment
    key_segment_ids: Optional[jax.Array] = None  # [B, S] int32
    # Size of the window. With `causal`, a query attends to the last `window` tokens, including its own. Without
    # `causal`, a query attends to window // 2 tokens before and after its own. None: no window.
    window: Optional[int] = flax.struct.field(pytree_node=False, default=None)
    # [] bool, whether `window` applies; None: it applies. In a scan over layers, the value may differ between layers.
    windowed: Optional[jax.Array] = None
    # [B, S] int32, 1 at the keys of a prefix, which neither `causal` nor sparse windows mask; None: no prefix
    prefix: Optional[jax.Array] = None
    query_positions: Optional[jax.Array] = None  # [T] or [B, T] int32; None: 0 … T-1
    key_positions: Optional[jax.Array] = None  # [S] or [B, S] int32; None: 0 … S-1
    layer: Optional[jax.Array] = None  # [] int32, layer index, if the keys depend on it (RandomBlocks)
    # Whether each row is one segment that starts at index 0, followed by padding. A kernel can then use the length of
    # the segment instead of segment ids.
    single_segment: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def has_positions(self) -> bool:
        """Returns True if queries or keys have explicit indices, which may differ from 0, 1, … in the row."""
        return self.query_positions is not None or self.key_positions is not None

    @property
    def reach(self) -> tuple[int, int]:
        """Returns how far a query may attend, as the number of tokens before it and the number of tokens after it.

        The mask must have a window. With a causal mask, tokens after the query are allowed only in a prefix.
        """
        if not self.causal:
            return self.window // 2, self.window // 2
        return self.window - 1, 0 if self.prefix is None else self.window - 1

    @property
    def lengths(self) -> Optional[tuple[jax.Array, jax.Array]]:
        """Returns the number of queries and the number of keys in each row's segment, [B] int32 each.

        Returns None unless each row has a single segment.
        """
        if not self.single_segment:
            return None
        queries, keys = ((ids > 0).sum(1, dtype=jnp.int32) for ids in (self.query_segment_ids, self.key_segment_ids))
        return queries, keys

    def check_shapes(self, rows: int, query_length: int, key_length: int) -> None:
        """Raises AssertionError if the shape of an array does not match the given sizes."""
        for name, axes, length in (
            ("query_segment_ids", "[B, T]", query_length),
            ("key_segment_ids", "[B, S]", key_length),
            ("prefix", "[B, S]", key_length),
        ):
            array = getattr(self, name)
            if array is not None:
                chex.assert_shape(array, (rows, length), custom_message=f"mask.{name} is {axes}")
        for name, axes, length in (("query_positions", "T", query_length), ("key_positions", "S", key_length)):
            array = getattr(self, name)
            if array is not None:
                allowed = (length,) if array.ndim == 1 else (rows, length)
                chex.assert_shape(array, allowed, custom_message=f"mask.{name} is [{axes}] or [B, {axes}]")

    def materialize(self, query_length: int, key_length: int) -> jax.Array:
        """Builds the mask array [B, 1, T, S] bool, True where the query may attend to the key.

        The first axis has size 1 if no array of the mask has a row axis.
        """
        queries = jnp.arange(query_length) if self.query_positions is None else self.query_positions
        keys = jnp.arange(key_length) if self.key_positions is None else self.key_positions
        # [S] or [B, S], [T] or [B, T] -> [1 or B, T, S]
        distance = jnp.atleast_2d(keys)[:, None, :] - jnp.atleast_2d(queries)[:, :, None]
        allowed = jnp.ones((1, 1, query_length, key_length), bool)
        if self.causal:
            # [1 or B, T, S] -> [1 or B, 1, T, S]
            allowed = (distance <= 0)[:, None]
            if self.prefix is not None:
                # [1 or B, 1, T, S] | [B, 1, 1, S] -> [B, 1, T, S]
                allowed |= self.prefix[:, None, None, :] > 0
        if self.window is not None:
            before, after = self.reach
            in_window = (-before <= distance) & (distance <= after)
            allowed &= (in_window if self.windowed is None else in_window | ~self.windowed)[:, None]
        if self.query_segment_ids is not None:
            # [B, 1, T, 1] == [B, 1, 1, S] -> [B, 1, T, S]
            same_segment = self.query_segment_ids[:, None, :, None] == self.key_segment_ids[:, None, None, :]
            allowed = allowed & same_segment
        return allowed


def masked_logits(
    q: jax.Array,
    k: jax.Array,
    mask: Mask,
    bias: Optional[jax.Array],
    scale: float,
    logit_cap: Optional[float],
) -> jax.Array:
    """Computes the logits cap(scale · q kᵀ) + bias, with FORBIDDEN at masked pairs: [B, G, R, T, S] float32, R = H / G.

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; bias: [1 or B, H, T, S], or None.
      scale, logit_cap: as in `attention`.
    """
    b, t, h, d = q.shape
    s, g = k.shape[1:3]
    r = h // g  # query heads per key head
    # The head axis is moved before the length, so that the einsum is a plain batched matmul. On a CPU this is 1.5 times
    # as fast as an einsum of the original q and k. [B, T, H, K] -> [B, G, R·T, K], [B, S, G, K] -> [B, G, S, K]
    q = q.reshape(b, t, g, r, d).transpose(0, 2, 3, 1, 4).reshape(b, g, r * t, d)
    logits = jnp.einsum("BGTK,BGSK->BGTS", q, k.swapaxes(1, 2), preferred_element_type=jnp.float32) * scale
    if logit_cap is not None:
        logits = logit_cap * jnp.tanh(logits / logit_cap)
    # [B, G, R·T, S] -> [B, G, R, T, S]
    logits = logits.reshape(b, g, r, t, s)
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(-1, g, r, t, s)
        logits += bias if len(bias) == b else _repeat_rows(bias, b)
    # [B, 1, T, S] -> [B, 1, 1, T, S]
    return jnp.where(mask.materialize(t, s)[:, :, None], logits, FORBIDDEN)


def weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Computes the weighted sum of values: weights [B, G, R, T, S], v [B, S, G, K] -> [B, G, R, T, K] float32.

    The weights are cast to the dtype of v; the sum is accumulated in float32.
    """
    b, g, r, t, s = weights.shape
    weights = weights.astype(v.dtype).reshape(b, g, r * t, s)
    out = jnp.einsum("BGTS,BGSK->BGTK", weights, v.swapaxes(1, 2), preferred_element_type=jnp.float32)
    return out.reshape(b, g, r, t, -1)


def heads_last(x: jax.Array) -> jax.Array:
    """Moves the head axes behind the length axis and merges them: [B, G, R, T, K] -> [B, T, H, K]."""
    b, g, r, t, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, d)


def _repeat(x: jax.Array, count: int) -> jax.Array:
    """Repeats an array with a single row `count` times: [1, …] -> [count, …]."""
    return jnp.broadcast_to(x, (count, *x.shape[1:]))


def _repeat_rows_backward(count, _, gradient):
    # The sum over rows is a matmul with ones. On a CPU, XLA would sum over the first axis on one core, 10 times slower
    # than it reads memory.
    ones = jnp.ones((count,), gradient.dtype)
    return (jnp.einsum("B,B...->...", ones, gradient, precision=jax.lax.Precision.HIGHEST)[None],)


_repeat_rows = jax.custom_vjp(_repeat, nondiff_argnums=(1,))
# The forward calls _repeat, not _repeat_rows, so that gradients can be differentiated again.
_repeat_rows.defvjp(lambda x, count: (_repeat(x, count), None), _repeat_rows_backward)


def padded_segments(mask: Mask, q: jax.Array, k: jax.Array, multiple: int) -> Optional[tuple[jax.Array, jax.Array]]:
    """Returns the segment ids of queries and keys, [B, T'] and [B, S'], padded to multiples of `multiple`.

    The added tokens have the segment id PADDING. Returns None if the mask has no segment ids and both lengths are
    already multiples of `multiple`.
    """
    ids = mask.query_segment_ids, mask.key_segment_ids
    if ids[0] is None:
        if q.shape[1] % multiple == 0 and k.shape[1] % multiple == 0:
            return None
        ids = jnp.ones(q.shape[:2], jnp.int32), jnp.ones(k.shape[:2], jnp.int32)
    return pad(ids[0], 1, multiple, PADDING), pad(ids[1], 1, multiple, PADDING)


def pad(x: jax.Array, axis: int, multiple: int, value: float = 0) -> jax.Array:
    """Pads the end of an axis with `value` up to the next multiple of `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)
