"""Rotary positions: queries and keys are rotated by angles that are proportional to the position (Su et al. 2021)."""

import math
from typing import Optional

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import LinearScaling, LongRopeScaling, ModelConfig, RotaryPositions, RotaryScaling, YarnScaling
from pretrainax.layers.positions.base import AttentionPositions, Positions, PositionTerms, register_positions
from pretrainax.layers.positions.sinusoidal import radians

Angles = tuple[jax.Array, jax.Array]  # cosines and sines of the angles of P planes, [B, T, P] float32 each; P <= K/2


@flax.struct.dataclass
class RotaryTerms(PositionTerms):
    """The rotation angles of the T queries, which are also the angles of the keys of the same tokens."""

    angles: Angles
    interleaved: bool = flax.struct.field(pytree_node=False, default=False)
    local: Optional["RotaryTerms"] = None  # terms for local layers; None: the same angles as in global layers

    def in_block(
        self, config: ModelConfig, is_local: bool | jax.Array, number: jax.Array, deterministic: bool
    ) -> "RotaryTerms":
        terms, every = self.replace(local=None), config.position.no_rotation_every
        if self.local is not None:
            terms = jax.tree.map(
                lambda local_angles, global_angles: jnp.where(is_local, local_angles, global_angles), self.local, terms
            )
        if every is None:
            return terms
        rotates = (number + 1) % every != 0
        cosines, sines = terms.angles
        return terms.replace(angles=(jnp.where(rotates, cosines, 1.0), jnp.where(rotates, sines, 0.0)))

    def rotate(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotate(q, *self.angles, self.interleaved), rotate(k, *self.angles, self.interleaved)


@register_positions(RotaryPositions)
class Rotary(Positions):
    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> RotaryTerms:
        position = self.config.position
        global_terms = self._angles(places, position.theta, position.scaling)
        if position.local_theta is None:
            return global_terms
        return global_terms.replace(local=self._angles(places, position.local_theta))

    def _angles(self, places: AttentionPositions, theta: float, scaling: Optional[RotaryScaling] = None) -> RotaryTerms:
        position = self.config.position
        rotated_dims = position.rotated_dims(self.config.position_dim)
        return RotaryTerms(
            rotary_angles(places.queries, rotated_dims, theta, scaling, places.segment_ids), position.interleaved
        )

    @property
    def logit_gain(self) -> float:
        scaling = self.config.position.scaling
        return _yarn_gain(scaling, scaling.mscale_all_dim) ** 2 if isinstance(scaling, YarnScaling) else 1.0


def rotary_angles(
    positions: jax.Array,
    turned: int,
    theta: float,
    scaling: Optional[RotaryScaling] = None,
    segment_ids: Optional[jax.Array] = None,
) -> Angles:
    """Computes the cosines and sines of the rotation angles for positions [B, T], [B, T, P] float32 each.

    Source: Su et al. 2021, section 3.2.2. LongRopeScaling and YarnScaling also multiply the cosines and sines by a
    constant.

    Args:
      turned: number of rotated dimensions, 2 P.
      theta: base of the frequencies.
      scaling: optional change of the frequencies, for contexts that are longer than in pre-training.
      segment_ids: as in AttentionPositions.
    """
    if isinstance(scaling, LongRopeScaling):
        real_positions = positions if segment_ids is None else jnp.where(segment_ids > 0, positions, 0)
        return _long_rope(real_positions, scaling, _frequencies(turned, theta))
    if isinstance(scaling, YarnScaling):
        frequencies = _yarn(scaling, turned, theta)
        gain = _yarn_gain(scaling, scaling.mscale) / _yarn_gain(scaling, scaling.mscale_all_dim)
    else:
        frequencies, gain = _stretch(_frequencies(turned, theta), scaling), 1.0
    angles = radians(positions, frequencies)
    return gain * jnp.cos(angles), gain * jnp.sin(angles)


def _long_rope(positions: jax.Array, scaling: LongRopeScaling, frequencies: np.ndarray) -> Angles:
    """Computes the angles with different frequencies for short and long segments (Ding et al. 2024, section 3.3).

    Segments are long if they have more than `scaling.original_length` tokens, without padding. Each segment of a packed
    row has its own length. In generation, the positions are those of the new tokens: a segment becomes long with the
    token at the position `original_length`, and `inference.cached` then recomputes the previous tokens.

    NOTE In transformers, the longest row of a batch selects the frequencies of all rows.
    """
    short, long = (
        radians(positions, frequencies / np.array(factors)) for factors in (scaling.short_factors, scaling.long_factors)
    )
    angles = jnp.where(_in_long_segment(positions, scaling.original_length)[:, :, None], long, short)
    gain = math.sqrt(1.0 + math.log(max(scaling.factor, 1.0)) / math.log(scaling.original_length))
    return gain * jnp.cos(angles), gain * jnp.sin(angles)


def _in_long_segment(positions: jax.Array, length: int) -> jax.Array:
    """Returns a mask of the tokens whose segment has more than `length` tokens, [B, T] bool.

    A segment has more than `length` tokens if it contains the position `length`. In generation, `positions` lacks the
    cached tokens, so a token with a larger position is sufficient too.
    """
    count = positions.shape[1]
    # Row index of the position `length` in the segment of each token, if the segment contains this position
    index = jnp.arange(count)[None] - positions + length
    position = jnp.take_along_axis(positions, index, axis=1, mode="clip")
    return (positions >= length) | (index < count) & (position == length)


def _frequencies(head_dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


def _yarn(scaling: YarnScaling, head_dim: int, theta: float) -> np.ndarray:
    """Computes the frequency of each plane: stretched, unchanged, or in between (Peng et al. 2023, section 3.2).

    A stretched frequency is divided by `scaling.factor`. In between, the stretching is linear in the plane index.
    """

    def plane_index(rotations: float) -> float:  # plane with this number of rotations in the original context length
        return head_dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = plane_index(scaling.fast), plane_index(scaling.slow)
    if scaling.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretched = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)  # 1: fully stretched
    return _frequencies(head_dim, theta) * (1.0 - stretched + stretched / scaling.factor)


def _yarn_gain(scaling: YarnScaling, weight: float) -> float:
    return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _stretch(frequencies: np.ndarray, scaling: Optional[RotaryScaling]) -> np.ndarray:
    """Returns the frequencies for a longer context, or unchanged frequencies if `scaling` is None.

    LinearScaling divides all frequencies by `factor`. LongContextScaling divides only the frequencies with fewer than
    `low_frequency_factor` rotations in the original context length. It leaves frequencies with more than
    `high_frequency_factor` rotations unchanged, and interpolates in between.
    """
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    rotations = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unchanged = np.clip((rotations - low) / (high - low), 0.0, 1.0)  # 1: unchanged
    return frequencies * (unchanged + (1.0 - unchanged) / scaling.factor)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array, interleaved: bool = False) -> jax.Array:
    """Rotates each plane of the first 2 P dimensions of x [B, T, H, K] by the plane's angle, in float32.

    The result is cast to the dtype of x.

    Args:
      cosines, sines: [B, T, P].
      interleaved: whether the planes of the input are interleaved.

    NOTE By default, plane i is (x[i], x[i + P]), as in GPT-NeoX and transformers. In the paper and in Meta's
    checkpoints, planes are interleaved: plane i is (x[2i], x[2i + 1]). The two layouts differ by a permutation of the
    rows of the query and key kernels. With `interleaved`, the result still has the default order. Queries and keys have
    the same order, so the logits are correct.
    """
    planes = cosines.shape[2]
    message = "angles are [B, T, P], with 2 P <= K, where queries or keys are [B, T, H, K]"
    chex.assert_shape((cosines, sines), (*x.shape[:2], min(planes, x.shape[3] // 2)), custom_message=message)
    cosines, sines = cosines[:, :, None, :], sines[:, :, None, :]  # [B, T, P] -> [B, T, 1, P]
    rotated, rest = jnp.split(x.astype(jnp.float32), (2 * planes,), axis=-1)
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else jnp.split(rotated, 2, axis=-1)
    return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines, rest], axis=-1).astype(x.dtype)
