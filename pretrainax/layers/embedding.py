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
    """Looks up the vectors of `ids` in a table: ids [B, T], table [rows, D] -> [B, T, D].

    The ids must be in range; `validate` and `check_batch` check this. `axes` names the axes of the table, like the
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
    # With `fsdp`, each device stores a slice of each vector. Gathering the table along `fsdp` saves the compiler from
    # gathering the ids.
    return jnp.take(constrain(table, logical_spec(axes[0], None)), ids, axis=0, mode="clip")


def _look_up_backward(axes, rows, ids, gradient):
    """Computes the gradient of the table: each device sums its tokens' gradients, and a reduce-scatter adds the sums.

    By default, the compiler would all-reduce the whole table's gradient, although each device needs only a slice of it.
    That is twice the traffic.
    """
    spec = batch_spec(ids.shape)
    if spec is None:
        return sum_by_id(ids, gradient, rows), None

    row_axis = AXIS_RULES[axes[0]]

    def sum_local_tokens(ids, gradient):
        size = rows // axis_size(row_axis) if row_axis else rows
        first_row = jax.lax.axis_index(row_axis) * size if row_axis else 0
        ids = jnp.where(ids >= first_row, ids - first_row, size)  # ids >= `size` are rows of other devices
        return scattered_sum(sum_by_id(ids, gradient, size), spec, axis=1)

    run = jax.shard_map(sum_local_tokens, in_specs=(spec, spec), out_specs=logical_spec(*axes), check_vma=False)
    return run(ids, gradient), None


_look_up = jax.custom_vjp(_take, nondiff_argnums=(0, 1))
# The forward calls _take, not _look_up, so that gradients can be differentiated again.
_look_up.defvjp(lambda *arguments: (_take(*arguments), arguments[-1]), _look_up_backward)
