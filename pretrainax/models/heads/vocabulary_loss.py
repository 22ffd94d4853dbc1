"""Computes the cross-entropy over the vocabulary, as sums and counts, without materializing all logits.

Logits [tokens, V] in float32 are the largest array of a small model's step (GPT-2 124M at 64 × 1,024 tokens: 13 GB).
This module computes the logits of `chunk` tokens at a time, with their gradients. The computation takes three matmuls,
the same number as with all logits in memory. `logit_passes` contains the passes over the logits of a chunk.

Shapes use these letters: B rows, N predictions per row, D features, V vocabulary, V' padded vocabulary; S shards of
tokens, R rows per shard, and M tokens per shard in a chunk.
"""

import functools
import math
from typing import Any, NamedTuple, Optional, TypedDict, Unpack, cast

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.attention_mask import pad
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.logit_passes import (
    are_rounded,
    column_multiple,
    logit_stats,
    recomputed_logits,
)
from pretrainax.models.heads.logit_products import (
    LogitGradient,
    OutputMatrix,
    gradients,
    logit_products,
    output_matrix,
)
from pretrainax.sharding.arrays import constrain, scattered_sum
from pretrainax.sharding.axes import BATCH_AXES, LENGTH_AXIS, TENSOR_AXIS, TOKEN_AXES, logical_spec
from pretrainax.sharding.mesh import axis_size

PER_TARGET = "per_target/"  # name prefix of values and weights of single predictions, [B, N] instead of sums


class _PerTarget(NamedTuple):
    loss: jax.Array  # negative log-likelihood in nats, float32
    is_correct: jax.Array  # bool


class _Settings(NamedTuple):
    logit_cap: Optional[float]
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk: int = 4096
    products: str = ""
    per_target: bool = False


class _ChunkOptions(TypedDict, total=False):
    # weight of log(Z)^2, with Z the softmax normalizer (Chowdhery et al. 2022, section 5); default 0
    z_loss: float
    # fraction of the target's probability spread over the vocabulary (Szegedy et al. 2016, section 7); default 0
    label_smoothing: float
    chunk: int  # number of tokens per device whose logits exist at the same time; default 4,096
    products: str  # format of the operands of matmuls, a key of `eight_bit.FORMATS`; default "", the features' dtype


class LossOptions(_ChunkOptions, total=False):
    """The options of `loss_sums`, which `Head.sums` also accepts."""

    sequences: bool  # also counts the sequences whose targets are all correct; default False
    per_target: bool  # also returns the loss and correctness of each target, under PER_TARGET names; default False


