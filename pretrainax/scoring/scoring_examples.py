"""Converts documents to examples from which a model scores them; `loss_weights` select the scored predictions.

A decoder predicts each token from the preceding tokens. An encoder predicts each token from all other tokens. A
denoising model predicts the tokens that its objective removes. `method_of` selects the method for the family and the
objective of a model.
"""

import dataclasses
import math
import numbers
import zlib
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.framing import special_token_frame
from pretrainax.data.leading_tokens import leading_token_ids
from pretrainax.data.objectives import Objective, SequenceToSequence
from pretrainax.data.objectives.base import ObjectiveInput
from pretrainax.data.objectives.masking_units import WholeWords
from pretrainax.data.objectives.prefix import DecoderOnly
from pretrainax.data.sources import NoSource
from pretrainax.data.sources.base import Document
from pretrainax.inference.framing import max_input_length
from pretrainax.inference.loaded import LoadedModel, check_language_model


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Options for scoring text; `method_of` raises UserError for an option that has no effect on the model."""

    context: Optional[int] = (
        None  # number of tokens that the model reads at a time; None: the default of `context_length`
    )
    stride: Optional[int] = (
        None  # decoders: number of tokens between the starts of consecutive windows; None: half the context
    )
    by_word: bool = False  # encoders: whether to also mask the subsequent tokens of the same word
    seed: Optional[int] = None  # denoising models: seed of the corruption; None: 0


AS_IN_TRAINING = Scoring()


class ScoringExamples(NamedTuple):
    """The examples from which a model scores one text, or one pair of source and target."""

    examples: Iterable[Example]  # not padded; `loss_weights` are 1 for scored predictions, otherwise 0
    bytes: int  # UTF-8 bytes of the predicted text
    unknown: int = 0  # number of unk tokens, whose likelihood is not the likelihood of the text
    pieces: int = 1  # number of chunks of the text, which are scored independently
    is_cut: bool = False  # True if the source or the target of a pair is truncated


class Method:
    """Base class of the scoring methods; the attribute `description` describes the method to users."""

    prefix: ClassVar[str] = ""  # prefix of the metric names, if the scores are not likelihoods of whole documents
    explanation: ClassVar[str] = ""  # explanation of the metrics with this prefix, for users
    options: ClassVar[tuple[str, ...]] = ()  # supported fields of `Scoring`, in addition to the context
    description: str

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        for field in dataclasses.fields(scoring):
            value = getattr(scoring, field.name)
            if field.name not in ("context", *self.options) and value != field.default:
                raise UserError(
                    f"{field.name}={value} changes nothing for this {_family_name(loaded)}, which is scored "
                    f"{self.manner}: leave it out"
                )
        self.tokenizer, self.vocabulary = loaded.tokenizer, loaded.tokenizer.vocabulary
        self.context = context_length(loaded, scoring.context)
        self.limit = f", at most {self.context:,} tokens at a time"  # for `description`

    manner: ClassVar[str]  # the first words of `description`, without numbers

    def examples_for(self, document: Document) -> ScoringExamples:
        """Builds the examples that score a text, or the target of a pair (source, target).

        Raises:
          UserError: the model does not support pairs, or `document` is a text and the model supports only pairs.
        """
        if isinstance(document, tuple):
            raise UserError(
                f"a pair of source and target needs a model that reads pairs, but this model is scored {self.manner}: "
                "give texts"
            )
        text = document if isinstance(document, str) else document.decode()
        return self._examples_for_text(text, self.tokenizer.encode(text))

    def _examples_for_text(self, text: str, ids: np.ndarray) -> ScoringExamples:
        raise NotImplementedError

    def _count_unknown(self, ids: np.ndarray) -> int:
        return 0 if self.vocabulary.unk is None else int((ids == self.vocabulary.unk).sum())


class LeftToRight(Method):
    """Predicts each token from the preceding tokens.

    A text that is longer than the context is read in overlapping windows. Each token is predicted once. Its window
    begins at least `context - stride` tokens before the token, or at the start of the text.
    """

    options = ("stride",)
    manner = "left to right"

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        super().__init__(loaded, scoring)
        self.stride = (self.context + 1) // 2 if scoring.stride is None else scoring.stride
        if not (isinstance(self.stride, numbers.Integral) and 1 <= self.stride <= self.context):
            raise UserError(
                f"stride={self.stride}: it must be a whole number from 1, for the most context of each token, to "
                f"{self.context}, the context, for the least compute"
            )
        self.start = leading_token_ids(loaded.experiment, self.vocabulary, is_needed=True)
        first_token = "" if self.start else ", the first token given"
        self.description = f"{self.manner}, in windows of {self.context:,} tokens every {self.stride:,}{first_token}"
        self._spellings = self.tokenizer.spellings()

    def _examples_for_text(self, text, ids):
        size = len(text.encode())
        if not self.start and len(ids):
            first = self._spellings[ids[0]]  # some tokenizers add a space before a text
            size -= min(len(first if text[:1].isspace() else first.removeprefix(b" ")), size)
        return ScoringExamples(self._window_examples(ids), size, self._count_unknown(ids))

    def _window_examples(self, ids: np.ndarray) -> Iterator[Example]:
        tokens = np.concatenate([self.start, ids]).astype(np.int32)
        last_predicted = max(len(self.start) - 1, 0)  # the tokens before the text are not scored
        for begin in range(0, len(tokens) - 1, self.stride):
            end = min(begin + self.context, len(tokens) - 1)
            if end > last_predicted:  # unless the tokens before the text fill the window
                yield causal_example(tokens[begin : last_predicted + 1], tokens[last_predicted + 1 : end + 1])
                last_predicted = end
            if end == len(tokens) - 1:
                return


class PseudoLikelihood(Method):
    """Predicts each token from all other tokens, with only this token masked (Salazar et al. 2020, section 2.1).

    The option `by_word` also masks the subsequent tokens of the same word, so that they do not reveal the predicted
    token (PLL-word-l2r, Kauf and Ivanova 2023).
    """

    prefix = "pseudo_"
    explanation = (
        "an encoder has no probability of a text and no perplexity; pseudo_ metrics predict each token from all others "
        "(Salazar et al. 2020) and are comparable only among encoders"
    )
    options = ("by_word",)
    manner = "pseudo-log-likelihood"

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        super().__init__(loaded, scoring)
        needed = ("cls", "sep", "mask") if self.vocabulary.frame is None else ("mask",)
        if missing := [name for name in needed if getattr(self.vocabulary, name) is None]:
            raise UserError(f"{loaded.origin}: the tokenizer has no {', '.join(missing)}; encoders need it for scoring")
        self._frame = special_token_frame("encoder", self.vocabulary)
        if self.max_input_length < 1:
            least = 1 + self._frame.count(1)
            raise UserError(f"context={self.context}: a token between [CLS] and [SEP] needs at least {least}")
        self._whole_words = WholeWords().bind(self.tokenizer) if scoring.by_word else None
        self.description = (
            f"{self.manner}, {'word by word, left to right' if scoring.by_word else 'token by token'}{self.limit}"
        )

    @property
    def max_input_length(self) -> int:
        """Returns the length in tokens of the longest text that the model can score in a single chunk."""
        return self.context - self._frame.count(1)

    def _examples_for_text(self, text, ids):
        chunks = [ids[i : i + self.max_input_length] for i in range(0, len(ids), self.max_input_length)]
        examples = (example for chunk in chunks for example in self._masked_examples(chunk))
        return ScoringExamples(examples, len(text.encode()), self._count_unknown(ids), max(len(chunks), 1))

    def _masked_examples(self, chunk: np.ndarray) -> Iterator[Example]:
        row, start = self._frame.wrap([chunk])[0], len(self._frame.single.before)
        begins_word = np.ones(len(row), bool) if self._whole_words is None else self._whole_words.starts(row)
        word_starts = np.append(np.flatnonzero(begins_word[: start + len(chunk)]), start + len(chunk))
        for position in range(start, start + len(chunk)):
            yield masked_example(row, position, word_starts[word_starts > position][0], self.vocabulary.mask)


class Targets(Method):
    """Predicts the targets that the training objective creates from a text, or the target of a pair (source, target).

    The corruption depends only on the seed and the text. The predictions include sentinels and end tokens, which encode
    the lengths of the removed spans but do not count as bytes.
    """

    prefix = "target_"
    explanation = (
        "target_ metrics predict what the objective removes from what it leaves; they are comparable only among models "
        "of the same objective"
    )
    options = ("seed",)
    manner = "by the targets of its objective"

    def __init__(self, loaded: LoadedModel, scoring: Scoring):
        super().__init__(loaded, scoring)
        objective, self.seed = loaded.experiment.objective.bind(self.tokenizer), scoring.seed or 0
        components = [(w, o) for w, o in objective.components() if isinstance(o, Objective)]
        self.text_objectives = [(w, o) for w, o in components if o.unit not in ("pairs", "records")]
        self.pair_objectives = [o for _, o in objective.components(pairs=True) if o.unit == "pairs"]
        vocabulary = dataclasses.replace(self.vocabulary, decoder_start=None)  # the start of the objective itself
        starts_with_pad = objective.components()[0][1].decoder_start(vocabulary) == vocabulary.pad
        if not self.pair_objectives and loaded.experiment.model.family == "encoder_decoder" and starts_with_pad:
            self.pair_objectives = [SequenceToSequence()]  # pairs in the format of T5's pretraining
        name = type(objective).__name__
        if not self.text_objectives and not self.pair_objectives:
            raise UserError(
                f"{loaded.origin} was trained by {name}, on records: use python -m pretrainax.evaluate without "
                "--source for its metrics"
            )
        self.description = (
            f"{self.manner}, {name}" + (f", seed {self.seed}" if self.text_objectives else "") + self.limit
        )
        self._name = name

    def examples_for(self, document):
        return self._examples_for_pair(*document) if isinstance(document, tuple) else super().examples_for(document)

    def _examples_for_text(self, text, ids):
        if not self.text_objectives:
            raise UserError(f"this model was trained by {self._name}, on pairs: give (source, target), not a text")
        rng = np.random.default_rng([self.seed % 2**64, zlib.crc32(ids.tobytes())])
        weights = np.array([weight for weight, _ in self.text_objectives])
        examples = []
        while len(ids) > 1:  # corruption requires a token to remove and a token to keep
            objective = self.text_objectives[rng.choice(len(weights), p=weights / weights.sum())][1]
            chunk = ids[: objective.lengths(self.context).raw]
            ids = ids[len(chunk) :]
            max_length = max(min(self.context, len(chunk) + 2), objective.shortest)
            objective.check_vocabulary(
                self.vocabulary, max_length
            )  # raises UserError if the vocabulary has too few sentinels
            examples.append(self._example(objective, chunk, np.array([len(chunk)]), rng))
        unknown = sum(self._count_unknown(example["targets"][example["loss_weights"] > 0]) for example in examples)
        return ScoringExamples(examples, sum(map(self._count_bytes, examples)), unknown, max(len(examples), 1))

    def _examples_for_pair(self, source: str, target: str) -> ScoringExamples:
        if not self.pair_objectives:
            raise UserError(f"this model was trained by {self._name}, which does not support pairs: give texts")
        (objective,) = self.pair_objectives[:1]
        sequences = [np.append(ids, self.vocabulary.separator) for ids in self.tokenizer.encode_batch([source, target])]
        max_lengths = objective.max_pair_lengths(objective.lengths(self.context))
        truncated = [
            sequence if len(sequence) <= max_length else np.append(sequence[: max_length - 1], sequence[-1])
            for sequence, max_length in zip(sequences, max_lengths, strict=True)
        ]
        is_cut = any(len(a) < len(b) for a, b in zip(truncated, sequences, strict=True))
        tokens = np.concatenate(truncated).astype(np.int32)
        example = self._example(
            objective, tokens, np.cumsum([len(sequence) for sequence in truncated]), np.random.default_rng(0)
        )
        size = self._count_bytes(example) if is_cut else len(target.encode())
        return ScoringExamples([example], size, self._count_unknown(truncated[1]), is_cut=is_cut)

    def _example(self, objective: Objective, ids: np.ndarray, parts: np.ndarray, rng: np.random.Generator) -> Example:
        return objective.example(ObjectiveInput(ids, np.ones(len(ids), np.int32), parts), rng, self.vocabulary)

    def _count_bytes(self, example: Example) -> int:
        return int(self.tokenizer.text_table.num_bytes[example["targets"][example["loss_weights"] > 0]].sum())


def method_of(loaded: LoadedModel, scoring: Scoring) -> Method:
    """Selects the scoring method for a model.

    Raises:
      UserError: the model does not predict tokens, or an option is out of range or has no effect on the model.
    """
    family, model = loaded.experiment.model.family, loaded.experiment.model
    check_language_model(loaded)
    if model.replaced_token_head and model.generator is None:
        raise UserError(
            f"{loaded.origin} predicts only if tokens were replaced (ELECTRA's discriminator), not the tokens "
            "themselves: it cannot score a text"
        )
    if family == "encoder":
        return PseudoLikelihood(loaded, scoring)
    if family != "encoder_decoder" and not all(isinstance(o, DecoderOnly) for _, o in _objectives(loaded)):
        return LeftToRight(loaded, scoring)
    return Targets(loaded, scoring)


def causal_example(before: np.ndarray, answer: np.ndarray, sees_prefix: bool = False) -> Example:
    """Builds a decoder example that predicts the token ids `answer` after the token ids `before`.

    Args:
      sees_prefix: whether attention within `before` is bidirectional, as in a prefix LM.
    """
    tokens = np.concatenate([before, answer])
    positions = np.arange(len(tokens) - 1, dtype=np.int32)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "segment_ids": np.ones_like(positions),
        "positions": positions,
        "loss_weights": (positions >= len(before) - 1).astype(np.float32),
        **({"prefix_mask": (positions < len(before)).astype(np.int32)} if sees_prefix else {}),
    }


def masked_example(row: np.ndarray, place: int, end: int, mask: int) -> Example:
    """Builds an encoder example that predicts the token at position `place` of a sequence.

    Args:
      row: token ids [T], special tokens included.
      end: the positions from `place` to `end` - 1 are masked.
      mask: id of the mask token.
    """
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


def context_length(loaded: LoadedModel, wanted: Optional[int] = None) -> int:
    """Resolves the number of tokens that a model reads at a time when it scores text.

    Args:
      wanted: the requested number. None selects the sequence length of training. Imported models do not record this
        length; for them, None selects the maximum input length, if there is one.

    Raises:
      UserError: `wanted` is out of range.
    """
    max_length, trained_length = max_input_length(loaded), loaded.experiment.data.sequence_length
    if wanted is None:
        is_imported = isinstance(loaded.experiment.data.source, NoSource)
        return max_length if is_imported and max_length else min(trained_length, max_length or trained_length)
    if not (isinstance(wanted, numbers.Integral) and 1 <= wanted <= (max_length or math.inf)):
        allowed = f" to {max_length}, the positions that this model has" if max_length else " on"
        raise UserError(f"context={wanted}: it must be a whole number from 1{allowed}")
    return wanted


def start_token(loaded: LoadedModel) -> Optional[int]:
    """Returns the id of the token that a decoder reads before a scored text, or None if there is none.

    Without this token, the first token of the text is not predicted.
    """
    return next(iter(leading_token_ids(loaded.experiment, loaded.tokenizer.vocabulary, is_needed=True)), None)


def _objectives(loaded: LoadedModel) -> list[tuple[float, Objective]]:
    return loaded.experiment.objective.components()


def _family_name(loaded: LoadedModel) -> str:
    return loaded.experiment.model.family.replace("_", "-")
