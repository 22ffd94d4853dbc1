"""Computes the three matmuls of the vocabulary loss: the logits and the gradients of the features and of the matrix.

Operands have the compute dtype, or 8 bits if `config.train.products` selects a format (`layers.eight_bit`). The
gradient of the logits is then rounded once for both matmuls that read it, with one scale per token:

- "fp8": float8_e5m2. Softmax probabilities span many orders of magnitude: with 50,257 tokens, most are near 2^-16,
  where float8_e4m3fn, scaled to a largest value of 1, has less than 3 bits.
- "int8": rounded stochastically. The variance that this adds to a sum of p over tokens is at most p / 127 per token,
  and the targets, sampled with probability p, have a variance of p (1 - p).

The gradient of the matrix sums over the tokens. Therefore the features are multiplied by the scales of their tokens
before they are rounded.

Shapes: S shards of tokens, M tokens per shard, D features, V vocabulary, V' padded vocabulary.
"""

from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers import eight_bit
from pretrainax.layers.eight_bit import Quantized
from pretrainax.models.heads.logit_passes import in_one_pass, sum_of_tokens


class RoundedMatrix(NamedTuple):
    """The output matrix [D, V'] in 8 bits."""

    for_logits: Quantized  # one scale per column, or per array
    for_features: Quantized  # one scale per row, or per array


OutputMatrix = jax.Array | RoundedMatrix


class LogitGradient(NamedTuple):
    """The gradient of the objective for the logits of a chunk."""

    values: jax.Array  # [S, M, V] float32
    bound: jax.Array  # [S, M], at least the largest absolute value of each token


def output_matrix(matrix: jax.Array, products: str) -> OutputMatrix:
    """Rounds the matrix [D, V'] for all chunks, if `products` selects a format."""
    if not products:
        return matrix
    for_logits = eight_bit.quantize(matrix, products, (0,))
    by_array = eight_bit.FORMATS[products].by_array
    return RoundedMatrix(for_logits, for_logits if by_array else eight_bit.quantize(matrix, products, (1,)))


def logit_products(features: jax.Array, matrix: OutputMatrix, products: str) -> jax.Array:
    """Multiplies features [S, M, D] by the matrix; returns [S, M, V'] in the features' dtype, or float32 on a CPU."""
    dtype = features.dtype if in_one_pass() else jnp.float32
    if not isinstance(matrix, RoundedMatrix):
        return jnp.einsum("SMD,DV->SMV", features, matrix, preferred_element_type=dtype)
    # One scale per shard, because a scale for all shards would need communication in each chunk
    return jax.vmap(
        lambda x: eight_bit.multiply(eight_bit.quantize(x, products, (1,)), matrix.for_logits, ((1,), (0,)), dtype)
    )(features)


def gradients(
    features: jax.Array, d_logits: LogitGradient, matrix: OutputMatrix, products: str, has_bias: bool
) -> tuple[jax.Array, jax.Array, Optional[jax.Array]]:
    """Computes the gradients of a chunk's features [S, M, D], of the matrix [S, D, V'] and of the bias [S, V'].

    The gradients of the matrix and of the bias, which is None without `has_bias`, are float32 sums over each shard.
    """

    def padded(x: jax.Array) -> jax.Array:
        columns = (matrix.for_logits.values if isinstance(matrix, RoundedMatrix) else matrix).shape[1]
        return jnp.pad(x, ((0, 0), (0, 0), (0, columns - x.shape[2])))

    if not isinstance(matrix, RoundedMatrix):
        rounded = padded(d_logits.values.astype(features.dtype))
        d_features = jnp.einsum("SMV,DV->SMD", rounded, matrix)
        d_matrix = jnp.einsum("SMD,SMV->SDV", features, rounded, preferred_element_type=jnp.float32)
        return d_features, d_matrix, sum_of_tokens(rounded) if has_bias else None

    form = eight_bit.LOGIT_GRADIENTS[products]
    bound = d_logits.bound[..., None]
    scales = eight_bit.scale_for(bound, form)

    def one_shard(x, values, scale, factor):
        def sum_over_tokens(factors):  # [M, n] -> [n, V']
            scaled = eight_bit.quantize(factors * factor, products, (0,))
            return eight_bit.multiply(scaled, unscaled, ((0,), (0,)), jnp.float32)

        unscaled = Quantized(values, jnp.ones((1, 1)))
        d_x = eight_bit.multiply(Quantized(values, scale), matrix.for_features, ((1,), (1,)), x.dtype)
        d_bias = sum_over_tokens(jnp.ones_like(factor))[0] if has_bias else None
        return d_x, sum_over_tokens(x.astype(jnp.float32)), d_bias

    rounded = padded(eight_bit.round_to(form, d_logits.values / scales, stochastic=True))
    # The scale of a token without weight is 1, which would be far larger than the others.
    return jax.vmap(one_shard)(features, rounded, scales, jnp.where(bound == 0, 0.0, scales))
