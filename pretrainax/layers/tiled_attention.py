"""Fused attention for every mask, bias and dropout, with this package's Pallas kernels (`tiled_kernels.py`)."""

import functools
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.layers import tiled_kernels
from pretrainax.layers.attention_mask import PADDING, Mask, pad
from pretrainax.layers.attention_spec import NO_OPTIONS, AttentionSpec, Weights, Work, old_gpu_obstacle
from pretrainax.layers.attention_work import all_pairs, unskipped_pairs
from pretrainax.layers.hashed_keys import key_words, leading_seed
from pretrainax.layers.sequence_parallel import on_each_device
from pretrainax.layers.tiled_kernels import Operands, Residuals, Settings
from pretrainax.layers.tiled_layout import VMEM_BYTES, Operand, to_array, to_operand
from pretrainax.layers.tpu_attention import LANES, tile_size
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import GPUS, gpu_capability, platform

_LARGEST_HEAD = 256
# {bytes per query or key: (queries, keys) per tile}: 128 and 256 numbers in bfloat16, 256 in float32. GPUs other than
# A100, H100 and B200 have 99 KiB of shared memory per program instead of at least 163, and use the next smaller tiles.
_GPU_TILES = {256: (128, 64), 512: (64, 32), 1024: (32, 32), 2048: (16, 16)}
_LARGE_SHARED_MEMORY = (8, 0), (9, 0), (10, 0), (10, 3)  # compute capabilities
_LATEST = jnp.iinfo(jnp.int32).max


def tiled_obstacle(spec: AttentionSpec, platform: str) -> Optional[str]:
    """Returns why `tiled` cannot compute this attention, phrased as a predicate, or None if it can."""
    if spec.blocks is not None:
        return "does not support blocks, and config.model.sparse_attention is set"
    if spec.head_dim > _LARGEST_HEAD:
        return f"needs config.model.head_dim to be at most {_LARGEST_HEAD}, and it is {spec.head_dim}"
    if spec.has_positions:
        return "does not support explicit positions, and this mask has them"
    if spec.sequence > 1:
        return f"needs unsplit lengths, and config.mesh.{LENGTH_AXIS} is {spec.sequence}"
    if platform in GPUS and (obstacle := old_gpu_obstacle()):
        return obstacle
    if platform == "tpu" and (size := _vmem_bytes(spec)) > VMEM_BYTES:
        return (
            f"needs {size >> 20} MiB of VMEM for {spec.query_length} queries and {spec.key_length} keys "
            f"(config.data.sequence_length), and a program has {VMEM_BYTES >> 20}"
        )
    return None


def _vmem_bytes(spec: AttentionSpec) -> int:
    """Estimates the VMEM of the largest kernel on a TPU, which holds two rows of each array and tiles of logits.

    A register has 128 lanes, also for the one number of a query in segment ids, normalizers and deltas.
    """
    (t, s), size = (length + -length % LANES for length in spec.lengths), jnp.dtype(spec.dtype).itemsize
    width, columns = spec.head_dim + -spec.head_dim % LANES, 3 * 4 * LANES
    queries = t * (4 * width * size + columns) + s * 2 * width * size  # q, out and their gradients; k and v
    keys = t * (2 * width * size + columns) + s * 2 * width * (size + 4)  # the gradients of k and v are in float32
    bias = 0 if spec.bias == "none" else 2 * 4 * t * s  # the bias and its gradient
    return 2 * (max(queries, keys) + bias) + 8 * 4 * tile_size(t) * tile_size(s)


def tiled_work(spec: AttentionSpec) -> Work:
    """Returns the `Work` of `tiled`, which computes all query-key pairs in the tiles that it does not skip.

    The tiles are those of a GPU. Pairs that segments mask are counted, because segments differ between rows. The
    backward runs one kernel for the gradients of queries and one for those of keys and values. Both recompute the
    logits, and both compute the gradient of the weights. A bias that all rows share needs a third kernel.
    """
    tiles = _tiles(*spec.lengths, spec.head_dim * jnp.dtype(spec.dtype).itemsize, "gpu")
    pairs = all_pairs(spec) if spec.has_prefix else unskipped_pairs(spec, tiles)
    return Work(pairs, recomputed=5 if spec.bias == "shared" else 3)


def _tiles(query_length: int, key_length: int, head_bytes: int, platform: str) -> tuple[int, int]:
    """Returns the numbers of queries and keys per tile.

    The accumulators of a tile must fit the registers of a GPU: 128 rows of 128 float32 numbers take a quarter of them.
    In Pallas' interpreter on a CPU, tiles are small, so that the short rows of a test have several.
    """
    if platform == "cpu":
        return 16, 16
    if platform == "tpu":
        return tile_size(query_length + -query_length % LANES), tile_size(key_length + -key_length % LANES)
    if gpu_capability() not in _LARGE_SHARED_MEMORY:
        head_bytes *= 2
    sizes = next(sizes for limit, sizes in _GPU_TILES.items() if head_bytes <= limit)
    return min(sizes[0], _power_of_two(query_length)), min(sizes[1], _power_of_two(key_length))


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and at least 16, the smallest size of a product."""
    return max(16, 1 << (size - 1).bit_length())


def tiled(q, k, v, mask: Mask, bias, scale, logit_cap, weights: Weights = NO_OPTIONS):
    """Computes `attention` with Pallas kernels that draw the dropout of the weights from the project's hash."""
    seeds, word, rate = None, None, 0.0
    if weights.drop is not None:
        words, rate = key_words(weights.drop.key), weights.drop.rate
        places = jnp.arange(q.shape[0] * q.shape[2], dtype=jnp.uint32).reshape(q.shape[0], q.shape[2])
        seeds, word = leading_seed(words[1], places), words[:1]
    return _tiled(q, k, v, mask, bias, scale, logit_cap, _HeadArrays(rate, weights.sinks, seeds, word))


