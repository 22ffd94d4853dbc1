"""The KV cache of a decoder's blocks.

The rows of a batch have different lengths, but generation appends one token to all rows in each step. All rows are
therefore aligned at their last tokens, and one token index serves all rows. The distance between two tokens of a row is
the difference of their indices.

A layer stores the last C tokens in a ring buffer, the token with index i in slot i mod C. In a local layer, C is the
window size. In a global layer, C is the maximum row length, so no slot is overwritten.
"""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.attention_mask import Mask
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec

# Position of the key in an empty slot. The position is after every query, so a causal mask masks the key.
_EMPTY_SLOT = jnp.iinfo(jnp.int32).max // 2


@flax.struct.dataclass
class KeyValues:
    """The keys and values of S tokens, [B, G, S, K] each. Heads come before the length, as matmuls require.

    For a batch with a single row, the arrays are [G, S, K]. XLA drops axes of size 1 in matmuls, so with a row axis it
    would store each ring buffer both with and without this axis, and copy both in each step.
    """

    keys: jax.Array  # after the key norm and the rotary position encoding, if the model has them
    values: Optional[jax.Array]  # None: the values are computed from the keys, as in latent attention

    @classmethod
    def from_arrays(cls, k: jax.Array, v: Optional[jax.Array]) -> "KeyValues":
        """Builds a KV cache from the keys and values [B, S, G, K] that attention computed.

        Args:
          v: None if the values are computed from the keys.
        """
        return jax.tree.map(lambda x: x.swapaxes(1, 2), cls(k, v))._squeezed()

    def heads_last(self) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values in the layout that `attention` expects, [B, S, G, K] each.

        A cache without values returns the keys twice.
        """
        keys, *values = jax.tree.leaves(jax.tree.map(lambda x: x.swapaxes(1, 2), self._batched()))
        return keys, values[0] if values else keys

    def take(self, rows: jax.Array) -> "KeyValues":
        """Selects rows of the cache by index; `rows` [B'] contains indices from 0 to B - 1."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), self._batched())._squeezed()._sharded()

    # --- the cache as a ring buffer, with length S = C ---

    def ring(self, lengths: jax.Array, size: int, next_index: int | jax.Array) -> "KeyValues":
        """Builds a ring buffer with `size` slots from the cache of right-padded rows.

        Args:
          lengths: [B], number of tokens of each row.
          next_index: token index that the next token of all rows will have.
        """
        cache, last = self._batched(), next_index - 1
        index = last - slot_distance(last, size)  # [C], token index of each slot; below 0: empty
        first = (next_index - lengths)[:, None]  # [B, 1], token index of each row's first token
        source_index = jnp.maximum(index[None, :] - first, 0)[:, None, :, None]  # [B, 1, C, 1]
        ring = jax.tree.map(lambda x: jnp.take_along_axis(x, source_index, axis=2, mode="clip"), cache)
        return ring._squeezed()._sharded()

    def append(self, token: "KeyValues", index: jax.Array) -> "KeyValues":
        """Writes one token per row into the slot for token index `index` [], and returns the updated ring buffer."""
        slot = index % self.keys.shape[-2]
        write = lambda buffer, x: jax.lax.dynamic_update_slice_in_dim(buffer, x, slot, buffer.ndim - 2)  # noqa: E731
        return jax.tree.map(write, self, token)

    def mask_for_query(
        self, index: jax.Array, mask: Mask, bias: Optional[jax.Array]
    ) -> tuple[Mask, Optional[jax.Array]]:
        """Returns the mask and the bias for one query per row that attends to the slots of the ring buffer.

        Args:
          index: [], token index of the query. The ring buffer already contains the query's own token.
          mask: a mask with `query_positions` [B, 1], the position of the query in its segment.
          bias: optional [1, H, 1, N] bias for the last N >= C tokens, up to and including the query's token.
        """
        distance = slot_distance(index, self.keys.shape[-2])[None, :]
        positions = mask.query_positions - distance  # [B, 1], [1, C] -> [B, C]
        mask = mask.replace(key_positions=jnp.where(positions < 0, _EMPTY_SLOT, positions))
        if bias is not None:
            bias = jnp.roll(bias[..., -distance.shape[1] :], index + 1, axis=3)  # [1, H, 1, C]
        return mask, bias

    def _squeezed(self) -> "KeyValues":
        return jax.tree.map(lambda x: x.reshape(x.shape[1:]) if x.shape[0] == 1 else x, self)

    def _batched(self) -> "KeyValues":
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[-3:]), self)

    def _sharded(self) -> "KeyValues":
        """Shards the cache over the mesh by rows and heads, like the outputs of the key and value projections."""
        heads = "num_kv_heads" if self.keys.shape[-3] > 1 else None  # a single head is replicated on all devices
        spec = P(*logical_spec("batch", heads)[4 - self.keys.ndim :])
        return jax.tree.map(lambda x: constrain(x, spec), self)


def slot_distance(index: int | jax.Array, size: int) -> jax.Array:
    """Returns the distance from the token with index `index` back to the token in each slot of a ring buffer, [C].

    Args:
      size: C, the number of slots.
    """
    return (index - jnp.arange(size, dtype=jnp.int32)) % size


@flax.struct.dataclass
class BlockKVCache:
    """The KV cache of a block. Both fields are None before the first token."""

    self_attention: Optional[KeyValues] = None  # tokens of a prompt, later a ring buffer
    cross_attention: Optional[KeyValues] = None  # tokens of the encoded sequence


@flax.struct.dataclass
class KVCache:
    """The KV caches of the L blocks of a decoder, and the index of the next token."""

    blocks: tuple[BlockKVCache, ...]
    index: Optional[jax.Array] = None  # [] int32, index of the next token of all rows; None: no ring buffers yet

    @property
    def longest(self) -> int:
        """Returns the number of slots of the largest ring buffer among the blocks."""
        return max(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Returns the number of slots of each block's ring buffer, [L]."""
        return [block.self_attention.keys.shape[-2] for block in self.blocks if block.self_attention is not None]

    def rings(self, lengths: jax.Array, sizes: list[int], next_index: int | jax.Array) -> "KVCache":
        """Converts the cache of right-padded rows to ring buffers, one for each block.

        Args:
          sizes: [L], number of slots of each block's ring buffer.
          lengths, next_index: as in `KeyValues.ring`.
        """
        blocks = tuple(
            block.replace(self_attention=block.self_attention.ring(lengths, size, next_index))
            for block, size in zip(self.blocks, sizes, strict=True)
        )
        return self.replace(blocks=blocks, index=jnp.asarray(next_index, jnp.int32))

    def with_rows(self, rows: jax.Array, other: "KVCache") -> "KVCache":
        """Returns this cache with the rows where `rows` [B] is True replaced by rows of `other`."""
        select_rows = lambda old, new: jnp.where(rows.reshape(-1, *(1,) * (old.ndim - 1)), new, old)  # noqa: E731
        return self.replace(blocks=jax.tree.map(select_rows, self.blocks, other.blocks))

    def take(self, rows: jax.Array) -> "KVCache":
        """Selects rows of the cache by index; `rows` [B'] contains indices from 0 to B - 1."""
        is_cache = lambda x: isinstance(x, KeyValues)  # noqa: E731
        return self.replace(blocks=jax.tree.map(lambda cache: cache.take(rows), self.blocks, is_leaf=is_cache))
