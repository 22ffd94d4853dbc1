"""Reports the health of a run at each validation: spread of states and predictions, and gradient norms per stack."""

import math
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config import ModelConfig
from pretrainax.config.metric import reported
from pretrainax.models.electra import component_configs
from pretrainax.models.heads.base import head_modules
from pretrainax.models.spread import HIDDEN_SPREAD, PREDICTION_SPREAD, TARGET_SPREAD
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training.callbacks import Callback

# Token states count as equal below this spread. Measured: 0.018 in a healthy T5 of width 32 after 20 steps, 3e-8 in a
# collapsed post-norm BERT. Rounding to bfloat16 gives equal states a spread of about 1e-5.
EQUAL_STATES = 1e-3
# The fraction of the run after which equal predictions at all positions are a collapse. Before, they are normal: a
# masked language model predicts the most frequent token at all positions for some thousand steps.
_SETTLED = 0.5


class Health(Callback):
    """Logs gradient norms per stack, prints a line at each validation, and warns once about each kind of collapse."""

    part = ""  # the methods are fast, so they need no row in the goodput table

    def __init__(self):
        self._warned: set[str] = set()

    def log_metrics(self, loop, state):
        return {f"gradient_norm/stack={stack}": norm for stack, norm in _norms(loop).items()}

    def on_evaluate(self, loop, state, metrics):
        loop.note(health_line(metrics, _norms(loop)))
        for name, warning in collapses(metrics, loop.step / loop.run.experiment.train.steps).items():
            if name not in self._warned:
                loop.note(f"WARNING: {warning}")
            self._warned.add(name)


def _norms(loop) -> dict[str, float]:
    """Returns the gradient norm of each stack in the last step, or {} before the first step."""
    if loop.newest is None:
        return {}
    names, model = parameter_names(loop.run.abstract_state.params), loop.run.experiment.model
    return stack_norms(model, names, loop.newest["gradient_squares"])


def stack_norms(model: ModelConfig, names: Sequence[str], squares: Sequence[float]) -> dict[str, float]:
    """Computes the gradient norm of each stack, of the embeddings and of the heads, {"encoder": …, "head": …}.

    Args:
      names: the paths of all parameters.
      squares: the sum of the squared gradient of each parameter.
    """
    heads = {name for config in component_configs(model) for name in head_modules(config)}
    totals: dict[str, float] = {}
    for name, square in zip(names, np.asarray(squares, np.float64).tolist(), strict=True):
        module = name.partition("/")[0]
        stack = "head" if module in heads else "embeddings" if "embedding" in module else module
        totals[stack] = totals.get(stack, 0.0) + square
    return {stack: math.sqrt(total) for stack, total in totals.items()}


def health_line(metrics: Mapping[str, Optional[float]], norms: Mapping[str, float]) -> str:
    """Formats the health of a run as one line: "health: hidden spread 0.7012 · gradient norm encoder 0.31"."""
    shown = [name for name in metrics if name.endswith(HIDDEN_SPREAD)] + [PREDICTION_SPREAD, TARGET_SPREAD]
    parts = [f"{name.replace('_', ' ')} {reported(name, x)}" for name in shown if (x := metrics.get(name)) is not None]
    if norms:
        parts.append("gradient norm " + ", ".join(f"{stack} {norm:.2g}" for stack, norm in norms.items()))
    return f"health: {' · '.join(parts)}"


def collapses(metrics: Mapping[str, Optional[float]], progress: float) -> dict[str, str]:
    """Describes each collapse of the model, with a remedy, as {metric: text}; returns {} for a healthy model.

    Args:
      metrics: the metrics of a validation.
      progress: fraction of the run's steps that are done.
    """
    found = {}
    for name, value in metrics.items():
        if name.endswith(HIDDEN_SPREAD) and value is not None and value < EQUAL_STATES:
            found[name] = (
                f"the model has collapsed: all tokens of a row have equal last hidden states ({name} {value:.1e}, the "
                f"limit is {EQUAL_STATES:g}). Start again in a new --workdir with a lower "
                "config.optimizer.learning_rate or a longer config.schedule.warmup_steps; a model that is not "
                "pretrained is also more stable with config.model.norm_at=pre, which transformers' BERT cannot express"
            )
    targets = metrics.get(TARGET_SPREAD) or 0.0
    if progress >= _SETTLED and metrics.get(PREDICTION_SPREAD) == 0.0 and targets > 0.0:
        found[PREDICTION_SPREAD] = (
            f"the model has collapsed: it gives one answer everywhere, but {targets:.0%} of the targets differ from "
            "the most frequent one. Start again in a new --workdir with a lower config.optimizer.learning_rate, a "
            "longer config.schedule.warmup_steps or more config.train.steps; a model that is not pretrained and "
            "narrower than 512 also needs a config.model.init_stddev above 0.02"
        )
    return found
