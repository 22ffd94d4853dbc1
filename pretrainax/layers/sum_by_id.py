"""The gradient of a table lookup, which is bitwise reproducible also on a GPU."""

import jax
import jax.numpy as jnp

from pretrainax.sharding.mesh import GPUS, platform

BLOCK = 128  # tokens per block: enough for a tensor core, and few enough that comparing all pairs of tokens is cheap


def sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Returns the sum of the vectors of each id from 0 to `rows` - 1, [rows, D]; other ids are ignored.

    A GPU would add to a table with atomic operations, in the order in which its threads arrive. On a GPU, this function
    therefore sorts the ids (`sorted_sum_by_id`).

    Args:
      ids: integers of any shape, [...].
      x: [..., D], one float vector per id.
      rows: number of rows of the result.
    """
    ids, x = ids.reshape(-1), x.reshape(-1, x.shape[-1])
    if platform() in GPUS:
        return sorted_sum_by_id(ids, x, rows)
    return jnp.zeros((rows, x.shape[-1]), x.dtype).at[ids].add(x, mode="drop")


def sorted_sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Computes `sum_by_id` of ids [N] and x [N, D] with products by matrices of zeros and ones.

    Tokens are sorted by id and split into blocks. Within a block, each token gets the sum over the tokens of the block
    with the same id, in float32. An id may also occur in earlier blocks. It is then the last id of each of these
    blocks, whose sums for this id are added. After that, the last token of each id has the sum over all tokens of the
    id. This sum becomes the row of the id in the result.
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
    earlier = _product(began_before, block_sums[:, -1])  # [blocks, D], sums of earlier blocks for each block's first id
    total = block_sums + jnp.where((blocks == first[:, None])[..., None], earlier[:, None], 0)
    last_token = jnp.searchsorted(ids, jnp.arange(rows, dtype=ids.dtype), side="right") - 1
    last_token = jnp.maximum(last_token, 0)
    is_present = ids[last_token] == jnp.arange(rows)
    return jnp.where(is_present[:, None], total.reshape(ids.size, -1)[last_token], 0).astype(x.dtype)


def _product(is_same: jax.Array, x: jax.Array) -> jax.Array:
    """Returns sums of the vectors x [..., M, D] that the rows of is_same [..., N, M] select, [..., N, D] float32."""
    # "highest", because by default a GPU would round the mantissas of float32 to 10 bits.
    return jnp.matmul(is_same.astype(x.dtype), x, precision="highest", preferred_element_type=jnp.float32)
