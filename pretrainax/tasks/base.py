"""The base of all tasks: records in, examples out, and the figures of what a model answers."""

import copy
import dataclasses
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Optional

import numpy as np

from pretrainax.config import Experiment, HeadConfig, ModelConfig, UserError, nearest, to_json
from pretrainax.config.heads import Kind
from pretrainax.data.batch import SEGMENT_FIELDS, Example, Lengths
from pretrainax.data.framing import Frame, decoder_start, frame_of, longest_first
from pretrainax.data.objectives import Objective, Text
from pretrainax.data.objectives.base import EveryFamily
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import text_of, value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import metrics  # noqa: F401  declared
from pretrainax.tasks.chunks import LOST, Chunks

if TYPE_CHECKING:
    from pretrainax.data.pipeline import Batches
    from pretrainax.tokenization.base import Tokenizer, Vocabulary
    from pretrainax.training.run import Params, Run

_MOST_SPECIAL = 4  # tokens around two texts


class Task(Objective):
    """Base of the tasks. A subclass is a dataclass that gives what raises NotImplementedError here.

    read       a record of a file or data set -> its texts, and a note of what else is known (labels): for preparation
    encode     texts -> ids, and the note as examples and figures need it; of a long text several documents
    example    ids and note -> the arrays of a batch, with the labels: see `framed`
    head       the architecture of a model -> the head that it needs in the place of those of its pretraining, unless it
               writes: see `writing.WritingTask`
    metrics    what that head answers to each record of a split, and their notes -> the task's figures
    ask        a record that says no label -> its texts, and a note: for `python -m pretrainax.predict`
    prediction what the head answers to one record -> what is written of it

    A corpus of records is shared by all models with one tokenizer. So texts are cut to the length of a row in
    `example`, unless `encode` does it (windows): then `prepared_by` has to say so.
    """

    families = EveryFamily()
    unit: ClassVar[str] = "records"
    packs: ClassVar[bool] = False
    watched: ClassVar[Optional[str]] = "loss"  # a task's model is kept for another figure
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

    def leaves_out(self, record: Record) -> bool:
        """Returns True if `encode` makes no document of a record, which `read` has counted."""
        del record
        return False

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

    def ask(self, record: Mapping) -> Record:
        """Returns what `read` does of a record whose label is not known, or not looked at; raises as that does.

        `encode` and `example` take such a record too: it gives the arrays of a batch without those of labels.
        """
        raise UserError(
            f"{type(self).__name__} reads no records without labels: python -m pretrainax.evaluate does more"
        )

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Returns what the model says of one record, which `ask` has read: fields that are written beside its own.

        Args:
          answers: of the head to each document that `encode` made of it, NumPy arrays [d, …], as for `metrics`.
          notes: of each, d.
        """
        raise NotImplementedError

    def validate(self, run: "Run", params: "Params") -> dict[str, float]:
        figures, answers, notes = run.validation.answers(params)
        return figures | self.metrics(answers, notes)

    def warnings_of(self, experiment: Experiment, batches: "Batches") -> Iterator[str]:
        if experiment.checkpoint.init_from is None:
            yield "FROM RANDOM NUMBERS: nothing is pretrained, as config.checkpoint.init_from is not set"
        (stream,) = batches.streams
        bound = stream.objective
        assert isinstance(bound, Task)  # bound: it knows the room that there is in a row
        cut, length = stream.plan.statistics["records cut short"], experiment.data.sequence_length
        if cut and self.has_head:  # one that writes says more itself
            yield (
                f"{cut:,} RECORDS LOSE TEXT, which is more than config.data.sequence_length {length:,} holds, or all "
                "windows of config.objective.chunks where that is set"
            )
        yield from bound.warnings(stream.corpus.note(i) for i in range(stream.corpus.num_documents))

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        """Yields what is likely no one's intention in the notes of all that is trained on."""
        yield from ()

    @property
    def most_texts(self) -> int:
        """Returns how many texts a document of the task has at most."""
        return 2

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

    def texts(self, tokens: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
        """Parts the tokens of a document into those of its texts."""
        return np.split(tokens, ends[:-1])

    @property
    def longest(self) -> int:
        """Returns how many tokens a row has at most."""
        return self.lengths(self._length).inputs

    def room(self, texts: int, length: Optional[int] = None) -> int:
        """Counts the tokens of text that a row of so many texts has room for.

        length: of the row; None: config.data.sequence_length.
        """
        return (length or self._length) - self._frame.count(texts)

    def is_cut(self, encoded: Encoded) -> bool:
        """Returns True if a document loses tokens where it is framed."""
        return sum(map(len, encoded.parts)) > self.room(len(encoded.parts))

    def framed(self, texts: Sequence[np.ndarray], vocabulary: "Vocabulary", length: Optional[int] = None) -> Example:
        """Returns what the model reads of the ids of texts: with the special tokens of its pretraining, cut to a row,
        of a length as in `room`.

        A decoder and an encoder read the row. Of an encoder-decoder both stacks do, the decoder one token later, as in
        BART (Lewis et al. 2019, section 3.1): its last token has seen everything.
        """
        kept = longest_first([len(ids) for ids in texts], self.room(len(texts), length))
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
    chunks: Optional[Chunks] = None  # a text that is longer than a row is read in windows; None: it loses its end

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.text_field, self.pair_field, self.label_field)))

    def read_texts(self, record: Mapping) -> tuple[str, ...]:
        """Returns the text of a record, or its pair of texts; ValueError where a field is missing or no text."""
        named = (("text_field", self.text_field), ("pair_field", self.pair_field))
        return tuple(text_in(record, name, field) for field, name in named if name is not None)

    @property
    def kind(self) -> Kind:
        """Returns what the head of the task is asked: `Classify.kind`."""
        raise NotImplementedError

    def read_label(self, record: Mapping) -> Note:
        """Returns the note of a record that says its label; raises as `read` does."""
        raise NotImplementedError

    def label(self, note: Note) -> Example:
        """Returns the arrays of a batch that a note of `read_label` becomes."""
        raise NotImplementedError

    def read(self, record: Mapping) -> Record:
        return Record(self.read_texts(record), self.read_label(record))

    def ask(self, record: Mapping) -> Record:
        return Record(self.read_texts(record), {})

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        (whole,) = super().encode(record, tokenizer)
        if self.chunks is None:
            yield whole
        else:
            room = self.bind(tokenizer).room(len(whole.parts))
            yield from self.chunks.windows(whole, room)

    def example(self, text: Text, rng: np.random.Generator, vocabulary: "Vocabulary") -> Example:
        assert text.parts is not None and text.note is not None  # a record's
        example = self.framed(self.texts(text.tokens, text.parts), vocabulary)
        return example | (self.label(text.note) if self.sample_note().keys() <= text.note.keys() else {})

    def is_cut(self, encoded: Encoded) -> bool:
        return LOST in encoded.note or super().is_cut(encoded)

    def by_record(self, answers: np.ndarray, notes: Sequence[Note]) -> tuple[np.ndarray, Sequence[Note]]:
        """Returns answers [records, L] and notes of records, of those [n, L] of their windows."""
        return (answers, notes) if self.chunks is None else self.chunks.joined(answers, notes, self.kind)

    def prepared_by(self) -> object:
        own = super().prepared_by()
        return own if self.chunks is None else [own, self._length, self._model.family]  # which windows follow from

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.chunks is not None:
            yield from self.chunks.problems(experiment)


