"""Provides the optimizers and learning-rate schedules that `config.optimizer` and `config.schedule` select."""

from pretrainax.optim.factored import SM3, Adafactor
from pretrainax.optim.muon import Muon
from pretrainax.optim.optimizers import Adagrad, AdamW, AdEMAMix, Lamb, Lion, Optimizer, StableAdamW
from pretrainax.optim.schedule_free import ScheduleFreeAdamW
from pretrainax.optim.schedules import (
    Schedule,
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSquareRoot,
    WarmupLinear,
    WarmupStableDecay,
    WarmupSteps,
)
from pretrainax.optim.soap import SOAP
from pretrainax.optim.sophia import Sophia

__all__ = [
    "Schedule",
    "WarmupCosine",
    "WarmupLinear",
    "WarmupInverseSquareRoot",
    "WarmupConstant",
    "WarmupStableDecay",
    "WarmupSteps",
    "Optimizer",
    "Adagrad",
    "AdamW",
    "Lamb",
    "StableAdamW",
    "AdEMAMix",
    "Lion",
    "Adafactor",
    "SM3",
    "Muon",
    "Sophia",
    "SOAP",
    "ScheduleFreeAdamW",
]
