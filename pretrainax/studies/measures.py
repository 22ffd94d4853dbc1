"""Defines the measures of pretrained runs that a study file can name.

    [[measures]]
    type = "BitsPerByte"
    name = "bits per byte"
    source = "TextFiles(path='heldout')"

The methods import JAX when they compute a measure, so that reading a study file is fast.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import ClassVar, Literal, Optional

from pretrainax.config import Experiment
from pretrainax.config.metric import declared, larger_is_better
from pretrainax.data.sources import Source
from pretrainax.files.json_files import JsonObject
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.studies.outcomes import MeasureContext, Outcome
from pretrainax.studies.study import Measure, Timed


@dataclasses.dataclass
class BitsPerByte(Measure):
    """Bits per byte of the same held-out spans for all families and tokenizers (`scoring/spans.py`).

    A record is a document, or a span if there are fewer than 20 documents. Every fifth record is for the tuning, and
    all other records are for the final runs.
    """

    source: Source
    split: Literal["valid", "train", "all"] = "valid"
    documents: Optional[int] = 500  # maximum number of documents; None: all
    # context of a span: own: the format of the model's training, with both sides if the model reads both | left: only
    # the left side, for all models; encoders then read a text that ends with the span
    given: Literal["own", "left"] = "own"
    share: float = SpanChoice.share  # fraction of the text in spans
    mean_bytes: float = SpanChoice.mean_bytes  # mean length of a span, in bytes
    context: int = SpanChoice.context  # maximum bytes of context on each side of a span
    seed: int = 0

    @property
    def larger_is_better(self) -> bool:
        return False

    @property
    def unit(self) -> str:
        return "bits per byte"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from _module("spans_measure").problems(self, experiment)

    def outcomes(self, folder: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
        return _module("spans_measure").outcomes(self, folder, context)

    def baselines(self, folder: str, experiment: Experiment, context: MeasureContext) -> dict[str, Outcome]:
        return _module("spans_measure").baselines(self, folder, context)


@dataclasses.dataclass
class TaskScore(Measure):
    """Score on the test records of a task, after fine-tuning on its training records.

    The validation split of `source` holds the test records. Fine-tuning never opens them: a hash divides the training
    records into those that update the model and those that choose the learning rate. Each fine-tuned model is scored on
    the test records once, after its last step.
    """

    task: str = "classification"  # variant of configs/finetune.py, for example sst2
    source: Optional[Source] = None  # training and test records; None: the records of the named task
    flags: tuple[str, ...] = ()  # further flags of the fine-tuning, for example "--config.train.steps=300"
    metric: str = ""  # metric of the task; "": the metric that selects its checkpoints
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3)  # learning rates; a best rate at an edge adds one rate
    # arm: all runs of an arm have the best rate of one of these runs | run: each run has its best rate
    rate_of: Literal["arm", "run"] = "arm"
    selection: float = 0.1  # fraction of the training records that choose the rate

    chooses: ClassVar[bool] = True

    @property
    def larger_is_better(self) -> bool:
        return larger_is_better(_module("task_measure").metric_of(self))

    @property
    def unit(self) -> str:
        return _module("task_measure").metric_of(self)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from _module("task_measure").problems(self, experiment)

    def timed(self, folder: str, experiment: Experiment, context: MeasureContext) -> Timed:
        return _module("task_measure").timed(self, folder, context)

    def choose(self, folder: str, experiment: Experiment, context: MeasureContext) -> JsonObject:
        return _module("task_measure").choose(self, folder, context) if self.rate_of == "arm" else {}

    def outcomes(self, folder: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
        return _module("task_measure").outcomes(self, folder, context)

    def baselines(self, folder: str, experiment: Experiment, context: MeasureContext) -> dict[str, Outcome]:
        return _module("task_measure").baselines(self, folder, context)


@dataclasses.dataclass
class ValidationLoss(Measure):
    """A metric of the run's validation, for the newest checkpoint.

    A record is a document, or a row if there are fewer than 20 documents. Every fifth record is for the tuning, and all
    other records are for the final runs.
    """

    metric: str = "loss"  # for example loss, masked_loss (at masked positions) or total_loss

    @property
    def larger_is_better(self) -> bool:
        return larger_is_better(self.metric)

    @property
    def unit(self) -> str:
        return declared(self.metric).unit or self.metric

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from _module("run_measures").problems(self, experiment)

    def differences(self, experiments: Mapping[str, Experiment]) -> Iterator[str]:
        yield from _module("run_measures").differences(self, experiments)

    def outcomes(self, folder: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
        return _module("run_measures").outcomes(self, folder, experiment, context)

    def baselines(self, folder: str, experiment: Experiment, context: MeasureContext) -> dict[str, Outcome]:
        return _module("run_measures").baselines(self, folder, experiment, context)


@dataclasses.dataclass
class Throughput(Measure):
    """Tokens of text per second of the training steps that compile no program, from metrics.jsonl."""

    is_time: ClassVar[bool] = True

    @property
    def larger_is_better(self) -> bool:
        return True

    @property
    def unit(self) -> str:
        return "tokens per second"

    def outcomes(self, folder: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
        return [Outcome(_module("run_measures").tokens_per_second(folder))]


def _module(name: str) -> ModuleType:
    """Imports a module of this package that computes a measure; it imports JAX, which takes seconds."""
    return importlib.import_module(f"pretrainax.studies.{name}")
