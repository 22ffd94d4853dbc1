"""Transfers the hyperparameters of a tuned run to a larger run: `plan --config=… --transfer_from=RUN`."""

import copy
import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import AUTO, Experiment, Transfer, UserError, load, to_json
from pretrainax.files.json_files import JsonObject
from pretrainax.optim.transfer import Multipliers, multipliers_of
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import large_number
from pretrainax.scaling.compute_optimal import text_tokens

# The batch size B is proportional to D^0.383, the learning rate is proportional to sqrt(B), and rate · decay · D / B is
# constant. Source: karpathy/nanochat@92d63d4e8bb4df75c3b71618f31ddde2378b2bcd:scripts/base_train.py, lines 276 to 302,
# with the papers arXiv 2505.13738 and 2405.13698, which study AdamW. nanochat assumes the same for Muon.
_BATCH_EXPONENT = 0.383


class TransferPlan(NamedTuple):
    """The hyperparameters of a large run, transferred from a base run."""

    base: Experiment
    run: Experiment  # the large run, with the transferred values
    base_tokens: float  # tokens of text in the base run
    tokens: float
    factors: dict[str, list[Multipliers]]  # multipliers of the parameters of each kind

    def flags(self) -> list[str]:
        """Returns the flags that set the transferred values."""
        transfer, run = self.run.transfer, self.run
        assert transfer is not None
        return [
            f'--config.transfer="{transfer}"',
            f'--config.optimizer="{run.optimizer}"',
            f"--config.train.global_batch_size={run.train.global_batch_size}",
            f"--config.train.steps={run.train.steps}",
        ]

    def values(self) -> JsonObject:
        """Returns the numbers that `plan --json` prints."""
        return {
            "base_tokens": self.base_tokens,
            "tokens": self.tokens,
            "optimizer": to_json(self.run.optimizer),
            "global_batch_size": self.run.train.global_batch_size,
            "steps": self.run.train.steps,
            "flags": self.flags(),
        }

    def __str__(self) -> str:
        base, run = self.base.model, self.run.model
        ratios = run.d_model / base.d_model, run.num_layers / base.num_layers, self.tokens / self.base_tokens
        title = "width × {:.3g}, depth × {:.3g}, tokens × {:.3g}".format(*ratios)
        tokens = f"{large_number(self.base_tokens)} to {large_number(self.tokens)} tokens"
        return "\n\n".join(
            [f"{title} ({tokens})", text_table(self._rows()), "\n".join(f"  {flag}" for flag in self.flags())]
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the rows of a table of the factors of each kind; the last matrix of a branch has its own row."""
        yield "kind", "parameters", "factor of Adam's update", "Adam's rate", "factor of initial values"
        optimizer = self.run.optimizer
        peak = getattr(optimizer, "adam_learning_rate", None) or optimizer.learning_rate
        for kind, found in sorted(self.factors.items()):
            pairs = [(float(np.ravel(m.update)[-1]), float(np.ravel(m.init)[-1])) for m in found]
            for update, init in sorted(set(pairs), reverse=True):
                yield kind, str(pairs.count((update, init))), f"{update:.3g}", f"{peak * update:.3g}", f"{init:.3g}"


def plan_transfer(experiment: Experiment, folder: str) -> TransferPlan:
    """Transfers the hyperparameters of the run in `folder` to the model and the number of tokens of `experiment`.

    Raises:
      UserError: the run cannot be read, has another optimizer or other proportions, or has no known number of steps.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise UserError(f"--transfer_from={folder} is not a run: it has no config.json")
    base, run = load(path), experiment
    if type(base.optimizer) is not type(run.optimizer):
        names = (type(x.optimizer).__name__ for x in (base, run))
        raise UserError("--transfer_from is a run with {}, and config.optimizer is {}: use the same one".format(*names))
    if base.train.steps < 1 or base.model.vocab_size == AUTO:
        raise UserError(f"--transfer_from={folder} has not started: its numbers of steps and tokens are not known")
    run.transfer = base.transfer or Transfer(base.model.d_model, base.model.num_layers)
    if problems := list(run.transfer.problems(run)):
        raise UserError("; ".join(problems))
    tokens, base_tokens = text_tokens(run), text_tokens(base)
    row, base_row = (text_tokens(x) / x.train.steps / x.train.global_batch_size for x in (run, base))
    batch = base.train.global_batch_size * base_row * (tokens / base_tokens) ** _BATCH_EXPONENT
    microbatches = run.train.accumulate  # the batch is a multiple of them
    run.train.global_batch_size = microbatches * 2 ** max(round(math.log2(batch / row / microbatches)), 0)
    run.train.steps = max(round(tokens / row / run.train.global_batch_size), 1)
    growth = (run.train.global_batch_size * row / (base.train.global_batch_size * base_row)) ** 0.5
    run.optimizer, rates = copy.deepcopy(base.optimizer), ("learning_rate", "adam_learning_rate")
    scales = dict.fromkeys(rates, growth) | {"weight_decay": growth * base_tokens / tokens}
    for name, scale in scales.items():
        if (value := getattr(run.optimizer, name, None)) is not None:
            setattr(run.optimizer, name, float(f"{value * scale:.3g}"))
    factors: dict[str, list[Multipliers]] = {}
    for m in jax.tree.leaves(multipliers_of(run.model, run.transfer, models.abstract_params(run.model))):
        factors.setdefault(m.kind, []).append(m)
    return TransferPlan(base, run, base_tokens, tokens, factors)
