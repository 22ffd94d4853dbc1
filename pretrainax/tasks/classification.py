"""Classification of a text or a pair of texts: one label of several, or any number of them."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pretrainax.config import Classify, HeadConfig
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.tasks import figures
from pretrainax.tasks.base import TextTask, class_number


@dataclasses.dataclass
class Classification(TextTask):
    """The class of a text, or of a pair of texts (Devlin et al. 2018, section 4.1; GLUE, Wang et al. 2018).

    With labels=("negative", "positive") the record {"text": "a fine film", "label": 1} becomes, for a BERT,

        tokens       [CLS] a fine film [SEP]
        token_types  0     0 0    0    0
        labels       1

    and with pair_field="hypothesis" a record of two texts [CLS] a [SEP] b [SEP], of types 0 and 1. What stands around
    texts is what stood there in the pretraining of the model (`data/framing.py`). Of what is too long for a row, the
    longer text loses its end first.

    A record has the name of a label or, unless names are numbers, its number from 0; with `multi_label` a list of them,
    which may be empty.
    """

    labels: tuple[str, ...] = ()  # names of the classes, in the order of their numbers
    multi_label: bool = False  # a text has any number of labels

    select_by = "accuracy"

    @property
    def figures(self) -> tuple[str, ...]:
        if self.multi_label:
            return figures.OF_LABELS
        return figures.OF_TWO_CLASSES if len(self.labels) == 2 else figures.OF_CLASSES

    def read(self, record: Mapping) -> Record:
        texts = self.read_texts(record)
        value = value_of(record, self.label_field, "config.objective.label_field")
        if not self.multi_label:
            return Record(texts, {"label": self._number(value)})
        if not isinstance(value, (list, tuple, np.ndarray)):
            raise ValueError(
                f"field {self.label_field!r} holds {value!r}, with config.objective.multi_label it is a list"
            )
        return Record(texts, {"labels": sorted({self._number(each) for each in value})})

    def _number(self, value: object) -> int:
        return class_number(value, self.label_field, self.labels)

    def example(self, text, rng, vocabulary):
        example = self.framed(self.texts(text.tokens, text.parts), vocabulary)
        if not self.multi_label:
            return {**example, "labels": np.array(text.note["label"], np.int32)}
        values = np.zeros(len(self.labels), np.float32)
        values[text.note["labels"]] = 1.0
        return {**example, "label_values": values}

    def sample_note(self):
        return {"labels": []} if self.multi_label else {"label": 0}

    def head(self, model):
        return Classify.usual(model, len(self.labels), "multi" if self.multi_label else "single")

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        wanted = "multi" if self.multi_label else "single"
        if not isinstance(head, Classify) or (head.kind, head.num_labels) != (wanted, len(self.labels)):
            yield (
                f"config.model.head is {head}, Classification of {len(self.labels)} labels needs "
                f"Classify(num_labels={len(self.labels)}, kind={wanted!r})"
            )

    def field_problems(self):
        if len(self.labels) < (1 if self.multi_label else 2) or len(set(self.labels)) < len(self.labels):
            yield f"config.objective.labels is {self.labels}, it must name all classes, as ('negative', 'positive')"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        if self.multi_label:
            truth = np.array([[i in note["labels"] for i in range(len(self.labels))] for note in notes])
            return figures.of_labels(answers > 0, truth)
        return figures.of_classes(answers.argmax(-1), np.array([note["label"] for note in notes]), len(self.labels))

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        counts = collections.Counter(i for note in notes for i in note.get("labels", [note.get("label")]))
        if never := [name for i, name in enumerate(self.labels) if not counts[i]]:
            yield (
                f"NO EXAMPLE OF {', '.join(map(repr, never))} in training: the model will not learn to say it; is the "
                "name in config.objective.labels as in the records?"
            )
