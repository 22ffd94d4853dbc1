"""Scaled dot-product attention behind one function, with the backends of each kind of hardware.

`xla` is the reference and runs everywhere; `cudnn` (GPU), `tpu_flash` and `tpu_splash` (TPU) never hold the
[B, H, T, S] weights. A mask is a description (`Mask`), made into an array only in a backend that needs one.
"""

import functools
import math
from typing import Any, Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.config import UserError

# What a forbidden pair's logit becomes. Finite, so that a row with no allowed key gives a mean, not a NaN; half of
# float32's range, so that adding a bias to it (cuDNN takes masks as biases) does not overflow.
_FORBIDDEN = -0.5 * float(jnp.finfo(jnp.float32).max)
_TPU_LANES = 128  # lengths are padded to multiples of the width of a TPU's vector registers
_PADDING = -1  # segment id of what such padding adds; segment ids of a batch are >= 0


@flax.struct.dataclass
class Mask:
    """Which keys a query may see: those of its own segment, and with `causal` none after it, but for its prefix.

    Padding is segment 0: it sees padding only, so in self-attention each query has a key to see.
    """

    causal: bool = flax.struct.field(pytree_node=False, default=False)
    query_segment_ids: Optional[jax.Array] = None  # [B, T] int32; None: all are of one segment
    key_segment_ids: Optional[jax.Array] = None  # [B, S] int32
    # Tokens a query sees: itself and those before it; without `causal` half as many on each side of it.
    window: Optional[int] = flax.struct.field(pytree_node=False, default=None)
    windowed: Optional[jax.Array] = None  # [] bool: does `window` hold (None: yes); the layers of a scan may differ
    prefix: Optional[jax.Array] = None  # [B, S] int32, 1 at keys that `causal` hides from nobody; None: there is none

    @property
    def reach(self) -> tuple[int, int]:
        """How many tokens before and after its own place a query sees."""
        if not self.causal:
            return self.window // 2, self.window // 2
        return self.window - 1, 0 if self.prefix is None else self.window - 1

    def array(self, query_length: int, key_length: int) -> jax.Array:
        """The mask as [B, 1, T, S] bool (first axis 1 without arrays); True where the query sees the key."""
        allowed = jnp.ones((1, 1, query_length, key_length), bool)
        if self.causal:
            allowed = jnp.tril(allowed)
            if self.prefix is not None:
                # [1, 1, T, S] | [B, 1, 1, S] -> [B, 1, T, S]
                allowed |= self.prefix[:, None, None, :] > 0
        if self.window is not None:
            before, after = self.reach
            distance = jnp.arange(key_length)[None] - jnp.arange(query_length)[:, None]  # [T, S]
            near = (-before <= distance) & (distance <= after)
            allowed &= (near if self.windowed is None else near | ~self.windowed)[None, None]
        if self.query_segment_ids is not None:
            # [B, 1, T, 1] == [B, 1, 1, S] -> [B, 1, T, S]
            same = self.query_segment_ids[:, None, :, None] == self.key_segment_ids[:, None, None, :]
            allowed = allowed & same
        return allowed


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    bias: Optional[jax.Array] = None,
    scale: float,
    logit_cap: Optional[float] = None,
    implementation: str = "xla",
) -> jax.Array:
    """softmax(scale · q kᵀ + bias) v (Vaswani et al. 2017, section 3.2.1), the softmax in float32.

    Args:
      q: [B, T, H, K]; k, v: [B, S, G, K]. Query heads [i·H/G, (i+1)·H/G) share key head i (Ainslie et al. 2023).
      mask: which keys each query may see. A query that may see none gives a finite value without a meaning.
      bias: [1 or B, H, T, S], added to the scaled logits; gradients flow to it.
      scale: 1/sqrt(K) for most models, 1 for T5.
      logit_cap: scaled logits x become cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2).
      implementation: a name that `choose_implementation` returned.

    Returns:
      [B, T, H, K] in q's dtype.
    """
    run = functools.partial(_IMPLEMENTATIONS[implementation], bias=bias, scale=scale, logit_cap=logit_cap)
    if mask.windowed is None or implementation == "xla":
        return run(q, k, v, mask)
    # A fused kernel is made for one mask: there are two, and a layer runs one of them.
    near, everywhere = mask.replace(windowed=None), mask.replace(windowed=None, window=None)
    return jax.lax.cond(mask.windowed, lambda *x: run(*x, near), lambda *x: run(*x, everywhere), q, k, v)


