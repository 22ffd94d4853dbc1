"""The loss over the vocabulary, as sums and counts, without materializing all logits.

Logits [tokens, V] in float32 are the largest array of a small model's step (GPT-2 124M at 64 × 1,024 tokens: 13 GB).
Here they exist for `chunk` tokens at a time, and each chunk computes its gradients immediately. This takes three matrix
products, the same number as with all logits in memory. `logit_passes` has the passes over the logits.
"""

import functools
import math
from typing import Any, NamedTuple, Optional, TypedDict, Unpack, cast

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.sums import Sums
from pretrainax.models.heads.logit_passes import are_rounded, logit_stats, products_of, recomputed_logits, sum_of_tokens
from pretrainax.sharding.arrays import constrain, scattered_sum
from pretrainax.sharding.axes import BATCH_AXES, LENGTH_AXIS, TOKEN_AXES, logical_spec
from pretrainax.sharding.mesh import axis_size


class _Settings(NamedTuple):
    logit_cap: Optional[float]
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk: int = 4096
    sequences: bool = False


class LossOptions(TypedDict, total=False):
    """The options of `loss_sums`, which heads receive; defaults are at the end of each comment."""

    z_loss: float  # weight of log(Z)^2, with Z the softmax normalizer (Chowdhery et al. 2022, section 5); 0
    label_smoothing: float  # share of the target spread over the vocabulary (Szegedy et al. 2016, section 7); 0
    chunk: int  # tokens per device whose logits exist at a time; 4,096
    sequences: bool  # also count whole sequences; False


def loss_sums(
    outputs: Any,
    targets: jax.Array,
    loss_weights: jax.Array,
    segment_ids: Optional[jax.Array] = None,
    text_weights: Optional[jax.Array] = None,
    **options: Unpack[LossOptions],
) -> Sums:
    """Returns {name: (weighted sum over the tokens, sum of the weights)}, to be added up and divided once.

    Args:
      outputs: a LanguageModelOutput: features [B, N, D], unembedding [D, V] float32, bias [V] float32 or None,
        logit_cap. Logits are features · unembedding + bias, with operands in the features' dtype, accumulated in
        float32 and, except on a CPU, rounded to the features' dtype. A cap maps a logit x to cap · tanh(x / cap).
      targets: [B, N] int32.
      loss_weights: [B, N] float32; 0 for tokens without loss.
      segment_ids: [B, N] int32, the sequence of each target in its row; only `sequences` needs them.
      text_weights: [B, N] float32, the loss weights of text targets; None: no text metrics.

    Returns:
      "objective": the loss to minimize, the only entry with gradients. "loss": the negative log-likelihood in nats.
      "accuracy": the share of targets with the largest logit. "text_loss", "text_accuracy": the same for text targets.
      "z_loss": the z-loss times its weight, if the weight is not 0. "sequence_accuracy", with `sequences`: the number
      of sequences whose targets are all correct, and the number of sequences.
    """
    settings = _Settings(outputs.logit_cap, **options)
    assert settings.chunk > 0, settings  # layers.compute.resolve_auto replaces the 0 of config.train.loss_chunk
    chex.assert_rank(outputs.features, 3, custom_message="features are [B, N, D]")
    tokens, (width, vocabulary) = outputs.features.shape[:2], outputs.unembedding.shape
    chex.assert_axis_dimension(outputs.features, 2, width, custom_message="features are [B, N, D], the matrix [D, V]")
    chex.assert_shape((targets, loss_weights), tokens, custom_message="targets and loss_weights are [B, N]")
    if outputs.bias is not None:
        chex.assert_shape(outputs.bias, (vocabulary,), custom_message="the bias is [V]")
    by_device = jax.tree.map(_by_device, (targets, loss_weights, text_weights))
    results = _sums(settings, _by_device(outputs.features), outputs.unembedding, outputs.bias, *by_device)
    # functools.partial hides the type of _sums.
    objective, reported, right = cast(tuple[jax.Array, dict[str, jax.Array], Optional[jax.Array]], results)
    counts = dict.fromkeys(reported, count := loss_weights.sum())
    if text_weights is not None:
        counts |= dict.fromkeys(("text_loss", "text_accuracy"), text_weights.sum())
    sums = {"objective": (objective, count)} | {
        name: (jax.lax.stop_gradient(value), counts[name]) for name, value in reported.items()
    }
    if right is not None:
        assert segment_ids is not None, "sequences=True needs segment_ids"
        sums["sequence_accuracy"] = _sequences_right(_by_row(right, tokens), loss_weights, segment_ids)
    return sums


