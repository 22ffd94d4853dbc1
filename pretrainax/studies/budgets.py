"""Converts the budget of a study to the number of steps of each arm, before any run starts."""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import Experiment, UserError, phases_of, resolve_auto
from pretrainax.data.batch import Lengths
from pretrainax.data.pipeline import PhaseBatches, phase_batches
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.files.errors import counted
from pretrainax.interop.run_start import TrainedStart
from pretrainax.layers.compute import resolve_auto as resolve_compute
from pretrainax.planning.search import estimate_run
from pretrainax.planning.topologies import Topology
from pretrainax.studies.arms import configured, length_flags
from pretrainax.studies.study import AMOUNTS, Arm, Budget, Study
from pretrainax.training.work import Work

_TRIAL_STEPS = 1000  # steps of the run whose mean costs give a first estimate of the steps
_SAMPLE = 64  # number of batches whose tokens and bytes of text are counted
_TOLERANCE = 0.02  # largest relative difference between the budget and the cost of an arm's steps


class Length(NamedTuple):
    """The length and the cost of each run of an arm."""

    steps: int
    flops: float  # training FLOPs of the run, equal to "flops" in the last line of its metrics.jsonl
    text_tokens: float  # tokens of text, from the mean of a sample of batches
    text_bytes: float  # UTF-8 bytes of text, from the same sample
    epochs: float  # epochs over the corpus that the run repeats most often; with phases, the sum over the phases
    tokenizer: str  # fingerprint
    vocabulary_size: int  # ids of the tokenizer


def lengths_of(study: Study, step_seconds: Mapping[str, float]) -> dict[str, Length]:
    """Computes the length of each arm's runs, by name of the arm.

    Prepares the data of the arms.

    Args:
      study: a study that `check_study` has checked.
      step_seconds: measured seconds of an update on this machine, by arm; only a budget in seconds without a machine
        reads them.

    Raises:
      UserError: an arm cannot have the budget, its corpus is too small, or the tokenizers differ.
    """
    lengths, problems = {}, []
    for arm in study.arms:
        lengths[arm.name] = ArmCost(arm, study.budget, step_seconds.get(arm.name)).length()
    first = study.arms[0].name
    for name, length in lengths.items():
        if length.epochs > study.budget.max_epochs:
            problems.append(
                f"the corpus of the arm {name} is too small for the budget: {length.steps:,} steps are "
                f"{length.epochs:.1f} epochs, budget.max_epochs is {study.budget.max_epochs:g}"
            )
        if study.budget.tokenizer == "shared" and length.tokenizer != lengths[first].tokenizer:
            problems.append(
                f"budget.tokenizer is 'shared', but the arms {first} and {name} have different tokenizers: train them "
                "on the same text, or set budget.tokenizer = 'own'"
            )
    if problems:
        raise UserError("; ".join(problems))
    return lengths


