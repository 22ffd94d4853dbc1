"""The base of all objectives: lengths, an example of a text, its inverse, and checks of config and vocabulary."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import AUTO, Experiment, UserError, kinds, nearest
from pretrainax.config.model import known_families
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.parts import parts_of_streams
from pretrainax.data.sources.base import Note

if TYPE_CHECKING:
    from pretrainax.data.pipeline import Batches
    from pretrainax.data.preparation.shards import Encoded
    from pretrainax.tokenization.base import Tokenizer, Vocabulary
    from pretrainax.training.run import Params, Run


class Text(NamedTuple):
    """The text that one example is made of: a run of tokens of the corpus."""

    tokens: np.ndarray  # [n] int32; a document ends with the vocabulary's separator
    segment_ids: np.ndarray  # [n] int32, numbers the documents from 1
    # [p] int64, where each sentence ends, source and target, or each text of a record; the last is n
    parts: Optional[np.ndarray] = None
    progress: float = 1.0  # of the training, from 0 to 1
    elsewhere: Optional[Callable[[np.random.Generator], "Text"]] = None  # draws a text of another document
    note: Optional[Note] = None  # of a record: what its task has noted


class Statistic(NamedTuple):
    """A number measured over some examples, beside what the config asks for."""

    name: str  # "mask rate"
    measured: float
    asked: Optional[float] = None  # None: nothing is asked
    tolerance: float = 0.0  # farther than this from `asked`, the objective is wrong: 5 standard deviations, rounding
    advice: str = ""  # what to do where it is

    @property
    def is_off(self) -> bool:
        return self.asked is not None and not math.fabs(self.measured - self.asked) <= self.tolerance


def of_field(field: str, lines: Iterator[str]) -> Iterator[str]:
    """Yields the error lines of an objective that is `config.objective.<field>`."""
    for line in lines:
        yield line.replace("config.objective", f"config.objective.{field}")


class EveryFamily:
    """`families` of an objective that trains every model."""

    def __get__(self, objective, owner) -> tuple[str, ...]:
        return known_families()


class Objective(kinds.Objective):
    """Base of the objectives. A subclass is a dataclass that gives what raises NotImplementedError here.

    Examples are as long as their text makes them: the pipeline puts several into a row and pads it.
    """

    families: ClassVar[tuple[str, ...]] = ()  # values of config.model.family it can train
    special_tokens: ClassVar[tuple[str, ...]] = ()  # fields of Vocabulary that must not be None
    tokenizers: ClassVar[str] = ""  # which have them, for the error line
    shortest: ClassVar[int] = 1  # least config.data.sequence_length
    # a text is: any run of tokens | whole "sentences" | one of the "pairs" of a source | one of the "records" of a task
    unit: ClassVar[str] = "tokens"
    pairs_documents: ClassVar[bool] = False  # an example may take text from another document
    packs: ClassVar[bool] = True  # a row may hold more than one example
    parts_rows: ClassVar[bool] = False  # an example is several texts side by side, which do not see one another
    is_likelihood: ClassVar[bool] = False  # the loss is a likelihood of the text: it has a meaning in bits per byte
    watched: ClassVar[Optional[str]] = None  # the loss whose spikes are looked for; None: `select_by`
    select_by: ClassVar[str] = "loss"  # the figure of a validation that its model is kept for: a loss that is trained
    head_figures: ClassVar[tuple[str, ...]] = ()  # that a validation of it has of further heads
    static: bool = False  # the same text gives the same example in each epoch

    @property
    def part(self) -> str:
        """Names it in the figures of a mixture, "loss/objective=CausalLM"."""
        return f"objective={type(self).__name__}"

    @property
    def one_text(self) -> bool:
        """Returns True if an example has one segment, so that all of its tokens may attend to each other."""
        return not self.parts_rows

    def lengths(self, sequence_length: int) -> Lengths:
        """Returns the lengths of the longest example that has no more than `sequence_length` inputs."""
        raise NotImplementedError

    def places(self, sequence_length: int) -> int:
        """Returns how many positions the longest text of such a row takes."""
        return max(self.lengths(sequence_length)[1:])

    def measure(self, raw: int) -> Lengths:
        """Returns at most how long an example of `raw` tokens is; of pairs, `measure_pairs`."""
        raise NotImplementedError

    def pair_room(self, lengths: Lengths) -> tuple[int, int]:
        """Returns the most tokens of source and target that make an example of these lengths; pairs are cut to it."""
        return lengths.inputs, lengths.targets

    def measure_pairs(self, sizes: np.ndarray) -> np.ndarray:
        """Returns inputs and targets, [n, 2], of examples of n pairs; sizes: [n, 2] tokens of source and target."""
        return sizes

    def is_cut(self, encoded: "Encoded") -> bool:
        """Returns True if a document of a corpus of records loses tokens where it becomes an example."""
        raise NotImplementedError

    def between(self, begin: float, end: float) -> "Objective":
        """Returns the objective as it is in this part of the training, from 0 to 1: its `statistics` are asked for."""
        return self

    def complete(self, experiment: Experiment) -> None:
        """Puts into a config, once all flags are known, what follows from this objective and is `auto` there."""

    def adapted(self, experiment: Experiment) -> "Objective":
        """Returns this objective with what it needs to know of a config; that is kept outside of the fields.

        Of its examples only a task's depend on the model: how texts are framed, how many tokens there is room for.
        """
        return self

    def bind(self, tokenizer: "Tokenizer") -> "Objective":
        """Returns this objective with what it needs to know of the tokenizer; that one makes the examples.

        What is known is kept outside of the fields: it is not part of the config.
        """
        return self

    def components(self, pairs: bool = False) -> list[tuple[float, "Objective"]]:
        """Returns the weighted objectives of a mixture, not nested, for a corpus that holds `pairs` or text."""
        return [(1.0, self)]

    def decoder_start(self, vocabulary: "Vocabulary") -> Optional[int]:
        """Returns the id that a decoder reads before its targets, where an encoder reads the inputs."""
        return vocabulary.pad

    def example(self, text: Text, rng: np.random.Generator, vocabulary: "Vocabulary") -> Example:
        """Makes the arrays of one example, not padded; a pure function of the arguments and the state of `rng`.

        Its names are those of a batch, and so are shapes and dtypes but for the axis of rows: `data.batch.FIELDS`.
        """
        raise NotImplementedError

    def prompt(self, tokens: np.ndarray, vocabulary: "Vocabulary") -> Example:
        """Returns what a model reads of a text that a user gives, before it writes: an example without predictions.

        Where there is an encoder, the text is all that it reads, and `tokens` are what the decoder starts from.
        """
        raise NotImplementedError

    def restore(self, example: Example, vocabulary: "Vocabulary") -> np.ndarray:
        """Returns the tokens that `example` was made of, [raw] int32: nothing of the text is lost."""
        raise NotImplementedError

    def statistics(self, examples: Sequence[Example], vocabulary: "Vocabulary") -> Iterator[Statistic]:
        """Measures `examples`: the rates that the fields of the objective ask for, and others worth a look."""
        yield from ()

    def validate(self, run: "Run", params: "Params") -> dict[str, float]:
        """Returns the metrics of the parameters of a model on the validation split of a run."""
        return run.validation.metrics(params)

    def save_beside(self, tokenizer_folder: str) -> None:
        """Writes into the folder of a run's tokenizer what users of the model need beside it."""

    def warnings_of(self, experiment: Experiment, batches: "Batches") -> Iterator[str]:
        """Yields what is likely no one's intention in a run that trains on these batches."""
        yield from ()

    def check_vocabulary(self, vocabulary: "Vocabulary", sequence_length: int) -> None:
        """Raises UserError when the vocabulary lacks a special token that examples of this length need."""
        missing = [name for name in self.special_tokens if getattr(vocabulary, name) is None]
        if missing:
            raise UserError(
                f"the tokenizer has no {' and no '.join(missing)} token, {type(self).__name__} needs "
                f"{', '.join(self.special_tokens)}; set config.tokenizer to {self.tokenizers}"
            )

    def field_problems(self) -> Iterator[str]:
        """Yields one line for each own field out of range."""
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
        if wrong:  # no lengths without sound fields
            return
        if length < self.shortest:
            yield f"config.data.sequence_length is {length}, {name} needs at least {self.shortest}"
            return
        for source in getattr(experiment.data.source, "components", tuple)():  # what is no source is told elsewhere
            if source.pairs and any(part.unit == "sentences" for _, part in self.components(pairs=True)):
                yield f"config.objective is {name}, which needs texts, and {type(source).__name__} has pairs"
        longest, room = self.adapted(experiment).places(length), experiment.model.position.max_length
        if room not in (None, AUTO) and longest > room:
            yield (
                f"config.data.sequence_length {length} makes rows of {longest} tokens, "
                f"config.model.position.max_length is {room}"
            )

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        """Yields what is wrong with how a run that trains this objective is validated, of a config otherwise sound."""
        asked, figure = experiment.validation_objective, experiment.evaluate.select_by
        if experiment.model.head is not None:
            name = type(self).__name__
            yield f"config.model.head is {experiment.model.head}, {name} trains a language model: set it to None"
        if asked.unit != self.unit:
            yield (
                f"config.evaluate.objective is {type(asked).__name__}, which is made of {asked.unit}, and "
                f"config.objective {type(self).__name__} of {self.unit}: validate by one that is made of the same"
            )
        sources = experiment.data.source.components()
        own = ("loss", "accuracy", "text_loss", "text_accuracy", *asked.head_figures)
        own += ("bits_per_byte",) if asked.is_likelihood else ()
        if all(source.pairs for source in sources) and experiment.model.family != "encoder":
            own += ("sequence_accuracy",)
        whole = ("perplexity", "bits_per_token")
        parts = dict.fromkeys(part for parts in parts_of_streams(sources, asked) for part in parts)
        if figure and figure not in (allowed := [*own, *whole, *(f"{name}/{part}" for name in own for part in parts)]):
            yield f"config.evaluate.select_by is {figure!r}, {nearest(figure, allowed)}"


def _kinds(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
