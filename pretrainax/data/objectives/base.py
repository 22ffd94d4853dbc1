"""What every objective has: lengths, an example of a window, its inverse, and checks of config and vocabulary."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from pretrainax.config import Choice, Experiment, UserError

if TYPE_CHECKING:
    from pretrainax.tokenizer import Vocabulary


class Lengths(NamedTuple):
    """Tokens of one example, the same for every example of a run."""

    raw: int  # taken from the corpus
    inputs: int  # read by the encoder, or by the decoder where there is no encoder
    targets: int  # predicted


class Objective(Choice):
    """Base of the objectives. A subclass is a dataclass that gives what raises NotImplementedError here."""

    families: ClassVar[tuple[str, ...]] = ()  # values of config.model.family it can train
    special_tokens: ClassVar[tuple[str, ...]] = ()  # fields of Vocabulary that must not be None
    tokenizers: ClassVar[str] = ""  # which have them, for the error line
    shortest: ClassVar[int] = 1  # least config.data.sequence_length

    def lengths(self, sequence_length: int) -> Lengths:
        """How many raw tokens make an example whose input is `sequence_length` long."""
        raise NotImplementedError

    def example(
        self, tokens: np.ndarray, rng: np.random.Generator, vocabulary: "Vocabulary", segment_ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One row of a batch; a pure function of its arguments and the state of `rng`.

        Args:
          tokens: [raw] int32, a window of the corpus; its length fixes every length of the example.
          rng: where all randomness comes from.
          segment_ids: [raw] int32, numbers the documents of the window from 1.
        """
        raise NotImplementedError

    def restore(self, example: dict[str, np.ndarray], vocabulary: "Vocabulary") -> np.ndarray:
        """The tokens that `example` was made of, [raw] int32: nothing of the text is lost."""
        raise NotImplementedError

    def check_vocabulary(self, vocabulary: "Vocabulary", sequence_length: int) -> None:
        """Raises UserError when the vocabulary lacks a special token that examples of this length need."""
        missing = [name for name in self.special_tokens if getattr(vocabulary, name) is None]
        if missing:
            raise UserError(
                f"the tokenizer has no {' and no '.join(missing)} token, {type(self).__name__} needs "
                f"{', '.join(self.special_tokens)}; set config.tokenizer to {self.tokenizers}"
            )

    def field_problems(self) -> Iterator[str]:
        """One line for each own field out of range."""
        yield from ()

    def problems(self, experiment: Experiment) -> Iterator[str]:
        name, family, length = type(self).__name__, experiment.model.family, experiment.data.sequence_length
        if family not in self.families:
            fitting = sorted(c.__name__ for c in Objective.__subclasses__() if family in c.families)
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
        longest, room = max(self.lengths(length)[1:]), experiment.model.position.max_length
        if room is not None and longest > room:
            yield (
                f"config.data.sequence_length {length} makes rows of {longest} tokens, "
                f"config.model.position.max_length is {room}"
            )