def loss_sums(
    outputs: Any,
    targets: jax.Array,
    loss_weights: jax.Array,
    segment_ids: Optional[jax.Array] = None,
    text_weights: Optional[jax.Array] = None,
    *,
    sequences: bool = False,
    per_target: bool = False,
    **options: Unpack[_ChunkOptions],
) -> Sums:
    """Computes the loss and its metrics as {metric: (weighted sum over the predictions, sum of the weights)}.

    Callers add up the sums of several batches, and then divide once.

    Args:
      outputs: a LanguageModelOutput: features [B, N, D], unembedding [D, V] float32, bias [V] float32 or None,
        logit_cap. Logits are features · unembedding + bias, with operands in the features' dtype, accumulated in
        float32 and, except on a CPU, rounded to the features' dtype. A cap maps a logit x to cap · tanh(x / cap).
      targets: [B, N] int32.
      loss_weights: [B, N] float32; 0 for tokens without loss.
      segment_ids: [B, N] int32, the number of each target's sequence in its row; only needed with `sequences`.
      text_weights: [B, N] float32, `loss_weights` with special tokens set to 0. If None, text metrics are omitted.

    Returns:
      A dictionary with these metrics:

      - "objective": the loss to minimize, the only entry with gradients
      - "loss": the negative log-likelihood in nats
      - "accuracy": 1 for each target whose logit is the largest, otherwise 0
      - "text_loss", "text_accuracy": loss and accuracy with `text_weights`
      - "z_loss": the z-loss times its weight, if the weight is not 0
      - "sequence_accuracy", with `sequences`: (number of sequences whose targets are all correct, number of sequences)
      - PER_TARGET + "loss" and PER_TARGET + "accuracy", with `per_target`: (values, `loss_weights`), [B, N] each
    """
    settings = _Settings(outputs.logit_cap, **options, per_target=sequences or per_target)
    assert settings.chunk > 0, settings  # layers.compute.resolve_auto replaces the 0 of config.train.loss_chunk
    chex.assert_rank(outputs.features, 3, custom_message="features are [B, N, D]")
    tokens, (width, vocabulary) = outputs.features.shape[:2], outputs.unembedding.shape
    chex.assert_axis_dimension(outputs.features, 2, width, custom_message="features are [B, N, D], the matrix [D, V]")
    chex.assert_shape((targets, loss_weights), tokens, custom_message="targets and loss_weights are [B, N]")
    if outputs.bias is not None:
        chex.assert_shape(outputs.bias, (vocabulary,), custom_message="the bias is [V]")
    target_arrays = jax.tree.map(_split_length, (targets, loss_weights, text_weights))
    results = _sums(settings, _split_length(outputs.features), outputs.unembedding, outputs.bias, *target_arrays)
    # functools.partial hides the type of _sums.
    objective, metric_sums, values = cast(tuple[jax.Array, dict[str, jax.Array], Optional[_PerTarget]], results)
    counts = dict.fromkeys(metric_sums, count := loss_weights.sum())
    if text_weights is not None:
        counts |= dict.fromkeys(("text_loss", "text_accuracy"), text_weights.sum())
    sums = {name: (jax.lax.stop_gradient(value), counts[name]) for name, value in metric_sums.items()}
    sums["objective"] = objective, count
    if values is not None:
        loss, is_correct = (jax.lax.stop_gradient(_merge_length(x, tokens)) for x in values)
        if sequences:
            sums["sequence_accuracy"] = _correct_sequences(is_correct, loss_weights, segment_ids)
        if per_target:
            sums[f"{PER_TARGET}loss"] = loss, loss_weights
            sums[f"{PER_TARGET}accuracy"] = is_correct.astype(jnp.float32), loss_weights
    return sums


