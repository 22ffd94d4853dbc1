"""Implements entity choice: selects the entity that fills the gap in a sentence about a passage."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from pretrainax.config import Classify, Experiment, HeadConfig
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import label_metrics
from pretrainax.tasks.base import Task, rounded, text_in, texts_in
from pretrainax.tasks.baselines import Baseline, cross_entropy, prior_logits, sums_of_parts
from pretrainax.tasks.chunks import WINDOW, records_of, softmax


@dataclasses.dataclass
class EntityChoice(Task):
    """Selects the entity that fills the gap of a sentence (ReCoRD, Zhang et al. 2018, arXiv 1810.12885).

    The record {"passage": "Ann met Bo.", "query": "Later @placeholder left.", "entities": ["Ann", "Bo"], "answers":
    ["Bo"]} becomes, for a BERT, an example for each entity:

        tokens  [CLS] ann met bo . [SEP] later ann left . [SEP]     labels  0
        tokens  [CLS] ann met bo . [SEP] later bo left . [SEP]      labels  1

    A record may have any number of entities, and several may be correct. In training, each entity counts as one
    example. Metrics are per record: the prediction is the entity with the highest score, and the metric of a prediction
    is the maximum over all reference answers, as in SQuAD. If a row is too short, the longer text is truncated first.

    In ReCoRD, a passage ends with summary lines that are marked with "@highlight". The task removes the markers, so
    that these lines become ordinary sentences.
    """

    passage_field: str = "passage"  # the field of the passage, which is read first
    query_field: str = "query"  # the field of the sentence with a gap
    entities_field: str = "entities"  # the field of the list of entities
    answers_field: str = "answers"  # the field of the list of correct entities
    gap: str = "@placeholder"  # string that marks the gap in the query

    labels: ClassVar[tuple[str, ...]] = ("False", "True")  # classes of an entity: wrong and correct
    select_by = "answer_f1"
    metric_names = label_metrics.OF_ANSWERS  # pyright: ignore[reportAssignmentType]

    @property
    def fields(self) -> tuple[str, ...]:
        return self.passage_field, self.query_field, self.entities_field, self.answers_field

    def read_unlabeled(self, record: Mapping) -> Record:
        passage = text_in(record, self.passage_field, "passage_field")
        query = text_in(record, self.query_field, "query_field")
        if self.gap not in query:
            raise ValueError(f"field {self.query_field!r} holds {query!r}, without {self.gap!r} (config.objective.gap)")
        entities = list(dict.fromkeys(texts_in(record, self.entities_field, "entities_field")))
        if not entities:
            raise ValueError(f"field {self.entities_field!r} is empty, it must list the entities")
        return Record((plain(passage), *(query.replace(self.gap, name) for name in entities)), {"entities": entities})

    def read(self, record: Mapping) -> Record:
        unlabeled, answers = self.read_unlabeled(record), texts_in(record, self.answers_field, "answers_field")
        if not set(answers) & set(unlabeled.note["entities"]):
            raise ValueError(
                f"field {self.answers_field!r} holds {answers}, none of which is in field {self.entities_field!r}"
            )
        return dataclasses.replace(unlabeled, note={**unlabeled.note, "answers": answers})

    def encode(self, record: Record, tokenizer) -> Iterator[Encoded]:
        """Yields a document for each entity: the passage, and the query with the entity in the gap.

        The window number in the note is the number of the entity, from 0. The note also has the "entity" and, for a
        record with answers, all "answers" and the "label": 1 if the entity is an answer, otherwise 0.
        """
        passage, *filled = tokenizer.encode_batch(list(record.texts))
        answers = record.note.get("answers")
        for number, (ids, entity) in enumerate(zip(filled, record.note["entities"], strict=True)):
            labels = {} if answers is None else {"answers": answers, "label": int(entity in answers)}
            yield Encoded([passage, ids], {WINDOW: number, "entity": entity, **labels})

    def example(self, text, rng, vocabulary):
        example = self.framed(self.split_strings(text.tokens, text.parts), vocabulary)
        return example | ({"labels": np.array(text.note["label"], np.int32)} if "label" in text.note else {})

    def sample_note(self):
        return {"label": 0}

    def head(self, model):
        return Classify.usual(model, len(self.labels), "single")

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Classify) or (head.kind, head.num_labels) != ("single", len(self.labels)):
            yield f"config.model.head is {head}, EntityChoice needs Classify(num_labels=2, kind='single')"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.data.drop_duplicates:
            yield "config.data.drop_duplicates compares documents, EntityChoice has one per entity: set it to False"

    def field_problems(self):
        if not self.gap:
            yield "config.objective.gap is '', it must be the marker of the gap, for example '@placeholder'"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        records = records_of(notes)
        predicted = [notes[docs][int(_scores(answers[docs]).argmax())]["entity"] for docs in records]
        return label_metrics.answer_metrics(
            predicted, [notes[docs.start]["answers"] for docs in records], some_have_none=False
        )

    def document_losses(self, answers: np.ndarray, notes: Sequence[Note]) -> np.ndarray:
        return cross_entropy(answers, np.array([note["label"] for note in notes]))

    def record_sums(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return sums_of_parts(self.metrics, answers, notes, records_of(notes))

    def baselines(self, train, valid, notes):
        is_correct = np.array([name in r.note["answers"] for r in train for name in r.note["entities"]])
        prior = prior_logits(np.stack([~is_correct, is_correct], axis=1), is_multi_label=False)
        yield Baseline("label frequencies: the first entity", np.tile(prior, (len(notes), 1)), is_constant=True)
        passages = (record.texts[0] for record in valid for _ in record.note["entities"])
        counts = [passage.count(note["entity"]) for passage, note in zip(passages, notes, strict=False)]
        scores = np.stack([np.zeros(len(counts)), np.array(counts, np.float64)], axis=1)
        yield Baseline("most frequent entity of the passage", scores, has_loss=False)

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Computes the most likely entity, and for each entity the probability that it is correct."""
        scores, correct = _scores(answers), softmax(answers)[:, 1]
        probabilities = {note["entity"]: rounded(p) for note, p in zip(notes, correct, strict=True)}
        return {"prediction": notes[int(scores.argmax())]["entity"], "probabilities": probabilities}


def plain(passage: str) -> str:
    """Removes the markers "@highlight" from a passage of ReCoRD, so that the lines after them become sentences."""
    return re.sub(r"(?<![.?!\"'])\n@highlight\n", ". ", passage).replace("\n@highlight\n", " ")


def _scores(answers: np.ndarray) -> np.ndarray:
    """Computes the ranking score of each entity: the logit of "correct" minus the logit of "wrong", [n, 2] -> [n]."""
    return answers[:, 1] - answers[:, 0]
