"""Implements a tokenizer with one token per word, where white space separates words."""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.tokenization.base import Tokenizer, Vocabulary
from pretrainax.tokenization.choices import TokenizerConfig, too_little_text

_WORD = re.compile(r"\S+")
# Vocabulary field -> special piece. These are the first lines of a vocabulary file of bilm-tf (the code of ELMo).
_SPECIALS = {"eos": "</S>", "bos": "<S>", "unk": "<UNK>"}


class WordTokenizer(Tokenizer):
    """A tokenizer that encodes each word as its line number in a vocabulary file, or as unk if it is not listed.

    Line numbers start at 0. Decoding joins words with single spaces, so other white space is not restored.
    """

    file = "words.txt"
    _separator = " "

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._words = _lines(model)
        self._check_size(len(self._words))
        if vocabulary.unk is None:
            raise ValueError("the vocabulary has no id for unknown words")
        word_ids = [(word, i) for i, word in enumerate(self._words) if i not in special_pieces]
        self._ids = dict(reversed(word_ids))  # a repeated word is encoded as its first id

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        unk = self.vocabulary.unk
        return [np.array([self._ids.get(word, unk) for word in _WORD.findall(text)], np.int32) for text in texts]

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        spans = [match.span() for match in _WORD.finditer(text)]
        return self._encode_batch([text])[0], np.array(spans, np.int32).reshape(-1, 2)

    def _decode(self, ids: list[int]) -> str:
        return " ".join(self._words[i] for i in ids)

    def spellings(self) -> list[bytes]:
        return [b"" if i in self.special_pieces else f" {word}".encode() for i, word in enumerate(self._words)]


@dataclasses.dataclass
class Words(TokenizerConfig):
    """Builds a `WordTokenizer` whose vocabulary is </S>, <S>, <UNK> and the most frequent words of the training text.

    White space separates words, so punctuation that is not surrounded by spaces is part of a word. The vocabulary file
    has one word per line, as in bilm-tf (the code of ELMo).
    """

    vocab_size: int = 793_471  # number of ids, special pieces included
    path: Optional[str] = None  # a saved tokenizer, or a file with one word per line, to load instead of training
    train_bytes: Optional[int] = 1_000_000_000  # bytes of text for the word counts; None: all text

    kind = WordTokenizer
    specials = _SPECIALS

    @property
    def size(self) -> int:
        return self.vocab_size

    def build(self, texts: Iterator[str]) -> Tokenizer:
        counts = collections.Counter()
        for text in texts:
            counts.update(_WORD.findall(text))
        for piece in _SPECIALS.values():  # a text may contain these strings; they are not words of the vocabulary
            counts.pop(piece, None)
        words = [*_SPECIALS.values(), *sorted(counts, key=lambda word: (-counts[word], word))]
        if len(words) < self.vocab_size:
            raise UserError(too_little_text(self.vocab_size, len(words)))
        return self._read("".join(f"{word}\n" for word in words[: self.vocab_size]).encode())

    def _read(self, model: bytes) -> Tokenizer:
        line_numbers = {word: i for i, word in enumerate(_lines(model))}
        if missing := [piece for piece in _SPECIALS.values() if piece not in line_numbers]:
            raise UserError(
                f"config.tokenizer.path={self.path} has no line {', '.join(missing)}: it is not a word vocabulary"
            )
        special_ids = {field: line_numbers[piece] for field, piece in _SPECIALS.items()}
        vocabulary = Vocabulary(len(_lines(model)), **special_ids)
        return WordTokenizer(model, vocabulary, {i: _SPECIALS[field] for field, i in special_ids.items()})


def _lines(model: bytes) -> list[str]:
    return model.decode().removesuffix("\n").split("\n")
