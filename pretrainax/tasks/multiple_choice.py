"""Implements multiple choice: selects the correct one of several choices, given a passage and a question."""

import collections
import dataclasses
import numbers
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Classify, HeadConfig
from pretrainax.data.batch import Lengths
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks.base import Task, concatenate_segments, rounded, text_in, texts_in
from pretrainax.tasks.baselines import Baseline, bag_of_words_classifier, cross_entropy, prior_logits
from pretrainax.tasks.chunks import softmax

_LETTERS = string.ascii_uppercase


@dataclasses.dataclass
class MultipleChoice(Task):
    """Selects the correct one of several choices (RACE, Lai et al. 2017; SWAG, Zellers et al. 2018; COPA).

    With choices=2, the record {"context": "It rained.", "question": "So", "choices": ["it is wet.", "it is dry."],
    "answer": "A"} becomes, for a BERT,

        tokens       [CLS] It rained . [SEP] So it is wet . [SEP] [CLS] It rained . [SEP] So it is dry . [SEP]
        segment_ids  1     1  1      1 1     1  1  1  1   1 1     2     2  2      2 2     2  2  2  2   2 2
        labels       0

    A row contains one record. The choices are segments that do not attend to each other. The head computes one score
    per segment, and the softmax over the scores gives the probability of each choice. Shuffling, sharding and
    accumulation move whole rows, so they cannot separate the choices of a record. Validation contains each record
    exactly once, and short choices need no padding. A disadvantage: if the kernel does not skip masked segments, it
    computes attention over the whole row. This costs a third more FLOPs for a BERT-base with four choices of 512
    tokens.

    config.data.sequence_length is the length of one choice together with its passage and question, and a row is
    `choices` times as long. If a choice does not fit, the end of the passage is removed first, then the beginning of
    the question. If a choice alone is too long, the beginning of the choice is removed.

    The answer of a record is the text of a choice, its letter (A, b), its number from 0, or the name of its field. A
    value that equals the text of a choice always means this choice.
    """

    context_fields: tuple[str, ...] = ("context",)  # the fields of the passage; several are joined in this order
    question_field: Optional[str] = "question"  # the field of the text before each choice; None: no such text
    choice_fields: tuple[str, ...] = ("choices",)  # one field with a list of all choices, or a field for each
    answer_field: str = "answer"  # the field of the correct choice: its text, letter, number from 0, or field name
    choices: int = 4  # number of choices per record

    packages = ("sklearn",)
    separates_rows: ClassVar[bool] = True
    select_by = "accuracy"
    metric_names = ("accuracy",)  # pyright: ignore[reportAssignmentType]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.context_fields, self.question_field, *self.choice_fields, self.answer_field)))

    def read_unlabeled(self, record: Mapping) -> Record:
        return self._unlabeled_record(record, self._checked_choices(record))

    def read(self, record: Mapping) -> Record:
        choices = self._checked_choices(record)
        answer = value_of(record, self.answer_field, "config.objective.answer_field")
        return dataclasses.replace(
            self._unlabeled_record(record, choices), note={"label": self._choice_index(answer, choices)}
        )

    def _unlabeled_record(self, record: Mapping, choices: Sequence[str]) -> Record:
        context = " ".join(filter(None, (text_in(record, name, "context_fields") for name in self.context_fields)))
        question = text_in(record, self.question_field, "question_field") if self.question_field is not None else ""
        return Record((context, *(f"{question} {choice}".lstrip() for choice in choices)), {})

    def _checked_choices(self, record: Mapping) -> list[str]:
        choices = self._read_choices(record)
        if len(choices) != self.choices:
            raise ValueError(f"the record has {len(choices)} choices, but config.objective.choices is {self.choices}")
        if empty_choices := [i for i, choice in enumerate(choices) if not choice.strip()]:
            raise ValueError(f"choice {empty_choices[0]} (from 0) is empty")
        return choices

    def _read_choices(self, record: Mapping) -> list[str]:
        if len(self.choice_fields) > 1:
            return [text_in(record, name, "choice_fields") for name in self.choice_fields]
        (name,) = self.choice_fields
        return texts_in(record, name, "choice_fields", "the choices")

    def _choice_index(self, value: object, choices: Sequence[str]) -> int:
        """Converts the answer of a record to the index of a choice; raises ValueError if the answer is not a choice."""
        value = value.decode() if isinstance(value, bytes) else value
        letters = _LETTERS[: len(choices)]
        if isinstance(value, str):
            for names in (choices, list(letters), list(letters.lower()), self.choice_fields):
                if value in names:
                    return list(names).index(value)
            value = int(value) if value.isdecimal() else value
        if isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= int(value) < len(choices):
            return int(value)
        raise ValueError(
            f"field {self.answer_field!r} holds {value!r}, it must be the text of a choice, {letters[0]} to "
            f"{letters[-1]}, or 0 to {len(choices) - 1}"
        )

    def encode(self, record: Record, tokenizer) -> Iterator[Encoded]:
        context, *choices = tokenizer.encode_batch(list(record.texts))
        yield Encoded([ids for choice in choices for ids in (context, choice)], record.note)

    def example(self, text, rng, vocabulary):
        parts = self.split_strings(text.tokens, text.parts)
        capacity = self.text_capacity(2)
        pairs = ((context, choice[-capacity:]) for context, choice in zip(parts[::2], parts[1::2], strict=True))
        rows = [self.framed((context[: capacity - len(choice)], choice), vocabulary) for context, choice in pairs]
        labels = {"labels": np.array(text.note["label"], np.int32)} if "label" in text.note else {}
        return {**concatenate_segments(rows), **labels}

    def is_cut(self, encoded: Encoded) -> bool:
        sizes = np.array([len(ids) for ids in encoded.parts]).reshape(-1, 2)
        return bool((sizes.sum(1) > self.text_capacity(2)).any())

    def lengths(self, sequence_length: int) -> Lengths:
        return Lengths(*(self.choices * n for n in super().lengths(sequence_length)))

    def max_positions(self, sequence_length: int) -> int:
        return sequence_length

    def measure(self, raw: int) -> Lengths:
        length = raw + self.choices * self._frame.count(2)
        return Lengths(raw, length, length)

    @property
    def max_texts(self) -> int:
        return 2 * self.choices

    def sample_note(self):
        return {"label": 0}

    def head(self, model):
        return Classify.usual(model, self.choices, "choice")

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Classify) or (head.kind, head.num_labels) != ("choice", self.choices):
            yield (
                f"config.model.head is {head}, MultipleChoice of {self.choices} needs "
                f"Classify(num_labels={self.choices}, kind='choice'); for a Hugging Face directory, id2label in its "
                "config.json names each choice"
            )

    def field_problems(self):
        if not 2 <= self.choices <= len(_LETTERS):
            yield f"config.objective.choices is {self.choices}, it must be from 2 to {len(_LETTERS)}"
        if len(self.choice_fields) not in (1, self.choices):
            yield (
                f"config.objective.choice_fields is {self.choice_fields}, it must name one field with a list, or "
                f"{self.choices} fields (config.objective.choices)"
            )
        if not self.context_fields:
            yield "config.objective.context_fields is (), it must name at least one field"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        return {"accuracy": float(np.mean(answers.argmax(-1) == [note["label"] for note in notes]))}

    def document_losses(self, answers: np.ndarray, notes: Sequence[Note]) -> np.ndarray:
        return cross_entropy(answers, np.array([note["label"] for note in notes]))

    def baselines(self, train, valid, notes):
        labels = np.eye(self.choices)[[record.note["label"] for record in train]]
        prior = prior_logits(labels, is_multi_label=False)
        yield Baseline("position frequencies", np.tile(prior, (len(valid), 1)), is_constant=True)
        pairs, valid_pairs = (
            [(context, choice) for record in records for context, *choices in [record.texts] for choice in choices]
            for records in (train, valid)
        )
        is_right = np.stack([1 - labels.ravel(), labels.ravel()], axis=1)
        logits = bag_of_words_classifier(pairs, is_right, valid_pairs, is_multi_label=False)
        yield Baseline("bag of words", (logits[:, 1] - logits[:, 0]).reshape(-1, self.choices))

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Computes the letter of the most likely choice ("prediction"), and the probability of each letter."""
        (logits,) = answers
        probabilities = dict(zip(_LETTERS, map(rounded, softmax(logits)), strict=False))
        return {"prediction": _LETTERS[int(logits.argmax())], "probabilities": probabilities}

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        counts = collections.Counter(note["label"] for note in notes)
        if len(counts) == 1:
            (number,) = counts
            yield (
                f"CHOICE {number} (from 0) IS RIGHT IN EVERY RECORD, so the model only learns its position. Check "
                "config.objective.answer_field"
            )
