"""The loss over the vocabulary, as sums and counts, without ever holding all logits.

Logits [tokens, V] in float32 are the largest array of a small model's step (GPT-2 124M at 64 × 1,024 tokens: 13 GB).
Here they exist for `chunk` tokens at a time, and the gradients are made while they are there: three matrix products in
all, as many as with all logits kept, and none is done twice. How logits are read is in `logit_passes`.
"""

import functools
import math
from typing import Any, NamedTuple, Optional, TypedDict, Unpack, cast

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.sums import Sums
from pretrainax.models.heads.logit_passes import are_rounded, logits_again, products_of, read, sum_of_tokens
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
    """The options of `loss_sums`, as heads are given them."""

    z_loss: float  # weight of log(Z)^2, Z the softmax's normaliser (Chowdhery et al. 2022, section 5); 0
    label_smoothing: float  # share of the target that is spread over the vocabulary (Szegedy et al. 2016, section 7); 0
    chunk: int  # tokens of each device whose logits exist at a time; 4,096
    sequences: bool  # counts whole sequences too; False


def loss_sums(
    outputs: Any,
    targets: jax.Array,
    loss_weights: jax.Array,
    segment_ids: Optional[jax.Array] = None,
    text_weights: Optional[jax.Array] = None,
    **options: Unpack[LossOptions],
) -> Sums:
    """Returns {name: (sum over the tokens, weighted; sum of the weights)}, to be added and then divided once.

    Args:
      outputs: a LanguageModelOutput: features [B, N, D], unembedding [D, V] float32, bias [V] float32 or None,
        logit_cap. Logits are features · unembedding + bias, with operands in the features' dtype, accumulated in
        float32 and, but on a CPU, rounded to that dtype; with a cap, x becomes cap · tanh(x / cap).
      targets: [B, N] int32.
      loss_weights: [B, N] float32; 0 where a token has no loss.
      segment_ids: [B, N] int32, which sequence of its row a target is of; only `sequences` needs them.
      text_weights: [B, N] float32, the loss weights of the targets that are text; None: nothing is said of these.

    Returns:
      "objective", to minimise and the only one with gradients; "loss", the negative log-likelihood in nats;
      "accuracy", share of targets with the largest logit; "text_loss" and "text_accuracy", both of the targets that are
      text; "z_loss" where its weight is not 0, weight included; "sequence_accuracy" with `sequences`: those whose every
      target has it, and the number of sequences.
    """
    settings = _Settings(outputs.logit_cap, **options)
    assert settings.chunk > 0, settings  # layers.compute.for_this_machine replaces the 0 of config.train.loss_chunk
    chex.assert_rank(outputs.features, 3, custom_message="features are [B, N, D]")
    tokens, (width, vocabulary) = outputs.features.shape[:2], outputs.unembedding.shape
    chex.assert_axis_dimension(outputs.features, 2, width, custom_message="features are [B, N, D], the matrix [D, V]")
    chex.assert_shape((targets, loss_weights), tokens, custom_message="targets and loss_weights are [B, N]")
    if outputs.bias is not None:
        chex.assert_shape(outputs.bias, (vocabulary,), custom_message="the bias is [V]")
    by_device = jax.tree.map(_by_device, (targets, loss_weights, text_weights))
    found = _sums(settings, _by_device(outputs.features), outputs.unembedding, outputs.bias, *by_device)
    # partial hides the type of _sums
    objective, reported, right = cast(tuple[jax.Array, dict[str, jax.Array], Optional[jax.Array]], found)
    counts = dict.fromkeys(reported, count := loss_weights.sum())
    if text_weights is not None:
        counts |= dict.fromkeys(("text_loss", "text_accuracy"), text_weights.sum())
    sums = {"objective": (objective, count)} | {
        name: (jax.lax.stop_gradient(value), counts[name]) for name, value in reported.items()
    }
    if right is not None:
        assert segment_ids is not None, "sequences are told apart by segment_ids"
        sums["sequence_accuracy"] = _sequences_right(_by_row(right, tokens), loss_weights, segment_ids)
    return sums


