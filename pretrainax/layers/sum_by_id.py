"""The gradient of a table lookup, bitwise reproducible also on a GPU."""

import jax
import jax.numpy as jnp

from pretrainax.sharding.mesh import GPUS, platform

BLOCK = 128  # tokens: large enough for a tensor core, and small enough that comparing all pairs costs little


def sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Returns for each id below `rows` the sum of the vectors with that id, [rows, D]; ignores other ids.

    A GPU adds to a table with atomics, in the order in which its threads arrive. On a GPU, this function therefore sums
    over sorted ids.

    Args:
      ids: integers of any shape.
      x: a float vector of size D for each id.
    """
    ids, x = ids.reshape(-1), x.reshape(-1, x.shape[-1])
    if platform() in GPUS:
        return sorted_sum_by_id(ids, x, rows)
    return jnp.zeros((rows, x.shape[-1]), x.dtype).at[ids].add(x, mode="drop")


def sorted_sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Computes `sum_by_id` of ids [N] and x [N, D], by products with matrices of zeros and ones.

    Tokens are sorted by id and split into blocks. Within a block, each token gets the sum over the tokens with its id,
    in float32. An id that began in earlier blocks is the last id of each of these blocks; their sums for this id are
    added. The last token of an id then has the whole sum, which becomes the id's row of the table.
    """
    count = -(-ids.size // BLOCK)
    pad = (0, count * BLOCK - ids.size)
    order = jnp.argsort(ids)  # stable
    ids = jnp.pad(ids[order], pad, constant_values=jnp.iinfo(ids.dtype).max)
    blocks = ids.reshape(count, BLOCK)
    vectors = jnp.pad(x[order], (pad, (0, 0))).reshape(count, BLOCK, -1)
    first, last = blocks[:, 0], blocks[:, -1]
    block_sums = _product(blocks[:, :, None] == blocks[:, None, :], vectors)
    numbers = jnp.arange(count)
    began_before = (first[:, None] == last[None, :]) & (numbers[None, :] < numbers[:, None])
    earlier = _product(began_before, block_sums[:, -1])  # [blocks, D]: earlier sums for the first id of each block
    total = block_sums + jnp.where((blocks == first[:, None])[..., None], earlier[:, None], 0)
    last_token = jnp.searchsorted(ids, jnp.arange(rows, dtype=ids.dtype), side="right") - 1
    last_token = jnp.maximum(last_token, 0)
    is_present = ids[last_token] == jnp.arange(rows)
    return jnp.where(is_present[:, None], total.reshape(ids.size, -1)[last_token], 0).astype(x.dtype)


def _product(is_same: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sum of the vectors [..., M, D] that each row of is_same [..., N, M] selects, in float32."""
    # "highest", because a GPU would round float32 to 10 bits.
    return jnp.matmul(is_same.astype(x.dtype), x, precision="highest", preferred_element_type=jnp.float32)
