"""Computes the cross-entropy over the vocabulary, as sums and counts, without materializing all logits.

Logits [tokens, V] in float32 are the largest array of a small model's step (GPT-2 124M at 64 × 1,024 tokens: 13 GB).
This module computes the logits of `chunk` tokens at a time, with their gradients. It needs three matrix products, the
same number as with all logits in memory. `logit_passes` contains the passes over the logits of a chunk.

Letters of shapes: B rows, N predictions per row, D features, V vocabulary; S shards of tokens, R rows per shard, and M
tokens per shard in a chunk.
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
    """The options of `loss_sums`, which `Head.sums` also takes."""

    # weight of log(Z)^2, with Z the softmax normalizer (Chowdhery et al. 2022, section 5); default 0
    z_loss: float
    # share of the target's probability that is spread over the vocabulary (Szegedy et al. 2016, section 7); default 0
    label_smoothing: float
    chunk: int  # number of tokens per device whose logits exist at the same time; default 4,096
    sequences: bool  # also counts the sequences whose targets are all correct; default False


def loss_sums(
    outputs: Any,
    targets: jax.Array,
    loss_weights: jax.Array,
    segment_ids: Optional[jax.Array] = None,
    text_weights: Optional[jax.Array] = None,
    **options: Unpack[LossOptions],
) -> Sums:
    """Returns {metric: (weighted sum over the predictions, sum of the weights)}.

    Callers add up the sums of several batches, and then divide once.

    Args:
      outputs: a LanguageModelOutput: features [B, N, D], unembedding [D, V] float32, bias [V] float32 or None,
        logit_cap. Logits are features · unembedding + bias, with operands in the features' dtype, accumulated in
        float32 and, except on a CPU, rounded to the features' dtype. A cap maps a logit x to cap · tanh(x / cap).
      targets: [B, N] int32.
      loss_weights: [B, N] float32; 0 for tokens without loss.
      segment_ids: [B, N] int32, the sequence of each target in its row; only needed with `sequences`.
      text_weights: [B, N] float32, `loss_weights` with 0 for special tokens; None: no text metrics.

    Returns:
      "objective": the loss to minimize, the only entry with gradients. "loss": the negative log-likelihood in nats.
      "accuracy": correct targets, whose logit is the largest. "text_loss", "text_accuracy": loss and accuracy with
      `text_weights`. "z_loss": the z-loss times its weight, if the weight is not 0. "sequence_accuracy", with
      `sequences`: the number of sequences whose targets are all correct, and the number of sequences.
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
    objective, reported, is_correct = cast(tuple[jax.Array, dict[str, jax.Array], Optional[jax.Array]], results)
    counts = dict.fromkeys(reported, count := loss_weights.sum())
    if text_weights is not None:
        counts |= dict.fromkeys(("text_loss", "text_accuracy"), text_weights.sum())
    sums = {"objective": (objective, count)} | {
        name: (jax.lax.stop_gradient(value), counts[name]) for name, value in reported.items()
    }
    if is_correct is not None:
        assert segment_ids is not None, "sequences=True needs segment_ids"
        sums["sequence_accuracy"] = _correct_sequences(_by_row(is_correct, tokens), loss_weights, segment_ids)
    return sums