def _correct_sequences(
    is_correct: jax.Array, weights: jax.Array, segment_ids: Optional[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Counts the sequences whose weighted targets are all correct, and all sequences with a weighted target.

    Args:
      is_correct: [B, N] bool, True for correct targets.
      weights: [B, N]; targets with weight 0 are ignored.
      segment_ids: [B, N], the number of each target's sequence in its row.
    """
    assert segment_ids is not None, "sequences=True needs segment_ids"
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first, last = (jnp.pad(changes, ((0, 0), padding), constant_values=True) for padding in ((1, 0), (0, 1)))

    def running_count(x):
        """Counts the True values from the start of a sequence up to each position, [B, N] bool -> [B, N]."""
        total = jnp.cumsum(x, axis=1)
        return total - jax.lax.cummax(jnp.where(first, total - x, 0), axis=1)

    has_weight = weights > 0
    ends = last & (running_count(has_weight) > 0)
    return (ends & (running_count(has_weight & ~is_correct) == 0)).sum(dtype=jnp.float32), ends.sum(dtype=jnp.float32)


def _split_length(x: jax.Array) -> jax.Array:
    """Reshapes [B, N, …] -> [B · n, N / n, …] if the mesh splits the length over n devices, without moving data.

    If n does not divide N, the length is padded with zeros, whose loss weight is 0.
    """
    num_devices = axis_size(LENGTH_AXIS)
    if num_devices == 1:
        return x
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % num_devices)] + [(0, 0)] * (x.ndim - 2))
    (batch, length), shards = x.shape[:2], _num_shards(x.shape[0], BATCH_AXES)
    # [S, R, n, N/n, …] -> [S, n, R, N/n, …]
    x = x.reshape(shards, batch // shards, num_devices, length // num_devices, *x.shape[2:]).swapaxes(1, 2)
    return constrain(x.reshape(batch * num_devices, length // num_devices, *x.shape[4:]), logical_spec("tokens"))


def _merge_length(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes the result of `_split_length` back to `shape`, [B · n, N / n] -> [B, N]."""
    (batch, length), num_devices = shape, x.shape[0] // shape[0]
    shards = _num_shards(batch, BATCH_AXES)
    # [B · n, N/n] -> [S, n, R, N/n] -> [S, R, n, N/n]
    x = x.reshape(shards, num_devices, batch // shards, x.shape[1]).swapaxes(1, 2)
    return x.reshape(batch, -1)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(settings: _Settings, features, unembedding, bias, *target_arrays):
    sums, _, values = _scan_chunks(settings, features, unembedding, bias, target_arrays, with_gradients=False)
    return sums.pop("objective"), sums, values


def _sums_forward(settings: _Settings, features, unembedding, bias, *target_arrays):
    sums, gradients, values = _scan_chunks(settings, features, unembedding, bias, target_arrays, with_gradients=True)
    return (sums.pop("objective"), sums, values), gradients


def _sums_backward(settings: _Settings, gradients, cotangents):
    # The forward pass has computed the gradients of the objective; the backward pass only scales them.
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _scan_chunks(settings: _Settings, features, unembedding, bias, target_arrays, with_gradients: bool):
    """Computes the sums, the gradients for (features, unembedding, bias), and the values of each target [B, N].

    The values are None if `settings.per_target` is False. The gradients are None if `with_gradients` is False.

    Args:
      target_arrays: (targets, loss_weights, text_weights), as in `loss_sums`.
    """
    (batch, length, width), vocabulary = features.shape, unembedding.shape[1]
    # The chunks split the S shards of R rows along the length, so that no token changes device. Each shard adds up its
    # own gradient of the unembedding. The sum over the shards is computed once, after the last chunk.
    shards = _num_shards(batch, TOKEN_AXES)
    num_chunks = math.ceil(length / max(settings.chunk * shards // batch, 1))
    size = math.ceil(length / num_chunks)
    # [B, N, …] -> [S, R, N', …]
    arrays = [
        jnp.pad(x, [(0, 0), (0, size * num_chunks - length)] + [(0, 0)] * (x.ndim - 2)).reshape(
            shards, batch // shards, size * num_chunks, *x.shape[2:]
        )
        for x in (features, *jax.tree.leaves(target_arrays))
    ]
    keeps_mean = bool(settings.z_loss) or settings.logit_cap is not None
    matrix = cast_unembedding(unembedding, features.dtype, keeps_mean, settings.products)
    matrix = output_matrix(_with_sharding(matrix, logical_spec(None, "vocab_size")), settings.products)

    def one_chunk(start):
        # [S, R, N', …] -> [S, M, …] with M = R · size
        x, *y = (jax.lax.dynamic_slice_in_dim(a, start, size, axis=2).reshape(shards, -1, *a.shape[3:]) for a in arrays)
        sums, values, d_logits = _chunk(settings, vocabulary, x, matrix, bias, *y)
        values = _PerTarget(*(v.reshape(shards, -1, size) for v in values)) if settings.per_target else None
        if not with_gradients:
            return (sums, None, None), (values, None)
        d_x, d_matrix, d_bias = gradients(x, d_logits, matrix, settings.products, has_bias=bias is not None)
        totals = (
            sums,
            _with_sharding(d_matrix, logical_spec("tokens", None, "vocab_size")),
            None if d_bias is None else _with_sharding(d_bias, logical_spec("tokens", "vocab_size")),
        )
        return totals, (values, d_x.reshape(shards, -1, size, width))

    def add_chunk(totals, start):
        chunk_totals, token_arrays = one_chunk(start)
        return jax.tree.map(jnp.add, totals, chunk_totals), token_arrays

    if num_chunks == 1:
        totals, token_arrays = one_chunk(0)
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one_chunk, 0)[0])
        totals, token_arrays = jax.lax.scan(add_chunk, zeros, jnp.arange(num_chunks) * size)
        # [num_chunks, S, R, size, …] -> [S, R, N', …]
        token_arrays = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], size * num_chunks, *x.shape[4:]), token_arrays
        )
    sums, d_matrix, d_bias = totals[0], _sum_shards(totals[1]), totals[2]
    sums, d_bias = jax.tree.map(lambda x: x.sum(0), (sums, d_bias))  # over the shards
    d_matrix, d_bias = jax.tree.map(lambda x: x[..., :vocabulary], (d_matrix, d_bias))
    # [S, R, N', …] -> [B, N, …]
    values, d_features = jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:])[:, :length], token_arrays)
    return sums, (d_features, d_matrix, d_bias), values


