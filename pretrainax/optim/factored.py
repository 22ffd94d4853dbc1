"""Optimizers that remember the squares of gradients by rows and columns, in the place of a number for each weight."""

import dataclasses
from typing import Optional

import optax

from pretrainax.optim.matrices import on_each_matrix
from pretrainax.optim.optimizers import Chain


@dataclasses.dataclass
class Adafactor(Chain):
    """Adafactor without a mean of gradients (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5): T5's.

        v = b v + (1 - b) (g² + 1e-30), b = 1 - (updates made)^-decay_exponent
        u = g / sqrt(v); u /= max(1, RMS(u) / clip_rms)
        w -= rate(step) · (max(1e-3, RMS(w)) · u + weight_decay · w)

    Of a matrix whose sides are least_factored or more, v is the product of the means of its rows and its columns.
    """

    learning_rate: float = 1e-2  # peak of the schedule
    decay_exponent: float = 0.8  # memory of squares grows with the number of updates to this power
    clip_rms: Optional[float] = 1.0  # largest root mean square of the update of a matrix; None: any
    scale_by_parameter_rms: bool = True  # steps relative to the size of each matrix
    least_factored: int = 128  # smaller sides: a number for each weight
    weight_decay: float = 0.0  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = None  # largest norm of the whole gradient; None: any

    @property
    def is_relative(self) -> bool:
        return self.scale_by_parameter_rms

    def directions(self, params_shape):
        parts = [
            optax.scale_by_factored_rms(decay_rate=self.decay_exponent, min_dim_size_to_factor=self.least_factored)
        ]
        if self.clip_rms is not None:
            parts.append(optax.clip_by_block_rms(self.clip_rms))
        if self.scale_by_parameter_rms:
            parts.append(optax.scale_by_param_block_rms(min_scale=1e-3))
        yield on_each_matrix(optax.chain(*parts), params_shape)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if not 0 < self.decay_exponent <= 1:
            yield f"config.optimizer.decay_exponent is {self.decay_exponent}, it must be in (0, 1]"
        if self.least_factored < 1:
            yield f"config.optimizer.least_factored is {self.least_factored}, it must be at least 1"


@dataclasses.dataclass
class SM3(Chain):
    """Adagrad with one sum of squares for each row and each column (Anil et al. 2019, arXiv 1901.11150, algorithm
    SM3-II), and a mean of updates.

        v = min(row, column) + g²; row, column = max of v along each
        m = b1 m + (1 - b1) g / sqrt(v)
        w -= rate(step) · (m + weight_decay · w)
    """

    learning_rate: float = 1e-1  # peak of the schedule
    b1: float = 0.9  # memory of the mean of updates
    weight_decay: float = 0.0  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = None  # largest norm of the whole gradient; None: any

    def directions(self, params_shape):
        yield on_each_matrix(optax.scale_by_sm3(self.b1, eps=0.0), params_shape)
