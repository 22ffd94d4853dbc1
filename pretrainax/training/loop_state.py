"""The state that a run keeps across a restart beside its `TrainState`: counters, the best figure, rollbacks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.files.json_files import JsonObject


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A return to an earlier checkpoint, after which some batches are left out."""

    spike: int  # the first step of the spike that it answers
    step: int  # steps done that stay: the batches are left out after them
    skipped: int  # batches


@dataclasses.dataclass
class Counts:
    """Holds what some steps have taken, over all processes."""

    text_tokens: int = 0  # that their examples were made of
    text_bytes: int = 0  # of these in UTF-8
    tokens: int = 0  # that entered the model, padding included
    flops: float = 0.0

    def add(self, other: "Counts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclasses.dataclass(kw_only=True)
class LoopState:
    """The loop's side of a checkpoint, in whose run.json it is stored under "extra"."""

    step: int = 0
    tokenizer: str  # fingerprint
    corpora: list[str]  # fingerprints
    skipped_updates: int = 0  # whose loss or gradient was not finite
    best_loss: Optional[float] = None  # the best value of `select_by` of all evaluations
    evaluations_since_best: int = 0
    rollbacks: list[Rollback] = dataclasses.field(default_factory=list)  # in the order of time
    recent: list[list[float]] = dataclasses.field(default_factory=list)  # what `loss_spikes.observe_step` remembers
    select_by: str = "loss"  # the figure of the validation that `best_loss` is of
    counts: Optional[Counts] = dataclasses.field(default_factory=Counts)  # of all steps; None: an older version began
    # {name: [sum, count]} since the last line: numbers, or of what is by layer lists of them
    sums: dict[str, list] = dataclasses.field(default_factory=dict)
    metrics_file: Optional[dict[str, int]] = None  # "bytes" and "lines" of metrics.jsonl; None: an older version
    is_scheduled: bool = True  # False: saved only because the process had to leave, as no undisturbed run does

    def add_sums(self, sums: Mapping[str, Sequence]) -> None:
        """Adds the sums and counts of a step to those since the last line."""
        for name, (value, count) in sums.items():
            before = self.sums.get(name, (0.0, 0.0))
            pairs = zip(before, (value, count), strict=True)
            self.sums[name] = [np.add(a, np.asarray(b, np.float64)).tolist() for a, b in pairs]

    def to_json(self) -> JsonObject:
        """Returns the fields in their order, as JSON can hold them; later changes of the state do not reach them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: JsonObject, default: "LoopState") -> "LoopState":
        """Reads what `to_json` gave: a field that is missing there, of an older checkpoint, is that of `default`.

        But what its steps have taken is not known. What no field is named after, of a newer one, is left out.
        """
        values = {field.name: stored[field.name] for field in dataclasses.fields(cls) if field.name in stored}
        if "rollbacks" in values:
            values["rollbacks"] = [Rollback(**rollback) for rollback in values["rollbacks"]]
        if values.get("counts"):
            known = {field.name for field in dataclasses.fields(Counts)}
            values["counts"] = Counts(**{name: n for name, n in values["counts"].items() if name in known})
        elif stored.get("step"):
            values["counts"] = None
        return dataclasses.replace(default, **values)
