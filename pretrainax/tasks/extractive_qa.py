"""Extractive question answering: which part of a passage answers a question, or that none does."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Optional

import numpy as np

from pretrainax.config import Experiment, Extract, HeadConfig
from pretrainax.data.framing import frame_of
from pretrainax.data.line_ends import plain
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import figures
from pretrainax.tasks.base import Task, rounded, text_in
from pretrainax.tasks.chunks import WINDOW, records_of

if TYPE_CHECKING:
    from pretrainax.tokenization.base import Tokenizer

WRONG = "answers that are not where they should be in their passage"  # how they are counted
LEFT_OUT = "records left out, as no other answer is there"
_OF_DECODING = ("null_score_diff_threshold", "max_answer_length", "n_best")  # fields that change no window
_NOTHING = -1e10  # the score of a passage without a token
_SHORTEST_WINDOW = 8  # tokens of a passage beside the longest question


class Said(NamedTuple):
    """The answer that is read off the numbers of a record's windows."""

    text: str  # "": there is none
    score: float  # of begin and end together
    null_score_diff: float  # by how much no answer has a higher score than the best there is


@dataclasses.dataclass
class ExtractiveQA(Task):
    """The part of a passage that answers a question (SQuAD, Rajpurkar et al. 2016), or that there is none (2018).

    The record {"question": "Who ran?", "context": "The old fox ran.", "answers": {"text": ["old fox"], "answer_start":
    [4]}} becomes, for a BERT,

        tokens       [CLS] who ran ? [SEP] the old fox ran . [SEP]
        token_types  0     0   0   0 0     1   1   1   1   1 1
        span         6 7

    A passage that is too long for a row is read in windows, one `stride` tokens after the other, each an example of its
    own. A window without the whole of the answer says that it has none, as does each of a question without answer: its
    span is the first token twice, [CLS] of BERT; of a decoder, which has read nothing there, the last one.

    Figures are of records: the answer is the part of the passage with the highest sum of both numbers over all windows.
    With `no_answer` it is none where the lowest sum at that token is higher by more than `null_score_diff_threshold`.
    Answers are compared without case, punctuation, articles and spaces, with the best of all that a record has.
    """

    question_field: str = "question"  # the field of the question
    context_field: str = "context"  # the field of the passage
    answers_field: str = "answers"  # lists of texts and of where each starts in characters, or a list of such pairs
    no_answer: bool = False  # some questions have no answer in their passage: an empty list (SQuAD 2)
    null_score_diff_threshold: float = 0.0  # by how much no answer must be better than the best that there is
    stride: int = 128  # tokens from the begin of a window to that of the next
    max_question_length: int = 64  # tokens; the end of a longer one is not read
    max_answer_length: int = 30  # tokens; a longer part of the passage is never said
    n_best: int = 20  # begins, and ends, of a window that are tried with each other
    wrong_answers: Literal["refuse", "skip"] = "refuse"  # at one that is not where it should be; skip: leave it out

    select_by = "answer_f1"

    @property
    def fields(self) -> tuple[str, ...]:
        return self.question_field, self.context_field, self.answers_field

    @property
    def figures(self) -> tuple[str, ...]:
        return figures.OF_ANSWERS_OR_NONE if self.no_answer else figures.OF_ANSWERS

    # --- records ------------------------------------------------------------------------------------------------------

    def ask(self, record: Mapping) -> Record:
        question = text_in(record, self.question_field, "question_field")
        context = text_in(record, self.context_field, "context_field")
        for name, text in ((self.question_field, question), (self.context_field, context)):
            if not text.strip():
                raise ValueError(f"field {name!r} is empty")
        return Record((question, context), {})

    def read(self, record: Mapping) -> Record:
        asked = self.ask(record)
        _, context = asked.texts
        answers = self._answers(record)
        if not answers and not self.no_answer:
            raise ValueError(
                f"field {self.answers_field!r} holds no answer: where some questions have none in their passage, set "
                "config.objective.no_answer=True"
            )
        right = [(text, start) for text, start in answers if text and context[start : start + len(text)] == text]
        if len(right) < len(answers) and self.wrong_answers == "refuse":
            raise ValueError(self._not_there(*next(pair for pair in answers if pair not in right), context))
        mended = {WRONG: len(answers) - len(right), LEFT_OUT: int(bool(answers) and not right)}
        spans = [[_place(context, start), _place(context, start + len(text))] for text, start in right]
        note = {"answers": [text for text, _ in right], "spans": spans}
        if mended[LEFT_OUT]:
            note["left_out"] = True
        return Record(asked.texts, note, {reason: count for reason, count in mended.items() if count})

    def _answers(self, record: Mapping) -> list[tuple[str, int]]:
        """Returns the answers of a record, each with the character that it starts at; ValueError where it has none."""
        value = value_of(record, self.answers_field, "config.objective.answers_field")
        try:
            if isinstance(value, Mapping):
                pairs = list(zip(value["text"], value["answer_start"], strict=True))
            else:
                pairs = [(answer["text"], answer["answer_start"]) for answer in _list(value)]
            answers = [(text.decode() if isinstance(text, bytes) else text, int(start)) for text, start in pairs]
            if any(not isinstance(text, str) or start < 0 for text, start in answers):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"field {self.answers_field!r} holds {value!r}, it must be "
                '{"text": ["an answer", …], "answer_start": [12, …]} or [{"text": "an answer", "answer_start": 12}, …]'
            ) from None
        return answers

    def _not_there(self, text: str, start: int, context: str) -> str:
        there = context.find(text) if text else -1
        elsewhere = f"it is at {there}" if there >= 0 else "nor anywhere in it"
        return (
            f"the answer {text!r} is not at character {start} of field {self.context_field!r}, {elsewhere}: "
            "config.objective.wrong_answers='skip' leaves such answers out, and counts them"
        )

    # --- windows ------------------------------------------------------------------------------------------------------

    def leaves_out(self, record: Record) -> bool:
        return record.note.get("left_out", False)

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        """Yields the windows of a record: the ids of its question and of a part of its passage.

        A note has the number of the window in its record; the text of the part, and where each of its tokens begins and
        ends in that, "starts" and "ends"; where the first of them is in the row, "first", and the token that stands for
        no answer, "null"; the place of the answer among them, "span", None where the window has not all of it.
        """
        if self.leaves_out(record):
            return
        question, context = record.texts
        asked = tokenizer.encode(question)[: self.max_question_length]
        ids, places = tokenizer.locate(context)
        frame = frame_of(self._model.family, tokenizer.vocabulary)
        room = self._length - frame.count(2) - len(asked)
        span = _tokens_of(places, *record.note["spans"][0]) if record.note.get("spans") else None
        for number, start in enumerate(_starts(len(ids), room, self.stride)):
            stop = min(start + room, len(ids))
            begin, end = (int(places[start:stop].min()), int(places[start:stop].max())) if stop > start else (0, 0)
            inside = span is not None and start <= span[0] and span[1] < stop
            note = {name: x for name, x in record.note.items() if name != "spans"}
            note |= {
                WINDOW: number,
                "context": context[begin:end],
                "starts": (places[start:stop, 0] - begin).tolist(),
                "ends": (places[start:stop, 1] - begin).tolist(),
                "first": len(frame.before) + len(asked) + len(frame.between),
                "null": len(asked) + stop - start + frame.count(2) - 1 if self._model.family == "decoder" else 0,
                "span": [place - start for place in span] if span is not None and inside else None,
            }
            yield Encoded([asked, ids[start:stop]], note)

    def prepared_by(self) -> object:
        names = [field.name for field in dataclasses.fields(self) if field.name not in _OF_DECODING]
        return [{name: getattr(self, name) for name in names}, self._length, self._model.family]

    def example(self, text, rng, vocabulary):
        texts, note = self.texts(text.tokens, text.parts), text.note
        example = self.framed(texts, vocabulary)
        if self._model.reads_question:
            places = np.arange(len(example["tokens"]))
            example["question"] = (places < len(self._frame.before) + len(texts[0])).astype(np.int32)
        if "answers" not in note:
            return example
        places = [note["null"]] * 2 if note["span"] is None else [note["first"] + place for place in note["span"]]
        return {**example, "span": np.array(places, np.int32)}

    def sample_note(self):
        return {"answers": [], "span": None, "first": 2, "null": 0}

    # --- the model, and what it answers -------------------------------------------------------------------------------

    def head(self, model):
        return Extract()

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        if not isinstance(head, Extract):
            yield f"config.model.head is {head}, ExtractiveQA needs Extract()"

    def field_problems(self):
        for name in ("stride", "max_question_length", "max_answer_length", "n_best"):
            if getattr(self, name) < 1:
                yield f"config.objective.{name} is {getattr(self, name)}, it must be at least 1"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        length, least = experiment.data.sequence_length, self.max_question_length + self.shortest + _SHORTEST_WINDOW
        if length < least:
            yield (
                f"config.data.sequence_length is {length}, and config.objective.max_question_length "
                f"{self.max_question_length} leaves no room for a passage: set it to {least} at least, or this lower"
            )
        windows = experiment.model.sparse_attention
        if experiment.model.reads_question and windows.longest_question <= self.max_question_length:
            yield (
                f"config.objective.max_question_length is {self.max_question_length}, which with the token before the "
                f"question is more than config.model.sparse_attention.longest_question {windows.longest_question}: set "
                f"that to {self.max_question_length + 1}"
            )
        if experiment.data.drop_duplicates:
            yield "config.data.drop_duplicates is of whole texts, ExtractiveQA makes windows of them: set it to False"

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        records = records_of(notes)
        said = [self.said(answers[record], notes[record]).text for record in records]
        return figures.of_answers(said, [notes[record.start]["answers"] for record in records], self.no_answer)

    def said(self, answers: np.ndarray, notes: Sequence[Note]) -> Said:
        """Returns the answer to a record; answers: [windows, T, 2]; notes: of its windows."""
        best, none = Said("", _NOTHING, 0.0), np.inf
        for logits, note in zip(answers.astype(np.float64), notes, strict=True):
            none = min(none, float(logits[note["null"]].sum()))
            first, count = note["first"], len(note["starts"])
            begins, ends = np.argsort(-logits[first : first + count], axis=0, kind="stable")[: self.n_best].T
            scores = logits[first + begins, 0][:, None] + logits[first + ends, 1]  # [begins, ends]
            lengths = ends - begins[:, None] + 1
            scores = np.where((lengths >= 1) & (lengths <= self.max_answer_length), scores, _NOTHING)
            if scores.size and scores.max() > best.score:
                i, j = np.unravel_index(scores.argmax(), scores.shape)
                text = note["context"][note["starts"][begins[i]] : note["ends"][ends[j]]]
                best = Said(text.strip(), float(scores[i, j]), 0.0)
        best = best._replace(null_score_diff=none - best.score)
        is_none = self.no_answer and best.null_score_diff > self.null_score_diff_threshold
        return best._replace(text="") if is_none else best

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Returns the answer, "" for none, its score, and by how much that of no answer is higher."""
        said = self.said(answers, notes)
        scores = {"score": said.score, "null_score_diff": said.null_score_diff}
        return {"prediction": said.text, **{name: rounded(np.float64(score)) for name, score in scores.items()}}


def _list(value: object) -> Sequence:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError
    return list(value)


def _place(context: str, place: int) -> int:
    """Returns where a character of a text is once its line ends are plain."""
    return len(plain(context[:place], collections.Counter()))


def _tokens_of(places: np.ndarray, begin: int, end: int) -> Optional[list[int]]:
    """Returns the first and the last token that have characters from begin to end; None where no token has any."""
    held = np.flatnonzero((places[:, 1] > begin) & (places[:, 0] < end))
    return [int(held[0]), int(held[-1])] if len(held) else None


def _starts(count: int, room: int, stride: int) -> Iterator[int]:
    """Yields where windows of so many tokens begin; the last one ends where the text does, or after that."""
    start = 0
    yield start
    while start + room < count:
        start += min(stride, room)
        yield start
