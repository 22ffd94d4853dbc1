"""Turns a text into what a model is asked about it: examples, in which the weights say which predictions count.

A decoder is asked for each token from those before it, an encoder for each token from all others, a model that fills
holes for what was in them. Which of it is done follows from the model's family and its objective: `method_of`.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.objectives import Objective, SequenceToSequence
from pretrainax.data.objectives.base import Text
from pretrainax.data.objectives.masking_units import WholeWords
from pretrainax.data.objectives.prefix import DecoderOnly
from pretrainax.data.sources import NoSource
from pretrainax.data.sources.base import Document
from pretrainax.inference.framing import before_text, longest
from pretrainax.inference.loaded import LoadedModel, check_language_model


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Says how texts are scored; a field that does nothing for a model's family is refused when it is set."""

    context: Optional[int] = None  # tokens that the model reads at a time; None: see `context_of`
    stride: Optional[int] = None  # decoders: tokens between the starts of two windows; None: half the context
    by_word: bool = False  # encoders: of a word in several tokens, those after the one that is asked for are masked too
    seed: Optional[int] = None  # models that fill holes: of the holes; None: 0


AS_IN_TRAINING = Scoring()


class Asked(NamedTuple):
    """Holds what a model is asked about one text."""

    examples: Iterable[Example]  # not padded; `loss_weights` are 1 where a prediction counts, else 0
    bytes: int  # of UTF-8, of the text that is predicted
    unknown: int = 0  # tokens that stand for what the vocabulary lacks: their likelihood is not that of the text
    pieces: int = 1  # each asked about without the others
    is_cut: bool = False  # a side of a pair is too long


class Method:
    """Is a way to score texts. `counted` says which, for people."""

    prefix: ClassVar[str] = ""  # of the names of its figures: where they are no likelihood of the whole text
    explanation: ClassVar[str] = ""  # what is given instead
    options: ClassVar[tuple[str, ...]] = ()  # fields of `Scoring` that it heeds, beside the context
    counted: str

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        for field in dataclasses.fields(scoring):
            value = getattr(scoring, field.name)
            if field.name not in ("context", *self.options) and value != field.default:
                raise UserError(
                    f"{field.name}={value} changes nothing for this {_family(loaded)}, which is scored "
                    f"{self.manner}: leave it out"
                )
        self.tokenizer, self.vocabulary = loaded.tokenizer, loaded.tokenizer.vocabulary
        self.context = context_of(loaded, scoring.context)
        self.limit = f", at most {self.context:,} tokens at a time"  # for `counted`

    manner: ClassVar[str]  # of `counted`, without the numbers

    def ask(self, document: Document) -> Asked:
        """Returns what the model is asked about a text, or a pair of source and target."""
        if isinstance(document, tuple):
            raise UserError(
                f"a pair of source and target needs a model that reads pairs, and this one is scored {self.manner}: "
                "give texts"
            )
        text = document if isinstance(document, str) else document.decode()
        return self._about(text, self.tokenizer.encode(text))

    def _about(self, text: str, ids: np.ndarray) -> Asked:
        raise NotImplementedError

    def _unknown(self, ids: np.ndarray) -> int:
        return 0 if self.vocabulary.unk is None else int((ids == self.vocabulary.unk).sum())


class LeftToRight(Method):
    """Asks for each token from those before it.

    A text that is longer than the context is read in windows that overlap, and each token is predicted once, in a
    window that begins at least `context - stride` tokens before it.
    """

    options = ("stride",)
    manner = "left to right"

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        super().__init__(loaded, scoring)
        self.stride = (self.context + 1) // 2 if scoring.stride is None else scoring.stride
        if not 1 <= self.stride <= self.context:
            raise UserError(
                f"stride={self.stride}: it must be from 1, the most context for each token, to {self.context}, the "
                "context, which takes the least time"
            )
        self.start = start_token(loaded)
        given = "" if self.start is not None else ", the first token given"
        self.counted = f"{self.manner}, in windows of {self.context:,} tokens every {self.stride:,}{given}"
        self._spellings = self.tokenizer.spellings()

    def _about(self, text, ids):
        size = len(text.encode())
        if self.start is None and len(ids):
            first = self._spellings[ids[0]]  # of which some tokenizers put a space before each text
            size -= min(len(first if text[:1].isspace() else first.removeprefix(b" ")), size)
        return Asked(self._windows(ids), size, self._unknown(ids))

    def _windows(self, ids: np.ndarray) -> Iterator[Example]:
        read = ids if self.start is None else np.concatenate([[self.start], ids]).astype(np.int32)
        predicted = 0
        for begin in range(0, len(read) - 1, self.stride):
            end = min(begin + self.context, len(read) - 1)
            yield causal_example(read[begin : predicted + 1], read[predicted + 1 : end + 1])
            predicted = end
            if end == len(read) - 1:
                return