class ArmCost:
    """The cost of an arm's runs as a function of their steps."""

    def __init__(self, arm: Arm, budget: Budget, step_seconds: Optional[float] = None):
        """Prepares the arm's data.

        Args:
          step_seconds: measured seconds of an update on this machine.
        """
        self._arm, self._budget, self._step_seconds = arm, budget, step_seconds
        self._plain = configured(arm)
        trial = self.experiment(_TRIAL_STEPS)
        self._prepared: Prepared = prepare(trial)

    def experiment(self, steps: int) -> Experiment:
        """Returns the config of a run of `steps` updates."""
        return configured(self._arm, length_flags(self._plain, steps))

    def length(self) -> Length:
        """Computes the largest number of steps whose cost is within the budget; 0 for an untrained arm.

        Raises:
          UserError: one step costs more than the budget, or the steps cannot use 98 % of it.
        """
        if self._arm.untrained:
            tokenizer = self._prepared.tokenizer
            return Length(0, 0.0, 0.0, 0.0, 0.0, tokenizer.fingerprint, tokenizer.vocabulary.size)
        (name,) = (n for n in AMOUNTS if getattr(self._budget, n))
        amount: float = getattr(self._budget, name)
        steps, cost = _TRIAL_STEPS, self._cost(name, _TRIAL_STEPS)
        for _ in range(4):  # with phases or buckets, the mean cost depends on the number of steps
            previous, steps = steps, max(int(steps * (amount / cost)), 1)
            if steps == previous:
                break
            cost = self._cost(name, steps)
        while steps > 1 and cost > amount:
            steps -= 1
            cost = self._cost(name, steps)
        while (more := self._cost(name, steps + 1)) <= amount:  # the division above may round 1001 down to 1000
            steps, cost = steps + 1, more
        if abs(cost - amount) > _TOLERANCE * amount:
            raise UserError(
                f"the arm {self._arm.name} cannot have budget.{name} {amount:.4g}: the cost of "
                f"{counted(steps, 'step')} is {cost:.4g}, {abs(cost / amount - 1):.0%} off; change the "
                "budget or config.train.global_batch_size"
            )
        return self.at(steps)

    def at(self, steps: int) -> Length:
        """Returns the length of a run of `steps` updates."""
        experiment, batches = self._resolved(steps)
        tokens, text_bytes = text_per_step(batches, steps)
        return Length(
            steps=steps,
            flops=flops_of_run(experiment, batches),
            text_tokens=tokens * steps,
            text_bytes=text_bytes * steps,
            epochs=sum(max(part.epochs) for part in batches.phases),
            tokenizer=self._prepared.tokenizer.fingerprint,
            vocabulary_size=self._prepared.tokenizer.vocabulary.size,
        )

    def _cost(self, name: str, steps: int) -> float:
        """Returns the cost of a run of `steps` updates, in the unit of the budget's field `name`."""
        if name == "seconds" and self._budget.machine is None:
            assert self._step_seconds is not None
            return steps * self._step_seconds
        experiment, batches = self._resolved(steps)
        if name == "flops":
            return flops_of_run(experiment, batches)
        if name in ("tokens", "bytes"):
            return steps * text_per_step(batches, steps)[name == "bytes"]
        roofline = estimate_run(experiment, Topology.parse(str(self._budget.machine))).roofline
        if name == "seconds":
            return roofline.hours * 3600
        if roofline.price is None:
            raise UserError(f"budget.dollars: the price of {self._budget.machine} is unknown; set budget.seconds")
        return roofline.price

    def _resolved(self, steps: int) -> tuple[Experiment, PhaseBatches]:
        experiment = self.experiment(steps)
        resolve_auto(experiment, self._prepared.tokenizer.vocabulary.size)
        return experiment, phase_batches(experiment, self._prepared)


def flops_of_run(experiment: Experiment, batches: PhaseBatches) -> float:
    """Computes the FLOPs of a run, added step by step as the training loop does, so that the sums are equal.

    Counts all gradients of an update (Sophia's Hessian), both models of ELECTRA, teachers, frozen parameters, phases
    and buckets; see `models.flops.flops_per_step`.
    """
    total = 0.0
    for flops in _step_flops(experiment, batches):  # `sum` compensates rounding errors, and the loop does not
        total += flops
    return total


def _step_flops(experiment: Experiment, batches: PhaseBatches) -> Iterator[float]:
    """Yields the FLOPs of each step of a run."""
    start = TrainedStart()
    for phase, part in zip(phases_of(experiment), batches.phases, strict=True):
        model = start.model(phase.experiment, resolve_compute(phase.experiment.train))
        work = Work(phase.experiment, model, [], part.lengths, {}, part, 1)
        if len(part.streams[0].lengths) == 1:
            yield from itertools.repeat(work.flops_per_step, phase.steps)
            continue
        flops: dict[Lengths, float] = {}
        for step in range(phase.start, phase.stop):
            lengths = part.lengths_of(step)
            if lengths not in flops:
                flops[lengths] = work.flops_at(lengths)
            yield flops[lengths]


def text_per_step(batches: PhaseBatches, steps: int) -> tuple[float, float]:
    """Returns the mean (tokens, UTF-8 bytes) of the text in a batch, over a sample of at most `_SAMPLE` batches.

    Raises:
      UserError: the objective does not count text.
    """
    sampled = sorted({int(step) for step in np.linspace(0, steps - 1, min(steps, _SAMPLE))})
    found = [batches.at(step)[step] for step in sampled]
    if not all("text_tokens" in batch for batch in found):
        raise UserError("the objective of an arm does not count its text: give the budget in flops")
    counts = [[int(batch[name].sum()) for name in ("text_tokens", "text_bytes")] for batch in found]
    tokens, text_bytes = np.mean(counts, axis=0).tolist()
    return tokens, text_bytes
