"""Defines the loop state that a checkpoint saves in addition to the `TrainState`: counters, best metric, rollbacks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.files.json_files import JsonObject


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A return to an earlier checkpoint after a loss spike, and the number of batches to skip afterwards."""

    spike: int  # first step of the spike
    step: int  # the run skips batches after this step
    skipped: int  # number of skipped batches


@dataclasses.dataclass
class Counts:
    """Counts of tokens, bytes and FLOPs in one or more steps, summed over all processes."""

    text_tokens: int = 0  # tokens of text in the examples, without special tokens
    text_bytes: int = 0  # UTF-8 bytes of the text of these tokens
    tokens: int = 0  # tokens that the model read, including padding
    flops: float = 0.0

    def add(self, other: "Counts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclasses.dataclass(kw_only=True)
class LoopState:
    """The state of the training loop, which each checkpoint stores in its run.json under "extra"."""

    step: int = 0  # number of completed updates
    tokenizer: str  # fingerprint of the tokenizer
    corpora: list[str]  # fingerprints of the corpora
    skipped_updates: int = 0  # updates with a non-finite loss or gradient
    best_loss: Optional[float] = None  # the best value of the metric `select_by` so far; None: no value yet
    evaluations_since_best: int = 0
    rollbacks: list[Rollback] = dataclasses.field(default_factory=list)  # in chronological order
    recent: list[list[float]] = dataclasses.field(default_factory=list)  # observations of `loss_spikes.observe_step`
    select_by: str = "loss"  # validation metric of `best_loss`
    # Counts of all steps; None if a version without counts started the run.
    counts: Optional[Counts] = dataclasses.field(default_factory=Counts)
    # {metric: [sum, count]} over the steps since the last log: numbers, or lists of numbers for per-layer sums
    sums: dict[str, list] = dataclasses.field(default_factory=dict)
    metrics_file: Optional[dict[str, int]] = None  # "bytes" and "lines" of metrics.jsonl; None: an older version saved
    is_scheduled: bool = True  # False: saved only because of a signal; an uninterrupted run has no such checkpoint
    valid_batches: Optional[int] = None  # batches of each validation of `best_loss`; None: an older version saved

    def add_sums(self, sums: Mapping[str, Sequence]) -> None:
        """Adds a step's sums and counts, {metric: (sum, count)}, to the running totals in `self.sums`."""
        for name, (value, count) in sums.items():
            previous = self.sums.get(name, (0.0, 0.0))
            pairs = zip(previous, (value, count), strict=True)
            self.sums[name] = [np.add(a, np.asarray(b, np.float64)).tolist() for a, b in pairs]

    def to_json(self) -> JsonObject:
        """Returns a deep copy of the fields as a JSON-serializable dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: JsonObject, default: "LoopState") -> "LoopState":
        """Builds a loop state from the output of `to_json`, possibly from an older or newer version of PretrainAX.

        Missing fields are taken from `default`, except `counts`, which is set to None if the state has completed steps.
        Unknown entries are ignored.
        """
        values = {field.name: stored[field.name] for field in dataclasses.fields(cls) if field.name in stored}
        if "rollbacks" in values:
            values["rollbacks"] = [Rollback(**rollback) for rollback in values["rollbacks"]]
        if values.get("counts"):
            field_names = {field.name for field in dataclasses.fields(Counts)}
            values["counts"] = Counts(**{name: n for name, n in values["counts"].items() if name in field_names})
        elif stored.get("step"):
            values["counts"] = None
        return dataclasses.replace(default, **values)
