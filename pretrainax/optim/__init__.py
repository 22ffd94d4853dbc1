"""Optimizers and learning-rate schedules, as configs name them."""

from pretrainax.optim.optimizers import AdamW, Lamb, Optimizer
from pretrainax.optim.schedules import (
    Schedule,
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSquareRoot,
    WarmupLinear,
    WarmupStableDecay,
)

__all__ = [
    "Schedule",
    "WarmupCosine",
    "WarmupLinear",
    "WarmupInverseSquareRoot",
    "WarmupConstant",
    "WarmupStableDecay",
    "Optimizer",
    "AdamW",
    "Lamb",
]
