"""Probe tasks: a linear classifier of the model's frozen states (Alain and Bengio 2016, arXiv 1610.01644, recalled)."""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.files.json_files import JsonObject
from pretrainax.inference.embed import embed
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import share
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Task, TaskMetric

_FOLDS = 5


class Labeled(NamedTuple):
    """A text and its class."""

    text: str
    label: str


@dataclasses.dataclass(kw_only=True)
class Probe(Task[Labeled]):
    """Classifies each text with a ridge regression on the mean of its last hidden states.

    A hash of the text divides the examples into five parts. The classifier of each part is fitted on the other four
    parts, so `accuracy` is measured on unseen text. `majority_accuracy` is the share of the most frequent label.
    """

    text: str = "{text}"
    label: str = "{label}"
    ridge: float = 10.0  # penalty of the squared weights; the states have mean 0 and variance 1

    kind: ClassVar[str] = "probe"
    measures: ClassVar[tuple[str, ...]] = ("accuracy", "majority_accuracy")

    def problems(self) -> Iterable[str]:
        if not self.ridge > 0:
            yield f"ridge is {self.ridge}, it must be positive"

    def read(self, example: Example) -> Labeled:
        item = Labeled(example.fill(self.text), example.fill(self.label))
        if not item.text.strip():
            raise example.error("the text is empty")
        return item

    def how(self, loaded: LoadedModel) -> str:
        loaded.check_plain("give embeddings")
        return f"{self.kind}: ridge regression on mean last states of {loaded.origin}, {_FOLDS}-fold cross-validation"

    def transcripts(self, loaded: LoadedModel, asked: Sequence[Labeled], chosen: Sequence[int]) -> list[JsonObject]:
        items = [asked[index] for index in chosen]
        states = embed(loaded, [item.text for item in items], "mean", truncate=True).astype(np.float64)
        names = sorted({item.label for item in items})
        labels = np.array([names.index(item.label) for item in items])
        digests = [hashlib.blake2b(item.text.encode(), digest_size=4).digest() for item in items]
        folds = np.array([int.from_bytes(digest) % _FOLDS for digest in digests])
        predicted = np.zeros(len(items), int)
        for fold in np.unique(folds):
            rows = folds == fold
            predicted[rows] = _classify(states[~rows], labels[~rows], states[rows], self.ridge)
        return [
            {**item._asdict(), "asked": True, "predicted": names[guess], "correct": bool(guess == label)}
            for item, guess, label in zip(items, predicted, labels, strict=True)
        ]

    def metrics(self, transcripts: Sequence[JsonObject]) -> list[TaskMetric]:
        ((most_frequent, _),) = collections.Counter(x["label"] for x in transcripts).most_common(1)
        correct = {
            "accuracy": [x["correct"] for x in transcripts],
            "majority_accuracy": [x["label"] == most_frequent for x in transcripts],
        }
        return [TaskMetric(measure, share(values), len(transcripts)) for measure, values in correct.items()]


def _classify(train: np.ndarray, labels: np.ndarray, states: np.ndarray, ridge: float) -> np.ndarray:
    """Fits a ridge regression of the labels [n] on states [n, D]; returns the most likely label of `states` [m, D].

    Returns 0 for all states if there is no training example.
    """
    if not len(train):
        return np.zeros(len(states), int)
    mean, deviation = train.mean(0), train.std(0) + 1e-6  # equal states deviate by rounding
    scaled, targets = (train - mean) / deviation, np.eye(labels.max() + 1)[labels]
    weights = np.linalg.solve(
        scaled.T @ scaled + ridge * np.eye(scaled.shape[1]), scaled.T @ (targets - targets.mean(0))
    )
    return ((states - mean) / deviation @ weights + targets.mean(0)).argmax(-1)
