"""The partition rules: one table from the paths of parameters to their axes, and the shardings that follow from it."""

import math
from collections.abc import Iterable
from typing import Union

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import DecoderSizes, Generator, UserError
from pretrainax.sharding.axes import logical_spec
from pretrainax.sharding.param_paths import PyTree, match_rules, parameter_names

# The end of a parameter's path -> its axes, as AXIS_RULES names them, which says what splits each. First match wins.
# Vectors of width D have one of "features": they are small, and copied. The names of a kernel are those that its Linear
# is given, after "layers" in a stack. The parts of a model that bring parameters of their own along add their rows: see
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


_OF_EXPERTS = {"experts": "experts.num_experts", "d_ff": "experts.d_ff"}  # fields of axes that experts have


def add_partition_rules(rows: Iterable[tuple[str, str]]) -> None:
    """Adds rows to PARTITION_RULES: called where a part of a model is defined."""
    PARTITION_RULES.extend(rows)


def param_specs(params: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `params` (arrays or shapes).

    Raises:
      ValueError: a parameter that PARTITION_RULES does not cover, or of another rank than its row.
    """
    specs = [logical_spec(*axes) for axes in axes_of_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def tree_shardings(mesh: Mesh, params: PyTree) -> PyTree:
    """Returns a NamedSharding for each leaf of `params` (arrays or shapes), written as the compiler writes those of its
    results.

    Raises:
      UserError: an axis that the mesh does not divide; lists every field of config.model at fault.
      ValueError: as `param_specs`.
    """
    names = parameter_names(params)
    problems, leaves = {}, list(zip(names, jax.tree.leaves(params), axes_of_leaves(params), strict=True))
    has_two = {"encoder", "decoder"} <= {name.partition("/")[0] for name in names}
    before = ("encoder/", "token_embedding/") if has_two else ()  # in which no length is the second stack's own
    of_first = {pair for path, x, axes in leaves if path.startswith(before) for pair in zip(axes, x.shape, strict=True)}
    for path, leaf, axes in leaves:
        for size, axis, splits in zip(leaf.shape, axes, map(_names, logical_spec(*axes)), strict=True):
            parts = math.prod(mesh.shape[name] for name in splits)
            if size % parts:
                by = " × ".join(f"config.mesh.{name} {mesh.shape[name]}" for name in splits if mesh.shape[name] > 1)
                field = _field(path, axes, axis, of_second=has_two and (axis, size) not in of_first)
                hint = f" (pad it to {-(-size // parts) * parts})" if field == "vocab_size" else ""
                problems[field, splits] = f"config.model.{field} {size} is not a multiple of {by}{hint}"
    if problems:
        raise UserError("; ".join(problems.values()))
    return jax.tree.map(lambda spec: named_sharding(mesh, spec), param_specs(params))


def _field(path: str, axes: tuple[str, ...], axis: str, of_second: bool) -> str:
    """Names the field of config.model that says how long an axis is; of_second: in an encoder-decoder's first stack
    none is as long."""
    if "generator/" in path and hasattr(Generator, axis):
        return f"generator.{axis}"
    if "experts" in axes and axis in _OF_EXPERTS:
        return _OF_EXPERTS[axis]
    if axis == "d_ff" and "mlp_after/" in path:
        return "experts.dense_after"
    return f"decoder.{axis}" if of_second and axis in DecoderSizes.__dataclass_fields__ else axis


def divided_shardings(mesh: Mesh, params: PyTree) -> PyTree:
    """Returns the same, but for axes that the mesh does not divide, which are left whole: of arrays that are read once
    and become others."""

    def one(x: jax.Array | jax.ShapeDtypeStruct, spec: P) -> NamedSharding:
        parts = [math.prod(mesh.shape[name] for name in _names(entry)) for entry in spec]
        kept = (entry if size % n == 0 else None for size, entry, n in zip(x.shape, spec, parts, strict=True))
        return named_sharding(mesh, P(*kept))

    return jax.tree.map(one, params, param_specs(params))


def with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns the shapes and dtypes of `tree` (arrays or shapes), each with its sharding."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def named_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Returns the sharding without mesh axes of size 1 and without trailing Nones. A step is compiled once more for a
    state that lies as before but says so differently, and the state it returns says it like this."""
    entries = []
    for entry in spec:
        names = tuple(name for name in _names(entry) if mesh.shape[name] > 1)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, P(*entries))


def _names(entry: Union[None, str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the axes of the mesh in one entry of a PartitionSpec: none, one or several."""
    return (entry,) if isinstance(entry, str) else entry or ()


def axes_of_leaves(params: PyTree) -> list[tuple[str, ...]]:
    """Returns the names of the axes of each leaf, in tree order."""
    rows = [tuple(row.split()) for row in jax.tree.leaves(match_rules(PARTITION_RULES, params, "PARTITION_RULES"))]
    for name, leaf, axes in zip(parameter_names(params), jax.tree.leaves(params), rows, strict=True):
        if leaf.ndim != len(axes):
            raise ValueError(f"{name} has shape {leaf.shape}, its row of PARTITION_RULES says {' '.join(axes)!r}")
    return rows
