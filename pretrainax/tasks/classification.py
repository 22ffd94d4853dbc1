"""Implements the classification of a text or text pair, with one label or with any number of labels per record."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pretrainax.config import Classify, Experiment, HeadConfig, nearest
from pretrainax.config.heads import Kind
from pretrainax.data.batch import Example
from pretrainax.data.sources.base import Note
from pretrainax.data.sources.records import value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import label_metrics
from pretrainax.tasks.base import TextTask, rounded
from pretrainax.tasks.baselines import Baseline, bag_of_words_classifier, cross_entropy, per_document, prior_logits
from pretrainax.tasks.chunks import sigmoid, softmax
from pretrainax.tasks.labels import (
    UNKNOWN,
    infer_labels,
    is_number,
    label_number,
    uneven_selection,
    unused_label_warnings,
)


@dataclasses.dataclass
class Classification(TextTask):
    """Classifies a text or a text pair (Devlin et al. 2018, section 4.1; GLUE, Wang et al. 2018).

    With labels=("negative", "positive") the record {"text": "a fine film", "label": 1} becomes, for a BERT,

        tokens       [CLS] a fine film [SEP]
        token_types  0     0 0    0    0
        labels       1

    With pair_field="hypothesis", a text pair becomes [CLS] a [SEP] b [SEP] with token types 0 and 1. The special tokens
    match pretraining (`data/framing.py`). If a row is too short, the longer text is truncated first.

    The label of a record is the name or the number (from 0) of a class. Numbers are valid only if no class name is a
    number. With `multi_label`, a record has a list of labels, which may be empty. `numbered` is for records that number
    the labels in a different order than `labels`. Without `labels`, the classes are the different labels of the
    training records, sorted; true, 1 and 1.0 have the names "true", "1" and "1".
    """

    # names of the classes, in the order of their numbers; (): the labels of the training records, sorted
    labels: tuple[str, ...] = ()
    multi_label: bool = False  # True if a text can have any number of labels
    numbered: tuple[str, ...] = ()  # the labels of the numbers 0, 1, … in the records; (): the order of `labels`

    packages = ("sklearn",)
    select_by = "accuracy"

    @property
    def metric_names(self) -> tuple[str, ...]:
        if self.multi_label:
            return label_metrics.OF_LABELS
        return label_metrics.OF_CLASSES

    @property
    def has_single_rows(self) -> bool:
        return self.chunks is None

    @property
    def kind(self) -> Kind:
        return "multi" if self.multi_label else "single"

    def complete(self, experiment: Experiment) -> None:
        self.labels = self.labels or infer_labels(experiment, self.label_field, self._label_values)
        super().complete(experiment)

    def read_label(self, record: Mapping) -> Note:
        numbers = [
            label_number(value, self.label_field, self.labels, self.numbered) for value in self._label_values(record)
        ]
        return {"labels": sorted(set(numbers))} if self.multi_label else {"label": numbers[0]}

    def _label_values(self, record: Mapping) -> Sequence[object]:
        """Returns the labels of a record: one, or any number with `multi_label`."""
        value = value_of(record, self.label_field, "config.objective.label_field")
        if not self.multi_label:
            return [value]
        if not isinstance(value, (list, tuple, np.ndarray)):
            raise ValueError(
                f"field {self.label_field!r} holds {value!r}, it must be a list with config.objective.multi_label"
            )
        return list(value)

    def label(self, note: Note) -> Example:
        if not self.multi_label:
            return {"labels": np.array(note["label"], np.int32)}
        values = np.zeros(len(self.labels), np.float32)
        values[note["labels"]] = 1.0
        return {"label_values": values}

    def sample_note(self):
        return {"labels": []} if self.multi_label else {"label": 0}

    def head(self, model):
        return Classify.usual(model, self._num_labels, self.kind)

    @property
    def _num_labels(self) -> int:
        return len(self.labels) or UNKNOWN

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Classify) or (head.kind, head.num_labels) != (self.kind, self._num_labels):
            yield (
                f"config.model.head is {head}, Classification of {self._num_labels} labels needs "
                f"Classify(num_labels={self._num_labels}, kind={self.kind!r})"
            )

    def field_problems(self):
        too_few = self.labels and len(self.labels) < (1 if self.multi_label else 2)
        if len(set(self.labels)) < len(self.labels):
            yield f"config.objective.labels is {self.labels}, which has a name twice: two classes cannot have one name"
        elif too_few:
            yield f"config.objective.labels is {self.labels}, it must name all classes, as ('negative', 'positive')"
        for name in self.numbered:
            if name not in self.labels:
                yield f"config.objective.numbered has {name!r}, {nearest(name, self.labels)} (config.objective.labels)"
        if self.numbered and any(map(is_number, self.labels)):
            yield (
                f"config.objective.numbered is {self.numbered}, but a number in a record is the name of a label, as "
                f"config.objective.labels is {self.labels}: set labels to names that are no numbers, or numbered to ()"
            )

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        answers, notes = self.combine_windows(answers, notes)
        if self.multi_label:
            return label_metrics.multi_label_metrics(answers > 0, self._label_matrix(notes) > 0)
        return label_metrics.class_metrics(
            answers.argmax(-1), np.array([note["label"] for note in notes]), len(self.labels)
        )

    def document_losses(self, answers: np.ndarray, notes: Sequence[Note]) -> np.ndarray:
        if not self.multi_label:
            return cross_entropy(answers, np.array([note["label"] for note in notes]))
        logits, truth = answers.astype(np.float64), self._label_matrix(notes)
        return (np.logaddexp(0.0, logits) - truth * logits).mean(-1)

    def _label_matrix(self, notes: Sequence[Note]) -> np.ndarray:
        """Returns 0 or 1 for each label of each record, [records, L]."""
        matrix = np.zeros((len(notes), len(self.labels)))
        for row, note in zip(matrix, notes, strict=True):
            row[note["labels"] if self.multi_label else note["label"]] = 1.0
        return matrix

    def baselines(self, train, valid, notes):
        labels = self._label_matrix([record.note for record in train])
        prior = np.tile(prior_logits(labels, self.multi_label), (len(valid), 1))
        yield Baseline("label frequencies", per_document(prior, notes), is_constant=True)
        if (labels != labels[0]).any():
            texts, valid_texts = ([record.texts for record in records] for records in (train, valid))
            logits = bag_of_words_classifier(texts, labels, valid_texts, self.multi_label)
            yield Baseline("bag of words", per_document(logits, notes))

    def selection(self, notes):
        """Selects by macro F1 instead of accuracy if one label is so frequent that always predicting it scores well."""
        if self.select_by != "accuracy":
            return super().selection(notes)
        return uneven_selection(
            self.select_by,
            "f1" if self.multi_label else "macro_f1",
            (" and ".join(self.labels[i] for i in note.get("labels", [note.get("label")])) or "none" for note in notes),
        )

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Computes "prediction" and "probabilities" for a record.

        The prediction is the most likely label or, with `multi_label`, the list of labels with a probability above 0.5.
        The probabilities are {label: probability} for all labels.
        """
        (logits,), _ = self.combine_windows(answers, notes)
        probabilities = (sigmoid if self.multi_label else softmax)(logits)
        likely = [name for name, logit in zip(self.labels, logits, strict=True) if logit > 0]
        return {
            "prediction": likely if self.multi_label else self.labels[int(logits.argmax())],
            "probabilities": dict(zip(self.labels, map(rounded, probabilities), strict=True)),
        }

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        counts = collections.Counter(i for note in notes for i in note.get("labels", [note.get("label")]))
        yield from unused_label_warnings(counts, self.labels)
