"""cuDNN attention for NVIDIA GPUs, called through JAX; it never holds the [B, H, T, S] attention weights in memory."""

import ctypes
import functools
from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.attention_spec import AttentionSpec, Work, kernel_obstacle
from pretrainax.layers.attention_work import all_pairs, seen_pairs
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.layers.sequence_parallel import on_each_device
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import GPUS

_HIDDEN = -(2.0**41)  # added to masked logits; cuDNN is wrong if it subtracts two larger numbers (as JAX notes)


# cuDNN versions with known errors in attention, which NVIDIA's TransformerEngine excludes: 9.10.0 and 9.10.1 with 16
# bits, 9.14.0 with windows over more than 1,024 keys (transformer_engine/common/fused_attn/fused_attn.cpp at 015d346).
_BROKEN = ("9.10.0", "9.10.1", "9.14.0")


@functools.cache
def _cudnn_version() -> Optional[str]:
    """Returns the version of the cuDNN that computes attention in this process, such as "9.15.1".

    Returns None without a GPU in this process, or if the major version is not 9.
    """
    if jax.default_backend() != "gpu":  # for example if the step is compiled for devices of a different machine
        return None
    try:
        number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()
    except OSError:  # cuDNN has a different major version
        return None
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def cudnn_obstacle(spec: AttentionSpec, platform: str) -> Optional[str]:
    """Returns the reason why cuDNN cannot compute an attention, as a predicate, or None if it can."""
    if platform not in GPUS:
        return f"needs an NVIDIA GPU, and this is a {platform.upper()}"
    if obstacle := kernel_obstacle(spec):
        return obstacle
    if (version := _cudnn_version()) in _BROKEN:
        return f"needs another cuDNN than {version}, which has errors in attention: install 9.15.1 or newer"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"needs config.train.dtype 'bfloat16' and got {spec.dtype!r}"
    if spec.head_dim % 8 or spec.head_dim > 128:
        return f"needs config.model.head_dim to be a multiple of 8 and at most 128, and it is {spec.head_dim}"
    if any(length % 2 for length in spec.lengths):
        return (
            f"needs even lengths, and they are {spec.query_length} and {spec.key_length} (config.data.sequence_length)"
        )
    if spec.bias == "by_row":
        # JAX's tests once reported a gradient of zeros for a bias with several rows; JAX gives no warning.
        return "has no tested gradient for a bias per row, and this model's positions need one"
    if spec.window is not None and not spec.causal:
        return "has causal windows only, and this model has local layers that see both sides"
    if spec.has_positions:
        return "does not support explicit positions, and this mask has them"
    if spec.logit_cap is not None:
        return "has no cap of attention logits, and config.model.attention_logit_cap is set"
    if spec.sequence > 1:
        return f"needs unsplit lengths, and config.mesh.{LENGTH_AXIS} is {spec.sequence}"
    return None


def cudnn_work(spec: AttentionSpec) -> Work:
    """Returns the work of cuDNN: the pairs that the causal mask and the window allow, because its tiles are not known.

    With a prefix, cuDNN gets the mask as a bias and multiplies all pairs. The backward recomputes the logits (Dao et
    al. 2022, arXiv 2205.14135).
    """
    return Work(all_pairs(spec) if spec.has_prefix else seen_pairs(spec), recomputed=1)


def cudnn(q, k, v, mask: Mask, bias, scale, logit_cap):
    """Computes `attention` with cuDNN's kernel, which does not support a logit cap."""
    # JAX has rules that split cuDNN's kernel over the mesh. They do not work inside a pipeline stage, for the axes that
    # the stage leaves to the compiler.
    run = on_each_device(_cudnn) if jax.sharding.get_abstract_mesh().manual_axes else _cudnn
    return run(q, k, v, mask, bias, scale, logit_cap)


def _cudnn(q, k, v, mask: Mask, bias, scale, logit_cap):
    assert logit_cap is None and not mask.has_positions
    array, lengths = None, mask.lengths
    # A mask array becomes an additive bias [B, 1, T, S] in q's dtype. cuDNN also computes a gradient of this bias.
    if mask.prefix is not None:  # the array is the whole mask, as the causal mask of the kernel would hide the prefix
        array, mask, lengths = mask.materialize(q.shape[1], k.shape[1]), Mask(), None
    elif lengths is None and mask.query_segment_ids is not None:
        array = Mask(False, mask.query_segment_ids, mask.key_segment_ids).materialize(q.shape[1], k.shape[1])
    bias = None if bias is None else bias.astype(q.dtype)
    if array is not None:  # saved, so that it is computed once for all blocks
        array = saved_residual(jnp.where(array, 0.0, _HIDDEN).astype(q.dtype))
        bias = array if bias is None else array + bias
    # A row without tokens gets the length 1, so that the softmax does not divide by 0.
    queries, keys = (None, None) if lengths is None else (jnp.maximum(length, 1) for length in lengths)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        scale=scale,
        is_causal=mask.causal,
        query_seq_lengths=queries,
        key_value_seq_lengths=keys,
        local_window_size=None if mask.window is None else mask.reach,
        implementation="cudnn",
    )