def score_of(value: object, field: str) -> float:
    """Returns the finite number that a field of a record holds; ValueError where it is none."""
    try:
        score = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"field {field!r} holds {value!r}, it must be a number")
    return score


def text_in(record: Mapping, name: str, field: str) -> str:
    """Returns the text that a field of a record holds, which is named by a field of config.objective; ValueError where
    it holds none."""
    text = text_of(record, name, f"config.objective.{field}")
    return text if isinstance(text, str) else text.decode()


def texts_in(record: Mapping, name: str, field: str, what: str = "texts") -> list[str]:
    """Returns the texts of the list that a field of a record holds, likewise; what: they are, for the error."""
    found = value_of(record, name, f"config.objective.{field}")
    if not isinstance(found, (list, tuple, np.ndarray)):
        raise ValueError(f"field {name!r} holds {found!r}, it must be a list of {what}")
    return [text_in({name: one}, name, field) for one in found]


def side_by_side(rows: Sequence[Example]) -> Example:
    """Returns one example of several of one text each: text i is segment i + 1."""
    joined = {name: [row[name] for row in rows] for name in rows[0]}
    for name in SEGMENT_FIELDS:
        if name in joined:
            joined[name] = [(i + 1) * ids for i, ids in enumerate(joined[name])]
    return {name: np.concatenate(arrays) for name, arrays in joined.items()}


def rounded(number: np.floating) -> float:
    """Returns a number with the six digits of it that are worth writing."""
    return float(f"{number:.6g}")


def label_number(value: object, field: str, labels: Sequence[str], meant: Sequence[str] = ()) -> int:
    """Returns the number of a label that a field holds: of its name or, unless names are numbers, of its number from 0;
    ValueError where it is none of those of the task.

    meant: the labels that are meant by 0, 1, …; (): in the order of `labels`.
    """
    value, meant = value.decode() if isinstance(value, bytes) else value, meant or labels
    if str(value) in labels and not isinstance(value, bool):
        return labels.index(str(value))
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    is_number |= isinstance(value, str) and value.isdecimal()  # in the columns of a table all is text
    is_number &= not any(name.isdecimal() for name in labels)  # where numbers are names, they are no places
    if is_number and 0 <= int(value) < len(meant):  # pyright: ignore[reportArgumentType]
        return labels.index(meant[int(value)])  # pyright: ignore[reportArgumentType]
    raise ValueError(
        f"field {field!r} holds the label {value!r}, {nearest(str(value), labels)} (config.objective.labels)"
    )


def never_seen(counts: Mapping[int, int], labels: Sequence[str]) -> Iterator[str]:
    """Yields a warning about the labels that no example has; counts: of each number."""
    if never := [name for i, name in enumerate(labels) if not counts.get(i)]:
        yield (
            f"NO EXAMPLE OF {', '.join(map(repr, never))} in training: the model will not learn to say it; is the "
            "name in config.objective.labels as in the records?"
        )
