"""The axes of the mesh, and the rules from logical axes of arrays to mesh axes.

- `data` splits the batch. Only this axis crosses a slow network between TPU slices or clusters.
- `fsdp` splits the batch, parameters and moments.
- `expert` splits the batch, and the experts of a mixture.
- `pipeline` splits the batch outside of a stack, and the layers of the stack (`layers/pipeline.py`).
- `sequence` splits the length.
- `tensor` splits heads, feed-forward and vocabulary.

Arrays have logical axes ("batch", "d_model"), and only AXIS_RULES maps logical axes to mesh axes. To rename or add a
mesh axis, change this file and the fields of `config.mesh`.
"""

from typing import Optional, Union

from jax.sharding import PartitionSpec as P

AXES = ("data", "pipeline", "fsdp", "expert", "sequence", "tensor")  # outermost first
DATA_AXIS, PIPELINE_AXIS, FSDP_AXIS, EXPERT_AXIS, LENGTH_AXIS, TENSOR_AXIS = AXES
BATCH_AXES = (DATA_AXIS, PIPELINE_AXIS, FSDP_AXIS, EXPERT_AXIS)  # the axes that split the rows of a batch
TOKEN_AXES = (*BATCH_AXES, LENGTH_AXIS)  # the axes that split its tokens

AXIS_RULES: dict[str, Union[None, str, tuple[str, ...]]] = {
    # Batches and activations
    "batch": BATCH_AXES,
    "length": LENGTH_AXIS,
    "tokens": TOKEN_AXES,  # rows and length in one axis
    # Parameters. A split axis has the name of the field of config.model that the mesh must divide.
    "d_ff": TENSOR_AXIS,
    "d_model": FSDP_AXIS,
    "embedding_dim": TENSOR_AXIS,
    "experts": EXPERT_AXIS,
    "layers": PIPELINE_AXIS,  # the blocks of a stack, in one array
    "latent": FSDP_AXIS,  # the side of a matrix of latent attention without heads
    "num_heads": TENSOR_AXIS,
    "num_kv_heads": TENSOR_AXIS,
    "vocab_size": TENSOR_AXIS,
    "buckets": None,  # of relative distances
    "features": None,  # the width of a small vector, or of a matrix whose other axis is split
    "head_dim": None,
    "labels": None,
    "rank": None,  # the rank of a LoRA update, which is small
    "offsets": None,  # the window of a convolution, in tokens
    "rows": None,  # of a small table: positions, token types
}


def add_axis(name: str, axis: Optional[str]) -> None:
    """Adds a logical axis of parameters and the mesh axis that splits it; `None` leaves it unsplit."""
    AXIS_RULES[name] = axis


def logical_spec(*names: Optional[str]) -> P:
    """Returns the PartitionSpec of an array with these logical axes; a name of `None` is an unsplit axis."""
    return P(*(None if name is None else AXIS_RULES[name] for name in names))


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the mesh axes that split a logical axis: none, one or several."""
    axes = AXIS_RULES[name]
    return (axes,) if isinstance(axes, str) else axes or ()
