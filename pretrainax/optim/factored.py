"""Implements the optimizers whose second moment is factored into rows and columns: Adafactor and SM3."""

import dataclasses
from typing import ClassVar, Optional

import optax

from pretrainax.optim.matrices import map_matrices
from pretrainax.optim.optimizers import Chain


@dataclasses.dataclass
class Adafactor(Chain):
    """Adafactor without a first moment, as in T5 (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5).

        v = b v + (1 - b) (g² + 1e-30), b = 1 - (number of updates)^-decay_exponent
        u = g / sqrt(v); u /= max(1, RMS(u) / clip_rms)
        w -= rate(step) · (max(1e-3, RMS(w)) · u + weight_decay · w)

    RMS is the root mean square over a matrix. If a matrix has at least `min_factored_size` rows and columns, the state
    contains only the row means and column means of v, and the update approximates v by their outer product.
    """

    transfers: ClassVar[bool] = True

    learning_rate: float = 1e-2  # peak of the schedule
    decay_exponent: float = 0.8  # the decay rate b of the second moment is 1 - updates^-decay_exponent
    clip_rms: Optional[float] = 1.0  # maximum RMS of the update of a matrix; None: no clipping
    scale_by_parameter_rms: bool = True  # multiplies the update of each matrix by the RMS of the matrix
    min_factored_size: int = 128  # matrices with fewer rows or columns have a full second moment
    weight_decay: float = 0.0  # decoupled, times the learning rate
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    @property
    def is_scale_invariant(self) -> bool:
        return self.scale_by_parameter_rms

    def directions(self, params_shape):
        transformations = [
            optax.scale_by_factored_rms(decay_rate=self.decay_exponent, min_dim_size_to_factor=self.min_factored_size)
        ]
        if self.clip_rms is not None:
            transformations.append(optax.clip_by_block_rms(self.clip_rms))
        if self.scale_by_parameter_rms:
            transformations.append(optax.scale_by_param_block_rms(min_scale=1e-3))
        yield map_matrices(optax.chain(*transformations), params_shape)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if not 0 < self.decay_exponent <= 1:
            yield f"config.optimizer.decay_exponent is {self.decay_exponent}, it must be in (0, 1]"
        if self.min_factored_size < 1:
            yield f"config.optimizer.min_factored_size is {self.min_factored_size}, it must be at least 1"


@dataclasses.dataclass
class SM3(Chain):
    """Adagrad with momentum, and with one accumulator per row and per column instead of one per weight.

    Source: Anil et al. 2019, arXiv 1901.11150, algorithm SM3-II.

        v = min(row, column) + g²; row, column = maximum of v over each row, each column
        m = b1 m + (1 - b1) g / sqrt(v)
        w -= rate(step) · (m + weight_decay · w)
    """

    learning_rate: float = 1e-1  # peak of the schedule
    b1: float = 0.9  # decay rate of the momentum m
    weight_decay: float = 0.0  # decoupled, times the learning rate
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    def directions(self, params_shape):
        yield map_matrices(optax.scale_by_sm3(self.b1, eps=0.0), params_shape)
