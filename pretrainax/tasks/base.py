"""Defines the base classes of tasks, which convert records to examples and compute metrics from head outputs."""

import abc
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Optional

import numpy as np

from pretrainax.config import Experiment, HeadConfig, ModelConfig, UserError, nearest, to_json
from pretrainax.config.heads import Kind
from pretrainax.config.metric import REPORT_HALF, SELECTION_HALF
from pretrainax.data.batch import SEGMENT_FIELDS, Example, Lengths
from pretrainax.data.framing import decoder_start, special_token_frame, truncate_longest_first
from pretrainax.data.objectives import Objective, ObjectiveInput
from pretrainax.data.objectives.base import EveryFamily
from pretrainax.data.parts import first_half
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import text_of, value_of
from pretrainax.files.extras import missing, needs
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import metrics  # noqa: F401  declared
from pretrainax.tasks.baselines import Baseline, Predicted, metrics_or_nan
from pretrainax.tasks.chunks import TRUNCATED, Chunks
from pretrainax.tasks.label_metrics import METRICS
from pretrainax.tasks.labels import label_number, unused_label_warnings  # noqa: F401  for tasks of other packages
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame

if TYPE_CHECKING:
    from pretrainax.data.pipeline import Batches
    from pretrainax.tokenization.base import Tokenizer, Vocabulary
    from pretrainax.training.run import Params, Run

BUDGET = "3 epochs"  # passes over the records if the config sets neither epochs nor steps (BERT: 2 to 4)
_MAX_SPECIAL_TOKENS = 4  # maximum number of special tokens around a text pair