def choose_implementation(
    requested: str,
    platform: str,
    *,
    head_dim: int,
    query_length: int,
    key_length: int,
    has_bias: bool,
    has_row_bias: bool = False,
    has_window: bool = False,
    has_logit_cap: bool = False,
    has_prefix: bool = False,
    causal: bool = True,
    dtype: Any,
) -> tuple[str, Optional[str]]:
    """The implementation for `config.train.attention = requested`, and a warning where a faster one was left out.

    Args:
      requested: a name, or "auto": the fastest that fits.
      platform: `jax.default_backend()`.
      has_row_bias: the bias is another one for each row, not one for all.
      has_prefix: a part of each segment is seen by the whole segment, though the mask is causal.
      dtype: of q, k and v.

    Raises:
      UserError: the requested one cannot run here.
    """
    shapes = {"head_dim": head_dim, "lengths": (query_length, key_length), "has_bias": has_bias}
    shapes |= {"has_row_bias": has_row_bias, "has_window": has_window, "has_logit_cap": has_logit_cap}
    shapes |= {"has_prefix": has_prefix, "causal": causal}
    if requested != "auto":
        obstacle = _obstacle(requested, platform, dtype=dtype, **shapes)
        if obstacle:
            raise UserError(
                f"config.train.attention is {requested!r}, which {obstacle}; set it to 'auto', or to 'xla', which "
                "always runs"
            )
        return requested, None
    if platform in ("gpu", "cuda"):
        best = "cudnn"
    elif platform == "tpu" and max(query_length, key_length) >= _TPU_LANES:  # shorter ones have nothing to gain
        best = "tpu_flash" if has_bias else "tpu_splash"
    else:
        return "xla", None
    obstacle = _obstacle(best, platform, dtype=dtype, **shapes)
    if obstacle:
        return "xla", f"SLOW ATTENTION: 'xla' is used on this {platform.upper()}, because {best!r} {obstacle}"
    return best, None


def _obstacle(
    name: str,
    platform: str,
    *,
    head_dim,
    lengths,
    has_bias,
    has_row_bias,
    has_window,
    has_logit_cap,
    has_prefix,
    causal,
    dtype,
) -> Optional[str]:
    """Why an implementation cannot run, as the end of a sentence that begins with its name; None if it can."""
    if name not in _IMPLEMENTATIONS:
        return f"is unknown (allowed: auto, {', '.join(_IMPLEMENTATIONS)})"
    if name == "cudnn":
        if platform not in ("gpu", "cuda"):
            return f"needs an NVIDIA GPU, and this is a {platform.upper()}"
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
            return f"needs config.train.dtype 'bfloat16' and got {jnp.dtype(dtype).name!r}"
        if head_dim % 8 or head_dim > 128:
            return f"needs config.model.head_dim to be a multiple of 8 and at most 128, and it is {head_dim}"
        if any(length % 2 for length in lengths):
            return f"needs even lengths, and they are {lengths[0]} and {lengths[1]} (config.data.sequence_length)"
        if has_row_bias:
            # JAX's tests once said that the gradient of a bias of several rows is zeros, without a warning.
            return "has not been seen to give a bias of each row its gradient, and this model's positions need one"
        if has_window and not causal:
            return "has causal windows only, and this model has local layers that see both sides"
        if has_logit_cap:
            return "has no cap of attention logits, and config.model.attention_logit_cap is set"
    if name in ("tpu_flash", "tpu_splash"):
        if platform != "tpu":
            return f"needs a TPU, and this is a {platform.upper()}"
        if head_dim != 64 and head_dim % 128:
            return f"needs config.model.head_dim to be 64 or a multiple of 128, and it is {head_dim}"
        if has_prefix:
            return "has no bidirectional prefix, and config.objective makes one in each row"
        if name == "tpu_splash" and has_bias:
            return "takes no bias, and this model has relative positions ('tpu_flash' takes one)"
        if name == "tpu_flash" and (has_window or has_logit_cap):
            return "has neither windows nor a cap of attention logits ('tpu_splash' has both)"
    return None


