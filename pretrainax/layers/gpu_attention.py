"""cuDNN attention for NVIDIA GPUs, called through JAX; it never materializes the [B, H, T, S] attention weights."""

import ctypes
import functools
from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.attention_mask import Mask, pad
from pretrainax.layers.attention_spec import AttentionSpec, Work, kernel_obstacle, old_gpu_obstacle
from pretrainax.layers.attention_work import all_pairs, unskipped_pairs
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.layers.sequence_parallel import on_each_device
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import GPUS, gpu_capability

_HIDDEN = -(2.0**41)  # added to masked logits; JAX notes that cuDNN fails if it subtracts two larger numbers


# cuDNN versions with known errors in attention, which NVIDIA's TransformerEngine excludes: 9.10.0 and 9.10.1 with
# 16-bit dtypes, 9.14.0 with windows over more than 1,024 keys (transformer_engine/common/fused_attn/fused_attn.cpp at
# 015d346).
_BROKEN = ("9.10.0", "9.10.1", "9.14.0")


@functools.cache
def cudnn_version() -> Optional[str]:
    """Returns the version of the cuDNN library that computes attention in this process, such as "9.15.1".

    Returns None if this process has no GPU, or if the major version is not 9.
    """
    if jax.default_backend() != "gpu":  # for example, the step is compiled for devices of another machine
        return None
    try:
        number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()
    except OSError:  # cuDNN has a different major version
        return None
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


# The largest head size that cuDNN trains: 256 on Hopper since 9.5, 128 on other GPUs, Blackwell included (same file).
_HEAD_DIM, _HOPPER_HEAD_DIM = 128, 256
_HOPPER_CORES = 132  # of H100 and H200; devices of a topology (planning/topologies.py) have no other mark of their kind


def _largest_head_dim() -> int:
    """Returns the largest head size that cuDNN trains on this host's GPUs or, without GPUs, on those of the mesh.

    NOTE An estimate of `plan` traces for GPUs of no particular kind. They count as Hopper.
    """
    if jax.default_backend() == "gpu":
        is_hopper = gpu_capability()[0] == 9
    else:  # the step is compiled for devices of another machine
        device = jax.sharding.get_abstract_mesh().abstract_device
        is_hopper = device is None or device.num_cores in (None, _HOPPER_CORES)
    return _HOPPER_HEAD_DIM if is_hopper else _HEAD_DIM


def cudnn_obstacle(spec: AttentionSpec, platform: str) -> Optional[str]:
    """Returns why cuDNN cannot compute this attention, phrased as a predicate, or None if it can."""
    if platform not in GPUS:
        return f"needs an NVIDIA GPU, and this is a {platform.upper()}"
    if obstacle := old_gpu_obstacle() or kernel_obstacle(spec):
        return obstacle
    if (version := cudnn_version()) in _BROKEN:
        return f"needs another cuDNN than {version}, which has errors in attention: install 9.15.1 or newer"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"needs config.train.dtype 'bfloat16' and got {spec.dtype!r}"
    largest = _largest_head_dim()
    if spec.head_dim % 8 or spec.head_dim > largest:
        return f"needs config.model.head_dim to be a multiple of 8 and at most {largest}, and it is {spec.head_dim}"
    if spec.bias == "by_row":
        # JAX's tests once found a gradient of zeros for a bias with several rows; JAX gives no warning.
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
    """Returns the `Work` of cuDNN, which computes all query-key pairs that the causal mask and the window allow.

    cuDNN's tile sizes are unknown and therefore ignored. With a prefix, cuDNN gets the mask as a bias and computes all
    pairs. The backward recomputes the logits (Dao et al. 2022, arXiv 2205.14135).
    """
    return Work(all_pairs(spec) if spec.has_prefix else unskipped_pairs(spec), recomputed=1)


def cudnn(q, k, v, mask: Mask, bias, scale, logit_cap):
    """Computes `attention` with cuDNN's kernel, which does not support a logit cap."""
    # JAX has partitioning rules for cuDNN's kernel. Inside a pipeline stage, they fail for the axes that the stage
    # leaves to the compiler.
    attend = on_each_device(_cudnn) if jax.sharding.get_abstract_mesh().manual_axes else _cudnn
    return attend(q, k, v, mask, bias, scale, logit_cap)


def _cudnn(q, k, v, mask: Mask, bias, scale, logit_cap):
    """Calls cuDNN's kernel through JAX, passing masks that it does not support as lengths or as an additive bias."""
    assert logit_cap is None and not mask.has_positions
    mask_array, lengths = None, mask.lengths
    # A mask array becomes an additive bias [B, 1, T, S] in q's dtype. cuDNN also computes a gradient of this bias.
    if mask.prefix is not None:  # the kernel's causal mask would mask the prefix, so the array is the complete mask
        mask_array, mask, lengths = mask.materialize(q.shape[1], k.shape[1]), Mask(), None
    elif lengths is None and mask.query_segment_ids is not None:
        mask_array = Mask(False, mask.query_segment_ids, mask.key_segment_ids).materialize(q.shape[1], k.shape[1])
    bias = None if bias is None else bias.astype(q.dtype)
    if mask_array is not None:  # saved, so that all blocks share one computation
        mask_array = saved_residual(jnp.where(mask_array, 0.0, _HIDDEN).astype(q.dtype))
        bias = mask_array if bias is None else mask_array + bias
    query_length, key_length = q.shape[1], k.shape[1]
    if query_length % 2 or key_length % 2:  # JAX's check of the backward requires even lengths
        lengths = lengths or (jnp.full(len(q), query_length, jnp.int32), jnp.full(len(q), key_length, jnp.int32))
        q, k, v = (pad(x, 1, 2) for x in (q, k, v))
        bias = None if bias is None else pad(pad(bias, 2, 2), 3, 2, _HIDDEN)
    # A row without tokens gets the length 1, so that the softmax does not divide by 0.
    queries, keys = (None, None) if lengths is None else (jnp.maximum(length, 1) for length in lengths)
    out = jax.nn.dot_product_attention(
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
    return out[:, :query_length]