class PseudoLikelihood(Method):
    """Asks for each token from all others, masked alone (Salazar et al. 2020, section 2.1).

    `by_word` also masks what follows of its word, by which a word of several tokens is not given away by its end (Kauf
    and Ivanova 2023: PLL-word-l2r).
    """

    prefix = "pseudo_"
    explanation = (
        "an encoder gives no probability of a text, hence no perplexity; pseudo_ figures are of each token given all "
        "others (Salazar et al. 2020), and compare with those of encoders alone"
    )
    options = ("by_word",)
    manner = "pseudo-log-likelihood"

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        super().__init__(loaded, scoring)
        if missing := [name for name in ("cls", "sep", "mask") if getattr(self.vocabulary, name) is None]:
            raise UserError(f"{loaded.origin}: the tokenizer has no {', '.join(missing)}, by which an encoder is asked")
        if self.context < 3:
            raise UserError(f"context={self.context}: a token between [CLS] and [SEP] needs at least 3")
        self._words = WholeWords().bind(self.tokenizer) if scoring.by_word else None
        self.counted = (
            f"{self.manner}, {'word by word, left to right' if scoring.by_word else 'token by token'}{self.limit}"
        )

    @property
    def longest(self) -> int:
        """Returns how many tokens a text may have, to be asked about as a whole."""
        return self.context - 2

    def _about(self, text, ids):
        pieces = [ids[i : i + self.longest] for i in range(0, len(ids), self.longest)]
        asked = (example for piece in pieces for example in self._masked(piece))
        return Asked(asked, len(text.encode()), self._unknown(ids), max(len(pieces), 1))

    def _masked(self, piece: np.ndarray) -> Iterator[Example]:
        row = np.concatenate([[self.vocabulary.cls], piece, [self.vocabulary.sep]]).astype(np.int32)
        begins = np.ones(len(row), bool) if self._words is None else self._words.starts(row)
        begins[-1] = True
        starts = np.flatnonzero(begins)
        for place in range(1, len(row) - 1):
            yield masked_example(row, place, starts[starts > place][0], self.vocabulary.mask)


class Targets(Method):
    """Asks for the targets that the model's objective makes of a text, or for the target of a pair.

    Holes follow from seed and text. Sentinels and ends are predicted too, and have no bytes: they say how long what was
    dropped is.
    """

    prefix = "target_"
    explanation = (
        "target_ figures are of what the objective drops, given what it leaves: they compare with models of the same "
        "objective alone"
    )
    options = ("seed",)
    manner = "by the targets of its objective"

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        super().__init__(loaded, scoring)
        objective, self.seed = loaded.experiment.objective.bind(self.tokenizer), scoring.seed or 0
        parts = [(w, o) for w, o in objective.components() if isinstance(o, Objective)]
        self.of_text = [(w, o) for w, o in parts if o.unit not in ("pairs", "records")]
        self.of_pairs = [o for _, o in objective.components(pairs=True) if o.unit == "pairs"]
        start = objective.components()[0][1].decoder_start(self.vocabulary)
        if not self.of_pairs and loaded.experiment.model.family == "encoder_decoder" and start == self.vocabulary.pad:
            self.of_pairs = [SequenceToSequence()]  # whose format T5's pretraining has too
        name = type(objective).__name__
        if not self.of_text and not self.of_pairs:
            raise UserError(
                f"{loaded.origin} was trained by {name}, on records: python -m pretrainax.evaluate without --source "
                "gives its figures"
            )
        self.counted = f"{self.manner}, {name}" + (f", seed {self.seed}" if self.of_text else "") + self.limit
        self._name = name

    def ask(self, document):
        return self._about_pair(*document) if isinstance(document, tuple) else super().ask(document)

    def _about(self, text, ids):
        if not self.of_text:
            raise UserError(f"this model was trained by {self._name}, on pairs: give (source, target), not a text")
        rng = np.random.default_rng([self.seed % 2**64, zlib.crc32(ids.tobytes())])
        weights = np.array([weight for weight, _ in self.of_text])
        examples = []
        while len(ids) > 1:  # of one token nothing can be dropped and something left
            objective = self.of_text[rng.choice(len(weights), p=weights / weights.sum())][1]
            piece = ids[: objective.lengths(self.context).raw]
            ids = ids[len(piece) :]
            room = max(min(self.context, len(piece) + 2), objective.shortest)
            objective.check_vocabulary(self.vocabulary, room)  # of sentinels enough for so long a text
            examples.append(self._example(objective, piece, np.array([len(piece)]), rng))
        unknown = sum(self._unknown(example["targets"][example["loss_weights"] > 0]) for example in examples)
        return Asked(examples, sum(map(self._bytes, examples)), unknown, max(len(examples), 1))

    def _about_pair(self, source: str, target: str) -> Asked:
        if not self.of_pairs:
            raise UserError(f"this model was trained by {self._name}, which knows no pairs: give texts")
        (objective,) = self.of_pairs[:1]
        sides = [np.append(ids, self.vocabulary.separator) for ids in self.tokenizer.encode_batch([source, target])]
        rooms = objective.pair_room(objective.lengths(self.context))
        kept = [s if len(s) <= room else np.append(s[: room - 1], s[-1]) for s, room in zip(sides, rooms, strict=True)]
        is_cut = any(len(a) < len(b) for a, b in zip(kept, sides, strict=True))
        both = np.concatenate(kept).astype(np.int32)
        example = self._example(objective, both, np.cumsum([len(side) for side in kept]), np.random.default_rng(0))
        size = self._bytes(example) if is_cut else len(target.encode())
        return Asked([example], size, self._unknown(kept[1]), is_cut=is_cut)

    def _example(self, objective: Objective, ids: np.ndarray, parts: np.ndarray, rng: np.random.Generator) -> Example:
        return objective.example(Text(ids, np.ones(len(ids), np.int32), parts), rng, self.vocabulary)

    def _bytes(self, example: Example) -> int:
        return int(self.tokenizer.text_table.num_bytes[example["targets"][example["loss_weights"] > 0]].sum())


