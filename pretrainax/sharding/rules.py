"""Defines the partition rules, which map parameter paths to logical axes, and computes shardings from these rules."""

import math
from collections.abc import Iterable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import DecoderSizes, Generator, UserError
from pretrainax.sharding.axes import PARAMETER_AXES, axes_of_entry, logical_spec
from pretrainax.sharding.param_paths import PyTree, match_rules, parameter_names

# End of a parameter's path -> the logical axes of the parameter, which AXIS_RULES maps to mesh axes. The first match
# wins. Vectors of width D have the axis "features": they are small, so they are replicated. A kernel has the axes of
# its `Linear`; in a stack, the axis "layers" comes first. Modules with additional parameters add rows with
# `add_partition_rules`.
PARTITION_RULES = [
    (r"(decoder_)?token_embedding/embedding", "vocab_size d_model"),
    (r"token_type_embedding/embedding", "rows d_model"),
    (r"embedding_projection/kernel", "features d_model"),
    (r"blocks/\w+_attention/query/kernel", "layers d_model num_heads head_dim"),
    (r"blocks/\w+_attention/query/bias", "layers num_heads head_dim"),
    (r"blocks/\w+_attention/(key|value)/kernel", "layers d_model num_kv_heads head_dim"),
    (r"blocks/\w+_attention/(key|value)/bias", "layers num_kv_heads head_dim"),
    (r"blocks/\w+_attention/out/kernel", "layers num_heads head_dim d_model"),
    (r"blocks/\w+_attention/out/bias", "layers features"),
    (r"blocks/\w+_attention/(query|key)_norm/(scale|bias)", "layers head_dim"),
    (r"blocks/\w+_attention/sinks", "layers num_heads"),
    (r"blocks/\w+_norm/(scale|bias)", "layers features"),
    (r"((decoder_)?embedding_norm|final_norm)/(scale|bias)", "features"),
    (r"convolution/kernel", "offsets d_model features"),
    (r"convolution/(bias|norm/scale|norm/bias)", "features"),
    (r"embedding_projection/bias", "features"),
]


# Logical axis of an expert parameter -> field of config.model that sets the size of the axis.
_EXPERT_FIELDS = {"experts": "experts.num_experts", "d_ff": "experts.d_ff"}


def add_partition_rules(rows: Iterable[tuple[str, str]]) -> None:
    """Adds rows (regular expression, logical axes) to PARTITION_RULES, for modules with additional parameters."""
    PARTITION_RULES.extend(rows)


def param_specs(params: PyTree) -> PyTree:
    """Computes the PartitionSpec of each leaf of `params` (arrays or shapes) from PARTITION_RULES.

    Raises:
      ValueError: PARTITION_RULES has no row for a parameter, or the row and the parameter have different ranks.
    """
    specs = [logical_spec(*axes) for axes in axes_of_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def gathered_axes(params: PyTree) -> list[tuple[str, ...]]:
    """Returns, for each leaf of `params`, the mesh axes along which devices gather it before they use it.

    Experts are not gathered along `expert`: each device applies its own experts.
    """
    return [
        tuple(
            mesh_axis
            for axis, entry in zip(axes, logical_spec(*axes), strict=True)
            if axis != "experts"
            for mesh_axis in axes_of_entry(entry)
            if mesh_axis in PARAMETER_AXES
        )
        for axes in axes_of_leaves(params)
    ]


def tree_shardings(mesh: Mesh, params: PyTree) -> PyTree:
    """Computes the `named_sharding` of each leaf of `params` (arrays or shapes).

    Raises:
      UserError: the mesh does not divide the size of an axis; the message lists the config.model fields that set the
        sizes of such axes.
      ValueError: as in `param_specs`.
    """
    names = parameter_names(params)
    problems, leaves = {}, list(zip(names, jax.tree.leaves(params), axes_of_leaves(params), strict=True))
    has_two_stacks = {"encoder", "decoder"} <= {name.partition("/")[0] for name in names}
    first_stack_paths = (
        ("encoder/", "token_embedding/") if has_two_stacks else ()
    )  # The axes of these parameters never have a size of the second stack.
    first_sizes = {
        pair
        for path, array, axes in leaves
        if path.startswith(first_stack_paths)
        for pair in zip(axes, array.shape, strict=True)
    }
    for path, leaf, axes in leaves:
        for size, axis, mesh_names in zip(leaf.shape, axes, map(axes_of_entry, logical_spec(*axes)), strict=True):
            shards = math.prod(mesh.shape[name] for name in mesh_names)
            if size % shards:
                divisor = " × ".join(
                    f"config.mesh.{name} {mesh.shape[name]}" for name in mesh_names if mesh.shape[name] > 1
                )
                field = _field(path, axes, axis, is_second_stack=has_two_stacks and (axis, size) not in first_sizes)
                hint = f" (pad it to {-(-size // shards) * shards})" if field == "vocab_size" else ""
                problems[field, mesh_names] = f"config.model.{field} {size} is not a multiple of {divisor}{hint}"
    if problems:
        raise UserError("; ".join(problems.values()))
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), param_specs(params))


