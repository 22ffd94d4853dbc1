"""Shards batches and activations, and checks that a mesh fits a config."""

import math
from collections.abc import Mapping, Sequence
from typing import Optional, Union

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import Experiment, UserError
from pretrainax.sharding.axes import (
    BATCH_AXES,
    DATA_AXIS,
    EXPERT_AXIS,
    FSDP_AXIS,
    LENGTH_AXIS,
    PARAMETER_AXES,
    logical_spec,
)
from pretrainax.sharding.mesh import BatchShare, axis_size, batch_share, free_axes
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.stages import check_stages

ACTIVATION_SPEC = logical_spec("batch", "length")  # the PartitionSpec of an activation [B, T, …]


def batch_sharding(mesh: Union[Mesh, AbstractMesh], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of a batch array [B, …] or [B, T, …].

    BATCH_AXES split the rows. LENGTH_AXIS splits the length if its size divides the length.
    """
    length_shards = mesh.shape[LENGTH_AXIS]
    splits_length = length_shards > 1 and len(shape) > 1 and shape[1] % length_shards == 0
    return NamedSharding(mesh, ACTIVATION_SPEC if splits_length else logical_spec("batch"))


def split_microbatches(batch: PyTree, micro_batches: int, mesh: Mesh) -> PyTree:
    """Splits a batch into A microbatches [A, B/A, …]; microbatch a has rows a, a + A, …, on their original devices."""

    def split(x):
        x = x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:])  # [B, …] -> [B/A, A, …]
        x = x.swapaxes(0, 1)  # [B/A, A, …] -> [A, B/A, …]
        spec = batch_sharding(mesh, x.shape[1:]).spec
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, *spec)))

    return jax.tree.map(split, batch)


def check_mesh(experiment: Experiment, mesh: Mesh) -> None:
    """Raises UserError if the mesh does not fit a config's pipeline stages, experts, batch size or attention."""
    check_stages(experiment, mesh.shape)
    if mesh.shape[EXPERT_AXIS] > 1 and experiment.model.experts is None:
        raise UserError(
            f"config.mesh.{EXPERT_AXIS} is {mesh.shape[EXPERT_AXIS]}, and the model has no experts "
            f"(config.model.experts is None): set it to 1, and config.mesh.{FSDP_AXIS} or {DATA_AXIS} to more"
        )
    rows, accumulate = experiment.train.global_batch_size, experiment.train.accumulate
    batch_divisor = accumulate * math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows % batch_divisor:
        split_axes = [axis for axis in BATCH_AXES if axis in (DATA_AXIS, FSDP_AXIS) or mesh.shape[axis] > 1]
        sizes = " × ".join(f"config.mesh.{axis} {mesh.shape[axis]}" for axis in split_axes)
        raise UserError(
            f"config.train.global_batch_size {rows} is not a multiple of {batch_divisor}: "
            f"config.train.accumulate {accumulate} × {sizes}"
        )
    obstacle = experiment.model.unsupported("sequence parallelism")
    if obstacle and mesh.shape[LENGTH_AXIS] > 1:
        raise UserError(
            f"config.mesh.{LENGTH_AXIS} is {mesh.shape[LENGTH_AXIS]}, and config.model {obstacle}: set it to 1, and "
            f"config.mesh.{DATA_AXIS} to more"
        )
    for name in ("attention_sinks", "sparse_attention"):
        if getattr(experiment.model, name) and mesh.shape[LENGTH_AXIS] > 1:
            raise UserError(
                f"config.model.{name} is set, which attention does not support on a mesh that splits the length: set "
                f"config.mesh.{LENGTH_AXIS}={mesh.shape[LENGTH_AXIS]} to 1"
            )
    dropout_rate, length_shards = experiment.model.attention_dropout_rate, mesh.shape[LENGTH_AXIS]
    if dropout_rate and length_shards > 1:
        raise UserError(
            f"config.model.attention_dropout_rate is {dropout_rate}, and attention has no dropout on a mesh that "
            f"splits the length: set it to 0, or config.mesh.{LENGTH_AXIS}={length_shards} to 1"
        )


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Builds the global batch of device arrays [B, …] from the rows [b, …] that this process loaded.

    The transfers to the devices are asynchronous.
    """
    share = batch_share(mesh, jax.process_index())
    return {name: _put(share, rows, mesh) for name, rows in batch.items()}


def _put(share: BatchShare, rows: np.ndarray, mesh: Mesh) -> jax.Array:
    shape, rows_per_part = (len(rows) * share.count, *rows.shape[1:]), len(rows) // len(share.parts)

    def device_rows(index) -> np.ndarray:
        start = share.parts.index((index[0].start or 0) // rows_per_part) * rows_per_part
        return rows[(slice(start, start + rows_per_part), *index[1:])]

    return jax.make_array_from_callback(shape, batch_sharding(mesh, shape), device_rows)


def batch_spec(shape: Sequence[int]) -> Optional[P]:
    """Returns the PartitionSpec of a batch array [B, …] on the mesh set by `jax.set_mesh`.

    Returns None if no mesh is set, or if the number of rows is not a multiple of the devices along BATCH_AXES.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or shape[0] % axis_size(BATCH_AXES):
        return None
    return batch_sharding(mesh, shape).spec


def scattered_sum(x: jax.Array, spec: P, axis: int) -> jax.Array:
    """Sums `x` over devices and scatters the sum over PARAMETER_AXES, inside `jax.shard_map`.

    Args:
      x: this device's summand.
      spec: the mesh axes to sum over, in addition to PARAMETER_AXES.
      axis: the axis of the sum that is scattered over PARAMETER_AXES.
    """
    if axis_size(PARAMETER_AXES) > 1:
        x = jax.lax.psum_scatter(x, PARAMETER_AXES, scatter_dimension=axis, tiled=True)
    other_axes = [name for name in jax.tree.leaves(tuple(spec)) if name not in PARAMETER_AXES and axis_size(name) > 1]
    return jax.lax.psum(x, other_axes) if other_axes else x


def constrain(x: jax.Array, spec: P = ACTIVATION_SPEC) -> jax.Array:
    """Constrains an activation to the sharding `spec` on the mesh set by `jax.set_mesh`; a no-op without a mesh.

    If the mesh does not divide the first axis, that axis is not split, because an inference batch may have few rows.
    The compiler pads the other axes, so target lengths need not be multiples of the mesh axis size.

    Parameters are split along axes that activations also have, for example the width. Without constraints, the compiler
    would shard activations like parameters: with fsdp, each device would hold all rows of the batch and a slice of the
    width.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    spec = P(*(free_axes((names,) if isinstance(names, str) else names or ()) or None for names in spec))
    if spec and spec[0] is not None and x.shape[0] % axis_size(spec[0]):
        spec = P(None, *spec[1:])
    return jax.lax.with_sharding_constraint(x, spec)