def method_of(loaded: LoadedModel, scoring: Scoring) -> Method:
    """Returns how texts are scored by a model; UserError for one that says no token, or options out of range."""
    family, model = loaded.experiment.model.family, loaded.experiment.model
    check_language_model(loaded)
    if model.replaced_token_head and model.generator is None:
        raise UserError(
            f"{loaded.origin} says of tokens whether they were replaced (ELECTRA's discriminator), and never which "
            "token stands where: it cannot score a text"
        )
    if family == "encoder":
        return PseudoLikelihood(loaded, scoring)
    if family != "encoder_decoder" and not all(isinstance(o, DecoderOnly) for _, o in _objectives(loaded)):
        return LeftToRight(loaded, scoring)
    return Targets(loaded, scoring)


def causal_example(before: np.ndarray, answer: np.ndarray, sees_prefix: bool = False) -> Example:
    """Asks for `answer` after `before`, which is seen from both sides where the model is a prefix LM."""
    tokens = np.concatenate([before, answer])
    places = np.arange(len(tokens) - 1, dtype=np.int32)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "segment_ids": np.ones_like(places),
        "positions": places,
        "loss_weights": (places >= len(before) - 1).astype(np.float32),
        **({"prefix_mask": (places < len(before)).astype(np.int32)} if sees_prefix else {}),
    }


def masked_example(row: np.ndarray, place: int, end: int, mask: int) -> Example:
    """Asks for the token at `place` of a row, where it and those before `end` are masks."""
    tokens = row.copy()
    tokens[place:end] = mask
    return {
        "tokens": tokens,
        "masked_positions": np.array([place], np.int32),
        "targets": row[place : place + 1],
        "loss_weights": np.ones(1, np.float32),
        "segment_ids": np.ones_like(row),
        "positions": np.arange(len(row), dtype=np.int32),
        "token_types": np.zeros_like(row),
    }


def context_of(loaded: LoadedModel, wanted: Optional[int] = None) -> int:
    """Returns how many tokens the model reads at a time: those that are wanted, or as many as in training.

    Nothing says how many those were of a model of others: it is as many as it has positions.
    """
    most, trained = longest(loaded), loaded.experiment.data.sequence_length
    if wanted is None:
        is_imported = isinstance(loaded.experiment.data.source, NoSource)
        return most if is_imported and most else min(trained, most or trained)
    if not 1 <= wanted <= (most or math.inf):
        allowed = f" to {most}, the positions that this model has" if most else " on"
        raise UserError(f"context={wanted}: it must be from 1{allowed}")
    return wanted


def start_token(loaded: LoadedModel) -> Optional[int]:
    """Returns the id that stands before a text that is scored; None for none: its first token is given."""
    return next(iter(before_text(loaded.experiment, loaded.tokenizer.vocabulary, is_needed=True)), None)


def _objectives(loaded: LoadedModel) -> list[tuple[float, Objective]]:
    return loaded.experiment.objective.components()


def _family(loaded: LoadedModel) -> str:
    return loaded.experiment.model.family.replace("_", "-")
