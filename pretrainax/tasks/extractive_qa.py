"""Implements extractive question answering: finds the span of a passage that answers a question, if one exists."""

import dataclasses
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Optional

import numpy as np

from pretrainax.config import Experiment, Extract, HeadConfig
from pretrainax.data.framing import special_token_frame
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import label_metrics
from pretrainax.tasks.base import Task, rounded, text_in
from pretrainax.tasks.baselines import Baseline, sums_of_parts
from pretrainax.tasks.chunks import WINDOW, record_indices, records_of
from pretrainax.tasks.passage_spans import first_words, similar_sentence, span_logits

if TYPE_CHECKING:
    from pretrainax.tokenization.base import Tokenizer

WRONG = "answers that are not where they should be in their passage"  # name in the counts of repairs
LEFT_OUT = "records left out, as no other answer is there"
_DECODING_FIELDS = ("null_score_diff_threshold", "max_answer_length", "n_best")  # fields that do not affect the corpus
_NO_SCORE = -1e10  # score of spans that are not allowed, and of passages without tokens
_SHORTEST_WINDOW = 8  # minimum room for passage tokens in a row with the longest question


class ExtractedAnswer(NamedTuple):
    """The predicted answer of a record: the best span of all its windows."""

    text: str  # "": no answer
    score: float  # sum of the start and end logits
    null_score_diff: float  # score of "no answer" minus `score`