# --- xla -----------------------------------------------------------------------------------------------------------


def _xla(q, k, v, mask: Mask, bias, scale, logit_cap):
    b, t, h, d = q.shape
    s, g = k.shape[1:3]
    r = h // g  # query heads for each key head
    # Heads come before the length, which makes plain matrix products of it: on a CPU 1.5 times as fast as the einsum
    # of q and k as they are. [B, T, H, K] -> [B, G, R·T, K], [B, S, G, K] -> [B, G, S, K]
    q = q.reshape(b, t, g, r, d).transpose(0, 2, 3, 1, 4).reshape(b, g, r * t, d)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    logits = jnp.einsum("BGTK,BGSK->BGTS", q, k, preferred_element_type=jnp.float32) * scale
    if logit_cap is not None:
        logits = logit_cap * jnp.tanh(logits / logit_cap)
    # [B, G, R·T, S] -> [B, G, R, T, S]
    logits = logits.reshape(b, g, r, t, s)
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(-1, g, r, t, s)
        logits += bias if len(bias) == b else _copies(bias, b)
    # [B, 1, T, S] -> [B, 1, 1, T, S]
    logits = jnp.where(mask.array(t, s)[:, :, None], logits, _FORBIDDEN)
    # The softmax divides after the product with v, where there are K and not S numbers a row.
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = weights.sum(-1)[..., None]
    weights = weights.astype(v.dtype).reshape(b, g, r * t, s)
    out = jnp.einsum("BGTS,BGSK->BGTK", weights, v, preferred_element_type=jnp.float32)
    # [B, G, R·T, K] -> [B, T, H, K]
    out = out.reshape(b, g, r, t, d) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d).astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(x: jax.Array, count: int) -> jax.Array:
    """[1, …] -> [count, …]."""
    return jnp.broadcast_to(x, (count, *x.shape[1:]))


def _copies_backward(count, _, gradient):
    # A product with ones: XLA sums over a first axis on one core of a CPU, and 10 times slower than it reads.
    ones = jnp.ones((count,), gradient.dtype)
    return (jnp.einsum("B,B...->...", ones, gradient, precision=jax.lax.Precision.HIGHEST)[None],)


_copies.defvjp(lambda x, count: (_copies(x, count), None), _copies_backward)


# --- GPU -----------------------------------------------------------------------------------------------------------


def _cudnn(q, k, v, mask: Mask, bias, scale, logit_cap):
    assert logit_cap is None
    array = None  # becomes one more additive bias [B, 1, T, S], in q's dtype
    if mask.prefix is not None:  # says all: the kernel's own causal mask would hide the prefix
        array, mask = mask.array(q.shape[1], k.shape[1]), Mask()
    elif mask.query_segment_ids is not None:
        array = Mask(False, mask.query_segment_ids, mask.key_segment_ids).array(q.shape[1], k.shape[1])
    bias = None if bias is None else bias.astype(q.dtype)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        array,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=None if mask.window is None else mask.reach,
        implementation="cudnn",
    )


# --- TPU -----------------------------------------------------------------------------------------------------------


def _per_device(kernel):
    """Runs a kernel that GSPMD cannot split on each device's own rows and heads, under the mesh of `jax.set_mesh`."""

    @functools.wraps(kernel)
    def sharded(q, k, v, mask: Mask, bias, scale, logit_cap):
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        if math.prod(sizes.values()) == 1:  # of no mesh too
            return kernel(q, k, v, mask, bias, scale, logit_cap)
        rows = ("data", "fsdp") if q.shape[0] % (sizes["data"] * sizes["fsdp"]) == 0 else None
        array, ids = P(rows, None, "tensor", None), P(rows)  # [B, T, H, K], [B, T]
        bias_spec = None if bias is None else P(rows if bias.shape[0] > 1 else None, "tensor")
        specs = array, array, array, jax.tree.map(lambda _: ids, mask), bias_spec
        run = jax.shard_map(
            lambda q, k, v, mask, bias: kernel(q, k, v, mask, bias, scale, logit_cap),
            in_specs=specs,
            out_specs=array,
            check_vma=False,  # the kernels do not say which axes their results vary over
        )
        return run(q, k, v, mask, bias)

    return sharded


