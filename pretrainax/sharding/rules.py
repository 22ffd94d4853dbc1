"""Where arrays live: the mesh, the one table from parameter paths to PartitionSpecs, and batches.

Axes of the mesh: `data` splits the batch; `fsdp` splits the batch, and parameters and moments with it; `sequence`
splits the length; `tensor` splits heads, feed-forward and vocabulary. Where slices of a TPU, or clusters, are joined by
a slow network, only `data` crosses it: its first axis is over them.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Optional

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import Experiment, Generator, MeshConfig, UserError
from pretrainax.sharding.param_paths import look_up, parameter_names

AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")  # the axes that split the rows of a batch
ROWS = P(BATCH, "sequence")  # of an activation [B, T, …]

# The end of a parameter's path -> its axes, each with the mesh axis that splits it, if one does. Where one does, the
# name is the field of config.model that has to divide. First match wins. Vectors [D] are copied: they are small.
TABLE = (
    (r"token_embedding/embedding", "vocab_size:tensor d_model:fsdp"),
    (r"((decoder_)?position|token_type|relative)_embedding/embedding", "rows d_model:fsdp"),
    (r"embedding_projection/kernel", "embedding_dim d_model:fsdp"),
    (r"relative_bias/embedding", "buckets num_heads:tensor"),
    (r"blocks/\w+_attention/query/kernel", "layers d_model:fsdp num_heads:tensor head_dim"),
    (r"blocks/\w+_attention/query/bias", "layers num_heads:tensor head_dim"),
    (r"blocks/\w+_attention/(key|value)/kernel", "layers d_model:fsdp num_kv_heads:tensor head_dim"),
    (r"blocks/\w+_attention/(key|value)/bias", "layers num_kv_heads:tensor head_dim"),
    (r"blocks/\w+_attention/out/kernel", "layers num_heads:tensor head_dim d_model:fsdp"),
    (r"blocks/mlp/(gate|up)/kernel", "layers d_model:fsdp d_ff:tensor"),
    (r"blocks/mlp/(gate|up)/bias", "layers d_ff:tensor"),
    (r"blocks/mlp/down/kernel", "layers d_ff:tensor d_model:fsdp"),
    (r"blocks/(\w+_attention/out|mlp/down)/bias", "layers d_model"),
    (r"blocks/self_attention/(query|key)_norm/(scale|bias)", "layers head_dim"),
    (r"blocks/\w+_norm/(scale|bias)", "layers d_model"),
    (r"((decoder_)?embedding_norm|final_norm|(relative_embedding|masked_lm_head)/norm)/(scale|bias)", "d_model"),
    (r"convolution/kernel", "tokens d_model:fsdp d_model"),
    (r"convolution/(bias|norm/scale|norm/bias)", "d_model"),
    (r"replaced_token_head/norm/(scale|bias)", "d_model"),
    (r"(pair|replaced_token)_head/dense/kernel", "d_model:fsdp d_model"),
    (r"(pair|replaced_token)_head/output/kernel", "d_model:fsdp labels"),
    (r"(pair|replaced_token)_head/(dense|output)/bias", "features"),
    (r"embedding_projection/bias", "d_model"),
    (r"masked_lm_head/dense/kernel", "d_model:fsdp embedding_dim:tensor"),
    (r"masked_lm_head/dense/bias", "d_model"),
    (r"unembedding/kernel", "d_model:fsdp vocab_size:tensor"),
    (r"unembedding/bias", "vocab_size:tensor"),
)


def make_mesh(config: MeshConfig, devices: Optional[Sequence[jax.Device]] = None) -> Mesh:
    """The mesh `data × fsdp × sequence × tensor` over all devices.

    Raises:
      UserError: as `mesh_sizes`, and slices that are not those of the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices), len({device.process_index for device in devices}))
    return Mesh(_arranged(tuple(sizes.values()), config.slices, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(config: MeshConfig, devices: int, processes: int) -> dict[str, int]:
    """Devices along each of AXES; an axis of -1 takes what the others leave.

    Raises:
      UserError: sizes whose product is not the number of devices, or rows of the batch that would span processes.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    got = ", ".join(f"config.mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{got}: sizes are at least 1, and at most one of them is -1 (all devices that are left)")
    if free:
        sizes[free[0]] = max(devices // math.prod(s for s in sizes.values() if s != -1), 1)
    if math.prod(sizes.values()) != devices:
        raise UserError(f"{got}: the product must be the number of devices, which is {devices}")
    if (sizes["data"] * sizes["fsdp"]) % processes:
        raise UserError(
            f"{got}: config.mesh.sequence × config.mesh.tensor must divide the {devices // processes} devices of "
            "a process, which reads whole rows of the batch"
        )
    if sizes["data"] % config.slices:
        raise UserError(f"{got}: config.mesh.data must be a multiple of config.mesh.slices {config.slices}")
    return sizes


def _arranged(sizes: tuple[int, ...], slices: int, devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of `sizes`, slice after slice along the first axis, and as near to each other within a
    slice as its wires allow.

    A process reads the rows of its own devices. Where that order would give a row to two processes, as it may on a
    torus whose hosts are smaller than a row's devices are far apart, devices are taken host by host instead.
    """
    within = (sizes[0] // slices, *sizes[1:])
    arrange = functools.partial(mesh_utils.create_device_mesh, within, allow_split_physical_axes=True)
    parts = [arrange(part) for part in _slices(devices, slices)]
    if any(len({d.process_index for d in row}) > 1 for part in parts for row in part.reshape(-1, math.prod(sizes[2:]))):
        parts = [np.array(sorted(p.flat, key=lambda d: (d.process_index, d.id))).reshape(within) for p in parts]
    return np.concatenate(parts)


def _slices(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """The devices of each slice. TPUs know theirs; others are cut into equal ranges of processes."""
    found = {}
    for device in devices:
        found.setdefault(getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []).append(device)
    if len(found) > 1 and len(found) != count:
        raise UserError(f"config.mesh.slices is {count}, and the devices are of {len(found)} slices: set it to that")
    if len(found) == count:
        return [found[index] for index in sorted(found)]
    size = len(devices) // count
    return [list(devices[i * size : (i + 1) * size]) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A parsed row of TABLE."""

    fields: tuple[str, ...]  # of config.model, one an axis
    spec: P

    @classmethod
    def parse(cls, text: str) -> "_Row":
        fields, _, axes = zip(*(axis.partition(":") for axis in text.split()), strict=True)
        return cls(fields, P(*(axis or None for axis in axes)))


def param_specs(tree: Any) -> Any:
    """A PartitionSpec for each leaf of `tree`: parameters, or a whole TrainState, whose moments follow them.

    Raises:
      ValueError: a leaf that TABLE does not cover, or of another rank than its row.
    """
    return jax.tree.map(lambda row: row.spec, _rows(tree))


def shardings(mesh: Mesh, tree: Any) -> Any:
    """A NamedSharding for each leaf of `tree` (arrays or shapes), written as the compiler writes those of its results.

    Raises:
      UserError: an axis that the mesh does not divide; lists every field of config.model at fault.
    """
    problems = {}
    for path, leaf, row in zip(parameter_names(tree), *map(jax.tree.leaves, (tree, _rows(tree))), strict=True):
        for size, field, axis in zip(leaf.shape, row.fields, row.spec, strict=True):
            parts = mesh.shape[axis] if axis else 1
            if size % parts:
                field = f"generator.{field}" if "generator/" in path and hasattr(Generator, field) else field
                hint = f" (pad it to {-(-size // parts) * parts})" if field == "vocab_size" else ""
                problems[field, axis] = (
                    f"config.model.{field} {size} is not a multiple of config.mesh.{axis} {parts}{hint}"
                )
    if problems:
        raise UserError("; ".join(problems.values()))
    return jax.tree.map(lambda spec: NamedSharding(mesh, _shortest(spec, mesh)), param_specs(tree))


def spread(mesh: Mesh, shapes: Any) -> Any:
    """Shapes and dtypes, each with its sharding; raises as `shardings`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings(mesh, shapes)
    )


def _shortest(spec: P, mesh: Mesh) -> P:
    """Without mesh axes of size 1 and without trailing Nones. A step is compiled once more for a state that lies as
    before but says so differently, and the state it returns says it like this."""
    axes = [axis if axis and mesh.shape[axis] > 1 else None for axis in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def _rows(tree: Any) -> Any:
    """The row of each leaf; an empty one for scalars (steps, counters), which are copied."""
    names, (leaves, structure) = parameter_names(tree), jax.tree.flatten(tree)
    texts = look_up(TABLE, {name: x for name, x in zip(names, leaves, strict=True) if x.ndim}, "sharding.TABLE")
    rows = [_Row.parse(texts[name]) if x.ndim else _Row((), P()) for name, x in zip(names, leaves, strict=True)]
    for name, leaf, row in zip(names, leaves, rows, strict=True):
        if leaf.ndim != len(row.fields):
            raise ValueError(f"{name} has shape {leaf.shape}, its row of sharding.TABLE says {' '.join(row.fields)!r}")
    return jax.tree.unflatten(structure, rows)


def batch_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Of an array [B, …] or [B, T, …]: rows over `data` and `fsdp`, and the length over `sequence`; a length that it
    does not divide is whole."""
    parts = mesh.shape["sequence"]
    splits = parts > 1 and len(shape) > 1 and shape[1] % parts == 0
    return NamedSharding(mesh, ROWS if splits else P(BATCH))


def check_batch_divides(experiment: Experiment, mesh: Mesh) -> None:
    """Raises UserError unless each device gets the same number of rows of each micro-batch."""
    rows, accumulate = experiment.train.global_batch_size, experiment.train.accumulate
    data, fsdp = (mesh.shape[axis] for axis in BATCH)
    if rows % (accumulate * data * fsdp):
        raise UserError(
            f"config.train.global_batch_size {rows} is not a multiple of {accumulate * data * fsdp}: "
            f"config.train.accumulate {accumulate} × config.mesh.data {data} × config.mesh.fsdp {fsdp}"
        )


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows [b, …] of the global batch -> its part of the arrays [B, …], without waiting for the copy."""
    return {
        name: jax.make_array_from_process_local_data(batch_sharding(mesh, rows.shape), rows)
        for name, rows in batch.items()
    }


def axis_size(axis: str) -> int:
    """Of the mesh of `jax.set_mesh`; 1 without one."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def batch_spec(shape: Sequence[int]) -> Optional[P]:
    """How an array of a batch lies on the mesh of `jax.set_mesh`; None without one, or for rows it does not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or shape[0] % math.prod(map(axis_size, BATCH)):
        return None
    return batch_sharding(mesh, shape).spec


def scattered_sum(x: jax.Array, spec: P, axis: int) -> jax.Array:
    """Within `jax.shard_map`: the sum of `x` over the devices that `spec` spreads tokens over, of which each keeps the
    part along `axis` that `fsdp` gives it."""
    if axis_size("fsdp") > 1:
        x = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True)
    others = [name for name in jax.tree.leaves(tuple(spec)) if name != "fsdp" and axis_size(name) > 1]
    return jax.lax.psum(x, others) if others else x


def platform() -> str:
    """Of the devices of `jax.set_mesh`, which may be absent ones to compile for; without it, of those of this machine:
    "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def constrain(x: jax.Array, spec: P = ROWS) -> jax.Array:
    """`x` spread as `spec` says over the mesh of `jax.set_mesh`; without one, `x` as it is.

    Parameters are split along axes that activations have too. Left to itself, the compiler lets activations follow
    them: with fsdp every device would hold all rows of the batch, and a part of their width.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec)