class Task(Objective):
    """Base class of tasks. A subclass is a dataclass that implements the methods that raise NotImplementedError here.

    A record is an entry of a file or dataset. A record's note is its metadata (labels, for example): everything except
    the strings.

    read            entry of a file or dataset -> `Record` with strings and note; runs during data preparation
    encode          record -> one or more documents: token ids, and the note for examples and metrics
    example         document -> the arrays of one row of a batch, with labels; see `framed`
    head            model architecture -> the head that replaces the pretraining heads (not for `WritingTask`)
    metrics         head outputs and notes of all documents of a split -> metrics
    baselines       training records -> trivial baselines, to which the final table of a run compares the model
    read_unlabeled  entry without a label -> `Record`; for `python -m pretrainax.predict`
    prediction      head outputs and notes of one record -> the fields that `pretrainax.predict` writes

    All models with the same tokenizer share a corpus (the tokenized documents). Therefore, `example` truncates a text
    to the row length, but `encode` does not. If `encode` depends on the row length (as with windows), `corpus_settings`
    must include this length.
    """

    families = EveryFamily()
    unit: ClassVar[str] = "records"
    packs: ClassVar[bool] = False
    watched: ClassVar[Optional[str]] = "loss"  # `select_by` of a task is usually a different metric
    shortest: ClassVar[int] = _MAX_SPECIAL_TOKENS + 2
    static: bool = True
    packages: ClassVar[tuple[str, ...]] = ()  # packages of the extra `metrics` that metrics and baselines import
    has_head: ClassVar[bool] = True  # True if the task adds a head; False: the model keeps its vocabulary head

    _model: ClassVar[ModelConfig] = ModelConfig()  # set by `adapted`
    _length: ClassVar[int] = 0  # tokens per row; set by `adapted`
    _frame: ClassVar[SpecialTokenFrame] = SpecialTokenFrame(RowFrame(), RowFrame())  # set by `bind`

    @property
    def fields(self) -> tuple[str, ...]:
        """Returns the names of the record fields that the task reads; "answers.text" is a nested field."""
        raise NotImplementedError

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """Returns the names in `fields` that a record may lack."""
        return ()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Returns the names of the metrics that `metrics` returns.

        These names and "loss" are the valid values of config.evaluate.select_by.
        """
        raise NotImplementedError

    @property
    def has_single_rows(self) -> bool:
        """Checks whether each record is one row, so that `metrics` accepts any rows of an array of answers."""
        return False

    def read(self, record: Mapping) -> Record:
        """Converts an entry of a file or dataset to a `Record`, with the label in its note. Strings may be empty.

        Raises:
          ValueError: the entry is invalid. The source adds its file and line to the message.
        """
        raise NotImplementedError

    def is_skipped(self, record: Record) -> bool:
        """Checks whether `encode` skips a record returned by `read`; the default is False."""
        del record
        return False

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        """Yields the documents of a record: token ids without special tokens, and a note.

        By default, a record has one document with the token ids of each string.
        """
        yield Encoded(tokenizer.encode_batch(list(record.texts)), record.note)

    def head(self, model: ModelConfig) -> HeadConfig:
        """Returns the default head config of this task for a model with the architecture `model`."""
        raise NotImplementedError

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        """Yields an error message for each reason why the head config `head` does not match the task."""
        yield from ()

    def evaluated(self) -> "Task":
        """Returns the task as the `evaluate` command needs it, which may take longer; by default, this task."""
        return self

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        """Computes the metrics in `metric_names` over all documents of a split.

        Args:
          answers: head outputs for the n documents of the split, NumPy array(s) [n, …]; see
            `models.heads.base.Head.predictions`.
          notes: the notes of the n documents.
        """
        raise NotImplementedError

    def read_unlabeled(self, record: Mapping) -> Record:
        """Converts an entry without a label to a `Record`.

        `encode` and `example` also accept this record. The example has no label arrays.

        Raises:
          ValueError: the entry is invalid.
          UserError: the task does not support predictions.
        """
        raise UserError(f"{type(self).__name__} cannot predict records without labels: use pretrainax evaluate")

    def prediction(self, answers: np.ndarray, notes: Sequence[Note]) -> JsonObject:
        """Computes the prediction for one record of `read_unlabeled`: the fields that `predict` adds to the record.

        Args:
          answers: head outputs for the d documents of the record, NumPy array(s) [d, …], as in `metrics`.
          notes: the notes of the d documents.
        """
        raise NotImplementedError

    def baselines(self, train: Sequence[Record], valid: Sequence[Record], notes: Sequence[Note]) -> Iterator[Baseline]:
        """Yields trivial baselines with their outputs for the validation records; constant baselines come first.

        The final table of a run compares the model with them. A task without a baseline raises UserError with a reason.

        Args:
          train: training records as returned by `read`, with labels.
          valid: the validation records.
          notes: the notes of all documents of `valid`, in order, as in `metrics`.
        """
        raise NotImplementedError

    def document_losses(self, answers: np.ndarray, notes: Sequence[Note]) -> Optional[np.ndarray]:
        """Computes the loss of each document from the head outputs, [documents]; None if they do not determine it."""
        return None

    def record_sums(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Computes metrics that are ratios of sums over records: {name: (numerators, denominators)}, both [records].

        The standard errors of other metrics are computed by resampling records. Therefore a ratio may also be missing
        here if `metrics` is fast and does not depend on the other records.
        """
        return {}

    def group(self, record: Record) -> str:
        """Returns the text that dependent records share (for example a passage): the first text that is not empty."""
        return next(filter(str.strip, record.texts), "")

    def validate(self, run: "Run", params: "Params") -> dict[str, float]:
        """Computes the validation loss and the metrics of the task for the parameters `params`."""
        return self.metrics_of(run, run.validation.predict(params))

    def metrics_of(self, run: "Run", predicted: Predicted) -> dict[str, float]:
        """Computes the metrics of `validate` from the result of `Validation.predict`."""
        validation_metrics, answers, notes = predicted
        all_metrics = validation_metrics | metrics_or_nan(self, answers, notes)
        if not (run.experiment.evaluate.halves and self.has_single_rows):
            return all_metrics
        size = run.experiment.train.global_batch_size
        middle = first_half(-(-len(notes) // size)) * size
        for end, rows in ((SELECTION_HALF, slice(middle)), (REPORT_HALF, slice(middle, None))):
            if notes[rows]:
                of_half = metrics_or_nan(self, answers[rows], notes[rows])
                all_metrics |= {f"{name}{end}": value for name, value in of_half.items()}
        return all_metrics

    def has_halves(self, metric):
        return metric not in self.metric_names or self.has_single_rows

    def warnings_of(self, experiment: Experiment, batches: "Batches") -> Iterator[str]:
        if experiment.checkpoint.init_from is None:
            yield "RANDOM INITIALIZATION: config.checkpoint.init_from is not set, so the model is not pretrained"
        (stream,) = batches.streams
        task = stream.objective
        assert isinstance(task, Task)  # bound to the tokenizer, which determines the number of special tokens per row
        truncated, length = stream.plan.statistics["records cut short"], experiment.data.sequence_length
        if truncated and self.has_head:  # a WritingTask has a different warning
            yield (
                f"{truncated:,} RECORDS ARE TRUNCATED: they are longer than config.data.sequence_length {length:,}, or "
                "with config.objective.chunks, longer than max_windows windows of this length"
            )
        yield from task.warnings(stream.corpus.note(i) for i in range(stream.corpus.num_documents))

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        """Yields warnings about probable mistakes in the training records; `notes` are the notes of all documents."""
        yield from ()

    @property
    def max_texts(self) -> int:
        """Returns the maximum number of strings in a document of the task."""
        return 2

    def sample_note(self) -> Note:
        """Returns a note with typical fields, used to plan a run's memory before any record is read."""
        raise NotImplementedError

    def corpus_settings(self) -> object:
        """Returns the task settings that determine the corpus, as JSON values; by default, all fields of the task."""
        return to_json(self)

    # --- methods of Objective ---------------------------------------------------------------------------------------

    @property
    def head_metrics(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.metric_names

    def complete(self, experiment: Experiment) -> None:
        if experiment.train.steps == 0 and experiment.train.budget is None:
            experiment.train.budget = BUDGET
        if not self.has_head:
            return
        default = self.head(experiment.model)
        head = experiment.model.head
        experiment.model.head = default if head is None else head.completed(default)

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        objective, name, allowed = (
            experiment.evaluate.objective,
            experiment.evaluate.select_by,
            ("loss", *self.metric_names, *(experiment.distill.metric_names if experiment.distill else ())),
        )
        if objective is not None:
            yield f"config.evaluate.objective is {type(objective).__name__}; a task validates itself: set it to None"
        if name and name not in allowed:
            yield f"config.evaluate.select_by is {name!r}, {nearest(name, allowed)}"

    def adapted(self, experiment: Experiment) -> "Task":
        task = copy.copy(self)
        task._model, task._length = experiment.model, experiment.data.sequence_length  # pyright: ignore
        return task

    def bind(self, tokenizer: "Tokenizer") -> "Task":
        task = copy.copy(self)
        task._frame = special_token_frame(self._model.family, tokenizer.vocabulary)  # pyright: ignore
        return task

    def lengths(self, sequence_length: int) -> Lengths:
        return Lengths(max(sequence_length - _MAX_SPECIAL_TOKENS, 1), sequence_length, sequence_length)

    def measure(self, raw: int) -> Lengths:
        length = raw + self._frame.max_count
        return Lengths(raw, length, length)

    def decoder_start(self, vocabulary: "Vocabulary") -> Optional[int]:
        return decoder_start(vocabulary)

    def check_vocabulary(self, vocabulary: "Vocabulary", sequence_length: int) -> None:
        """Accepts any vocabulary, because `special_token_frame` omits special tokens that the vocabulary lacks."""

    def prompt(self, tokens: np.ndarray, vocabulary: "Vocabulary") -> Example:
        raise UserError(f"the model was trained for {type(self).__name__} and cannot generate text")

    def split_strings(self, tokens: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
        """Splits the tokens of a document into the tokens of each string; `ends` are the end offsets of the strings."""
        return np.split(tokens, ends[:-1])

    @property
    def longest(self) -> int:
        """Returns the maximum number of tokens in a row."""
        return self.lengths(self._length).inputs

    def text_capacity(self, texts: int, length: Optional[int] = None) -> int:
        """Computes the maximum number of text tokens in a row: the row length minus the special tokens.

        Args:
          texts: number of strings in the row.
          length: number of tokens in the row. The default is config.data.sequence_length.
        """
        return (length or self._length) - self._frame.count(texts)

    def is_cut(self, encoded: Encoded) -> bool:
        """Checks whether `example` truncates the document to the row length."""
        return sum(map(len, encoded.parts)) > self.text_capacity(len(encoded.parts))

    def framed(self, texts: Sequence[np.ndarray], vocabulary: "Vocabulary", length: Optional[int] = None) -> Example:
        """Builds the model inputs for one row: the truncated strings with the special tokens of pretraining.

        In an encoder-decoder, encoder and decoder read the same row. The decoder inputs are shifted by one token, as in
        BART (Lewis et al. 2019, section 3.1), so that the last decoder position attends to all tokens of the row.

        Args:
          texts: token ids of each string, one array [tokens] per string.
          length: number of tokens in the row. The default is config.data.sequence_length.
        """
        sizes = truncate_longest_first([len(ids) for ids in texts], self.text_capacity(len(texts), length))
        row, types = self._frame.wrap([ids[:n] for ids, n in zip(texts, sizes, strict=True)])
        ones, positions = np.ones(len(row), np.int32), np.arange(len(row), dtype=np.int32)
        example = {"tokens": row, "segment_ids": ones, "positions": positions}
        if self._model.family == "encoder":
            return {**example, "token_types": np.minimum(types, max(self._model.num_token_types - 1, 0))}
        if self._model.family == "encoder_decoder":
            encoder_inputs = {f"encoder_{name}": array for name, array in example.items()}
            return {
                **encoder_inputs,
                **example,
                "tokens": np.append([self.decoder_start(vocabulary) or 0], row[:-1]).astype("i4"),
            }
        return example

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        data, head, name = experiment.data, experiment.model.head, type(self).__name__
        if self.has_head and head is None:
            yield f"config.objective is {name}, and config.model.head is None: use --config=finetune"
        elif not self.has_head and head is not None:
            yield f"config.model.head is {head}, but {name} generates with the vocabulary head: set it to None"
        elif head is not None:
            yield from self.head_problems(head)
        if absent := missing(self.packages):
            yield needs(f"config.objective is {name}, which", absent, METRICS)
        if len(data.source.components()) > 1:
            yield f"config.data.source is {type(data.source).__name__}, but {name} supports only one source"
        for field in ("quality", "near_duplicates"):
            if getattr(data, field) is not None:
                yield f"config.data.{field} applies to documents, but {name} has records: set it to None"
        if experiment.phases:
            yield f"{name} does not support config.phases: set it to ()"
        if self.has_head and (experiment.train.label_smoothing or experiment.train.z_loss):
            yield f"config.train.label_smoothing and z_loss need predicted tokens, {name} has none: set them to 0"

    def statistics(self, examples: Sequence[Example], vocabulary: "Vocabulary"):
        yield from ()


@dataclasses.dataclass
class TextTask(Task):
    """Base class of tasks that predict a label for a text or a text pair."""

    text_field: str = "text"  # the field of a record that contains its text
    pair_field: Optional[str] = None  # the field of the second text; None: records have one text
    label_field: str = "label"  # the field of the label
    chunks: Optional[Chunks] = None  # splits a text that is longer than a row into windows; None: truncates it

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.text_field, self.pair_field, self.label_field)))

    def read_texts(self, record: Mapping) -> tuple[str, ...]:
        """Returns the text or text pair of a record.

        Raises:
          ValueError: a field is missing, or its value is not text.
        """
        fields = (("text_field", self.text_field), ("pair_field", self.pair_field))
        return tuple(text_in(record, name, field) for field, name in fields if name is not None)

    @property
    @abc.abstractmethod  # the class is no ABC; the decorator only prevents a config from selecting this class
    def kind(self) -> Kind:
        """Returns the kind of the classification head: the field `kind` of `Classify`."""
        raise NotImplementedError

    def read_label(self, record: Mapping) -> Note:
        """Reads the label of a record and returns a note with the label; raises ValueError if the label is invalid."""
        raise NotImplementedError

    def label(self, note: Note) -> Example:
        """Builds the label arrays of an example from the label in its note."""
        raise NotImplementedError

    def read(self, record: Mapping) -> Record:
        return Record(self.read_texts(record), self.read_label(record))

    def read_unlabeled(self, record: Mapping) -> Record:
        return Record(self.read_texts(record), {})

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        (encoded,) = super().encode(record, tokenizer)
        if self.chunks is None:
            yield encoded
        else:
            capacity = self.bind(tokenizer).text_capacity(len(encoded.parts))
            yield from self.chunks.windows(encoded, capacity)

    def example(self, text: ObjectiveInput, rng: np.random.Generator, vocabulary: "Vocabulary") -> Example:
        assert text.parts is not None and text.note is not None  # set for records
        example = self.framed(self.split_strings(text.tokens, text.parts), vocabulary)
        return example | (self.label(text.note) if self.sample_note().keys() <= text.note.keys() else {})

    def is_cut(self, encoded: Encoded) -> bool:
        return TRUNCATED in encoded.note or super().is_cut(encoded)

    def combine_windows(self, answers: np.ndarray, notes: Sequence[Note]) -> tuple[np.ndarray, Sequence[Note]]:
        """Combines the head outputs [n, L] of n windows into one output per record, [records, L].

        Also returns one note per record. Without `chunks`, each record has one window, so the arguments are returned
        unchanged.
        """
        return (answers, notes) if self.chunks is None else self.chunks.combine(answers, notes, self.kind)

    def corpus_settings(self) -> object:
        settings = super().corpus_settings()
        return (
            settings if self.chunks is None else [settings, self._length, self._model.family]
        )  # these define the windows

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.chunks is not None:
            yield from self.chunks.problems(experiment)


def score_of(value: object, field: str) -> float:
    """Converts the value of a field to a float; raises ValueError if the value is not a finite number.

    Args:
      field: name of the field, for the error message.
    """
    try:
        score = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"field {field!r} holds {value!r}, it must be a number")
    return score


