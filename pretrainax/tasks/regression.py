"""Implements regression: predicts a number for a text or a text pair."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config import Classify, HeadConfig
from pretrainax.config.heads import Kind
from pretrainax.data.batch import Example
from pretrainax.data.sources.base import Note
from pretrainax.data.sources.records import value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import label_metrics
from pretrainax.tasks.base import TextTask, rounded, score_of
from pretrainax.tasks.baselines import Baseline, bag_of_words_regression, per_document


@dataclasses.dataclass
class Regression(TextTask):
    """Predicts a number for a text or text pair: the similarity of two sentences, for example (STS-B, Cer et al. 2017).

    The loss is the squared error. With pair_field="pair", the record {"text": "A plane is taking off.", "pair": "An air
    plane is taking off.", "label": 5.0} becomes the row of a text pair, as in `Classification`, with label_values
    [5.0].
    """

    low: Optional[float] = None  # a record with a smaller number is invalid; None: no limit
    high: Optional[float] = None  # a record with a larger number is invalid; None: no limit

    packages = ("sklearn",)
    select_by = "pearson"
    metric_names = label_metrics.OF_NUMBERS  # pyright: ignore[reportAssignmentType]

    @property
    def has_single_rows(self) -> bool:
        return self.chunks is None

    @property
    def kind(self) -> Kind:
        return "regression"

    def read_label(self, record: Mapping) -> Note:
        score = score_of(value_of(record, self.label_field, "config.objective.label_field"), self.label_field)
        if (self.low is not None and score < self.low) or (self.high is not None and score > self.high):
            raise ValueError(
                f"field {self.label_field!r} holds {score:g}, outside of config.objective.low and high, {self.low} and "
                f"{self.high}"
            )
        return {"score": score}

    def label(self, note: Note) -> Example:
        return {"label_values": np.array([note["score"]], np.float32)}

    def sample_note(self):
        return {"score": 0.0}

    def head(self, model):
        return Classify.usual(model, 1, self.kind)

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Classify) or (head.kind, head.num_labels) != (self.kind, 1):
            yield f"config.model.head is {head}, Regression needs Classify(num_labels=1, kind='regression')"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        answers, notes = self.combine_windows(answers, notes)
        return label_metrics.regression_metrics(answers[:, 0], np.array([note["score"] for note in notes]))

    def document_losses(self, answers: np.ndarray, notes: Sequence[Note]) -> np.ndarray:
        return np.square(answers[:, 0].astype(np.float64) - [note["score"] for note in notes])

    def baselines(self, train, valid, notes):
        numbers = np.array([record.note["score"] for record in train])
        for name, number in (("mean", numbers.mean()), ("median", np.median(numbers))):
            yield Baseline(name, per_document(np.full((len(valid), 1), number), notes), is_constant=True)
        texts, valid_texts = ([record.texts for record in records] for records in (train, valid))
        predicted = bag_of_words_regression(texts, numbers, valid_texts)
        yield Baseline("bag of words", per_document(predicted[:, None], notes))

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Returns the number predicted for a record, as "prediction"."""
        ((number,),), _ = self.combine_windows(answers, notes)
        return {"prediction": rounded(number)}