def _pad(x: jax.Array, axis: int, value: int = 0) -> jax.Array:
    """Fills an axis up to a multiple of the TPU's lanes."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % _TPU_LANES)
    return jnp.pad(x, widths, constant_values=value)


def _padded_segments(mask: Mask, q: jax.Array, k: jax.Array) -> Optional[tuple[jax.Array, jax.Array]]:
    """Segment ids ([B, T], [B, S]) of padded lengths; None where the kernel needs none."""
    ids = mask.query_segment_ids, mask.key_segment_ids
    if ids[0] is None:
        if q.shape[1] % _TPU_LANES == 0 and k.shape[1] % _TPU_LANES == 0:
            return None
        ids = jnp.ones(q.shape[:2], jnp.int32), jnp.ones(k.shape[:2], jnp.int32)
    return _pad(ids[0], 1, _PADDING), _pad(ids[1], 1, _PADDING)


def _block(length: int) -> int:
    """Rows of a tile: large tiles keep the matrix unit busy, 512 × 512 in float32 is 1 MB of the 16 MB of VMEM."""
    return math.gcd(length, 512)


@_per_device
def _tpu_splash(q, k, v, mask: Mask, bias, scale, logit_cap):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    assert bias is None and mask.prefix is None
    segments = _padded_segments(mask, q, k)
    # [B, T, H, K] -> [B, H, T', K]; the kernel has no scale of its own
    heads_first = [_pad(x, 1).swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v)]
    shape = heads_first[0].shape[2], heads_first[1].shape[2]
    block_q, block_kv = map(_block, shape)
    if mask.window is not None:
        seen = masks.LocalMask(shape, window_size=mask.reach, offset=0)
    else:
        seen = (masks.CausalMask if mask.causal else masks.FullMask)(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([seen] * q.shape[2]),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=logit_cap,
    )
    out = jax.vmap(kernel)(*heads_first, None if segments is None else splash.SegmentIds(*segments))
    # [B, H, T', K] -> [B, T, H, K]
    return out.swapaxes(1, 2)[:, : q.shape[1]]


@_per_device
def _tpu_flash(q, k, v, mask: Mask, bias, scale, logit_cap):
    assert mask.window is None and mask.prefix is None and logit_cap is None
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    segments = _padded_segments(mask, q, k)
    repeats = q.shape[2] // k.shape[2]
    # [B, T, H, K] -> [B, H, T', K]; the kernel would scale the bias too, so q is scaled here
    heads_first = [
        _pad(x, 1).swapaxes(1, 2)
        for x in (q * jnp.asarray(scale, q.dtype), jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2))
    ]
    if bias is not None:
        # [1 or B, H, T, S] -> [1 or B, H, T', S']
        bias = _pad(_pad(bias.astype(q.dtype), 2), 3)
    block_q, block_kv = (_block(x.shape[2]) for x in heads_first[:2])
    run = functools.partial(
        flash.flash_attention,
        causal=mask.causal,
        block_sizes=flash.BlockSizes(
            block_q=block_q,
            block_k_major=block_kv,
            block_k=block_kv,
            block_b=1,
            block_q_major_dkv=block_q,
            block_k_major_dkv=block_kv,
            block_k_dkv=block_kv,
            block_q_dkv=block_q,
            block_k_major_dq=block_kv,
            block_k_dq=block_kv,
            block_q_dq=block_q,
        ),
    )

    def one_row(q, k, v, bias, segments):
        segments = None if segments is None else flash.SegmentIds(*(x[None] for x in segments))
        return run(q[None], k[None], v[None], None if bias is None else bias[None], segments)[0]

    # By row, because the kernel wants the bias as [B, H, T, S]: a bias shared by all rows stays [1, H, T, S] in memory.
    shared = bias is not None and bias.shape[0] == 1
    bias_axis = None if shared else 0
    out = jax.vmap(one_row, in_axes=(0, 0, 0, bias_axis, 0))(*heads_first, bias[0] if shared else bias, segments)
    # [B, H, T', K] -> [B, T, H, K]
    return out.swapaxes(1, 2)[:, : q.shape[1]]


_IMPLEMENTATIONS = {"xla": _xla, "cudnn": _cudnn, "tpu_flash": _tpu_flash, "tpu_splash": _tpu_splash}
