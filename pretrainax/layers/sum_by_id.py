"""The gradient of a lookup of vectors, bitwise reproducible even on a GPU."""

import functools

import jax
import jax.numpy as jnp

from pretrainax.sharding.mesh import GPUS, platform

BLOCK = 128  # tokens per block: enough for a tensor core, and few enough to compare all pairs of tokens cheaply


def vectors_at(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the vectors of x [B, T, D] at positions [B, K] of each row: [B, K, D].

    On a GPU, the gradient would be a scatter-add, which `sum_by_id` explains. There, it is a multiplication by a matrix
    of zeros and ones.
    """
    return (_vectors_at if platform() in GPUS else _look_up)(x.shape[1], x, positions)


def _look_up(length: int, x: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, positions[:, :, None], axis=1, mode="clip")


def _forward(length: int, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _look_up(length, x, positions), positions


def _backward(length: int, positions: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    is_same = positions[:, None] == jnp.arange(length)[None, :, None]  # [B, T, K]
    # A matmul adds in float32, whatever its result's dtype; a float32 result would be another pass over [B, T, D].
    return jnp.matmul(is_same.astype(gradient.dtype), gradient, precision="highest"), None


_vectors_at = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))(_look_up)
_vectors_at.defvjp(_forward, _backward)


def sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Sums the vectors of each id from 0 to `rows` - 1, and returns [rows, D], ignoring vectors with other ids.

    On a GPU, a scatter-add would use atomic operations, in the order in which threads arrive. There, this function
    therefore multiplies by a matrix of zeros and ones, or, if there are many rows, sorts the ids (`sorted_sum_by_id`).

    Args:
      ids: integers of any shape, [...].
      x: [..., D], one float vector per id.
      rows: number of rows in the result.
    """
    ids, x = ids.reshape(-1), x.reshape(-1, x.shape[-1])
    if platform() not in GPUS:
        return jnp.zeros((rows, x.shape[-1]), x.dtype).at[ids].add(x, mode="drop")
    if rows > BLOCK:
        return sorted_sum_by_id(ids, x, rows)
    return _sum_selected(ids[None] == jnp.arange(rows)[:, None], x).astype(x.dtype)


def sorted_sum_by_id(ids: jax.Array, x: jax.Array, rows: int) -> jax.Array:
    """Computes `sum_by_id` of ids [N] and x [N, D] with matmuls by matrices of zeros and ones.

    The computation has these steps:

    - Sort the tokens by id, and split them into blocks.
    - Within a block, give each token the sum over the block's tokens with the same id, in float32.
    - An id may also occur in earlier blocks. It is then the last id of each of these blocks; add their sums for this
      id.
    - The last token of each id now has the sum over all tokens of the id. Copy it to the row of the id in the result.
    """
    num_blocks = -(-ids.size // BLOCK)
    pad = (0, num_blocks * BLOCK - ids.size)
    order = jnp.argsort(ids)  # stable
    ids = jnp.pad(ids[order], pad, constant_values=jnp.iinfo(ids.dtype).max)
    blocks = ids.reshape(num_blocks, BLOCK)
    vectors = jnp.pad(x[order], (pad, (0, 0))).reshape(num_blocks, BLOCK, -1)
    first, last = blocks[:, 0], blocks[:, -1]
    block_sums = _sum_selected(blocks[:, :, None] == blocks[:, None, :], vectors)
    block_index = jnp.arange(num_blocks)
    is_continued = (first[:, None] == last[None, :]) & (block_index[None, :] < block_index[:, None])
    earlier = _sum_selected(is_continued, block_sums[:, -1])  # [blocks, D], for each block's first id
    total = block_sums + jnp.where((blocks == first[:, None])[..., None], earlier[:, None], 0)
    last_token = jnp.searchsorted(ids, jnp.arange(rows, dtype=ids.dtype), side="right") - 1
    last_token = jnp.maximum(last_token, 0)
    is_present = ids[last_token] == jnp.arange(rows)
    return jnp.where(is_present[:, None], total.reshape(ids.size, -1)[last_token], 0).astype(x.dtype)


def _sum_selected(is_same: jax.Array, x: jax.Array) -> jax.Array:
    """Sums the vectors x [..., M, D] that the rows of is_same [..., N, M] select: [..., N, D] float32."""
    # "highest", because by default a GPU would round the mantissas of float32 to 10 bits.
    return jnp.matmul(is_same.astype(x.dtype), x, precision="highest", preferred_element_type=jnp.float32)
