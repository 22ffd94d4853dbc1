"""Fill in the middle: causal language modelling that also teaches a model to insert text."""

import copy
import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.objectives.base import ObjectiveInput, Statistic
from pretrainax.data.objectives.causal import CausalLM
from pretrainax.data.objectives.tolerances import binomial_tolerance
from pretrainax.tokenization.base import Tokenizer

_MAX_UNSPLIT_FRACTION = 0.15  # maximum fraction of drawn documents that exceed the split capacity of their row
_MAX_ADDED_TOKENS = 8  # maximum number of tokens that splitting inside two words adds to a document
_WHITE_SPACE_SAMPLE = "a  b\nc "  # text that the tokenizer must encode and decode without changes


class _LosslessTokenizer(NamedTuple):
    """Converts tokens to text and back; both methods return None if the conversion is not reversible."""

    tokenizer: Tokenizer
    spellings: list[bytes]  # [V], the UTF-8 bytes of each token

    def text(self, tokens: np.ndarray) -> Optional[str]:
        """Decodes tokens, or returns None if they begin or end inside a character, as may happen at window bounds."""
        try:
            return b"".join(map(self.spellings.__getitem__, tokens.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def tokens(self, text: str) -> Optional[np.ndarray]:
        """Tokenizes a text.

        Returns None if the tokens do not decode to the same text, for example because the tokenizer normalizes it.
        """
        tokens = self.tokenizer.encode(text)
        return tokens if self.text(tokens) == text else None


@dataclasses.dataclass
class FillInTheMiddle(CausalLM):
    """Trains a causal language model on documents whose middle is moved to the end.

    Source: Bavarian et al. 2022, arXiv 2207.14255, section 3 and appendix D.

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="FillInTheMiddle()" \\
            --config.tokenizer.num_sentinels=3 --config.model.vocab_size=50304

    Each document of a sequence is split with probability `fim_rate`, at two uniformly drawn positions. `the cat sat on
    the mat <eot>`, split into `the cat`, `sat on` and `the mat`, becomes

        <PRE> the cat <SUF> the mat <MID> sat on <eot>        PSM: prefix, suffix, middle
        <PRE> <SUF> the mat <MID> the cat sat on <eot>        SPM: suffix, prefix, middle

    CausalLM then converts this sequence to an example and predicts every token. <PRE>, <SUF> and <MID> are the first
    three sentinels of the vocabulary, and <eot> is its separator. A document that continues after the window has no
    <eot>.

    A row of n original tokens has room for ceil(n / `tokens_per_document`) splits. If more documents are drawn to be
    split, the excess ones stay unsplit, and a run refuses to start if there are too many of these. Rows with fewer
    splits end in padding. A single-token sequence stays unsplit.

    With split="characters", documents are split between any two characters. The prefix, middle and suffix are tokenized
    separately, as in the paper and in Megatron-LM, so that the model learns to complete words. Rows have room for 8
    additional tokens per split. A document is split between tokens instead if it would need more than that, or if its
    window begins or ends inside a character. `restore` retokenizes the joined text; the result may differ from the
    corpus if the window begins or ends inside a word.
    NOTE The paper truncates rows that become too long. Here, rows reserve the room, so no token is lost.
    """

    fim_rate: float = 0.5  # fraction of the documents that are split
    spm_rate: float = 0.5  # fraction of the split documents in SPM order, with the suffix first
    tokens_per_document: int = 256  # a row reserves capacity for one split per this many tokens
    split: Literal["tokens", "characters"] = "tokens"  # where documents may be split

    _lossless_tokenizer: ClassVar[Optional[_LosslessTokenizer]] = None  # set by `bind` if split="characters"

    is_likelihood: ClassVar[bool] = False  # documents are reordered and contain sentinels
    shortest: ClassVar[int] = 4  # inputs of two tokens and three sentinels; the last token is only a target

    @property
    def needs_documents(self):
        return True  # `restore` finds the documents of a sequence by their separators

    def field_problems(self):
        for name in ("fim_rate", "spm_rate"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"config.objective.{name} is {getattr(self, name)}, it must be in [0, 1]"
        if self.tokens_per_document < 2:
            yield f"config.objective.tokens_per_document is {self.tokens_per_document}, it must be at least 2"

    def problems(self, experiment):
        yield from super().problems(experiment)
        min_length, length = self.shortest + self._max_added_tokens, experiment.data.sequence_length
        if self.shortest <= length < min_length:
            yield f"config.data.sequence_length is {length}, with split='characters' it must be at least {min_length}"

    def bind(self, tokenizer):
        if self.split == "tokens":
            return self
        bound = copy.copy(self)
        bound._lossless_tokenizer = _LosslessTokenizer(tokenizer, tokenizer.spellings())
        if bound._lossless_tokenizer.tokens(_WHITE_SPACE_SAMPLE) is None:
            raise UserError(
                "config.objective.split is 'characters', which requires a tokenizer that preserves white space, and "
                "this one does not: set config.tokenizer to ByteBPE or Unigram, or set config.objective.split to "
                "'tokens'"
            )
        return bound

    def check_vocabulary(self, vocabulary, sequence_length):
        if vocabulary.separator is None or len(vocabulary.sentinels) < 3:
            raise UserError(
                f"the tokenizer has {len(vocabulary.sentinels)} sentinels, FillInTheMiddle needs 3 and an end of text: "
                "set config.tokenizer to ByteBPE or Unigram with num_sentinels >= 3"
            )

    def lengths(self, sequence_length):
        max_added = 3 + self._max_added_tokens
        room = sequence_length + 1 - max_added  # without one split, because `_max_splits` rounds up
        raw = room * self.tokens_per_document // (self.tokens_per_document + max_added)  # always fits
        while self.measure(raw + 1).inputs <= sequence_length:
            raw += 1
        return Lengths(raw, sequence_length, sequence_length)

    def measure(self, raw):
        length = raw - 1 + (3 + self._max_added_tokens) * self._max_splits(raw)
        return Lengths(raw, length, length)

    @property
    def _max_added_tokens(self) -> int:
        return _MAX_ADDED_TOKENS if self.split == "characters" else 0

    def _max_splits(self, raw: int) -> int:
        """Returns the maximum number of documents to split in a sequence of `raw` tokens."""
        return math.ceil(raw / self.tokens_per_document) if raw > 1 else 0

    def example(self, text, rng, vocabulary):
        last_positions = np.flatnonzero(np.diff(text.segment_ids))
        documents = np.split(text.tokens, last_positions + 1)
        drawn_documents = np.flatnonzero(rng.random(len(documents)) < self.fim_rate)
        for i in rng.permutation(drawn_documents)[: self._max_splits(len(text.tokens))].tolist():
            documents[i] = self._split_document(documents[i], rng, vocabulary)
        sizes = [len(document) for document in documents]
        segment_ids = np.arange(1, len(documents) + 1, dtype=np.int32).repeat(sizes)
        return super().example(ObjectiveInput(np.concatenate(documents), segment_ids), rng, vocabulary)

    def _split_document(self, document: np.ndarray, rng: np.random.Generator, vocabulary) -> np.ndarray:
        """Splits a document at two random positions, and returns its parts in PSM or SPM order, with sentinels."""
        length = len(document) - (document[-1] == vocabulary.separator)
        document, end = np.split(document, [length])
        prefix, middle, suffix = self._split_between_characters(document, rng) or np.split(
            document, _draw_split_positions(length, rng)
        )
        context = _context(prefix, suffix, rng.random() < self.spm_rate, vocabulary)
        return np.concatenate([context, middle, end])

    def context(self, prefix: np.ndarray, suffix: np.ndarray, vocabulary) -> np.ndarray:
        """Returns the tokens before the middle, [n] int32: in PSM order, or in SPM order if training has no other."""
        return _context(prefix, suffix, self.spm_rate == 1, vocabulary)

    def _split_between_characters(self, document: np.ndarray, rng: np.random.Generator) -> Optional[list[np.ndarray]]:
        """Splits a document between characters, and returns the tokens of its prefix, middle and suffix.

        Returns None if the document must be split between tokens instead.
        """
        text = None if self._lossless_tokenizer is None else self._lossless_tokenizer.text(document)
        if text is None:
            return None
        first, second = _draw_split_positions(len(text), rng)
        parts = [self._lossless_tokenizer.tokens(part) for part in (text[:first], text[first:second], text[second:])]
        if any(part is None for part in parts) or sum(map(len, parts)) > len(document) + _MAX_ADDED_TOKENS:
            return None
        return parts

    def restore(self, example, vocabulary):
        documents = self._document_parts(example, vocabulary)
        return np.concatenate([part for parts in documents for part in self._tokenize_again(parts)])

    def token_offsets(self, example, vocabulary):
        """Computes offsets as in `Objective`; sentinels have the offset of the start of their document.

        With split="characters", offsets inside a document are approximate, as its parts are tokenized separately.
        """
        offsets, start, sentinel = [], 0, np.zeros(1, np.int64)
        for parts in self._document_parts(example, vocabulary):
            sizes = [len(part) for part in parts]
            indices = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])  # in the order of the original text
            if len(parts) > 1:
                prefix, middle, suffix, end = indices
                indices = [sentinel, prefix, sentinel, suffix, sentinel, middle, end]
            size = sum(map(len, self._tokenize_again(parts)))
            offsets.append(start + np.concatenate(indices).clip(max=size - 1))
            start += size
        return np.concatenate(offsets)[1:]

    def _tokenize_again(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Converts a document's parts, from `_document_parts`, to arrays whose concatenation is the original document.

        If documents are split between characters, this retokenizes the joined text.
        """
        if self._lossless_tokenizer is None or len(parts) == 1:
            return parts
        *parts, end = parts
        text = self._lossless_tokenizer.text(np.concatenate(parts))
        original = None if text is None else self._lossless_tokenizer.tokens(text)
        return [*parts, end] if original is None else [original, end]

    def _document_parts(self, example: Example, vocabulary) -> list[list[np.ndarray]]:
        """Returns the parts of each document of an example, in the order of the original text.

        An unsplit document has one part. A split document has four parts: the tokens before <SUF>, the tokens after
        <MID>, the suffix, and the separator. In SPM order, the first part is empty and the second one contains both
        prefix and middle.
        """
        tokens = super().restore(example, vocabulary)
        prefix_token, suffix_token, middle_token = vocabulary.sentinels[:3]
        parts = []
        for document in np.split(tokens, np.flatnonzero(tokens[:-1] == vocabulary.separator) + 1):
            if document[0] != prefix_token:
                parts.append([document])
                continue
            length = len(document) - (document[-1] == vocabulary.separator)
            (suffix_index,), (middle_index) = (
                np.flatnonzero(document == suffix_token),
                np.flatnonzero(document == middle_token)[0],
            )
            parts.append(
                [
                    document[1:suffix_index],
                    document[middle_index + 1 : length],
                    document[suffix_index + 1 : middle_index],
                    document[length:],
                ]
            )
        return parts

    def _count_split_positions(self, parts: list[np.ndarray]) -> int:
        """Returns the number of positions at which the document with these `parts` could have been split."""
        document = np.concatenate(parts)
        text = None if self._lossless_tokenizer is None else self._lossless_tokenizer.text(document)
        return 1 + len(document if text is None else text)

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        total = num_split = eligible = eligible_split = 0  # eligible: the row may split all its documents
        is_spm, expected = [], []
        for example in examples:
            documents = self._document_parts(example, vocabulary)
            split_sizes = [[len(part) for part in parts[:3]] for parts in documents if len(parts) > 1]
            total, num_split = total + len(documents), num_split + len(split_sizes)
            raw = sum(len(part) for parts in documents for part in self._tokenize_again(parts))
            if len(documents) <= self._max_splits(raw - self._max_added_tokens):  # `raw` is inexact, see `restore`
                eligible, eligible_split = eligible + len(documents), eligible_split + len(split_sizes)
            is_spm += [before_suffix == 0 for before_suffix, _, _ in split_sizes]
            # A prefix may be empty: neither of two draws is the first of n positions with probability (1 - 1 / n)^2.
            positions = [self._count_split_positions(parts[:3]) for parts in documents if len(parts) > 1]
            expected += [1 - (1 - self.spm_rate) * (1 - 1 / n) ** 2 for n in positions]
        deviation = math.sqrt(self.fim_rate * (1 - self.fim_rate))
        if eligible:
            tolerance = binomial_tolerance(eligible, self.fim_rate)
            yield Statistic("documents taken apart", eligible_split / eligible, self.fim_rate, tolerance)
        if self.fim_rate:
            yield Statistic(
                "drawn documents without room",
                max(1 - num_split / (self.fim_rate * total), 0.0),
                0.0,
                _MAX_UNSPLIT_FRACTION + 5 * deviation / math.sqrt(total) / self.fim_rate,
                f"config.objective.tokens_per_document is {self.tokens_per_document}; lower it to the length of most "
                "documents",
            )
        if is_spm:
            # The probabilities differ between documents, so the binomial variance is an upper bound.
            probability = float(np.mean(expected))
            tolerance = binomial_tolerance(len(is_spm), probability)
            yield Statistic("suffix first", float(np.mean(is_spm)), probability, tolerance)


def _draw_split_positions(length: int, rng: np.random.Generator) -> list[int]:
    """Draws two positions uniformly from 0 to `length`, both inclusive; returns them sorted."""
    return sorted(rng.integers(0, length + 1, 2).tolist())


def _context(prefix: np.ndarray, suffix: np.ndarray, suffix_first: bool, vocabulary) -> np.ndarray:
    """Returns the tokens of a split document before its middle, in PSM or SPM order, with sentinels."""
    prefix_token, suffix_token, middle_token = np.array(vocabulary.sentinels[:3], np.int32)[:, None]
    if suffix_first:
        return np.concatenate([prefix_token, suffix_token, suffix, middle_token, prefix])
    return np.concatenate([prefix_token, prefix, suffix_token, suffix, middle_token])
