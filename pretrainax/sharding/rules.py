"""Defines the partition rules, a table from parameter paths to logical axes, and computes shardings from this table."""

import math
from collections.abc import Iterable
from typing import Union

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import DecoderSizes, Generator, UserError
from pretrainax.sharding.axes import logical_spec
from pretrainax.sharding.param_paths import PyTree, match_rules, parameter_names

# End of a parameter's path -> the logical axes of the parameter, which AXIS_RULES maps to mesh axes. The first match
# wins. Vectors of width D have the axis "features": they are small, and replicated. A kernel has the axes that are
# given to its `Linear`; in a stack, the axis "layers" comes first. Modules with further parameters add rows with
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


_EXPERT_FIELDS = {"experts": "experts.num_experts", "d_ff": "experts.d_ff"}  # axis of experts -> config.model field


def add_partition_rules(rows: Iterable[tuple[str, str]]) -> None:
    """Adds rows (regular expression, logical axes) to PARTITION_RULES, for modules with further parameters."""
    PARTITION_RULES.extend(rows)


def param_specs(params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `params` (arrays or shapes).

    Raises:
      ValueError: PARTITION_RULES has no row for a parameter, or the row and the parameter have different ranks.
    """
    specs = [logical_spec(*axes) for axes in axes_of_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def tree_shardings(mesh: Mesh, params: PyTree) -> PyTree:
    """Returns the `named_sharding` of each leaf of `params` (arrays or shapes).

    Raises:
      UserError: the mesh does not divide the size of an axis; the message lists the fields of config.model that set
        such sizes.
      ValueError: as in `param_specs`.
    """
    names = parameter_names(params)
    problems, leaves = {}, list(zip(names, jax.tree.leaves(params), axes_of_leaves(params), strict=True))
    has_two = {"encoder", "decoder"} <= {name.partition("/")[0] for name in names}
    before = ("encoder/", "token_embedding/") if has_two else ()  # paths without sizes of the second stack
    first_sizes = {
        pair for path, x, axes in leaves if path.startswith(before) for pair in zip(axes, x.shape, strict=True)
    }
    for path, leaf, axes in leaves:
        for size, axis, splits in zip(leaf.shape, axes, map(_names, logical_spec(*axes)), strict=True):
            parts = math.prod(mesh.shape[name] for name in splits)
            if size % parts:
                by = " × ".join(f"config.mesh.{name} {mesh.shape[name]}" for name in splits if mesh.shape[name] > 1)
                field = _field(path, axes, axis, of_second=has_two and (axis, size) not in first_sizes)
                hint = f" (pad it to {-(-size // parts) * parts})" if field == "vocab_size" else ""
                problems[field, splits] = f"config.model.{field} {size} is not a multiple of {by}{hint}"
    if problems:
        raise UserError("; ".join(problems.values()))
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), param_specs(params))


def _field(path: str, axes: tuple[str, ...], axis: str, of_second: bool) -> str:
    """Returns the name of the field of config.model that sets the size of an axis of a parameter.

    Args:
      path, axes: the path and the logical axes of the parameter.
      of_second: the size belongs to the second stack of an encoder-decoder: no axis of this name in the first stack has
        this size.
    """
    if "generator/" in path and hasattr(Generator, axis):
        return f"generator.{axis}"
    if "experts" in axes and axis in _EXPERT_FIELDS:
        return _EXPERT_FIELDS[axis]
    if axis == "d_ff" and "mlp_after/" in path:
        return "experts.dense_after"
    return f"decoder.{axis}" if of_second and axis in DecoderSizes.__dataclass_fields__ else axis


def divided_shardings(mesh: Mesh, params: PyTree) -> PyTree:
    """Returns shardings like `tree_shardings`, but axes that the mesh does not divide are not split.

    These shardings are for arrays that are read once and then converted to other arrays.
    """

    def sharding(x: jax.Array | jax.ShapeDtypeStruct, spec: P) -> NamedSharding:
        parts = [math.prod(mesh.shape[name] for name in _names(entry)) for entry in spec]
        entries = (entry if size % n == 0 else None for size, entry, n in zip(x.shape, spec, parts, strict=True))
        return named_sharding(mesh, P(*entries))

    return jax.tree.map(sharding, params, param_specs(params))


def with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns a `jax.ShapeDtypeStruct` with shape, dtype and sharding for each leaf of `tree` (arrays or shapes)."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def named_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Returns the sharding of a PartitionSpec, without mesh axes of size 1 and without trailing Nones.

    The results of compiled functions have this form. If the form of a state's shardings differed, JAX would compile the
    training step a second time.
    """
    entries = []
    for entry in spec:
        names = tuple(name for name in _names(entry) if mesh.shape[name] > 1)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, P(*entries))


def _names(entry: Union[None, str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec: none, one or several."""
    return (entry,) if isinstance(entry, str) else entry or ()


def axes_of_leaves(params: PyTree) -> list[tuple[str, ...]]:
    """Returns the logical axes of each leaf of `params` (arrays or shapes), in tree order.

    Raises:
      ValueError: as in `param_specs`.
    """
    rows = [tuple(row.split()) for row in jax.tree.leaves(match_rules(PARTITION_RULES, params, "PARTITION_RULES"))]
    for name, leaf, axes in zip(parameter_names(params), jax.tree.leaves(params), rows, strict=True):
        if leaf.ndim != len(axes):
            raise ValueError(f"{name} has shape {leaf.shape}, its row of PARTITION_RULES has axes {' '.join(axes)!r}")
    return rows
