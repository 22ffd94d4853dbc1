"""The gradient of a table that rows were looked up in, with the same bits each time, also on a GPU."""

import jax
import jax.numpy as jnp

from pretrainax.sharding.mesh import GPUS, platform

BLOCK = 128  # tokens: large enough for a tensor core, and few enough that comparing each with each costs little


def sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Returns for each id below `rows` the sum of the vectors with that id, [rows, D]; others are left out.

    A GPU adds to a table with atomics, in whatever order its threads arrive; there the sum is over sorted ids.

    Args:
      ids: whole numbers of any shape.
      x: a vector of size D for each, float.
    """
    ids, x = ids.reshape(-1), x.reshape(-1, x.shape[-1])
    if platform() in GPUS:
        return sorted_sum_by_id(ids, x, rows)
    return jnp.zeros((rows, x.shape[-1]), x.dtype).at[ids].add(x, mode="drop")


def sorted_sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Returns what `sum_by_id` does, of ids [N] and x [N, D], by products with matrices of zeros and ones.

    Tokens are sorted by id and cut into blocks. Within a block each token gets the sum over those of its id, in
    float32. An id that began in an earlier block is the last one of each such block, whose sum for it is added. The
    last token of an id then has the whole sum, which its row of the table takes.
    """
    count = -(-ids.size // BLOCK)
    pad = (0, count * BLOCK - ids.size)
    order = jnp.argsort(ids)  # stable
    ids = jnp.pad(ids[order], pad, constant_values=jnp.iinfo(ids.dtype).max)
    blocks = ids.reshape(count, BLOCK)
    vectors = jnp.pad(x[order], (pad, (0, 0))).reshape(count, BLOCK, -1)
    first, last = blocks[:, 0], blocks[:, -1]
    own = _product(blocks[:, :, None] == blocks[:, None, :], vectors)
    numbers = jnp.arange(count)
    began_before = (first[:, None] == last[None, :]) & (numbers[None, :] < numbers[:, None])
    earlier = _product(began_before, own[:, -1])  # [blocks, D]: of the first id of each
    total = own + jnp.where((blocks == first[:, None])[..., None], earlier[:, None], 0)
    place = jnp.searchsorted(ids, jnp.arange(rows, dtype=ids.dtype), side="right") - 1
    place = jnp.maximum(place, 0)
    is_there = ids[place] == jnp.arange(rows)
    return jnp.where(is_there[:, None], total.reshape(ids.size, -1)[place], 0).astype(x.dtype)


def _product(is_same: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sums of vectors [..., M, D] that each row of is_same [..., N, M] asks for, in float32."""
    # "highest": a GPU would round float32 to 10 bits
    return jnp.matmul(is_same.astype(x.dtype), x, precision="highest", preferred_element_type=jnp.float32)
