"""The base of all tasks: records in, examples out, and the figures of what a model answers."""

import copy
import dataclasses
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Optional, Union

import numpy as np

from pretrainax.config import Experiment, HeadConfig, ModelConfig, UserError, nearest, to_json
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.framing import Frame, decoder_start, frame_of, longest_first
from pretrainax.data.objectives import Objective
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import text_of

if TYPE_CHECKING:
    from pretrainax.tokenization.base import Tokenizer, Vocabulary

_MOST_SPECIAL = 4  # tokens around two texts


class Task(Objective):
    """Base of the tasks. A subclass is a dataclass that gives what raises NotImplementedError here.

    read       a record of a file or data set -> its texts, and a note of what else is known (labels): for preparation
    encode     texts -> ids, and the note as examples and figures need it; of a long text several documents
    example    ids and note -> the arrays of a batch, with the labels: see `framed`
    head       the architecture of a model -> the head that it needs in the place of those of its pretraining, unless it
               writes: see `writing.WritingTask`
    metrics    what that head answers to each record of a split, and their notes -> the task's figures

    A corpus of records is shared by all models with one tokenizer. So texts are cut to the length of a row in
    `example`, unless `encode` does it (windows): then `prepared_by` has to say so.
    """

    families: ClassVar[tuple[str, ...]] = ("encoder", "encoder_decoder", "decoder")
    unit: ClassVar[str] = "records"
    packs: ClassVar[bool] = False
    shortest: ClassVar[int] = _MOST_SPECIAL + 2
    static: bool = True
    has_head: ClassVar[bool] = True  # of its own; False: the model keeps that over the vocabulary

    _model: ClassVar[ModelConfig] = ModelConfig()  # of the config, see `adapted`
    _length: ClassVar[int] = 0  # tokens of a row, of the same
    _frame: ClassVar[Frame] = Frame((), (), ())  # see `bind`

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the fields of a record that are read, "answers.text" for one inside of another."""
        raise NotImplementedError

    @property
    def figures(self) -> tuple[str, ...]:
        """Names what `metrics` returns: each can be config.evaluate.select_by."""
        raise NotImplementedError

    def read(self, record: Mapping) -> Record:
        """Returns the texts of a record, some of which may be empty, and its note.

        Raises:
          ValueError: what is wrong with it; the source adds file and line.
        """
        raise NotImplementedError

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        """Yields the documents that a record becomes: the ids of its texts without special ones, and a note. One."""
        yield Encoded(tokenizer.encode_batch(list(record.texts)), record.note)

    def head(self, model: ModelConfig) -> HeadConfig:
        """Returns the head that a model of this architecture needs, where nobody says which."""
        raise NotImplementedError

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        """Yields why a head does not fit the task."""
        yield from ()

    def evaluated(self) -> "Task":
        """Returns the task as the command `evaluate` asks it, which has more time than a validation in training."""
        return self

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        """Returns the `figures` of a split.

        Args:
          answers: of the model's head to each document, NumPy arrays [n, …]: see `models.heads.base.Head.answers`.
          notes: of each, n.
        """
        raise NotImplementedError

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        """Yields what is likely no one's intention in the notes of all that is trained on."""
        yield from ()

    def sample_note(self) -> Note:
        """Returns a note as some record has it: what a run takes is planned without any record."""
        raise NotImplementedError

    def prepared_by(self) -> object:
        """Returns all that a corpus follows from beside text and tokenizer, which JSON can hold: the task's fields."""
        return to_json(self)

    # --- what an objective is asked ----------------------------------------------------------------------------------

    @property
    def head_figures(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.figures

    def complete(self, experiment: Experiment) -> None:
        if not self.has_head:
            return
        wanted = self.head(experiment.model)
        head = experiment.model.head
        experiment.model.head = wanted if head is None else head.completed(wanted)

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        asked, figure, allowed = experiment.evaluate.objective, experiment.evaluate.select_by, ("loss", *self.figures)
        if asked is not None:
            yield f"config.evaluate.objective is {type(asked).__name__}, a task is validated by itself: set it to None"
        if figure and figure not in allowed:
            yield f"config.evaluate.select_by is {figure!r}, {nearest(figure, allowed)}"

    def adapted(self, experiment: Experiment) -> "Task":
        task = copy.copy(self)
        task._model, task._length = experiment.model, experiment.data.sequence_length  # pyright: ignore
        return task

    def bind(self, tokenizer: "Tokenizer") -> "Task":
        task = copy.copy(self)
        task._frame = frame_of(self._model.family, tokenizer.vocabulary)  # pyright: ignore
        return task

    def lengths(self, sequence_length: int) -> Lengths:
        return Lengths(max(sequence_length - _MOST_SPECIAL, 1), sequence_length, sequence_length)

    def measure(self, raw: int) -> Lengths:
        length = raw + self._frame.count(2)
        return Lengths(raw, length, length)

    def decoder_start(self, vocabulary: "Vocabulary") -> Optional[int]:
        return decoder_start(vocabulary)

    def check_vocabulary(self, vocabulary: "Vocabulary", sequence_length: int) -> None:
        """Any vocabulary does: what it lacks does not stand around texts."""

    def prompt(self, tokens: np.ndarray, vocabulary: "Vocabulary") -> Example:
        raise UserError(f"the model was trained for {type(self).__name__}, and writes no text")

    def framed(self, texts: Sequence[np.ndarray], vocabulary: "Vocabulary") -> Example:
        """Returns what the model reads of the ids of texts: with the special tokens of its pretraining, cut to a row.

        A decoder and an encoder read the row. Of an encoder-decoder both stacks do, the decoder one token later, as in
        BART (Lewis et al. 2019, section 3.1): its last token has seen everything.
        """
        kept = longest_first([len(ids) for ids in texts], self._length - self._frame.count(len(texts)))
        row, numbers = self._frame.around([ids[:n] for ids, n in zip(texts, kept, strict=True)])
        ones, places = np.ones(len(row), np.int32), np.arange(len(row), dtype=np.int32)
        example = {"tokens": row, "segment_ids": ones, "positions": places}
        if self._model.family == "encoder":
            return {**example, "token_types": np.minimum(numbers, max(self._model.num_token_types - 1, 0))}
        if self._model.family == "encoder_decoder":
            read = {f"encoder_{name}": array for name, array in example.items()}
            return {
                **read,
                **example,
                "tokens": np.append([self.decoder_start(vocabulary) or 0], row[:-1]).astype("i4"),
            }
        return example

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        data, head, name = experiment.data, experiment.model.head, type(self).__name__
        if self.has_head and head is None:
            yield f"config.objective is {name}, and config.model.head is None: take --config=finetune"
        elif not self.has_head and head is not None:
            yield f"config.model.head is {head}, {name} writes with the head of the pretraining: set it to None"
        elif head is not None:
            yield from self.head_problems(head)
        if len(data.source.components()) > 1:
            yield f"config.data.source is {type(data.source).__name__}, {name} is of one source"
        for field in ("quality", "near_duplicates"):
            if getattr(data, field) is not None:
                yield f"config.data.{field} is of texts, {name} has records: set it to None"
        if experiment.phases:
            yield f"config.phases are not for {name}: set them to ()"
        if self.has_head and (experiment.train.label_smoothing or experiment.train.z_loss):
            yield f"config.train.label_smoothing and z_loss are of predicted tokens, {name} has none: set them to 0"

    def statistics(self, examples: Sequence[Example], vocabulary: "Vocabulary"):
        yield from ()


@dataclasses.dataclass
class TextTask(Task):
    """A task of one text, or of a pair of texts, with a label."""

    text_field: str = "text"  # the field of a record that holds its text
    pair_field: Optional[str] = None  # the field of the second text of a pair; None: there is one text
    label_field: str = "label"  # the field of what is to be said of it

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.text_field, self.pair_field, self.label_field)))

    def read_texts(self, record: Mapping) -> tuple[str, ...]:
        """Returns the text of a record, or its pair of texts; ValueError where a field is missing or no text."""
        named = (("text_field", self.text_field), ("pair_field", self.pair_field))
        texts = (text_of(record, name, f"config.objective.{field}") for field, name in named if name is not None)
        return tuple(map(string_of, texts))

    def texts(self, tokens: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
        """Parts the tokens of a document into those of its texts."""
        return np.split(tokens, ends[:-1])


def string_of(text: Union[str, bytearray]) -> str:
    """Returns a text that a very long line of JSON has as its UTF-8."""
    return text if isinstance(text, str) else text.decode()


def score_of(value: object, field: str) -> float:
    """Returns the finite number that a field of a record holds; ValueError where it is none."""
    try:
        score = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"field {field!r} holds {value!r}, it must be a number")
    return score


def class_number(value: object, field: str, labels: Sequence[str]) -> int:
    """Returns the number of the label that a field of a record names or, where no name is a number, is the number of.

    Raises:
      ValueError: it is none of `labels`.
    """
    value = value.decode() if isinstance(value, bytes) else value
    if str(value) in labels and not isinstance(value, bool):
        return labels.index(str(value))
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    is_number &= not any(name.isdecimal() for name in labels)  # where numbers are names, they are no places
    if is_number and 0 <= int(value) < len(labels):  # pyright: ignore[reportArgumentType]
        return int(value)  # pyright: ignore[reportArgumentType]
    raise no_label(value, field, labels)


def no_label(value: object, field: str, labels: Sequence[str]) -> ValueError:
    """Returns the error of a label that is none of those of the task."""
    return ValueError(
        f"field {field!r} holds the label {value!r}, {nearest(str(value), labels)} (config.objective.labels)"
    )