def _sequences_right(right: jax.Array, weights: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts the sequences whose weighted targets [B, N] are all `right`, and the sequences with weighted targets."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first, last = (jnp.pad(changes, ((0, 0), side), constant_values=True) for side in ((1, 0), (0, 1)))

    def running_count(x):
        """Returns the number of true values of a sequence up to each position, [B, N] bool -> [B, N]."""
        total = jnp.cumsum(x, axis=1)
        return total - jax.lax.cummax(jnp.where(first, total - x, 0), axis=1)

    weighted = weights > 0
    ends = last & (running_count(weighted) > 0)
    return (ends & (running_count(weighted & ~right) == 0)).sum(dtype=jnp.float32), ends.sum(dtype=jnp.float32)


def _by_device(x: jax.Array) -> jax.Array:
    """Reshapes [B, N, …] -> [B · n, N / n, …] if the mesh shards the length over n devices, device by device.

    Padding of a length that n does not divide has weight 0.
    """
    parts = axis_size(LENGTH_AXIS)
    if parts == 1:
        return x
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % parts)] + [(0, 0)] * (x.ndim - 2))
    (batch, length), shards = x.shape[:2], _shards(x.shape[0], BATCH_AXES)
    # [S, R, n, N/n, …] -> [S, n, R, N/n, …]
    x = x.reshape(shards, batch // shards, parts, length // parts, *x.shape[2:]).swapaxes(1, 2)
    return constrain(x.reshape(batch * parts, length // parts, *x.shape[4:]), logical_spec("tokens"))


def _by_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts `_by_device`, [B · n, N / n] -> [B, N] of this shape."""
    (batch, length), parts = shape, x.shape[0] // shape[0]
    shards = _shards(batch, BATCH_AXES)
    # [B · n, N/n] -> [S, n, R, N/n] -> [S, R, n, N/n]
    x = x.reshape(shards, parts, batch // shards, x.shape[1]).swapaxes(1, 2)
    return x.reshape(batch, -1)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(settings: _Settings, features, unembedding, bias, *of_targets):
    sums, _, right = _scan_chunks(settings, features, unembedding, bias, of_targets, with_gradients=False)
    return sums.pop("objective"), sums, right


def _sums_forward(settings: _Settings, features, unembedding, bias, *of_targets):
    sums, gradients, right = _scan_chunks(settings, features, unembedding, bias, of_targets, with_gradients=True)
    return (sums.pop("objective"), sums, right), gradients


def _sums_backward(settings: _Settings, gradients, cotangents):
    # The forward pass has computed the gradients of the sum; the backward pass only scales them.
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _scan_chunks(settings: _Settings, features, unembedding, bias, of_targets, with_gradients: bool):
    """Returns the sums, the gradients for (features, unembedding, bias), and the mask of correct targets.

    The mask [B, N] is True for targets with the largest logit; it is None unless `settings.sequences`. Gradients are
    None unless `with_gradients`.

    Args:
      of_targets: the targets, their weights, and their weights as text or None.
    """
    batch, length, width = features.shape
    # S shards of R rows are cut into chunks along the length, so that no token changes device. Each shard sums the
    # gradient of the unembedding separately; the sum over the shards runs once, after the last chunk.
    shards = _shards(batch, TOKEN_AXES)
    pieces = math.ceil(length / max(settings.chunk * shards // batch, 1))
    step = math.ceil(length / pieces)
    # [B, N, …] -> [S, R, N', …]
    rows = [
        jnp.pad(x, [(0, 0), (0, step * pieces - length)] + [(0, 0)] * (x.ndim - 2)).reshape(
            shards, batch // shards, step * pieces, *x.shape[2:]
        )
        for x in (features, *jax.tree.leaves(of_targets))
    ]
    matrix = _with_sharding(_operand(settings, unembedding, features.dtype), logical_spec(None, "vocab_size"))

    def one_chunk(start):
        # [S, R, N', …] -> [S, M, …] with M = R · step
        x, *y = (jax.lax.dynamic_slice_in_dim(a, start, step, axis=2).reshape(shards, -1, *a.shape[3:]) for a in rows)
        sums, right, d_logits = _chunk(settings, x, matrix, bias, *y)
        right = right.reshape(shards, -1, step) if settings.sequences else None
        if not with_gradients:
            return (sums, None, None), (right, None)
        d_x = jnp.einsum("SMV,DV->SMD", d_logits, matrix)
        d_matrix = jnp.einsum("SMD,SMV->SDV", x, d_logits, preferred_element_type=jnp.float32)
        d_bias = None if bias is None else sum_of_tokens(d_logits)
        totals = (
            sums,
            _with_sharding(d_matrix, logical_spec("tokens", None, "vocab_size")),
            None if d_bias is None else _with_sharding(d_bias, logical_spec("tokens", "vocab_size")),
        )
        return totals, (right, d_x.reshape(shards, -1, step, width))

    def add_chunk(totals, start):
        new, of_tokens = one_chunk(start)
        return jax.tree.map(jnp.add, totals, new), of_tokens

    if pieces == 1:
        totals, of_tokens = one_chunk(0)
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one_chunk, 0)[0])
        totals, of_tokens = jax.lax.scan(add_chunk, zeros, jnp.arange(pieces) * step)
        # [pieces, S, R, step, …] -> [S, R, N', …]
        of_tokens = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], step * pieces, *x.shape[4:]), of_tokens
        )
    sums, d_matrix, d_bias = totals[0], _summed(totals[1]), totals[2]
    sums, d_bias = jax.tree.map(lambda x: x.sum(0), (sums, d_bias))  # over the shards
    # [S, R, N', …] -> [B, N, …]
    right, d_features = jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:])[:, :length], of_tokens)
    return sums, (d_features, d_matrix, d_bias), right


def _operand(settings: _Settings, unembedding, dtype):
    """Returns the unembedding matrix [D, V] in this dtype, gathered once for all chunks.

    A softmax does not depend on the mean of a token's logits. GPT-2's logits are near -100, where bfloat16 has steps of
    0.5, so the mean is removed before rounding. A cap and z-loss depend on the mean, and keep it small.
    """
    if are_rounded(dtype) and not settings.z_loss and settings.logit_cap is None:
        unembedding = unembedding - unembedding.mean(1, keepdims=True)
    return unembedding.astype(dtype)


def _chunk(settings: _Settings, features, matrix, bias, targets, weights, text_weights=None):
    """Returns the sums [S] over a chunk [S, M, D] of tokens, the mask of correct targets [S, M], and d_logits.

    d_logits [S, M, V] is the gradient of the chunk's objective with respect to the logits.
    """
    products = _with_sharding(products_of(features, matrix), logical_spec("tokens", None, "vocab_size"))
    smoothing = settings.label_smoothing
    reading = logit_stats(products, bias, targets, settings.logit_cap, with_mean=bool(smoothing))
    log_z = jnp.log(reading.normaliser) + reading.largest
    loss = log_z - reading.target
    objective = loss
    if reading.mean is not None:
        objective = log_z - (1 - smoothing) * reading.target - smoothing * reading.mean
    sums = {"loss": (loss * weights).sum(1), "accuracy": jnp.where(reading.right, weights, 0.0).sum(1)}
    if text_weights is not None:
        sums["text_loss"] = (loss * text_weights).sum(1)
        sums["text_accuracy"] = jnp.where(reading.right, text_weights, 0.0).sum(1)
    slope = 1.0
    if settings.z_loss:
        penalty = settings.z_loss * jnp.square(log_z)
        objective = objective + penalty
        slope = 1.0 + 2 * settings.z_loss * log_z  # of objective in log_z
        sums["z_loss"] = (penalty * weights).sum(1)
    sums["objective"] = (objective * weights).sum(1)

    # The second pass over the logits starts here.
    logits = recomputed_logits(products, bias, settings.logit_cap)
    hits = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None] == targets[..., None]
    d_logits = jnp.exp(logits - reading.largest[..., None]) * (weights * slope / reading.normaliser)[..., None]
    d_logits -= jnp.where(hits, (1 - smoothing) * weights[..., None], 0.0)
    if smoothing:
        d_logits -= (smoothing / logits.shape[-1]) * weights[..., None]
    if settings.logit_cap is not None:
        d_logits *= 1.0 - jnp.square(logits / settings.logit_cap)  # the slope of the cap
    return sums, reading.right, d_logits.astype(features.dtype)


def _summed(d_matrix: Optional[jax.Array]) -> Optional[jax.Array]:
    """Sums [S, D, V] -> [D, V] into the sharding of the parameter, as for the gradient of `Embedding`."""
    if d_matrix is None or len(d_matrix) == 1:
        return None if d_matrix is None else d_matrix[0]
    spec = logical_spec("tokens")
    return jax.shard_map(
        lambda x: scattered_sum(x[0], spec, axis=0),
        in_specs=logical_spec("tokens", None, "vocab_size"),
        out_specs=logical_spec("d_model", "vocab_size"),
        check_vma=False,
    )(d_matrix)


def _shards(rows: int, axes: tuple[str, ...]) -> int:
    """Returns the number of row shards in the mesh of `jax.set_mesh`; 1 without a mesh, or if it does not divide."""
    shards = axis_size(axes)
    return shards if rows % shards == 0 else 1


def _with_sharding(x: jax.Array, spec: P) -> jax.Array:
    """Constrains `x` to the sharding in the mesh of `jax.set_mesh`, except axes of size 1; unchanged without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(
        x, P(*(axis if n > 1 else None for n, axis in zip(x.shape, spec, strict=True)))
    )
