"""Choice of an entity: which of those that a passage names belongs into the gap of a sentence about it."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from pretrainax.config import Classify, Experiment, HeadConfig
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import figures
from pretrainax.tasks.base import Task, rounded, text_in, texts_in
from pretrainax.tasks.chunks import WINDOW, records_of, softmax


@dataclasses.dataclass
class EntityChoice(Task):
    """Tells which entity belongs into the gap of a sentence (ReCoRD, Zhang et al. 2018, arXiv 1810.12885).

    The record {"passage": "Ann met Bo.", "query": "Later @placeholder left.", "entities": ["Ann", "Bo"], "answers":
    ["Bo"]} becomes, for a BERT, an example for each entity,

        tokens  [CLS] ann met bo . [SEP] later ann left . [SEP]     labels  0
        tokens  [CLS] ann met bo . [SEP] later bo left . [SEP]      labels  1

    so records may have any numbers of entities, several of which may be right. Each example counts as one in training.
    Figures are of records: what is said is the entity that is likeliest to be right, and it is compared with the best
    of all answers, as those of SQuAD are. What is too long for a row loses its end, the longer text first.

    The summary's lines, which ReCoRD marks in a passage by lines of "@highlight", are read as sentences.
    """

    passage_field: str = "passage"  # the field of what is read first
    query_field: str = "query"  # the field of the sentence with a gap
    entities_field: str = "entities"  # the field of a list of texts to choose from
    answers_field: str = "answers"  # the field of a list of those that are right
    gap: str = "@placeholder"  # what stands in the query where an entity belongs

    labels: ClassVar[tuple[str, ...]] = ("False", "True")  # of an entity
    select_by = "answer_f1"
    figures = figures.OF_ANSWERS  # pyright: ignore[reportAssignmentType]

    @property
    def fields(self) -> tuple[str, ...]:
        return self.passage_field, self.query_field, self.entities_field, self.answers_field

    def ask(self, record: Mapping) -> Record:
        passage = text_in(record, self.passage_field, "passage_field")
        query = text_in(record, self.query_field, "query_field")
        if self.gap not in query:
            raise ValueError(f"field {self.query_field!r} holds {query!r}, without {self.gap!r} (config.objective.gap)")
        entities = list(dict.fromkeys(texts_in(record, self.entities_field, "entities_field")))
        if not entities:
            raise ValueError(f"field {self.entities_field!r} is empty: there is nothing to choose from")
        return Record((plain(passage), *(query.replace(self.gap, one) for one in entities)), {"entities": entities})

    def read(self, record: Mapping) -> Record:
        asked, answers = self.ask(record), texts_in(record, self.answers_field, "answers_field")
        if not set(answers) & set(asked.note["entities"]):
            raise ValueError(
                f"field {self.answers_field!r} holds {answers}, none of which is in field {self.entities_field!r}"
            )
        return dataclasses.replace(asked, note={**asked.note, "answers": answers})

    def encode(self, record: Record, tokenizer) -> Iterator[Encoded]:
        """Yields the passage and the filled sentence for each entity, whose number is that of a window.

        A note has the entity, and where they are known all "answers", and whether it is one of them, "label".
        """
        passage, *filled = tokenizer.encode_batch(list(record.texts))
        answers = record.note.get("answers")
        for number, (ids, entity) in enumerate(zip(filled, record.note["entities"], strict=True)):
            known = {} if answers is None else {"answers": answers, "label": int(entity in answers)}
            yield Encoded([passage, ids], {WINDOW: number, "entity": entity, **known})

    def example(self, text, rng, vocabulary):
        example = self.framed(self.texts(text.tokens, text.parts), vocabulary)
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
            yield "config.data.drop_duplicates is of whole texts, EntityChoice has one for each entity: set it to False"

    def field_problems(self):
        if not self.gap:
            yield "config.objective.gap is '', it must be what stands where an entity belongs, as '@placeholder'"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        records = records_of(notes)
        said = [notes[one][int(_scores(answers[one]).argmax())]["entity"] for one in records]
        return figures.of_answers(said, [notes[one.start]["answers"] for one in records], some_have_none=False)

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Returns the entity that is likeliest, and of each how likely it is to be right."""
        scores, right = _scores(answers), softmax(answers)[:, 1]
        probabilities = {note["entity"]: rounded(p) for note, p in zip(notes, right, strict=True)}
        return {"prediction": notes[int(scores.argmax())]["entity"], "probabilities": probabilities}


def plain(passage: str) -> str:
    """Returns a passage whose lines after "@highlight" are sentences behind the rest."""
    return re.sub(r"(?<![.?!\"'])\n@highlight\n", ". ", passage).replace("\n@highlight\n", " ")


def _scores(answers: np.ndarray) -> np.ndarray:
    """Returns by how much each entity, [n, 2], is rather right than wrong: its place in a list of all, [n]."""
    return answers[:, 1] - answers[:, 0]
