"""Keys and values that the blocks of a decoder keep of the tokens they have read, for the tokens that follow.

The rows of a batch end at different places and go on together. So each is kept aligned at its last token: one index
counts the tokens of all rows, and two tokens of a row are as far apart as their indices. A layer keeps the C tokens
that were read last in a ring, the one of index i in slot i mod C. C is the window of a local layer; in a global one it
is all that the rows can grow to, and nothing is ever overwritten.
"""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.attention_mask import Mask
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec

_NOT_THERE = jnp.iinfo(jnp.int32).max // 2  # place of a key that is in no slot: after every query


@flax.struct.dataclass
class KeysAndValues:
    """Holds what queries read of S tokens, [B, G, S, K] each: heads come before the length, as the products want them.

    Of one row it is [G, S, K]: XLA drops an axis of size 1 in the products, and would keep a ring once with it and once
    without, and copy both in each step.
    """

    keys: jax.Array  # normed, and turned by their positions
    values: Optional[jax.Array]  # None: keys say all there is, as of latent attention

    @classmethod
    def of(cls, k: jax.Array, v: Optional[jax.Array]) -> "KeysAndValues":
        """Returns those of a call of attention, [B, S, G, K]."""
        return jax.tree.map(lambda x: x.swapaxes(1, 2), cls(k, v))._at_rest()

    def heads_last(self) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values as attention takes them, [B, S, G, K]; of keys that say all, these twice."""
        keys, *values = jax.tree.leaves(jax.tree.map(lambda x: x.swapaxes(1, 2), self._with_rows()))
        return keys, values[0] if values else keys

    def take(self, rows: jax.Array) -> "KeysAndValues":
        """Returns those of `rows` [B'], indices into B."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), self._with_rows())._at_rest()._spread()

    # --- as a ring: S is C ---

    def ring(self, lengths: jax.Array, size: int) -> "KeysAndValues":
        """Returns the ring of prompts of `lengths` [B] that are padded on the right to S; the next index is S."""
        whole = self._with_rows()
        padded = whole.keys.shape[2]
        index = padded - 1 - behind(padded - 1, size)  # [C], of the token in each slot; below 0: none
        source = jnp.maximum(index[None, :] - (padded - lengths)[:, None], 0)[:, None, :, None]  # [B, 1, C, 1]
        ring = jax.tree.map(lambda x: jnp.take_along_axis(x, source, axis=2, mode="clip"), whole)
        return ring._at_rest()._spread()

    def written(self, token: "KeysAndValues", index: jax.Array) -> "KeysAndValues":
        """Returns the ring with those of one token more in the slot of `index` []."""
        slot = index % self.keys.shape[-2]
        write = lambda kept, x: jax.lax.dynamic_update_slice_in_dim(kept, x, slot, kept.ndim - 2)  # noqa: E731
        return jax.tree.map(write, self, token)

    def seen_from(self, index: jax.Array, mask: Mask, bias: Optional[jax.Array]) -> tuple[Mask, Optional[jax.Array]]:
        """Returns the mask and the bias of a query on the slots.

        Args:
          index: [], of the query, whose own token is in the ring already.
          mask: with `query_positions` [B, 1], the place of the query in its text.
          bias: [1, H, 1, N] on the N >= C tokens that end with the query's, or None.
        """
        distance = behind(index, self.keys.shape[-2])[None, :]
        places = mask.query_positions - distance  # [B, 1], [1, C] -> [B, C]
        mask = mask.replace(key_positions=jnp.where(places < 0, _NOT_THERE, places))
        if bias is not None:
            bias = jnp.roll(bias[..., -distance.shape[1] :], index + 1, axis=3)  # [1, H, 1, C]
        return mask, bias

    def _at_rest(self) -> "KeysAndValues":
        return jax.tree.map(lambda x: x.reshape(x.shape[1:]) if x.shape[0] == 1 else x, self)

    def _with_rows(self) -> "KeysAndValues":
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[-3:]), self)

    def _spread(self) -> "KeysAndValues":
        """Returns them spread over the mesh as the maps that made them are: rows, and heads."""
        heads = "num_kv_heads" if self.keys.shape[-3] > 1 else None  # one is whole on all devices
        spec = P(*logical_spec("batch", heads)[4 - self.keys.ndim :])
        return jax.tree.map(lambda x: constrain(x, spec), self)


def behind(index: int | jax.Array, size: int) -> jax.Array:
    """Returns how many tokens before that of `index` the one in each slot of a ring stands, [C]."""
    return (index - jnp.arange(size, dtype=jnp.int32)) % size


@flax.struct.dataclass
class BlockMemory:
    """Holds what a block keeps of the tokens it has read; nothing before the first."""

    own: Optional[KeysAndValues] = None  # of self-attention: of a prompt, and then a ring
    read: Optional[KeysAndValues] = None  # of cross-attention: of the encoded text


@flax.struct.dataclass
class Memory:
    """Holds what the L blocks of a decoder keep, and how far the rows are."""

    blocks: tuple[BlockMemory, ...]
    index: Optional[jax.Array] = None  # [] int32, of the next token, in all rows; None: there are no rings yet
    reach: Optional[int] = flax.struct.field(pytree_node=False, default=None)  # tokens that the longest row may grow to

    @property
    def longest(self) -> int:
        """Returns the number of slots of the longest ring."""
        return max(block.own.keys.shape[-2] for block in self.blocks if block.own is not None)

    def rings(self, lengths: jax.Array, sizes: list[int]) -> "Memory":
        """Returns the memory of prompts of `lengths` [B], which are padded on the right, as rings of `sizes` [L]."""
        first = self.blocks[0].own
        assert first is not None
        blocks = tuple(
            block.replace(own=block.own.ring(lengths, size)) for block, size in zip(self.blocks, sizes, strict=True)
        )
        return self.replace(blocks=blocks, index=jnp.asarray(first.keys.shape[-2], jnp.int32))

    def take(self, rows: jax.Array) -> "Memory":
        """Returns the memory of `rows` [B'], indices into B."""
        is_kept = lambda x: isinstance(x, KeysAndValues)  # noqa: E731
        return self.replace(blocks=jax.tree.map(lambda kept: kept.take(rows), self.blocks, is_leaf=is_kept))
