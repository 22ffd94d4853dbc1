"""The axes of the mesh, and which of them splits which axis of an array.

`data` splits the batch; `fsdp` splits the batch, and parameters and moments with it; `expert` splits the batch, and the
experts of a mixture; `pipeline` splits the batch around a stack, and the layers of the stack (`layers/pipeline.py`);
`sequence` splits the length; `tensor` splits heads, feed-forward and vocabulary. Where slices of a TPU, or clusters,
are joined by a slow network, only `data` crosses it.

Arrays name their axes by what they count ("batch", "d_model"), and AXIS_RULES alone says which axis of the mesh splits
each. So another name for an axis of the mesh, or a new one, is a change of this file and a field of `config.mesh`.
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
    # Parameters. Those that are split bear the name of the field of config.model that the mesh has to divide.
    "d_ff": TENSOR_AXIS,
    "d_model": FSDP_AXIS,
    "embedding_dim": TENSOR_AXIS,
    "experts": EXPERT_AXIS,
    "layers": PIPELINE_AXIS,  # the blocks of a stack, in one array
    "latent": FSDP_AXIS,  # of latent attention, the side of a matrix that is not heads
    "num_heads": TENSOR_AXIS,
    "num_kv_heads": TENSOR_AXIS,
    "vocab_size": TENSOR_AXIS,
    "buckets": None,  # of relative distances
    "features": None,  # a width in a vector, which is small, or in a matrix whose other axis is split
    "head_dim": None,
    "labels": None,
    "rank": None,  # of an update of a matrix, which is small
    "offsets": None,  # the tokens around each that a convolution sees
    "rows": None,  # of a small table: positions, token types
}


def add_axis(name: str, axis: Optional[str]) -> None:
    """Adds a name for an axis of parameters, and the axis of the mesh that splits it; None: it is not split."""
    AXIS_RULES[name] = axis


def logical_spec(*names: Optional[str]) -> P:
    """Returns the PartitionSpec of an array whose axes have these names; None: not split here, whatever it is."""
    return P(*(None if name is None else AXIS_RULES[name] for name in names))


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the axes of the mesh that split an axis of this name: none, one or several."""
    axes = AXIS_RULES[name]
    return (axes,) if isinstance(axes, str) else axes or ()