@dataclasses.dataclass
class ExtractiveQA(Task):
    """Extracts the span of a passage that answers a question (SQuAD, Rajpurkar et al. 2016 and 2018).

    The record {"question": "Who ran?", "context": "The old fox ran.", "answers": {"text": ["old fox"], "answer_start":
    [4]}} becomes, for a BERT,

        tokens       [CLS] who ran ? [SEP] the old fox ran . [SEP]
        token_types  0     0   0   0 0     1   1   1   1   1 1
        span         6 7

    `span` has the positions of the first and the last token of the answer. A passage that is too long for a row is
    split into windows whose starts are `stride` tokens apart. Each window is an example. A window that does not contain
    the complete answer has the label "no answer". For this label, both entries of `span` are the position of the
    first token, [CLS] for BERT. In a decoder, they are the position of the last token, because the first token has no
    context.

    Metrics are per record. The prediction is the span with the highest score, the sum of start and end logits, over all
    windows. The null score of a window is the score of "no answer". With `no_answer`, the prediction is "" if the
    lowest null score of all windows exceeds the score of the best span by more than `null_score_diff_threshold`.
    Predictions and answers are compared without case, punctuation, articles and spaces. The metric of a prediction is
    the maximum over the answers of the record.
    """

    question_field: str = "question"  # the field of the question
    context_field: str = "context"  # the field of the passage
    # the field of the answers: {"text": [answer, …], "answer_start": [index of its first character, …]}, or a list of
    # {"text": answer, "answer_start": index}
    answers_field: str = "answers"
    no_answer: bool = False  # True if some questions have an empty list of answers (SQuAD 2)
    null_score_diff_threshold: float = 0.0  # "no answer" is predicted above this difference from the best score
    stride: int = 128  # tokens from the start of one window to the start of the next
    max_question_length: int = 64  # tokens; longer questions are truncated
    max_answer_length: int = 30  # tokens; longer spans are never predicted
    n_best: int = 20  # number of start and of end candidates per window; all pairs of candidates are scored
    # what to do with an answer that is not at its position: "refuse" (raise an error) or "skip" (skip and count it)
    wrong_answers: Literal["refuse", "skip"] = "refuse"

    select_by = "answer_f1"

    @property
    def fields(self) -> tuple[str, ...]:
        return self.question_field, self.context_field, self.answers_field

    @property
    def metric_names(self) -> tuple[str, ...]:
        return label_metrics.OF_ANSWERS_OR_NONE if self.no_answer else label_metrics.OF_ANSWERS

    # --- records ------------------------------------------------------------------------------------------------------

    def read_unlabeled(self, record: Mapping) -> Record:
        question = text_in(record, self.question_field, "question_field")
        context = text_in(record, self.context_field, "context_field")
        for name, text in ((self.question_field, question), (self.context_field, context)):
            if not text.strip():
                raise ValueError(f"field {name!r} is empty")
        return Record((question, context), {})

    def read(self, record: Mapping) -> Record:
        unlabeled = self.read_unlabeled(record)
        _, context = unlabeled.texts
        answers = self._read_answers(record)
        if not answers and not self.no_answer:
            raise ValueError(
                f"field {self.answers_field!r} holds no answer: if some questions have no answer in their passage, "
                "set config.objective.no_answer=True"
            )
        valid_answers = [
            (text, start) for text, start in answers if text and context[start : start + len(text)] == text
        ]
        if len(valid_answers) < len(answers) and self.wrong_answers == "refuse":
            raise ValueError(
                self._misplaced_message(*next(pair for pair in answers if pair not in valid_answers), context)
            )
        repairs = {WRONG: len(answers) - len(valid_answers), LEFT_OUT: int(bool(answers) and not valid_answers)}
        spans = [
            [_normalized_offset(context, start), _normalized_offset(context, start + len(text))]
            for text, start in valid_answers
        ]
        note = {"answers": [text for text, _ in valid_answers], "spans": spans}
        if repairs[LEFT_OUT]:
            note["left_out"] = True
        return Record(unlabeled.texts, note, {reason: count for reason, count in repairs.items() if count})

    def _read_answers(self, record: Mapping) -> list[tuple[str, int]]:
        """Reads each answer of a record as (text, index of its first character in the passage).

        Raises:
          ValueError: the field does not have one of the two formats of `answers_field`.
        """
        value = value_of(record, self.answers_field, "config.objective.answers_field")
        try:
            if isinstance(value, Mapping):
                pairs = list(zip(value["text"], value["answer_start"], strict=True))
            else:
                pairs = [(answer["text"], answer["answer_start"]) for answer in _as_list(value)]
            answers = [(text.decode() if isinstance(text, bytes) else text, int(start)) for text, start in pairs]
            if any(not isinstance(text, str) or start < 0 for text, start in answers):
                raise TypeError
        except (LookupError, TypeError, ValueError, OverflowError):
            raise ValueError(
                f"field {self.answers_field!r} holds {value!r}, it must be "
                '{"text": ["an answer", …], "answer_start": [12, …]} or [{"text": "an answer", "answer_start": 12}, …]'
            ) from None
        return answers

    def _misplaced_message(self, text: str, start: int, context: str) -> str:
        position = context.find(text) if text else -1
        elsewhere = f"it is at {position}" if position >= 0 else "nor anywhere in it"
        return (
            f"the answer {text!r} is not at character {start} of field {self.context_field!r}, {elsewhere}: set "
            "config.objective.wrong_answers='skip' to skip and count these answers"
        )

    # --- windows ------------------------------------------------------------------------------------------------------

    def is_skipped(self, record: Record) -> bool:
        return record.note.get("left_out", False)

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        """Yields the windows of a record: the token ids of the question and of a part of the passage.

        The note of a window has the window number and these keys:
          context       text of this part of the passage
          starts, ends  index in `context` of the first character of each passage token, and after its last character
          first         index in the row of the first passage token
          null          index in the row of the token for "no answer"
          span          indices of the first and last answer token, relative to `first`; None if incomplete
        """
        if self.is_skipped(record):
            return
        question, context = record.texts
        question_ids = tokenizer.encode(question)[: self.max_question_length]
        ids, offsets = tokenizer.locate(context)
        frame = special_token_frame(self._model.family, tokenizer.vocabulary)
        row = frame.row(2)
        capacity = self._length - frame.count(2) - len(question_ids)
        span = _token_range(offsets, *record.note["spans"][0]) if record.note.get("spans") else None
        for number, start in enumerate(_window_starts(len(ids), capacity, self.stride)):
            stop = min(start + capacity, len(ids))
            begin, end = (int(offsets[start:stop].min()), int(offsets[start:stop].max())) if stop > start else (0, 0)
            end = _end_of_marks(context, end, int(offsets[stop, 0]) if stop < len(ids) else len(context))
            is_complete = span is not None and start <= span[0] and span[1] < stop
            note = {name: x for name, x in record.note.items() if name != "spans"}
            note |= {
                WINDOW: number,
                "context": context[begin:end],
                "starts": (offsets[start:stop, 0] - begin).tolist(),
                "ends": (offsets[start:stop, 1] - begin).tolist(),
                "first": len(row.before) + len(question_ids) + len(row.between),
                "null": len(question_ids) + stop - start + frame.count(2) - 1 if self._model.family == "decoder" else 0,
                "span": [token - start for token in span] if span is not None and is_complete else None,
            }
            yield Encoded([question_ids, ids[start:stop]], note)

    def corpus_settings(self) -> object:
        names = [field.name for field in dataclasses.fields(self) if field.name not in _DECODING_FIELDS]
        settings = {name: getattr(self, name) for name in names} | {"by_group": True}  # earlier: split by question
        return [settings, self._length, self._model.family]

    def example(self, text, rng, vocabulary):
        texts, note = self.split_strings(text.tokens, text.parts), text.note
        example = self.framed(texts, vocabulary)
        if self._model.reads_question:
            indices = np.arange(len(example["tokens"]))
            example["question"] = (indices < len(self._frame.row(2).before) + len(texts[0])).astype(np.int32)
        if "answers" not in note:
            return example
        span = [note["null"]] * 2 if note["span"] is None else [note["first"] + token for token in note["span"]]
        return {**example, "span": np.array(span, np.int32)}

    def sample_note(self):
        return {"answers": [], "span": None, "first": 2, "null": 0}

    # --- head and predictions -----------------------------------------------------------------------------------------

    def head(self, model):
        return Extract()

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Extract):
            yield f"config.model.head is {head}, ExtractiveQA needs Extract()"

    def field_problems(self):
        for name in ("stride", "max_question_length", "max_answer_length", "n_best"):
            if getattr(self, name) < 1:
                yield f"config.objective.{name} is {getattr(self, name)}, it must be at least 1"
        if self.null_score_diff_threshold and not self.no_answer:
            yield (
                f"config.objective.null_score_diff_threshold is {self.null_score_diff_threshold}, but without "
                "config.objective.no_answer=True, each question gets an answer: set both, or neither"
            )

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        length, lowest = experiment.data.sequence_length, self.max_question_length + self.shortest + _SHORTEST_WINDOW
        if length < lowest:
            yield (
                f"config.data.sequence_length is {length}, and config.objective.max_question_length "
                f"{self.max_question_length} leaves no room for a passage: set sequence_length to at least {lowest}, "
                "or reduce max_question_length"
            )
        windows = experiment.model.sparse_attention
        if experiment.model.reads_question and windows.longest_question <= self.max_question_length:
            yield (
                f"config.objective.max_question_length is {self.max_question_length}, which with the token before the "
                f"question is more than config.model.sparse_attention.longest_question {windows.longest_question}: set "
                f"longest_question to {self.max_question_length + 1}"
            )
        if experiment.data.drop_duplicates:
            yield "config.data.drop_duplicates compares whole documents, ExtractiveQA makes windows: set it to False"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        records = records_of(notes)
        predicted = [self.extract(answers[record], notes[record]).text for record in records]
        return label_metrics.answer_metrics(
            predicted, [notes[record.start]["answers"] for record in records], self.no_answer
        )

    def extract(self, answers: np.ndarray, notes: Sequence[Note]) -> ExtractedAnswer:
        """Computes the answer for a record from the start and end logits of its windows, `answers` [windows, T, 2]."""
        best, null_score = ExtractedAnswer("", _NO_SCORE, 0.0), np.inf
        for logits, note in zip(answers.astype(np.float64), notes, strict=True):
            null_score = min(null_score, float(logits[note["null"]].sum()))
            first, count = note["first"], len(note["starts"])
            begins, ends = np.argsort(-logits[first : first + count], axis=0, kind="stable")[: self.n_best].T
            scores = logits[first + begins, 0][:, None] + logits[first + ends, 1]  # [begins, ends]
            lengths = ends - begins[:, None] + 1
            scores = np.where((lengths >= 1) & (lengths <= self.max_answer_length), scores, _NO_SCORE)
            if scores.size and scores.max() > best.score:
                i, j = np.unravel_index(scores.argmax(), scores.shape)
                context, limits = note["context"], [*note["starts"][1:], len(note["context"])]
                end = _end_of_marks(context, note["ends"][ends[j]], limits[ends[j]])
                text = context[note["starts"][begins[i]] : end]
                best = ExtractedAnswer(text.strip(), float(scores[i, j]), 0.0)
        best = best._replace(null_score_diff=null_score - best.score)
        is_none = self.no_answer and best.null_score_diff > self.null_score_diff_threshold
        return best._replace(text="") if is_none else best

    def record_sums(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        sums = sums_of_parts(self.metrics, answers, notes, records_of(notes))
        return {name: sums[name] for name in label_metrics.OF_ANSWERS}  # other metrics cover only some records

    def group(self, record: Record) -> str:
        return record.texts[1]

    def baselines(self, train, valid, notes):
        questions = [record.texts[0] for record in valid]
        if self.no_answer:
            yield Baseline("no answer", span_logits([None] * len(notes), notes), is_constant=True, has_loss=False)
        length = max(int(np.median([len(text.split()) for r in train for text in r.note["answers"][:1]] or [1])), 1)
        starts = [first_words(note, length) if note[WINDOW] == 0 else None for note in notes]
        yield Baseline(f"first {length} words", span_logits(starts, notes), is_constant=True, has_loss=False)
        spans = [
            similar_sentence(questions[i], note, self.max_answer_length)
            for i, note in zip(record_indices(notes), notes, strict=True)
        ]
        yield Baseline("sentence most similar to the question", span_logits(spans, notes), has_loss=False)

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Computes the predicted answer ("" for no answer), its score, and the null score minus the answer's score."""
        answer = self.extract(answers, notes)
        scores = {"score": answer.score, "null_score_diff": answer.null_score_diff}
        return {"prediction": answer.text, **{name: rounded(np.float64(score)) for name, score in scores.items()}}


def _as_list(value: object) -> Sequence:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError
    return list(value)


def _normalized_offset(context: str, offset: int) -> int:
    """Converts the index of a character in a passage to its index after the normalization of line ends."""
    mark = context.startswith("\ufeff") and offset > 0
    return offset - mark - context.count("\r\n", 0, offset + 1)  # a carriage return without "\n" remains


def _end_of_marks(text: str, end: int, limit: int) -> int:
    """Returns the index after the combining marks at `end`, at most `limit`, the beginning of the next token.

    These marks belong to the token that ends at `end`, but tokenizers that remove accents leave them out.
    """
    while end < limit and unicodedata.category(text[end]).startswith("M"):
        end += 1
    return end


def _token_range(offsets: np.ndarray, begin: int, end: int) -> Optional[list[int]]:
    """Returns the indices of the first and last token that overlap characters `begin` … `end` - 1.

    Returns None if no token overlaps them.

    Args:
      offsets: [tokens, 2], the index of each token's first character, and the index after its last character.
    """
    tokens = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
    return [int(tokens[0]), int(tokens[-1])] if len(tokens) else None


def _window_starts(count: int, size: int, stride: int) -> Iterator[int]:
    """Yields the index of the first token of each window of `size` tokens; the windows cover all `count` tokens."""
    start = 0
    yield start
    while start + size < count:
        start += min(stride, size)
        yield start