def _field(path: str, axes: tuple[str, ...], axis: str, is_second_stack: bool) -> str:
    """Returns the name of the config.model field that sets the size of a parameter's axis.

    Args:
      path, axes: the path and the logical axes of the parameter.
      axis: the logical axis.
      is_second_stack: whether the size belongs to the second stack of an encoder-decoder, i.e. no axis of this name in
        the first stack has this size.
    """
    if "generator/" in path and hasattr(Generator, axis):
        return f"generator.{axis}"
    if "experts" in axes and axis in _EXPERT_FIELDS:
        return _EXPERT_FIELDS[axis]
    if axis == "d_ff" and "mlp_after/" in path:
        return "experts.dense_after"
    return f"decoder.{axis}" if is_second_stack and axis in DecoderSizes.__dataclass_fields__ else axis


def divided_shardings(mesh: Mesh, params: PyTree) -> PyTree:
    """Computes shardings like `tree_shardings`, but leaves axes unsplit if the mesh does not divide them.

    Use these shardings for arrays that are read once and then converted to other arrays.
    """

    def sharding(x: jax.Array | jax.ShapeDtypeStruct, spec: P) -> NamedSharding:
        shard_counts = [math.prod(mesh.shape[name] for name in axes_of_entry(entry)) for entry in spec]
        entries = (
            entry if size % shards == 0 else None
            for size, entry, shards in zip(x.shape, spec, shard_counts, strict=True)
        )
        return named_sharding(mesh, P(*entries))

    return jax.tree.map(sharding, params, param_specs(params))


def with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """Converts each leaf of `tree` (arrays or shapes) to a `jax.ShapeDtypeStruct` with a sharding."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def named_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Converts a PartitionSpec to a sharding, without mesh axes of size 1 and without trailing Nones.

    JAX normalizes the output shardings of compiled functions in the same way. If the training state's shardings were
    different, JAX would compile the training step a second time.
    """
    entries = []
    for entry in spec:
        names = tuple(name for name in axes_of_entry(entry) if mesh.shape[name] > 1)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, P(*entries))


def axes_of_leaves(params: PyTree) -> list[tuple[str, ...]]:
    """Looks up the logical axes of each leaf of `params` (arrays or shapes) in PARTITION_RULES, in tree order.

    Raises:
      ValueError: as in `param_specs`.
    """
    axes_by_leaf = [
        tuple(row.split()) for row in jax.tree.leaves(match_rules(PARTITION_RULES, params, "PARTITION_RULES"))
    ]
    for name, leaf, axes in zip(parameter_names(params), jax.tree.leaves(params), axes_by_leaf, strict=True):
        if leaf.ndim != len(axes):
            raise ValueError(f"{name} has shape {leaf.shape}, its row of PARTITION_RULES has axes {' '.join(axes)!r}")
    return axes_by_leaf
