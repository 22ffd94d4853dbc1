"""Rotary positions: queries and keys are turned by angles that grow with the position (Su et al. 2021)."""

import math
from typing import Optional

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import LinearScaling, ModelConfig, RotaryPositions, RotaryScaling
from pretrainax.layers.positions.base import Places, Positions, PositionTerms, behaviour_of
from pretrainax.layers.positions.sinusoidal import radians

Angles = tuple[jax.Array, jax.Array]  # cosines and sines of each plane's angle, [B, T, P] float32; P is K/2, or less


@flax.struct.dataclass
class RotaryTerms(PositionTerms):
    """The angles of queries, and of the keys of the same tokens."""

    angles: Angles
    local: Optional["RotaryTerms"] = None  # of local layers, where they have their own

    def in_block(
        self, config: ModelConfig, is_local: jax.Array, number: jax.Array, deterministic: bool
    ) -> "RotaryTerms":
        terms, every = self.replace(local=None), config.position.no_rotation_every
        if self.local is not None:
            terms = jax.tree.map(lambda near, far: jnp.where(is_local, near, far), self.local, terms)
        if every is None:
            return terms
        turns = (number + 1) % every != 0
        cosines, sines = terms.angles
        return terms.replace(angles=(jnp.where(turns, cosines, 1.0), jnp.where(turns, sines, 0.0)))

    def rotate(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotate(q, *self.angles), rotate(k, *self.angles)


@behaviour_of(RotaryPositions)
class Rotary(Positions):
    def terms(self, places: Places, *, causal: bool, dtype: jnp.dtype) -> RotaryTerms:
        position = self.config.position
        everywhere = self._angles(places, position.theta, position.scaling)
        if position.local_theta is None:
            return everywhere
        return everywhere.replace(local=self._angles(places, position.local_theta))

    def _angles(self, places: Places, theta: float, scaling: Optional[RotaryScaling] = None) -> RotaryTerms:
        turned = self.config.position.turned(self.config.dim_per_head)
        return RotaryTerms(rotary_angles(places.queries, turned, theta, scaling))


def rotary_angles(positions: jax.Array, turned: int, theta: float, scaling: Optional[RotaryScaling] = None) -> Angles:
    """Returns cosines and sines of each plane's angle, [B, T] -> each [B, T, P] float32 (Su et al. 2021, section
    3.2.2), of `turned` dimensions, which are P planes."""
    angles = radians(positions, _stretch(theta ** (-np.arange(0, turned, 2) / turned), scaling))
    return jnp.cos(angles), jnp.sin(angles)


def _stretch(frequencies: np.ndarray, scaling: Optional[RotaryScaling]) -> np.ndarray:
    """Returns the frequencies of a longer context.

    LongContextScaling divides frequencies that turn fewer than `low` times in the old context by `factor`, leaves
    those that turn more than `high` times, and goes from one to the other in between."""
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    alone = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: left alone
    return frequencies * (alone + (1.0 - alone) / scaling.factor)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Turns each plane of the first 2 P dimensions of x [B, T, H, K] by its angle, in float32; cosines and sines
    [B, T, P].

    NOTE Plane i is (x[i], x[i + P]), as in GPT-NeoX and transformers; the paper and Meta's files take neighbours,
    (x[2i], x[2i + 1]). The two differ by a permutation of the rows of the query and key kernels.
    """
    planes = cosines.shape[2]
    message = "angles are [B, T, P], with 2 P <= K, where queries or keys are [B, T, H, K]"
    chex.assert_shape((cosines, sines), (*x.shape[:2], min(planes, x.shape[3] // 2)), custom_message=message)
    cosines, sines = cosines[:, :, None, :], sines[:, :, None, :]  # [B, T, P] -> [B, T, 1, P]
    a, b, rest = jnp.split(x.astype(jnp.float32), (planes, 2 * planes), axis=-1)
    return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines, rest], axis=-1).astype(x.dtype)
