"""Fill in the middle: causal language modelling that also teaches a model to insert text."""

import copy
import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.objectives.base import Statistic, Text
from pretrainax.data.objectives.causal import CausalLM
from pretrainax.tokenization.base import Tokenizer

_NO_ROOM = 0.15  # maximum fraction of drawn documents without room for a split
_GROWTH = 8  # maximum tokens that a split between characters adds to a document: it cuts two words
_PROBE = "a  b\nc "  # text that a tokenizer must reproduce


class _Spelling(NamedTuple):
    """Converts tokens to text and text to tokens; returns None if the conversion would lose information."""

    tokenizer: Tokenizer
    spellings: list[bytes]  # [V]

    def text(self, tokens: np.ndarray) -> Optional[str]:
        """Returns the text of tokens; None if the tokens begin or end inside a character, as in a window."""
        try:
            return b"".join(map(self.spellings.__getitem__, tokens.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def tokens(self, text: str) -> Optional[np.ndarray]:
        """Returns the tokens of a text.

        Returns None if they do not decode to the same text, for example because the tokenizer normalizes it.
        """
        tokens = self.tokenizer.encode(text)
        return tokens if self.text(tokens) == text else None


@dataclasses.dataclass
class FillInTheMiddle(CausalLM):
    """Trains a causal language model on documents whose middle is moved to the end (Bavarian et al. 2022, arXiv
    2207.14255, section 3 and appendix D).

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="FillInTheMiddle()" \\
            --config.tokenizer.num_sentinels=3 --config.model.vocab_size=50304

    Each document of a sequence is split with probability `fim_rate`, at two uniformly drawn positions. `the cat sat on
    the mat <eot>`, split into `the cat`, `sat on` and `the mat`, becomes

        <PRE> the cat <SUF> the mat <MID> sat on <eot>        PSM: prefix, suffix, middle
        <PRE> <SUF> the mat <MID> the cat sat on <eot>        SPM: suffix, prefix, middle

    and then an example of CausalLM, which predicts every token. <PRE>, <SUF> and <MID> are the first three sentinels of
    the vocabulary, <eot> is its separator. A document that continues after the window has no <eot>.

    A row has room to split ceil(n / `tokens_per_document`) documents of its n original tokens. If more documents are
    drawn, the remaining drawn documents stay unsplit. A run does not start if this makes the rate too low. Rows with
    fewer splits end in padding. A sequence of a single token stays unsplit.

    With split="characters", documents are split between any two characters and the three parts are tokenized
    separately, as in the paper and in Megatron-LM. A model then learns to complete words. The parts may have 8 tokens
    more than the document, and rows have room for them. A document is split between tokens if its parts are longer, or
    if its window begins or ends inside a character. `restore` returns the tokens of the whole text. They differ from
    the corpus if the window begins or ends inside a word.
    NOTE The paper truncates rows that become too long; here no token is lost.
    """

    fim_rate: float = 0.5  # fraction of the documents that are split
    spm_rate: float = 0.5  # fraction of the split documents with the suffix first
    tokens_per_document: int = 256  # tokens of a sequence for each document that may be split
    split: Literal["tokens", "characters"] = "tokens"  # documents are split between tokens or between characters

    _spelling: ClassVar[Optional[_Spelling]] = None  # set by `bind` if documents are split between characters

    is_likelihood: ClassVar[bool] = False  # the text is reordered and has sentinels
    shortest: ClassVar[int] = 4  # two tokens and three sentinels, without the last token, which is only a target

    def field_problems(self):
        for name in ("fim_rate", "spm_rate"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"config.objective.{name} is {getattr(self, name)}, it must be in [0, 1]"
        if self.tokens_per_document < 2:
            yield f"config.objective.tokens_per_document is {self.tokens_per_document}, it must be at least 2"

    def problems(self, experiment):
        yield from super().problems(experiment)
        least, length = self.shortest + self._growth, experiment.data.sequence_length
        if self.shortest <= length < least:
            yield f"config.data.sequence_length is {length}, with split='characters' it must be at least {least}"

    def bind(self, tokenizer):
        if self.split == "tokens":
            return self
        bound = copy.copy(self)
        bound._spelling = _Spelling(tokenizer, tokenizer.spellings())
        if bound._spelling.tokens(_PROBE) is None:
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
        added = 3 + self._growth
        raw = (sequence_length - 2) * self.tokens_per_document // (self.tokens_per_document + added)  # always fits
        while self.measure(raw + 1).inputs <= sequence_length:
            raw += 1
        return Lengths(raw, sequence_length, sequence_length)

    def measure(self, raw):
        length = raw - 1 + (3 + self._growth) * self._max_splits(raw)
        return Lengths(raw, length, length)

    @property
    def _growth(self) -> int:
        return _GROWTH if self.split == "characters" else 0

    def _max_splits(self, raw: int) -> int:
        """Returns the maximum number of documents that are split in a sequence of `raw` tokens."""
        return math.ceil(raw / self.tokens_per_document) if raw > 1 else 0

    def example(self, text, rng, vocabulary):
        starts = np.flatnonzero(np.diff(text.segment_ids))
        documents = np.split(text.tokens, starts + 1)
        drawn = np.flatnonzero(rng.random(len(documents)) < self.fim_rate)
        for i in rng.permutation(drawn)[: self._max_splits(len(text.tokens))].tolist():
            documents[i] = self._split_document(documents[i], rng, vocabulary)
        sizes = [len(document) for document in documents]
        numbers = np.arange(1, len(documents) + 1, dtype=np.int32).repeat(sizes)
        return super().example(Text(np.concatenate(documents), numbers), rng, vocabulary)

    def _split_document(self, document: np.ndarray, rng: np.random.Generator, vocabulary) -> np.ndarray:
        """Returns a document after a random split: its parts in PSM or SPM order, with sentinels."""
        length = len(document) - (document[-1] == vocabulary.separator)
        document, end = np.split(document, [length])
        prefix, middle, suffix = self._parts_by_characters(document, rng) or np.split(document, _positions(length, rng))
        before, after, between = np.array(vocabulary.sentinels[:3], np.int32)[:, None]
        if rng.random() < self.spm_rate:
            parts = before, after, suffix, between, prefix, middle, end
        else:
            parts = before, prefix, after, suffix, between, middle, end
        return np.concatenate(parts)

    def _parts_by_characters(self, document: np.ndarray, rng: np.random.Generator) -> Optional[list[np.ndarray]]:
        """Returns prefix, middle and suffix of a document, split between characters and tokenized separately.

        The result is None if the document must be split between tokens.
        """
        text = None if self._spelling is None else self._spelling.text(document)
        if text is None:
            return None
        first, second = _positions(len(text), rng)
        parts = [self._spelling.tokens(part) for part in (text[:first], text[first:second], text[second:])]
        if any(part is None for part in parts) or sum(map(len, parts)) > len(document) + _GROWTH:
            return None
        return parts

    def restore(self, example, vocabulary):
        documents = self._documents(example, vocabulary)
        return np.concatenate([part for parts in documents for part in self._joined(parts)])

    def _joined(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Returns arrays whose concatenation is the original document with the given parts.

        The text of a document that was split between characters is tokenized again.
        """
        if self._spelling is None or len(parts) == 1:
            return parts
        *parts, end = parts
        text = self._spelling.text(np.concatenate(parts))
        whole = None if text is None else self._spelling.tokens(text)
        return [*parts, end] if whole is None else [whole, end]

    def _documents(self, example: Example, vocabulary) -> list[list[np.ndarray]]:
        """Returns the parts of each document in their original order.

        An unsplit document has one part. A split document has four parts: the tokens before <SUF>, the tokens after
        <MID>, the suffix, and the separator. With the suffix first (SPM), the first part is empty.
        """
        tokens = super().restore(example, vocabulary)
        before, after, between = vocabulary.sentinels[:3]
        parts = []
        for document in np.split(tokens, np.flatnonzero(tokens[:-1] == vocabulary.separator) + 1):
            if document[0] != before:
                parts.append([document])
                continue
            length = len(document) - (document[-1] == vocabulary.separator)
            (mark,), (last) = np.flatnonzero(document == after), np.flatnonzero(document == between)[0]
            parts.append([document[1:mark], document[last + 1 : length], document[mark + 1 : last], document[length:]])
        return parts

    def _split_positions(self, parts: list[np.ndarray]) -> int:
        """Returns the number of positions at which the document with the given parts may be split."""
        document = np.concatenate(parts)
        text = None if self._spelling is None else self._spelling.text(document)
        return 1 + len(document if text is None else text)

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        total = total_split = roomy = roomy_split = 0  # all documents; documents of sequences with room for all
        first, expected = [], []
        for example in examples:
            documents = self._documents(example, vocabulary)
            sizes = [[len(part) for part in parts] for parts in documents]
            split = [parts[:3] for parts in sizes if len(parts) > 1]
            total, total_split = total + len(documents), total_split + len(split)
            if len(documents) <= self._max_splits(sum(map(sum, sizes))):
                roomy, roomy_split = roomy + len(documents), roomy_split + len(split)
            first += [before == 0 for before, _, _ in split]
            # A prefix may be empty: neither of two draws is the first of n positions with probability (1 - 1 / n)^2.
            positions = [self._split_positions(parts[:3]) for parts in documents if len(parts) > 1]
            expected += [1 - (1 - self.spm_rate) * (1 - 1 / n) ** 2 for n in positions]
        deviation = math.sqrt(self.fim_rate * (1 - self.fim_rate))
        if roomy:
            tolerance = 5 * deviation / math.sqrt(roomy) + 1e-6
            yield Statistic("documents taken apart", roomy_split / roomy, self.fim_rate, tolerance)
        if self.fim_rate:
            yield Statistic(
                "drawn documents without room",
                max(1 - total_split / (self.fim_rate * total), 0.0),
                0.0,
                _NO_ROOM + 5 * deviation / math.sqrt(total) / self.fim_rate,
                f"config.objective.tokens_per_document is {self.tokens_per_document}; lower it to the length of most "
                "documents",
            )
        if first:
            probability = np.array(expected)
            deviation = math.sqrt((probability * (1 - probability)).sum()) / len(first)
            yield Statistic("suffix first", float(np.mean(first)), float(probability.mean()), 5 * deviation + 1e-6)


def _positions(length: int, rng: np.random.Generator) -> list[int]:
    """Returns two positions, sorted, that are drawn uniformly from 0 to `length`."""
    return sorted(rng.integers(0, length + 1, 2).tolist())
