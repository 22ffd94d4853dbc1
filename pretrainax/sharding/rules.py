"""Where parameters and optimizer states live: the one table from parameter paths to PartitionSpecs."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import Generator, UserError
from pretrainax.sharding.param_paths import match_rules, parameter_names

# The end of a parameter's path -> its axes, each with the mesh axis that splits it, if one does. Where one does, the
# name is the field of config.model that has to divide. First match wins. Vectors [D] are copied: they are small.
# The parts of a model that bring parameters of their own along add their rows: see `add_partition_rules`.
PARTITION_RULES = [
    (r"token_embedding/embedding", "vocab_size:tensor d_model:fsdp"),
    (r"token_type_embedding/embedding", "rows d_model:fsdp"),
    (r"embedding_projection/kernel", "embedding_dim d_model:fsdp"),
    (r"blocks/\w+_attention/query/kernel", "layers d_model:fsdp num_heads:tensor head_dim"),
    (r"blocks/\w+_attention/query/bias", "layers num_heads:tensor head_dim"),
    (r"blocks/\w+_attention/(key|value)/kernel", "layers d_model:fsdp num_kv_heads:tensor head_dim"),
    (r"blocks/\w+_attention/(key|value)/bias", "layers num_kv_heads:tensor head_dim"),
    (r"blocks/\w+_attention/out/kernel", "layers num_heads:tensor head_dim d_model:fsdp"),
    (r"blocks/\w+_attention/out/bias", "layers d_model"),
    (r"blocks/self_attention/(query|key)_norm/(scale|bias)", "layers head_dim"),
    (r"blocks/\w+_norm/(scale|bias)", "layers d_model"),
    (r"((decoder_)?embedding_norm|final_norm)/(scale|bias)", "d_model"),
    (r"convolution/kernel", "tokens d_model:fsdp d_model"),
    (r"convolution/(bias|norm/scale|norm/bias)", "d_model"),
    (r"embedding_projection/bias", "d_model"),
]


def add_partition_rules(rows: Iterable[tuple[str, str]]) -> None:
    """Adds rows to PARTITION_RULES: called where a part of a model is defined."""
    PARTITION_RULES.extend(rows)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A parsed row of PARTITION_RULES."""

    fields: tuple[str, ...]  # of config.model, one an axis
    spec: P

    @classmethod
    def parse(cls, text: str) -> "_Row":
        fields, _, axes = zip(*(axis.partition(":") for axis in text.split()), strict=True)
        return cls(fields, P(*(axis or None for axis in axes)))


def param_specs(tree: Any) -> Any:
    """A PartitionSpec for each leaf of `tree`: parameters, or a whole TrainState, whose moments follow them.

    Raises:
      ValueError: a leaf that PARTITION_RULES does not cover, or of another rank than its row.
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


def with_shardings(mesh: Mesh, shapes: Any) -> Any:
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
    texts = match_rules(
        PARTITION_RULES, {name: x for name, x in zip(names, leaves, strict=True) if x.ndim}, "PARTITION_RULES"
    )
    rows = [_Row.parse(texts[name]) if x.ndim else _Row((), P()) for name, x in zip(names, leaves, strict=True)]
    for name, leaf, row in zip(names, leaves, rows, strict=True):
        if leaf.ndim != len(row.fields):
            raise ValueError(f"{name} has shape {leaf.shape}, its row of PARTITION_RULES says {' '.join(row.fields)!r}")
    return jax.tree.unflatten(structure, rows)
