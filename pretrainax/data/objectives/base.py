"""Defines the base class of objectives: lengths and arrays of examples, their inverse, and checks of the config."""

import math
from collections.abc import Callable, Iterator, Sequence
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


class Text(NamedTuple):
    """The input of one example: a sequence of corpus tokens."""

    tokens: np.ndarray  # [n] int32; a document ends with the vocabulary's separator
    segment_ids: np.ndarray  # [n] int32, numbers the documents from 1
    # [p] int64, ends of the sentences, of source and target, or of the fields of a record; the last is n
    parts: Optional[np.ndarray] = None
    progress: float = 1.0  # training progress, from 0 to 1
    elsewhere: Optional[Callable[[np.random.Generator], "Text"]] = None  # draws a sequence from another document
    note: Optional[Note] = None  # metadata of a record, written by its task


class Statistic(NamedTuple):
    """A value measured over some examples, with the expected value, which the config sets."""

    name: str  # "mask rate"
    measured: float
    expected: Optional[float] = None  # expected value; None: no expected value
    tolerance: float = 0.0  # largest deviation of a correct objective: 5 standard deviations, plus rounding
    advice: str = ""  # how to change the config if `is_off`

    @property
    def is_off(self) -> bool:
        """Returns True if there is an expected value and `measured` deviates from it by more than the tolerance."""
        return self.expected is not None and not math.fabs(self.measured - self.expected) <= self.tolerance


def with_field_path(field: str, lines: Iterator[str]) -> Iterator[str]:
    """Yields error lines of a nested objective, with the path config.objective.<field> for config.objective."""
    for line in lines:
        yield line.replace("config.objective", f"config.objective.{field}")


class EveryFamily:
    """Descriptor for `families` of an objective that supports every model family."""

    def __get__(self, objective, owner) -> tuple[str, ...]:
        return known_families()