def _sequences_right(right: jax.Array, weights: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts the sequences of [B, N] targets that are `right` wherever they have a weight, and all that have one."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first, last = (jnp.pad(changes, ((0, 0), side), constant_values=True) for side in ((1, 0), (0, 1)))

    def so_far(x):
        """Counts how many of a sequence are true up to each place, [B, N] bool -> [B, N]."""
        total = jnp.cumsum(x, axis=1)
        return total - jax.lax.cummax(jnp.where(first, total - x, 0), axis=1)

    asked = weights > 0
    ends = last & (so_far(asked) > 0)
    return (ends & (so_far(asked & ~right) == 0)).sum(dtype=jnp.float32), ends.sum(dtype=jnp.float32)


def _by_device(x: jax.Array) -> jax.Array:
    """Reshapes [B, N, …] -> [B · n, N / n, …] where the mesh cuts the length into n parts: rows of one device, then of
    the next; what is added to a length that does not divide has weight 0."""
    parts = axis_size(LENGTH_AXIS)
    if parts == 1:
        return x
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % parts)] + [(0, 0)] * (x.ndim - 2))
    (batch, length), shards = x.shape[:2], _shards(x.shape[0], BATCH_AXES)
    # [S, R, n, N/n, …] -> [S, n, R, N/n, …]
    x = x.reshape(shards, batch // shards, parts, length // parts, *x.shape[2:]).swapaxes(1, 2)
    return constrain(x.reshape(batch * parts, length // parts, *x.shape[4:]), logical_spec("tokens"))


def _by_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes `_by_device`: returns [B · n, N / n] as [B, N] of this shape."""
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
    # The gradients of the sum are at hand: what follows the sum only scales them.
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _scan_chunks(settings: _Settings, features, unembedding, bias, of_targets, with_gradients: bool):
    """Returns the sums, the gradients of the objective's sum for (features, unembedding, bias), and which targets have
    the largest logit, [B, N]; None where nobody asks.

    of_targets: the targets, their weights, and their weights as text or None.
    """
    batch, length, width = features.shape
    # Each device keeps its own rows: S shards of R rows, cut along the length, so that no token changes device. The
    # gradient of the unembedding is summed apart in each shard, and over the shards once, after the last chunk.
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
    matrix = _constrain(_operand(settings, unembedding, features.dtype), logical_spec(None, "vocab_size"))

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
            _constrain(d_matrix, logical_spec("tokens", None, "vocab_size")),
            None if d_bias is None else _constrain(d_bias, logical_spec("tokens", "vocab_size")),
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
    """Returns the matrix [D, V] that makes logits in this dtype, gathered once for all chunks.

    What all logits of a token have in common is in no softmax, and GPT-2's are near -100, where bfloat16 has steps of
    0.5: it is left out of what is rounded. A cap and z-loss do see it, and keep it small.
    """
    if are_rounded(dtype) and not settings.z_loss and settings.logit_cap is None:
        unembedding = unembedding - unembedding.mean(1, keepdims=True)
    return unembedding.astype(dtype)


def _chunk(settings: _Settings, features, matrix, bias, targets, weights, text_weights=None):
    """Returns the sums [S] over a chunk [S, M, D] of tokens, which targets have the largest logit, [S, M], and the
    gradient of its objective for the logits [S, M, V]."""
    products = _constrain(products_of(features, matrix), logical_spec("tokens", None, "vocab_size"))
    smoothing = settings.label_smoothing
    reading = read(products, bias, targets, settings.logit_cap, with_mean=bool(smoothing))
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

    # From here on the second pass
    logits = logits_again(products, bias, settings.logit_cap)
    hits = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None] == targets[..., None]
    d_logits = jnp.exp(logits - reading.largest[..., None]) * (weights * slope / reading.normaliser)[..., None]
    d_logits -= jnp.where(hits, (1 - smoothing) * weights[..., None], 0.0)
    if smoothing:
        d_logits -= (smoothing / logits.shape[-1]) * weights[..., None]
    if settings.logit_cap is not None:
        d_logits *= 1.0 - jnp.square(logits / settings.logit_cap)  # the slope of the cap
    return sums, reading.right, d_logits.astype(features.dtype)


def _summed(d_matrix: Optional[jax.Array]) -> Optional[jax.Array]:
    """Sums [S, D, V] -> [D, V], each device's part as the parameter lies; see Embedding, whose gradient is summed
    like this too."""
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
    """Counts the parts that the mesh of `jax.set_mesh` cuts rows into; 1 without one, or for rows not divided."""
    shards = axis_size(axes)
    return shards if rows % shards == 0 else 1


def _constrain(x: jax.Array, spec: P) -> jax.Array:
    """Returns `x` sharded so under the mesh of `jax.set_mesh`, but for axes of size 1; unchanged without one."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(
        x, P(*(axis if n > 1 else None for n, axis in zip(x.shape, spec, strict=True)))
    )