def text_in(record: Mapping, name: str, field: str) -> str:
    """Reads the field `name` of a record as a string.

    Args:
      field: the field of config.objective that sets `name`, for the error message.

    Raises:
      ValueError: the field is missing, or its value is neither text nor an integer.
    """
    text = text_of(record, name, f"config.objective.{field}")
    return text if isinstance(text, str) else text.decode()


def texts_in(record: Mapping, name: str, field: str, what: str = "texts") -> list[str]:
    """Reads the field `name` of a record as a list of strings.

    Args:
      field: the field of config.objective that sets `name`, for the error message.
      what: plural noun for the items in the error message.

    Raises:
      ValueError: the field is missing, or its value is not a list of strings.
    """
    values = value_of(record, name, f"config.objective.{field}")
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise ValueError(f"field {name!r} holds {values!r}, it must be a list of {what}")
    return [text_in({name: value}, name, field) for value in values]


def concatenate_segments(rows: Sequence[Example]) -> Example:
    """Concatenates several examples into one example with a separate segment for each of them.

    The segment id of example i (from 0) is i + 1, so that the examples do not attend to each other.
    """
    arrays_by_name = {name: [row[name] for row in rows] for name in rows[0]}
    for name in SEGMENT_FIELDS:
        if name in arrays_by_name:
            arrays_by_name[name] = [(i + 1) * ids for i, ids in enumerate(arrays_by_name[name])]
    return {name: np.concatenate(arrays) for name, arrays in arrays_by_name.items()}


def rounded(number: np.floating) -> float:
    """Rounds a number to six significant digits."""
    return float(f"{number:.6g}")