class Objective(kinds.Objective):
    """Base class of objectives. A subclass is a dataclass that overrides the methods that raise NotImplementedError.

    Examples vary in length: the pipeline packs several examples into a row and pads the row.
    """

    families: ClassVar[tuple[str, ...]] = ()  # supported values of config.model.family
    special_tokens: ClassVar[tuple[str, ...]] = ()  # fields of Vocabulary that must not be None
    tokenizers: ClassVar[str] = ""  # tokenizers with these special tokens, for error messages
    shortest: ClassVar[int] = 1  # minimum config.data.sequence_length
    # input of an example: any run of "tokens" | whole "sentences" | one of the "pairs" of a source | one of the
    # "records" of a task
    unit: ClassVar[str] = "tokens"
    pairs_documents: ClassVar[bool] = False  # an example may contain text of another document
    packs: ClassVar[bool] = True  # a row may contain several examples
    separates_rows: ClassVar[bool] = False  # an example contains several sequences that do not attend to each other
    is_likelihood: ClassVar[bool] = False  # the loss is a negative log-likelihood, so bits per byte are meaningful
    watched: ClassVar[Optional[str]] = None  # name of the loss that is monitored for spikes; None: `select_by`
    select_by: ClassVar[str] = "loss"  # the validation metric that selects the best checkpoint: a training loss
    head_metrics: ClassVar[tuple[str, ...]] = ()  # validation metrics of additional heads
    static: bool = False  # True: a sequence gives the same example in each epoch

    @property
    def part(self) -> str:
        """Returns the label of the objective in metrics of a mixture, as in "loss/objective=CausalLM"."""
        return f"objective={type(self).__name__}"

    @property
    def single_segment(self) -> bool:
        """Returns True if an example has one segment, so that all of its tokens may attend to each other."""
        return not self.separates_rows

    def lengths(self, sequence_length: int) -> Lengths:
        """Returns the lengths of the longest example that has at most `sequence_length` inputs."""
        raise NotImplementedError

    def max_positions(self, sequence_length: int) -> int:
        """Returns the number of positions of the longest example in a row with `sequence_length` inputs."""
        return max(self.lengths(sequence_length)[1:])

    def measure(self, raw: int) -> Lengths:
        """Returns the maximum lengths of an example of `raw` corpus tokens; for pairs, see `measure_pairs`."""
        raise NotImplementedError

    def max_pair_lengths(self, lengths: Lengths) -> tuple[int, int]:
        """Returns the maximum numbers of source and target tokens in an example of these lengths.

        Longer sources and targets are truncated.
        """
        return lengths.inputs, lengths.targets

    def measure_pairs(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the numbers of inputs and targets of n pairs, [n, 2].

        sizes: the numbers of source and target tokens, [n, 2].
        """
        return sizes

    def is_cut(self, encoded: "Encoded") -> bool:
        """Returns True if the example of a record has fewer tokens than the encoded record."""
        raise NotImplementedError

    def between(self, begin: float, end: float) -> "Objective":
        """Returns the objective with its settings in an interval of training progress (0 to 1).

        The data check reads the `statistics` of this objective.
        """
        return self

    def complete(self, experiment: Experiment) -> None:
        """Sets the `auto` fields of a config that follow from this objective, after all flags are parsed."""

    def adapted(self, experiment: Experiment) -> "Objective":
        """Returns this objective with the settings that it takes from the rest of a config.

        These settings are not fields of the objective. Only the examples of tasks depend on the model: on the special
        tokens around sequences and on the available length.
        """
        return self

    def bind(self, tokenizer: "Tokenizer") -> "Objective":
        """Returns this objective bound to a tokenizer; the bound objective makes the examples.

        Data of the tokenizer is stored outside of the dataclass fields, because it is not part of the config.
        """
        return self

    def components(self, pairs: bool = False) -> list[tuple[float, "Objective"]]:
        """Returns (weight, objective) for each objective of a mixture, without nesting.

        An objective that is not a mixture returns itself with weight 1. pairs: True for a corpus of pairs, False for a
        corpus of documents.
        """
        return [(1.0, self)]

    def decoder_start(self, vocabulary: "Vocabulary") -> Optional[int]:
        """Returns the id of the first decoder token in an encoder-decoder; None if the vocabulary has no such token."""
        return vocabulary.pad

    def example(self, text: Text, rng: np.random.Generator, vocabulary: "Vocabulary") -> Example:
        """Returns the arrays of one example, without padding; a pure function of the arguments and the state of `rng`.

        Names, dtypes and shapes match those of a batch (`data.batch.FIELDS`), without the batch axis.
        """
        raise NotImplementedError

    def prompt(self, tokens: np.ndarray, vocabulary: "Vocabulary") -> Example:
        """Returns the model input for the prompt of a user: an example without targets.

        If the model has an encoder, the encoder reads the prompt, and `tokens` is the initial input of the decoder.
        """
        raise NotImplementedError

    def restore(self, example: Example, vocabulary: "Vocabulary") -> np.ndarray:
        """Returns the corpus tokens from which `example` was made, int32 [raw]; no token is lost."""
        raise NotImplementedError

    def statistics(self, examples: Sequence[Example], vocabulary: "Vocabulary") -> Iterator[Statistic]:
        """Yields statistics of `examples`: the rates that fields of the objective set, and other informative rates."""
        yield from ()

    def validate(self, run: "Run", params: "Params") -> dict[str, float]:
        """Returns the metrics of the parameters `params` on the validation split of a run, by name."""
        return run.validation.metrics(params)

    def save_assets(self, tokenizer_folder: str) -> None:
        """Writes additional files for users of the model into the tokenizer folder of a run."""

    def warnings_of(self, experiment: Experiment, batches: "Batches") -> Iterator[str]:
        """Yields warnings about likely mistakes in a run that trains on these batches."""
        yield from ()

    def check_vocabulary(self, vocabulary: "Vocabulary", sequence_length: int) -> None:
        """Raises UserError if the vocabulary lacks a special token that examples of this length need."""
        missing = [name for name in self.special_tokens if getattr(vocabulary, name) is None]
        if missing:
            raise UserError(
                f"the tokenizer has no {' and no '.join(missing)} token, {type(self).__name__} needs "
                f"{', '.join(self.special_tokens)}; set config.tokenizer to {self.tokenizers}"
            )

    def field_problems(self) -> Iterator[str]:
        """Yields one error line per field that is out of range."""
        yield from ()

    def problems(self, experiment: Experiment) -> Iterator[str]:
        name, family, length = type(self).__name__, experiment.model.family, experiment.data.sequence_length
        if family not in self.families:
            fitting = sorted(c.__name__ for c in _kinds(Objective) if family in c.families)
            yield (
                f"config.objective is {name}, which trains config.model.family {' or '.join(self.families)}, "
                f"not {family!r}" + (f" (for it: {', '.join(fitting)})" if fitting else "")
            )
        wrong = list(self.field_problems())
        yield from wrong
        if wrong:  # lengths are undefined
            return
        if length < self.shortest:
            yield f"config.data.sequence_length is {length}, {name} needs at least {self.shortest}"
            return
        for source in getattr(experiment.data.source, "components", tuple)():  # another check reports invalid sources
            if source.pairs and any(part.unit == "sentences" for _, part in self.components(pairs=True)):
                yield f"config.objective is {name}, which needs documents, but {type(source).__name__} has pairs"
        longest, limit = self.adapted(experiment).max_positions(length), experiment.model.position.max_length
        if limit not in (None, AUTO) and longest > limit:
            yield (
                f"config.data.sequence_length {length} makes rows of {longest} tokens, "
                f"config.model.position.max_length is {limit}"
            )

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        """Yields error lines about the validation of a run with this objective, for an otherwise valid config."""
        validated, metric = experiment.validation_objective, experiment.evaluate.select_by
        if experiment.model.head is not None:
            name = type(self).__name__
            yield f"config.model.head is {experiment.model.head}, {name} trains a language model: set it to None"
        if validated.unit != self.unit:
            yield (
                f"config.evaluate.objective is {type(validated).__name__}, which reads {validated.unit}, but "
                f"config.objective {type(self).__name__} reads {self.unit}: both must read the same unit"
            )
        sources = experiment.data.source.components()
        by_part = ("loss", "accuracy", "text_loss", "text_accuracy", *validated.head_metrics)
        by_part += ("bits_per_byte",) if validated.is_likelihood else ()
        if all(source.pairs for source in sources) and experiment.model.family != "encoder":
            by_part += ("sequence_accuracy",)
        overall = ("perplexity", "bits_per_token")
        parts = dict.fromkeys(part for parts in stream_part_names(sources, validated) for part in parts)
        if metric and metric not in (
            allowed := [*by_part, *overall, *(f"{name}/{part}" for name in by_part for part in parts)]
        ):
            yield f"config.evaluate.select_by is {metric!r}, {nearest(metric, allowed)}"


def _kinds(base: type) -> Iterator[type]:
    """Yields all direct and indirect subclasses of a class."""
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