def _correct_sequences(right: jax.Array, weights: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the number of sequences whose weighted targets are all correct, and of sequences with weighted targets.

    Args:
      right: [B, N] bool, True for correct targets.
      weights: [B, N]; targets with weight 0 are ignored.
      segment_ids: [B, N], the sequence of each target in its row.
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first, last = (jnp.pad(changes, ((0, 0), side), constant_values=True) for side in ((1, 0), (0, 1)))

    def running_count(x):
        """Returns the number of True values from the start of a sequence up to each position, [B, N] bool -> [B, N]."""
        total = jnp.cumsum(x, axis=1)
        return total - jax.lax.cummax(jnp.where(first, total - x, 0), axis=1)

    weighted = weights > 0
    ends = last & (running_count(weighted) > 0)
    return (ends & (running_count(weighted & ~right) == 0)).sum(dtype=jnp.float32), ends.sum(dtype=jnp.float32)


def _by_device(x: jax.Array) -> jax.Array:
    """Reshapes [B, N, …] -> [B · n, N / n, …] if the mesh splits the length over n devices; no value changes device.

    If n does not divide the length, it is padded with zeros, which have loss weight 0.
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
    """Reshapes the result of `_by_device` back to `shape`, [B · n, N / n] -> [B, N]."""
    (batch, length), parts = shape, x.shape[0] // shape[0]
    shards = _shards(batch, BATCH_AXES)
    # [B · n, N/n] -> [S, n, R, N/n] -> [S, R, n, N/n]
    x = x.reshape(shards, parts, batch // shards, x.shape[1]).swapaxes(1, 2)
    return x.reshape(batch, -1)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(settings: _Settings, features, unembedding, bias, *of_targets):
    sums, _, is_correct = _scan_chunks(settings, features, unembedding, bias, of_targets, with_gradients=False)
    return sums.pop("objective"), sums, is_correct


def _sums_forward(settings: _Settings, features, unembedding, bias, *of_targets):
    sums, gradients, is_correct = _scan_chunks(settings, features, unembedding, bias, of_targets, with_gradients=True)
    return (sums.pop("objective"), sums, is_correct), gradients


def _sums_backward(settings: _Settings, gradients, cotangents):
    # The forward pass has computed the gradients of the objective; the backward pass only scales them.
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _scan_chunks(settings: _Settings, features, unembedding, bias, of_targets, with_gradients: bool):
    """Returns the sums, the gradients for (features, unembedding, bias), and the mask of correct targets, [B, N] bool.

    The mask is None without `settings.sequences`. The gradients are None without `with_gradients`.

    Args:
      of_targets: (targets, loss_weights, text_weights), as in `loss_sums`.
    """
    batch, length, width = features.shape
    # The chunks split the S shards of R rows along the length, so that no token changes device. Each shard adds up its
    # own gradient of the unembedding. The sum over the shards is computed once, after the last chunk.
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
    """Returns the unembedding matrix [D, V] cast to `dtype`, which is gathered once for all chunks.

    A softmax does not depend on the mean of a token's logits. GPT-2's logits are near -100, where the spacing of
    bfloat16 is 0.5, so the mean over the vocabulary is subtracted before rounding. A cap or z-loss depends on the mean
    and keeps it small, so then nothing is subtracted.
    """
    if are_rounded(dtype) and not settings.z_loss and settings.logit_cap is None:
        unembedding = unembedding - unembedding.mean(1, keepdims=True)
    return unembedding.astype(dtype)


def _chunk(settings: _Settings, features, matrix, bias, targets, weights, text_weights=None):
    """Returns the sums [S] over a chunk of tokens, the mask of correct targets [S, M], and d_logits [S, M, V].

    d_logits is the gradient of the chunk's objective with respect to the logits before the cap.

    Args:
      features: [S, M, D].
      matrix: the result of `_operand`.
      targets, weights, text_weights: [S, M], as in `loss_sums`.
    """
    products = _with_sharding(products_of(features, matrix), logical_spec("tokens", None, "vocab_size"))
    smoothing = settings.label_smoothing
    reading = logit_stats(products, bias, targets, settings.logit_cap, with_mean=bool(smoothing))
    log_z = jnp.log(reading.normaliser) + reading.largest
    loss = log_z - reading.target
    objective = loss
    if reading.mean is not None:
        objective = log_z - (1 - smoothing) * reading.target - smoothing * reading.mean
    sums = {"loss": (loss * weights).sum(1), "accuracy": jnp.where(reading.is_correct, weights, 0.0).sum(1)}
    if text_weights is not None:
        sums["text_loss"] = (loss * text_weights).sum(1)
        sums["text_accuracy"] = jnp.where(reading.is_correct, text_weights, 0.0).sum(1)
    slope = 1.0
    if settings.z_loss:
        penalty = settings.z_loss * jnp.square(log_z)
        objective = objective + penalty
        slope = 1.0 + 2 * settings.z_loss * log_z  # derivative of the objective with respect to log_z
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
        d_logits *= 1.0 - jnp.square(logits / settings.logit_cap)  # derivative of the cap
    return sums, reading.is_correct, d_logits.astype(features.dtype)


def _summed(d_matrix: Optional[jax.Array]) -> Optional[jax.Array]:
    """Sums the gradient of the unembedding over the shards, [S, D, V] -> [D, V], sharded like the parameter.

    `Embedding` sums its gradient in this way too. None stays None.
    """
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
    """Returns the number of shards into which `axes` of the current mesh split the rows.

    The result is 1 without a mesh, or if the number of shards does not divide `rows`.
    """
    shards = axis_size(axes)
    return shards if rows % shards == 0 else 1


def _with_sharding(x: jax.Array, spec: P) -> jax.Array:
    """Constrains `x` to a sharding in the current mesh, without splitting axes of size 1; no effect without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(
        x, P(*(axis if n > 1 else None for n, axis in zip(x.shape, spec, strict=True)))
    )
