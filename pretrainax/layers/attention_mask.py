"""Masks: descriptions of which keys a query may see, made into arrays only where needed; and the logits they leave."""

from typing import Optional

import chex
import flax.struct
import jax
import jax.numpy as jnp

# What a forbidden pair's logit becomes. Finite, so that a row with no allowed key gives a mean, not a NaN; half of
# float32's range, so that adding a bias to it (cuDNN takes masks as biases) does not overflow.
FORBIDDEN = -0.5 * float(jnp.finfo(jnp.float32).max)
PADDING = -1  # segment id of what padding to a length adds; segment ids of a batch are >= 0


@flax.struct.dataclass
class Mask:
    """Describes the keys that a query may see: those of its segment, and with `causal` none after it, but for a prefix.

    Padding is segment 0: it sees padding only, so in self-attention each query has a key to see.

    What is before and what is after follows from indices in the row: 0 … T-1 and 0 … S-1, unless the mask has
    `query_positions` and `key_positions`, as for a part of a row, or for new queries at a cache of keys. (They are not
    the positions of a batch, which begin anew in each segment.)
    """

    causal: bool = flax.struct.field(pytree_node=False, default=False)
    query_segment_ids: Optional[jax.Array] = None  # [B, T] int32; None: all are of one segment
    key_segment_ids: Optional[jax.Array] = None  # [B, S] int32
    # Tokens a query sees: itself and those before it; without `causal` half as many on each side of it.
    window: Optional[int] = flax.struct.field(pytree_node=False, default=None)
    windowed: Optional[jax.Array] = None  # [] bool: does `window` hold (None: yes); the layers of a scan may differ
    # [B, S] int32, 1 at keys that `causal` hides from nobody, nor sparse windows; None: there is none
    prefix: Optional[jax.Array] = None
    query_positions: Optional[jax.Array] = None  # [T] or [B, T] int32; None: 0 … T-1
    key_positions: Optional[jax.Array] = None  # [S] or [B, S] int32; None: 0 … S-1
    layer: Optional[jax.Array] = None  # [] int32, number of the layer, where each sees keys of its own (RandomBlocks)
    # Of segments there is one a row, from its start, and padding behind it: its length says what the ids do.
    one_text: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def has_positions(self) -> bool:
        """Returns True if queries or keys have indices other than those of a row from its start."""
        return self.query_positions is not None or self.key_positions is not None

    @property
    def reach(self) -> tuple[int, int]:
        """Returns how many tokens before and after itself a query sees."""
        if not self.causal:
            return self.window // 2, self.window // 2
        return self.window - 1, 0 if self.prefix is None else self.window - 1

    @property
    def lengths(self) -> Optional[tuple[jax.Array, jax.Array]]:
        """Returns how many queries and keys of a row are its text, [B] int32 each; None where it may have several."""
        if not self.one_text:
            return None
        queries, keys = ((ids > 0).sum(1, dtype=jnp.int32) for ids in (self.query_segment_ids, self.key_segment_ids))
        return queries, keys

    def check_shapes(self, rows: int, query_length: int, key_length: int) -> None:
        """Raises AssertionError for an array that is not of so many rows, queries and keys."""
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
        """Returns the mask as [B, 1, T, S] bool (first axis 1 without arrays); True where the query sees the key."""
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
            near = (-before <= distance) & (distance <= after)
            allowed &= (near if self.windowed is None else near | ~self.windowed)[:, None]
        if self.query_segment_ids is not None:
            # [B, 1, T, 1] == [B, 1, 1, S] -> [B, 1, T, S]
            same = self.query_segment_ids[:, None, :, None] == self.key_segment_ids[:, None, None, :]
            allowed = allowed & same
        return allowed


def masked_logits(
    q: jax.Array,
    k: jax.Array,
    mask: Mask,
    bias: Optional[jax.Array],
    scale: float,
    logit_cap: Optional[float],
) -> jax.Array:
    """Returns cap(scale · q kᵀ) + bias where the mask allows, else FORBIDDEN: [B, G, R, T, S] float32, R = H / G.

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; bias: [1 or B, H, T, S].
    """
    b, t, h, d = q.shape
    s, g = k.shape[1:3]
    r = h // g  # query heads for each key head
    # Heads come before the length, which makes plain matrix products of it: on a CPU 1.5 times as fast as the einsum
    # of q and k as they are. [B, T, H, K] -> [B, G, R·T, K], [B, S, G, K] -> [B, G, S, K]
    q = q.reshape(b, t, g, r, d).transpose(0, 2, 3, 1, 4).reshape(b, g, r * t, d)
    logits = jnp.einsum("BGTK,BGSK->BGTS", q, k.swapaxes(1, 2), preferred_element_type=jnp.float32) * scale
    if logit_cap is not None:
        logits = logit_cap * jnp.tanh(logits / logit_cap)
    # [B, G, R·T, S] -> [B, G, R, T, S]
    logits = logits.reshape(b, g, r, t, s)
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(-1, g, r, t, s)
        logits += bias if len(bias) == b else _copies(bias, b)
    # [B, 1, T, S] -> [B, 1, 1, T, S]
    return jnp.where(mask.materialize(t, s)[:, :, None], logits, FORBIDDEN)


def weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Sums values by their weights: [B, G, R, T, S] float32, [B, S, G, K] -> [B, G, R, T, K] float32."""
    b, g, r, t, s = weights.shape
    weights = weights.astype(v.dtype).reshape(b, g, r * t, s)
    out = jnp.einsum("BGTS,BGSK->BGTK", weights, v.swapaxes(1, 2), preferred_element_type=jnp.float32)
    return out.reshape(b, g, r, t, -1)


def heads_last(x: jax.Array) -> jax.Array:
    """Moves heads behind the length: [B, G, R, T, K] -> [B, T, H, K]."""
    b, g, r, t, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, d)


def _repeat(x: jax.Array, count: int) -> jax.Array:
    """Repeats the only row: [1, …] -> [count, …]."""
    return jnp.broadcast_to(x, (count, *x.shape[1:]))


def _copies_backward(count, _, gradient):
    # A product with ones: XLA sums over a first axis on one core of a CPU, and 10 times slower than it reads.
    ones = jnp.ones((count,), gradient.dtype)
    return (jnp.einsum("B,B...->...", ones, gradient, precision=jax.lax.Precision.HIGHEST)[None],)


_copies = jax.custom_vjp(_repeat, nondiff_argnums=(1,))
# not _copies, of which a gradient could not be differentiated again
_copies.defvjp(lambda x, count: (_repeat(x, count), None), _copies_backward)


def padded_segments(mask: Mask, q: jax.Array, k: jax.Array, multiple: int) -> Optional[tuple[jax.Array, jax.Array]]:
    """Returns the segment ids ([B, T'], [B, S']) of lengths padded to multiples; None where all are of one segment."""
    ids = mask.query_segment_ids, mask.key_segment_ids
    if ids[0] is None:
        if q.shape[1] % multiple == 0 and k.shape[1] % multiple == 0:
            return None
        ids = jnp.ones(q.shape[:2], jnp.int32), jnp.ones(k.shape[:2], jnp.int32)
    return pad(ids[0], 1, multiple, PADDING), pad(ids[1], 1, multiple, PADDING)


def pad(x: jax.Array, axis: int, multiple: int, value: int = 0) -> jax.Array:
    """Fills an axis up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)
