"""Fill in the middle: a causal language model that learns to write what is missing inside of a text."""

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

_NO_ROOM = 0.15  # of the documents that are drawn may find no room
_GROWTH = 8  # tokens, at most, by which the parts of a document may be longer than it: two words are cut, and the rest
_PROBE = "a  b\nc "  # what a tokenizer must give back


class _Spelling(NamedTuple):
    """Text of tokens and tokens of text, without a loss."""

    tokenizer: Tokenizer
    spellings: list[bytes]  # [V]

    def text(self, tokens: np.ndarray) -> Optional[str]:
        """Returns what tokens write; None where they begin or end within a character, as a window may."""
        try:
            return b"".join(map(self.spellings.__getitem__, tokens.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def tokens(self, text: str) -> Optional[np.ndarray]:
        """Returns the tokens of a text; None where they write another one, as after a normalizer."""
        tokens = self.tokenizer.encode(text)
        return tokens if self.text(tokens) == text else None


@dataclasses.dataclass
class FillInTheMiddle(CausalLM):
    """Causal language modelling of documents whose middle is moved to their end (Bavarian et al. 2022, arXiv
    2207.14255, section 3 and appendix D).

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="FillInTheMiddle()" \\
            --config.tokenizer.num_sentinels=3 --config.model.vocab_size=50304

    Each document of a text is taken apart with a chance of `fim_rate`, at two places drawn uniformly. `the cat sat on
    the mat <eot>`, taken apart as `the cat`, `sat on` and `the mat`, becomes the text

        <PRE> the cat <SUF> the mat <MID> sat on <eot>        PSM: prefix, suffix, middle
        <PRE> <SUF> the mat <MID> the cat sat on <eot>        SPM: suffix, prefix, middle

    and then an example of CausalLM: all of it is predicted. <PRE>, <SUF> and <MID> are the first three sentinels of the
    vocabulary, <eot> is its separator; a document that goes on behind the window has none.

    A row has room to take apart one document in each `tokens_per_document` of its text or fraction of that; where more
    are drawn, the others stay as they are, and where that makes the rate too low no run starts. Rows in which fewer are
    drawn end in padding. A text of a single token stays as it is.

    With split="characters" the places are between any two characters, and the three parts are tokenized again: so the
    paper does, and Megatron-LM, and a model learns to fill in the rest of a word. The parts have a few tokens more than
    the document, for which a row has room too. A document stays between tokens where they are more than that, or where
    its window begins or ends within a character. `restore` gives the tokens of the whole text, which differ from those
    of the corpus where its window begins or ends within a word.
    NOTE The paper cuts rows that have become too long; here nothing is lost.
    """

    fim_rate: float = 0.5  # of the documents are taken apart
    spm_rate: float = 0.5  # of these come suffix first
    tokens_per_document: int = 256  # of text, for each document that may be taken apart
    split: Literal["tokens", "characters"] = "tokens"  # between what a document is taken apart

    _spelling: ClassVar[Optional[_Spelling]] = None  # of a bound one that splits characters

    is_likelihood: ClassVar[bool] = False  # of a text in another order, with marks
    shortest: ClassVar[int] = 4  # of two tokens and three sentinels, all but the last

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
                "config.objective.split is 'characters', for which a tokenizer has to give white space back as it was, "
                "and this one does not: set config.tokenizer to ByteBPE or Unigram, or leave config.objective.split at "
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
        marks = 3 + self._growth
        raw = (sequence_length - 2) * self.tokens_per_document // (self.tokens_per_document + marks)  # this many fit
        while self.measure(raw + 1).inputs <= sequence_length:
            raw += 1
        return Lengths(raw, sequence_length, sequence_length)

    def measure(self, raw):
        length = raw - 1 + (3 + self._growth) * self._room(raw)
        return Lengths(raw, length, length)

    @property
    def _growth(self) -> int:
        return _GROWTH if self.split == "characters" else 0

    def _room(self, raw: int) -> int:
        """Returns how many documents of a text may be taken apart."""
        return math.ceil(raw / self.tokens_per_document) if raw > 1 else 0

    def example(self, text, rng, vocabulary):
        starts = np.flatnonzero(np.diff(text.segment_ids))
        documents = np.split(text.tokens, starts + 1)
        drawn = np.flatnonzero(rng.random(len(documents)) < self.fim_rate)
        for i in rng.permutation(drawn)[: self._room(len(text.tokens))].tolist():
            documents[i] = self._take_apart(documents[i], rng, vocabulary)
        sizes = [len(document) for document in documents]
        numbers = np.arange(1, len(documents) + 1, dtype=np.int32).repeat(sizes)
        return super().example(Text(np.concatenate(documents), numbers), rng, vocabulary)

    def _take_apart(self, document: np.ndarray, rng: np.random.Generator, vocabulary) -> np.ndarray:
        length = len(document) - (document[-1] == vocabulary.separator)
        document, end = np.split(document, [length])
        prefix, middle, suffix = self._parts_by_characters(document, rng) or np.split(document, _two(length, rng))
        before, after, between = np.array(vocabulary.sentinels[:3], np.int32)[:, None]
        if rng.random() < self.spm_rate:
            parts = before, after, suffix, between, prefix, middle, end
        else:
            parts = before, prefix, after, suffix, between, middle, end
        return np.concatenate(parts)

    def _parts_by_characters(self, document: np.ndarray, rng: np.random.Generator) -> Optional[list[np.ndarray]]:
        """Returns three parts of a document, each tokenized by itself; None where it is to be split between tokens."""
        text = None if self._spelling is None else self._spelling.text(document)
        if text is None:
            return None
        first, second = _two(len(text), rng)
        parts = [self._spelling.tokens(part) for part in (text[:first], text[first:second], text[second:])]
        if any(part is None for part in parts) or sum(map(len, parts)) > len(document) + _GROWTH:
            return None
        return parts

    def restore(self, example, vocabulary):
        documents = self._documents(example, vocabulary)
        return np.concatenate([part for parts in documents for part in self._joined(parts)])

    def _joined(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Returns a document, or pieces of it: that was taken apart between characters by its tokens as a whole."""
        if self._spelling is None or len(parts) == 1:
            return parts
        *parts, end = parts
        text = self._spelling.text(np.concatenate(parts))
        whole = None if text is None else self._spelling.tokens(text)
        return [*parts, end] if whole is None else [whole, end]

    def _documents(self, example: Example, vocabulary) -> list[list[np.ndarray]]:
        """Returns the parts of each document, in their order: one, or four: what stands before the suffix' mark, what
        after the middle's, the suffix, the end. Of SPM the first is empty."""
        tokens = super().restore(example, vocabulary)
        before, after, between = vocabulary.sentinels[:3]
        found = []
        for document in np.split(tokens, np.flatnonzero(tokens[:-1] == vocabulary.separator) + 1):
            if document[0] != before:
                found.append([document])
                continue
            length = len(document) - (document[-1] == vocabulary.separator)
            (mark,), (last) = np.flatnonzero(document == after), np.flatnonzero(document == between)[0]
            found.append([document[1:mark], document[last + 1 : length], document[mark + 1 : last], document[length:]])
        return found

    def _places(self, parts: list[np.ndarray]) -> int:
        """Counts the places where a document may be taken apart."""
        document = np.concatenate(parts)
        text = None if self._spelling is None else self._spelling.text(document)
        return 1 + len(document if text is None else text)

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        seen = taken_apart = drawn = apart = 0  # of all documents, and of those of texts that have room for all
        first, expected = [], []
        for example in examples:
            documents = self._documents(example, vocabulary)
            sizes = [[len(part) for part in parts] for parts in documents]
            taken = [parts[:3] for parts in sizes if len(parts) > 1]
            seen, taken_apart = seen + len(documents), taken_apart + len(taken)
            if len(documents) <= self._room(sum(map(sum, sizes))):
                drawn, apart = drawn + len(documents), apart + len(taken)
            first += [before == 0 for before, _, _ in taken]
            # A prefix may be empty: of n places none of two is the first with a chance of (1 - 1 / n)^2.
            places = [self._places(parts[:3]) for parts in documents if len(parts) > 1]
            expected += [1 - (1 - self.spm_rate) * (1 - 1 / n) ** 2 for n in places]
        deviation = math.sqrt(self.fim_rate * (1 - self.fim_rate))
        if drawn:
            tolerance = 5 * deviation / math.sqrt(drawn) + 1e-6
            yield Statistic("documents taken apart", apart / drawn, self.fim_rate, tolerance)
        if self.fim_rate:
            yield Statistic(
                "drawn documents without room",
                max(1 - taken_apart / (self.fim_rate * seen), 0.0),
                0.0,
                _NO_ROOM + 5 * deviation / math.sqrt(seen) / self.fim_rate,
                f"lower config.objective.tokens_per_document {self.tokens_per_document} to what most documents have",
            )
        if first:
            chance = np.array(expected)
            deviation = math.sqrt((chance * (1 - chance)).sum()) / len(first)
            yield Statistic("suffix first", float(np.mean(first)), float(chance.mean()), 5 * deviation + 1e-6)


def _two(length: int, rng: np.random.Generator) -> list[int]:
    """Draws two of the places between, before and after so many things, in order."""
    return sorted(rng.integers(0, length + 1, 2).tolist())
