"""A table of vectors, looked up by an id."""

import functools
from typing import Any, Optional

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.sharding.arrays import batch_spec, constrain, scattered_sum
from pretrainax.sharding.mesh import axis_size


class Embedding(nn.Module):
    """Row ids[b, t] of `embedding` [rows, D]. Ids are in range: `validate` and `check_batch` see to it."""

    rows: int
    features: int
    embedding_init: Any
    rows_split_by: Optional[str] = None  # the mesh axis that splits the rows

    def setup(self):
        self.embedding = self.param("embedding", self.embedding_init, (self.rows, self.features), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        chex.assert_rank(ids, 2, custom_message="ids are [B, T]")
        # [B, T] -> [B, T, D]
        return _look_up(self.rows_split_by, self.rows, self.embedding, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(rows_split_by: Optional[str], rows: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    # With fsdp a device holds a part of each vector: the table is gathered, so that the ids need not be.
    return jnp.take(constrain(table, P(rows_split_by, None)), ids, axis=0, mode="clip")


def _look_up_backward(rows_split_by, rows, ids, gradient):
    """Lets each device add up the gradients of its own tokens, and scatters the sums. Left to itself, the compiler
    gives every device the sum of the whole table, of which it then keeps a part: twice the traffic."""
    spec = batch_spec(ids.shape)
    if spec is None:
        return jnp.zeros((rows, gradient.shape[-1]), gradient.dtype).at[ids].add(gradient), None

    def of_own_tokens(ids, gradient):
        size = rows // axis_size(rows_split_by) if rows_split_by else rows
        start = jax.lax.axis_index(rows_split_by) * size if rows_split_by else 0
        ids = jnp.where(ids >= start, ids - start, size)  # `size` and more are rows of other devices
        table = jnp.zeros((size, gradient.shape[-1]), gradient.dtype).at[ids].add(gradient, mode="drop")
        return scattered_sum(table, spec, axis=1)

    run = jax.shard_map(of_own_tokens, in_specs=(spec, spec), out_specs=P(rows_split_by, "fsdp"), check_vma=False)
    return run(ids, gradient), None


_look_up.defvjp(lambda *arguments: (_look_up(*arguments), arguments[-1]), _look_up_backward)
