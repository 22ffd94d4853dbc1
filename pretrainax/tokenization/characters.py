"""Implements a tokenizer with one token per character."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.tokenization.base import Tokenizer, Vocabulary
from pretrainax.tokenization.choices import TokenizerConfig


class CharacterTokenizer(Tokenizer):
    """A tokenizer that encodes each character as one id, or as unk if it is not in the vocabulary."""

    file = "characters.json"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._characters = json.loads(model)
        "".join(self._characters).encode()  # raises an error for a lone surrogate
        self._check_size(len(self._characters) + len(vocabulary.special_ids))
        if vocabulary.unk is None:
            raise ValueError("the vocabulary has no id for unknown characters")
        self._first_id = vocabulary.size - len(self._characters)
        self._codes = np.array([ord(c) for c in self._characters], np.uint32)  # in ascending order

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(len(text), dtype=np.int32)
        return self._encode(text), np.stack([starts, starts + 1], axis=1)

    def _encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        indices = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[indices] == codes, indices + self._first_id, self.vocabulary.unk).astype(np.int32)

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._characters[i - self._first_id] for i in ids)

    def spellings(self) -> list[bytes]:
        return [b""] * self._first_id + [c.encode() for c in self._characters]


@dataclasses.dataclass
class Characters(TokenizerConfig):
    """Builds a `CharacterTokenizer` whose vocabulary is the set of characters of the training text.

    The ids are pad = 0, eos = 1 and unk = 2, followed by the characters in order of their code points.
    """

    path: Optional[str] = None  # a saved tokenizer to load instead of training

    kind = CharacterTokenizer
    train_bytes = None
    specials = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}

    def build(self, texts: Iterator[str]) -> Tokenizer:
        characters = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise UserError("no text to collect characters from; see config.data.source")
        return self._read(json.dumps(sorted(characters)).encode())

    def _read(self, model: bytes) -> Tokenizer:
        pieces = dict(enumerate(self.specials.values()))
        vocabulary = Vocabulary(len(pieces) + len(json.loads(model)), pad=0, eos=1, unk=2)
        return CharacterTokenizer(model, vocabulary, pieces)
