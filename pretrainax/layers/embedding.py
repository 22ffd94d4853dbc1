"""A table of trained vectors, which are looked up by id."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from pretrainax.layers.sum_by_id import sum_by_id
from pretrainax.sharding.arrays import batch_spec, constrain, scattered_sum
from pretrainax.sharding.axes import AXIS_RULES, logical_spec
from pretrainax.sharding.mesh import axis_size


class Embedding(nn.Module):
    """Looks up the vectors with the given ids in a table: ids [B, T], table [rows, D] -> [B, T, D].

    The ids must be in range, which `validate` and `check_batch` ensure. `axes` names the axes of the table, like the
    kernel axes of a Linear.
    """

    rows: int
    features: int
    embedding_init: Initializer
    axes: tuple[str, str] = ("rows", "d_model")

    def setup(self):
        self.embedding = self.param("embedding", self.embedding_init, (self.rows, self.features), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        chex.assert_rank(ids, 2, custom_message="ids are [B, T]")
        # [B, T] -> [B, T, D]
        return _look_up(self.axes, self.rows, self.embedding, ids)


def _take(axes: tuple[str, str], rows: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    # With `fsdp`, each device has a part of each vector. The table is gathered along `fsdp`, so that the compiler need
    # not gather the ids.
    return jnp.take(constrain(table, logical_spec(axes[0], None)), ids, axis=0, mode="clip")


def _look_up_backward(axes, rows, ids, gradient):
    """Returns the gradient of the table: each device sums the gradients of its own tokens, and the sums are scattered.

    By default, the compiler would give every device the sum of the whole table, although a device then uses only a part
    of it. That is twice the traffic.
    """
    spec = batch_spec(ids.shape)
    if spec is None:
        return sum_by_id(ids, gradient, rows), None

    rows_split_by = AXIS_RULES[axes[0]]

    def of_own_tokens(ids, gradient):
        size = rows // axis_size(rows_split_by) if rows_split_by else rows
        start = jax.lax.axis_index(rows_split_by) * size if rows_split_by else 0
        ids = jnp.where(ids >= start, ids - start, size)  # ids of `size` or more are rows of other devices
        return scattered_sum(sum_by_id(ids, gradient, size), spec, axis=1)

    run = jax.shard_map(of_own_tokens, in_specs=(spec, spec), out_specs=logical_spec(*axes), check_vma=False)
    return run(ids, gradient), None


_look_up = jax.custom_vjp(_take, nondiff_argnums=(0, 1))
# The forward calls _take, not _look_up, so that gradients can be differentiated again.
_look_up.defvjp(lambda *arguments: (_take(*arguments), arguments[-1]), _look_up_backward)
