"""Defines the base class of tasks that generate text. The model keeps the vocabulary head of pretraining."""

import abc
import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Experiment, UserError, nearest, to_json
from pretrainax.config.choice import resumable_field
from pretrainax.data.batch import Example
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.sources.base import Note, Record
from pretrainax.tasks import text_metrics
from pretrainax.tasks.base import Task
from pretrainax.tasks.baselines import Baseline
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.frames import SpecialTokenFrame

_VALIDATION_FIELDS = ("scores", "answers", "num_beams", "max_new_tokens")  # fields that do not affect the corpus


@dataclasses.dataclass
class WritingTask(Task):
    """Base class of tasks that generate a text. A subclass implements `prompt_example` and the methods of `Task`.

    The validation loss covers all records. Generation is slower, because it needs one model step per token. Validation
    during training therefore generates answers for only `answers` records, evenly spaced in the split. `python -m
    pretrainax.evaluate` generates answers for all records.
    """

    # metrics of the generated answers: exact_match | rouge | bleu | chrf
    scores: tuple[str, ...] = resumable_field(("exact_match",))
    answers: Optional[int] = resumable_field(
        0
    )  # number of records for which a validation generates answers; 0: only the loss; None: all records
    num_beams: int = resumable_field(1)  # number of beams of beam search; 1: greedy decoding
    max_new_tokens: Optional[int] = resumable_field(
        None
    )  # maximum number of tokens of a generated answer; None: the room in a row

    has_head: ClassVar[bool] = False
    select_by = "loss"

    # The special tokens around an answer: `_frame`, and the end of an answer if the tokenizer does not add it.
    _target_frame: ClassVar[SpecialTokenFrame] = Task._frame

    def bind(self, tokenizer: Tokenizer) -> Task:
        task, end = super().bind(tokenizer), (tokenizer.vocabulary.separator,)
        frame = task._frame.single
        row = frame if frame.after[-1:] == end or end == (None,) else frame._replace(after=frame.after + end)
        task._target_frame = SpecialTokenFrame(row, row)  # pyright: ignore
        return task

    @abc.abstractmethod  # the class is not an ABC; the decorator only prevents a config from selecting this class
    def prompt_example(self, text: ObjectiveInput, vocabulary) -> Example:
        """Builds the model inputs of a record up to the beginning of the answer, as an example without targets."""
        raise NotImplementedError

    @property
    def answer_capacity(self) -> int:
        """Returns the number of tokens reserved for a generated answer, which is the maximum length of the answer."""
        raise NotImplementedError

    @property
    def stop(self) -> tuple[str, ...]:
        """Returns the strings that end a generated answer, in addition to the end-of-text token."""
        return ()

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text_metrics.PACKAGES[x] for x in self.scores if x in text_metrics.PACKAGES))

    @property
    def metric_names(self) -> tuple[str, ...]:
        return () if self.answers == 0 else text_metrics.names(self.scores)

    def validate(self, run, params):
        validation_metrics = run.validation.metrics(params)
        if self.answers == 0:
            return validation_metrics
        answers, notes = run.write(run, params, self)
        return validation_metrics | self.metrics([answer.text for answer in answers], notes)

    def evaluated(self):
        return dataclasses.replace(self, answers=None)

    def corpus_settings(self):
        return {name: value for name, value in to_json(self).items() if name not in _VALIDATION_FIELDS}

    def metrics(self, answers: Sequence[str], notes: Sequence[Note]) -> dict[str, float]:  # pyright: ignore
        return text_metrics.generation_metrics(answers, [note["answer"] for note in notes], self.scores)

    def source_text(self, record: Record) -> str:
        """Returns the text that precedes the answer of a record, for baselines that read it."""
        raise NotImplementedError

    def baselines(self, train, valid, notes):
        answer, _ = collections.Counter(record.note["answer"] for record in train).most_common(1)[0]
        yield Baseline("most frequent answer", [answer] * len(notes), is_constant=True, has_loss=False)
        texts = [self.source_text(record) for record in valid]
        yield Baseline("first sentence of the input", list(map(_first_sentence, texts)), has_loss=False)

    def check_vocabulary(self, vocabulary, sequence_length):
        if vocabulary.separator is None:
            raise UserError(f"the tokenizer has no end-of-text token, with which {type(self).__name__} ends an answer")

    def field_problems(self) -> Iterator[str]:
        for name in self.scores:
            if name not in text_metrics.SCORES:
                yield f"config.objective.scores has {name!r}, {nearest(name, text_metrics.SCORES)}"
        for field, minimum in (("answers", 0), ("num_beams", 1), ("max_new_tokens", 1)):
            value = getattr(self, field)
            if value is not None and value < minimum:
                yield f"config.objective.{field} is {value}, it must be at least {minimum}"

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        metric, generation_metrics = experiment.evaluate.select_by, dataclasses.replace(self, answers=None).metric_names
        if self.answers == 0 and metric in generation_metrics:
            yield (
                f"config.evaluate.select_by is {metric!r}, which needs generated answers: set "
                "config.objective.answers to their number, for example 200"
            )
            return
        yield from super().validation_problems(experiment)


def answer_note(answer: str) -> Note:
    """Returns the note of a record with its answer, whose line ends are normalized like the line ends of targets."""
    return {"answer": normalize_line_ends(answer, collections.Counter())}


def _first_sentence(text: str) -> str:
    """Returns the text up to the end of its first sentence or line."""
    sentence = re.match(r"\s*(.*?(?:[.!?](?=\s)|$))", text, re.MULTILINE)
    return sentence.group(1) if sentence else text


def decoder_example(row: np.ndarray, weights: np.ndarray) -> Example:
    """Builds the example of a decoder that reads token ids and predicts the next token ids.

    Args:
      row: [n] token ids; the decoder reads the first n - 1 tokens and predicts the last n - 1 tokens.
      weights: [n], the loss weight of each token of `row` as a target; 0 means no loss.
    """
    return {
        **decoder_inputs(row[:-1]),
        "targets": row[1:].astype(np.int32),
        "loss_weights": weights[1:].astype(np.float32),
    }


def decoder_inputs(row: np.ndarray) -> Example:
    """Builds the example of a decoder that reads the token ids `row`, [n], without targets."""
    positions = np.arange(len(row), dtype=np.int32)
    return {"tokens": row.astype(np.int32), "segment_ids": np.ones(len(row), np.int32), "positions": positions}
