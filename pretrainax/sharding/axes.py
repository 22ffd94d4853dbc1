"""Defines the axes of the device mesh, and the rules that map logical axes of arrays to mesh axes.

- `data` splits the rows of a batch. Only this axis crosses a slow network between TPU slices or clusters.
- `fsdp` splits the rows of a batch, the parameters and the optimizer's moments.
- `expert` splits the rows of a batch, the experts of a mixture of experts, and, with `fsdp`, the other parameters and
  their moments.
- `pipeline` splits the layers of a stack, and outside of stacks the rows of a batch (`layers/pipeline.py`).
- `sequence` splits the length of the rows.
- `tensor` splits attention heads, the hidden units of feed-forward layers, and the vocabulary.

Array axes have logical names ("batch", "d_model"), and only AXIS_RULES maps these names to mesh axes. To rename or add
a mesh axis, change this file and the fields of `config.mesh`.
"""

from typing import Optional, Union

from jax.sharding import PartitionSpec as P

AXES = ("data", "pipeline", "fsdp", "expert", "sequence", "tensor")  # outermost first
DATA_AXIS, PIPELINE_AXIS, FSDP_AXIS, EXPERT_AXIS, LENGTH_AXIS, TENSOR_AXIS = AXES
BATCH_AXES = (DATA_AXIS, PIPELINE_AXIS, FSDP_AXIS, EXPERT_AXIS)  # the axes that split the rows of a batch
TOKEN_AXES = (*BATCH_AXES, LENGTH_AXIS)  # the axes that split the tokens of a batch
PARAMETER_AXES = (FSDP_AXIS, EXPERT_AXIS)  # the axes that split the width of parameters, except in experts

AXIS_RULES: dict[str, Union[None, str, tuple[str, ...]]] = {
    # Batches and activations
    "batch": BATCH_AXES,
    "length": LENGTH_AXIS,
    "tokens": TOKEN_AXES,  # rows and length merged into one axis
    # Parameters. Axes that the mesh may split have the names of fields of config.model, for error messages.
    "d_ff": TENSOR_AXIS,
    "d_model": PARAMETER_AXES,
    "embedding_dim": TENSOR_AXIS,
    "experts": EXPERT_AXIS,
    "layers": PIPELINE_AXIS,  # the blocks of a stack, stacked in one array
    "latent": PARAMETER_AXES,  # the latent dimension of latent attention, which has no heads
    "num_heads": TENSOR_AXIS,
    "num_kv_heads": TENSOR_AXIS,
    "vocab_size": TENSOR_AXIS,
    "buckets": None,  # buckets of relative distances
    "features": None,  # the width of a small vector, or of a matrix whose other axis is split
    "head_dim": None,
    "labels": None,
    "rank": None,  # the rank of a LoRA update, which is small
    "offsets": None,  # the window of a convolution, in tokens
    "rows": None,  # the rows of a small table: positions, token types
}


def add_axis(name: str, axis: Optional[str]) -> None:
    """Adds the logical axis `name` to AXIS_RULES, split by the mesh axis `axis`, or not split if `axis` is None."""
    AXIS_RULES[name] = axis


def logical_spec(*names: Optional[str]) -> P:
    """Returns the PartitionSpec of an array with the logical axes `names`; an axis named None is not split.

    A mesh axis splits only one axis of an array: experts are split by `expert`, so their width is split by `fsdp` only.
    """
    entries, used = [], set()
    for name in names:
        axes = () if name is None else mesh_axes(name)
        axes = tuple(axis for axis in axes if axis not in used)
        used |= {*axes}
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return P(*entries)


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the mesh axes that split a logical axis: none, one or several."""
    return axes_of_entry(AXIS_RULES[name])


def axes_of_entry(entry: Union[None, str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec: none, one or several."""
    return (entry,) if isinstance(entry, str) else entry or ()