@flax.struct.dataclass
class _HeadArrays:
    """The dropout and the sinks of this device's rows and heads; the arrays are as in `Operands`."""

    dropout_rate: float = flax.struct.field(pytree_node=False)
    sinks: Optional[jax.Array]
    seeds: Optional[jax.Array]
    word: Optional[jax.Array]


@on_each_device
def _tiled(q, k, v, mask: Mask, bias, scale, logit_cap, by_head: _HeadArrays):
    """Computes `tiled` on one device."""
    assert not mask.has_positions and mask.windowed is None
    (t, s), width = (q.shape[1], k.shape[1]), v.shape[3]
    tiles = _tiles(t, s, q.shape[3] * q.dtype.itemsize, platform())
    reach = None if mask.window is None else mask.reach
    settings = Settings(scale, logit_cap, mask.causal, reach, by_head.dropout_rate, (t, s), tiles)
    # Triton loads powers of two numbers.
    q, k, v = (
        pad(pad(x, 3, 1 if platform() == "tpu" else _power_of_two(x.shape[3])), 1, tile)
        for x, tile in zip((q, k, v), (tiles[0], tiles[1], tiles[1]), strict=True)
    )
    bias = None if bias is None else pad(pad(bias, 2, tiles[0]), 3, tiles[1])
    ids = _padded_ids(mask, tiles)
    prefix = None if mask.prefix is None else pad(mask.prefix, 1, tiles[1])
    may_attend = _unmasked_tiles(settings, (q.shape[1], k.shape[1]), ids, prefix)
    x = Operands(
        q=to_operand(q),
        k=to_operand(k),
        v=to_operand(v),
        bias=bias,
        query_ids=None if ids is None else ids[0][:, :, None],
        key_ids=None if ids is None else ids[1][:, None],
        prefix=None if prefix is None else prefix[:, None],
        key_ranges=_ranges(may_attend),
        query_ranges=_ranges(may_attend.swapaxes(1, 2)),
        sinks=by_head.sinks,
        seeds=by_head.seeds,
        word=by_head.word,
    )
    return to_array(_attend(settings, x))[:, :t, :, :width]


def _padded_ids(mask: Mask, tiles: tuple[int, int]) -> Optional[tuple[jax.Array, jax.Array]]:
    """Returns the segment ids of queries and keys, padded to whole tiles; None if the mask has no segment ids."""
    if mask.query_segment_ids is None or mask.key_segment_ids is None:
        return None
    return pad(mask.query_segment_ids, 1, tiles[0], PADDING), pad(mask.key_segment_ids, 1, tiles[1], PADDING)


def _unmasked_tiles(settings: Settings, lengths: tuple[int, int], ids, prefix) -> jax.Array:
    """Computes which tiles may contain an allowed pair, [1 or B, T / tile, S / tile] bool.

    The segment ids of a tile are taken as a range. The ids of a row increase, except for padding, which counts as the
    last segment here.
    """
    (query_tile, key_tile), (t, s) = settings.tiles, lengths
    first_query, first_key = jnp.arange(0, t, query_tile)[None, :, None], jnp.arange(0, s, key_tile)[None, None]
    allowed = jnp.ones((1, t // query_tile, s // key_tile), bool)
    if settings.causal:
        allowed &= first_key < first_query + query_tile
        if prefix is not None:
            allowed |= (prefix > 0).reshape(len(prefix), 1, -1, key_tile).any(-1)
    if settings.reach is not None:
        before, after = settings.reach
        allowed &= (first_query - before < first_key + key_tile) & (first_key < first_query + query_tile + after)
    if ids is not None:
        queries, keys = (
            jnp.where(x > 0, x, _LATEST).reshape(len(x), -1, tile) for x, tile in zip(ids, settings.tiles, strict=True)
        )
        allowed &= queries.min(-1)[:, :, None] <= keys.max(-1)[:, None]
        allowed &= keys.min(-1)[:, None] <= queries.max(-1)[:, :, None]
    return allowed


def _ranges(allowed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the first True of the last axis and after the last True, [B, N, M] -> [B, N] int32 each.

    Both are 0 if there is none.
    """
    first, from_end = (x.argmax(-1).astype(jnp.int32) for x in (allowed, allowed[..., ::-1]))
    return first, jnp.where(allowed.any(-1), allowed.shape[-1] - from_end, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, x: Operands) -> Operand:
    return tiled_kernels.forward(settings, x)[0]


def _attend_forward(settings: Settings, x: Operands):
    out, normalizer = tiled_kernels.forward(settings, x)
    return out, (x, out, normalizer)


def _attend_backward(settings: Settings, saved, d_out):
    x, out, normalizer = saved
    residuals = Residuals(d_out, normalizer)
    d_q, delta, d_bias = tiled_kernels.query_gradients(settings, x, out, residuals)
    residuals = residuals._replace(delta=delta)
    d_k, d_v = tiled_kernels.key_value_gradients(settings, x, residuals)
    if x.bias is not None and tiled_kernels.shares_bias(x):
        d_bias = tiled_kernels.shared_bias_gradient(settings, x, residuals)
    d_sinks = None
    if x.sinks is not None:  # the sink's value is 0, so that the gradient of its weight is -delta
        d_sinks = -(jnp.exp(x.sinks[None, :, None, None] - normalizer) * delta).sum((0, 2, 3))
    constants = dict.fromkeys(set(Operands._fields) - {"q", "k", "v", "bias", "sinks"})
    return (Operands(q=d_q, k=d_k, v=d_v, bias=d_bias, sinks=d_sinks, **constants),)


_attend.defvjp(_attend_forward, _attend_backward)