def cast_unembedding(unembedding: jax.Array, dtype: jnp.dtype, keeps_mean: bool, products: str = "") -> jax.Array:
    """Casts the unembedding matrix to `dtype` and pads it, [D, V] -> [D, V']; it is gathered once for all chunks.

    No pass reads the logits of the added columns, which are zeros. Logits that are rounded lose their mean first:
    GPT-2's logits are near -100, where the spacing of bfloat16 is 0.5, and a softmax does not depend on a number that
    is added to all logits of a token. The mean of some 1,024 columns is close enough, and avoids another pass over the
    matrix.

    Args:
      keeps_mean: whether the result depends on the mean, as with caps and the z-loss, which keep it small.
      products: the format of the matmul's operands, as in `loss_sums`.
    """
    if not keeps_mean and (are_rounded(dtype) or products):
        stride = 1 if axis_size(TENSOR_AXIS) > 1 else max(unembedding.shape[1] // 1024, 1)
        unembedding = unembedding - unembedding[:, ::stride].mean(1, keepdims=True)
    return pad(unembedding.astype(dtype), 1, column_multiple())


def _chunk(
    settings: _Settings, vocabulary: int, features, matrix: OutputMatrix, bias, targets, weights, text_weights=None
):
    """Computes the sums [S] over a chunk of tokens, the values of each target [S, M], and a `LogitGradient`.

    `LogitGradient` holds the gradient of the chunk's objective with respect to the logits before the cap.

    Args:
      vocabulary: the number of columns of `matrix` that are not padding, V.
      features: [S, M, D].
      matrix: the result of `cast_unembedding`, [D, V'], as an `OutputMatrix`.
      targets, weights, text_weights: [S, M], as in `loss_sums`.
    """
    products = logit_products(features, matrix, settings.products)
    products = _with_sharding(products, logical_spec("tokens", None, "vocab_size"))
    smoothing = settings.label_smoothing
    stats = logit_stats(products[..., :vocabulary], bias, targets, settings.logit_cap, with_mean=bool(smoothing))
    log_z = jnp.log(stats.normaliser) + stats.largest
    loss = log_z - stats.target
    objective = loss
    if stats.mean is not None:
        objective = log_z - (1 - smoothing) * stats.target - smoothing * stats.mean
    sums = {"loss": (loss * weights).sum(1), "accuracy": jnp.where(stats.is_correct, weights, 0.0).sum(1)}
    if text_weights is not None:
        sums["text_loss"] = (loss * text_weights).sum(1)
        sums["text_accuracy"] = jnp.where(stats.is_correct, text_weights, 0.0).sum(1)
    slope = 1.0
    if settings.z_loss:
        penalty = settings.z_loss * jnp.square(log_z)
        objective = objective + penalty
        slope = 1.0 + 2 * settings.z_loss * log_z  # derivative of the objective with respect to log_z
        sums["z_loss"] = (penalty * weights).sum(1)
    sums["objective"] = (objective * weights).sum(1)

    # The second pass over the logits starts here.
    logits = recomputed_logits(products, vocabulary, bias, settings.logit_cap)
    is_target = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None] == targets[..., None]
    d_logits = jnp.exp(logits - stats.largest[..., None]) * (weights * slope / stats.normaliser)[..., None]
    d_logits -= jnp.where(is_target, (1 - smoothing) * weights[..., None], 0.0)
    if smoothing:
        d_logits -= (smoothing / logits.shape[-1]) * weights[..., None]
    if settings.logit_cap is not None:
        d_logits *= 1.0 - jnp.square(logits / settings.logit_cap)  # derivative of the cap
    # The other probabilities sum to 1 - p, where p is the target's. The margin is for rounding in float32.
    bound = 1.001 * jnp.maximum(-jnp.expm1(stats.target - log_z), 0.0) + 1e-6 + jnp.abs(slope - 1.0) + smoothing
    return sums, _PerTarget(loss, stats.is_correct), LogitGradient(d_logits, bound * jnp.abs(weights))


def _sum_shards(d_matrix: Optional[jax.Array]) -> Optional[jax.Array]:
    """Sums the gradient of the unembedding over the shards, [S, D, V] -> [D, V], sharded like the parameter.

    `Embedding` sums its gradient in the same way. Returns None if `d_matrix` is None.
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


def _num_shards(rows: int, axes: tuple[str, ...]) -> int:
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
