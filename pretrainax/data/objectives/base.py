"""Defines `Objective`, the base class of pretraining objectives, and the types of its inputs and statistics."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import AUTO, Experiment, UserError, kinds, nearest
from pretrainax.config.model import known_families
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.parts import stream_part_names
from pretrainax.data.sources.base import Note

if TYPE_CHECKING:
    from pretrainax.data.pipeline import Batches
    from pretrainax.data.preparation.shards import Encoded
    from pretrainax.tokenization.base import Tokenizer, Vocabulary
    from pretrainax.training.run import Params, Run


class ObjectiveInput(NamedTuple):
    """The input of one training example: a sequence of corpus tokens, with document and sentence boundaries."""

    tokens: np.ndarray  # [n] int32 token ids; the vocabulary's separator ends each document
    segment_ids: np.ndarray  # [n] int32, the number of each token's document within the sequence, from 1
    # [p] int64 end offsets of the sentences, of source and target, or of the fields of a record; the last offset is n
    parts: Optional[np.ndarray] = None
    progress: float = 1.0  # training progress at this example, from 0 to 1
    draw_other_document: Optional[Callable[[np.random.Generator], "ObjectiveInput"]] = (
        None  # draws a sequence from another document
    )
    note: Optional[Note] = None  # metadata that a task attached to a record; None: not a record


class Statistic(NamedTuple):
    """A rate or mean measured over several examples, with the value that the config leads to expect."""

    name: str  # for example "mask rate"
    measured: float
    expected: Optional[float] = None  # None: the statistic has no expected value
    tolerance: float = 0.0  # maximum deviation for a correct objective, on the side of `measured`; see `tolerances`
    advice: str = ""  # how to change the config if `is_off` is True

    @property
    def is_off(self) -> bool:
        """Returns True if `expected` is set and `measured` deviates from `expected` by more than `tolerance`."""
        return self.expected is not None and not math.fabs(self.measured - self.expected) <= self.tolerance

    @property
    def is_weak(self) -> bool:
        """Returns True if there are too few examples to notice that a rate is half of `expected`."""
        return bool(self.expected) and self.tolerance >= self.expected / 2


def with_field_path(field: str, lines: Iterator[str]) -> Iterator[str]:
    """Yields the error lines of a nested objective, with "config.objective" replaced by "config.objective.<field>"."""
    for line in lines:
        yield line.replace("config.objective", f"config.objective.{field}")


class EveryFamily:
    """Descriptor for the `families` attribute of objectives that support every model family."""

    def __get__(self, objective, owner) -> tuple[str, ...]:
        return known_families()


class Objective(kinds.Objective):
    """Base class of pretraining objectives, which convert sequences of corpus tokens into training examples.

    Subclasses are dataclasses that override the methods that raise NotImplementedError. Examples vary in length: the
    pipeline packs several examples into a row and pads the row.
    """

    families: ClassVar[tuple[str, ...]] = ()  # supported values of config.model.family
    special_tokens: ClassVar[tuple[str, ...]] = ()  # required special tokens, as fields of `Vocabulary`
    # those of `special_tokens` that are not required if the tokenizer itself adds special tokens around a text
    replaced_by_frame: ClassVar[tuple[str, ...]] = ()
    tokenizers: ClassVar[str] = ""  # tokenizers with `special_tokens`, for error messages
    shortest: ClassVar[int] = 1  # minimum config.data.sequence_length
    # input of one example: consecutive "tokens" | whole "sentences" | one of the "pairs" of a data source | one of the
    # "records" of a task
    unit: ClassVar[str] = "tokens"
    pairs_documents: ClassVar[bool] = False  # an example may combine tokens of two documents
    packs: ClassVar[bool] = True  # a row may contain several examples
    separates_rows: ClassVar[bool] = False  # an example contains several sequences that do not attend to each other
    is_likelihood: ClassVar[bool] = False  # the loss is a negative log-likelihood, so bits per byte are meaningful
    watched: ClassVar[Optional[str]] = None  # loss metric that is monitored for spikes; None: `select_by`
    select_by: ClassVar[str] = "loss"  # validation metric that selects the best checkpoint: one of the training losses
    head_metrics: ClassVar[tuple[str, ...]] = ()  # additional validation metrics, for example of additional heads
    static: bool = False  # True: a sequence results in the same example in every epoch

    @property
    def part(self) -> str:
        """Returns this objective's label in the metrics of a mixture, as in "loss/objective=CausalLM"."""
        return f"objective={type(self).__name__}"

    @property
    def single_segment(self) -> bool:
        """Returns True if all tokens in an example belong to one segment, so that they may attend to each other."""
        return not self.separates_rows

    @property
    def needs_documents(self) -> bool:
        """Returns True if the input cannot be a pair, whose source and target both end with a separator."""
        return self.unit == "sentences"

    def lengths(self, sequence_length: int) -> Lengths:
        """Returns the maximum numbers of corpus, input and target tokens for examples with `sequence_length` inputs."""
        raise NotImplementedError

    def max_positions(self, sequence_length: int) -> int:
        """Returns the maximum number of positions in an example's inputs or targets, whichever is larger.

        sequence_length: the number of input tokens per row.
        """
        return max(self.lengths(sequence_length)[1:])

    def measure(self, raw: int) -> Lengths:
        """Returns the maximum lengths of an example made from `raw` corpus tokens (for pairs, see `measure_pairs`)."""
        raise NotImplementedError

    @property
    def has_own_sizes(self) -> bool:
        """Returns True if `measure` depends on the model or the tokenizer, and so do the stored row plans."""
        return self.unit == "records"

    def max_pair_lengths(self, lengths: Lengths) -> tuple[int, int]:
        """Returns the maximum source and target lengths of a pair; longer sequences are truncated.

        lengths: the maximum lengths of an example.
        """
        return lengths.inputs, lengths.targets

    def measure_pairs(self, sizes: np.ndarray) -> np.ndarray:
        """Returns how many input and target tokens the examples made from n pairs have, [n, 2].

        sizes: the numbers of source and target tokens of each pair, [n, 2].
        """
        return sizes

    def is_cut(self, encoded: "Encoded") -> bool:
        """Returns True if `example` has to truncate the encoded record to fit the row length."""
        raise NotImplementedError

    def with_settings_between(self, begin: float, end: float) -> "Objective":
        """Returns this objective with the settings that apply between two values of training progress (from 0 to 1).

        The data check compares the examples of this interval with the `statistics` of the returned objective.
        """
        return self

    def complete(self, experiment: Experiment) -> None:
        """Sets the "auto" fields of `experiment` that this objective determines, after all flags are parsed."""

    def adapted(self, experiment: Experiment) -> "Objective":
        """Returns this objective with additional settings taken from other parts of the config.

        These settings are not fields of the objective. Only tasks have additional settings: their examples depend on
        the model, which determines the special tokens around a sequence, and on the sequence length.
        """
        return self

    def bind(self, tokenizer: "Tokenizer") -> "Objective":
        """Returns this objective bound to a tokenizer. Only bound objectives can make examples.

        Data that depends on the tokenizer is stored outside of the dataclass fields, because it is not part of the
        config.
        """
        return self

    def components(self, pairs: bool = False) -> list[tuple[float, "Objective"]]:
        """Returns (weight, objective) for each objective in a mixture, flattening nested mixtures.

        An objective that is not a mixture returns itself with weight 1.

        Args:
          pairs: whether the corpus consists of source-target pairs, rather than documents.
        """
        return [(1.0, self)]

    def decoder_start(self, vocabulary: "Vocabulary") -> Optional[int]:
        """Returns the id of an encoder-decoder's first decoder input, or None if the vocabulary lacks this token."""
        return vocabulary.pad if vocabulary.decoder_start is None else vocabulary.decoder_start

    def example(self, text: ObjectiveInput, rng: np.random.Generator, vocabulary: "Vocabulary") -> Example:
        """Builds the arrays of one example, without padding; a pure function of its arguments and the state of `rng`.

        Names, dtypes and shapes match those of a batch (`data.batch.FIELDS`), without the batch axis.
        """
        raise NotImplementedError

    def prompt(self, tokens: np.ndarray, vocabulary: "Vocabulary") -> Example:
        """Builds the model input for a user's prompt: an example without targets.

        In an encoder-decoder, the encoder reads the prompt, and the array "tokens" of the result is the decoder's
        initial input.

        Args:
          tokens: [n] int32, the token ids of the prompt.
        """
        raise NotImplementedError

    def prompt_start(self, vocabulary: "Vocabulary") -> tuple[int, ...]:
        """Returns the special token ids with which each `prompt` of a decoder begins."""
        return ()

    def restore(self, example: Example, vocabulary: "Vocabulary") -> np.ndarray:
        """Recovers the corpus tokens from which `example` was made, [raw] int32."""
        raise NotImplementedError

    def token_offsets(self, example: Example, vocabulary: "Vocabulary") -> np.ndarray:
        """Returns the offsets in the corpus tokens of `example` from which its T tokens come, [T] int64.

        In a decoder, the offset at a position is that of the target that is predicted there. Offsets may be outside the
        corpus tokens at special tokens. Validation uses them to assign predictions to documents.
        """
        return np.arange(len(example["tokens"]))

    def statistics(self, examples: Sequence[Example], vocabulary: "Vocabulary") -> Iterator[Statistic]:
        """Yields statistics of `examples`: measured rates, with expected values if fields of the objective set them."""
        yield from ()

    def selection(self, notes: Iterable[Note]) -> tuple[str, str]:
        """Returns the metric that selects checkpoints by default, and why it is not `select_by`, or "".

        Args:
          notes: metadata of training records; empty if the objective has no records.
        """
        return self.select_by, ""

    def input_statistics(
        self, examples: Sequence[Example], inputs: Sequence[ObjectiveInput], vocabulary: "Vocabulary"
    ) -> Iterator[Statistic]:
        """Yields statistics whose expected values depend on the `inputs` from which the `examples` were made."""
        yield from ()

    def validate(self, run: "Run", params: "Params") -> dict[str, float]:
        """Computes the metrics of `params` on a run's validation split, by metric name."""
        return run.validation.metrics(params)

    def has_halves(self, metric: str) -> bool:
        """Checks whether `evaluate.halves` computes a metric of this objective for each half of the validation."""
        return "/" not in metric and metric not in ("perplexity", "bits_per_token")

    def save_assets(self, tokenizer_folder: str) -> None:
        """Writes other files that users of the model need to the run's tokenizer folder."""

    def warnings_of(self, experiment: Experiment, batches: "Batches") -> Iterator[str]:
        """Yields warnings about likely mistakes in the config of a run that trains on `batches`."""
        yield from ()

    def check_vocabulary(self, vocabulary: "Vocabulary", sequence_length: int) -> None:
        """Raises UserError if the vocabulary lacks a special token for examples with `sequence_length` inputs."""
        has_frame = vocabulary.frame is not None and vocabulary.frame.count(1) > 0
        missing = [name for name in self.special_tokens if getattr(vocabulary, name) is None]
        missing = [name for name in missing if not (has_frame and name in self.replaced_by_frame)]
        if missing:
            raise UserError(
                f"the tokenizer has no {' and no '.join(missing)} token, {type(self).__name__} needs "
                f"{', '.join(self.special_tokens)}; set config.tokenizer to {self.tokenizers}"
            )

    def field_problems(self) -> Iterator[str]:
        """Yields error lines about invalid field values of this objective."""
        yield from ()

    def problems(self, experiment: Experiment) -> Iterator[str]:
        name, family, length = type(self).__name__, experiment.model.family, experiment.data.sequence_length
        if family not in self.families:
            built_in = (c for c in Objective.alternatives(Objective) if issubclass(c, Objective))  # narrows the type
            alternatives = sorted(c.__name__ for c in built_in if family in c.families)
            yield (
                f"config.objective is {name}, which trains config.model.family {' or '.join(self.families)}, "
                f"not {family!r}" + (f" (for it: {', '.join(alternatives)})" if alternatives else "")
            )
        field_errors = list(self.field_problems())
        yield from field_errors
        if field_errors:  # lengths are undefined
            return
        if length < self.shortest:
            yield f"config.data.sequence_length is {length}, {name} needs at least {self.shortest}"
            return
        for source in getattr(experiment.data.source, "components", tuple)():  # another check reports invalid sources
            if source.pairs and any(part.needs_documents for _, part in self.components(pairs=True)):
                yield f"config.objective is {name}, which needs documents, but {type(source).__name__} has pairs"
        longest, limit = self.adapted(experiment).max_positions(length), experiment.model.position.max_length
        if limit not in (None, AUTO) and longest > limit:
            yield (
                f"config.data.sequence_length {length} makes rows of {longest} tokens, "
                f"config.model.position.max_length is {limit}"
            )

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        """Yields error lines about the validation settings of a config that is otherwise valid."""
        validation_objective, metric = experiment.validation_objective, experiment.evaluate.select_by
        if experiment.model.head is not None:
            name = type(self).__name__
            yield f"config.model.head is {experiment.model.head}, {name} trains a language model: set it to None"
        if validation_objective.unit != self.unit:
            yield (
                f"config.evaluate.objective is {type(validation_objective).__name__}, which reads "
                f"{validation_objective.unit}, but "
                f"config.objective {type(self).__name__} reads {self.unit}: both must read the same unit"
            )
        sources = experiment.data.source.components()
        per_part_metrics = ("loss", "accuracy", "text_loss", "text_accuracy", *validation_objective.head_metrics)
        per_part_metrics += ("bits_per_byte",) if validation_objective.is_likelihood else ()
        if all(source.pairs for source in sources) and experiment.model.family != "encoder":
            per_part_metrics += ("sequence_accuracy",)
        per_part_metrics += () if experiment.distill is None else experiment.distill.metric_names
        overall_metrics = ("perplexity", "bits_per_token")
        parts = dict.fromkeys(part for parts in stream_part_names(sources, validation_objective) for part in parts)
        if metric and metric not in (
            allowed := [
                *per_part_metrics,
                *overall_metrics,
                *(f"{name}/{part}" for name in per_part_metrics for part in parts),
            ]
        ):
            yield f"config.evaluate.select_by is {metric!r}, {nearest(metric, allowed)}"
