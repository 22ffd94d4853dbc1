"""Defines the vocabulary of a model, and the base class of tokenizers, which convert text to ids and back.

Each kind of tokenizer has a module, together with the config that trains it: `sentencepiece`, `subwords` (WordPiece,
byte-level BPE and any other tokenizer.json), `characters` and `words`. `huggingface` reads published tokenizers.

Encoding text never returns special ids except unk. For example, `<extra_id_0>` in a document is encoded as ordinary
characters and not as a sentinel. This is the only difference from transformers, which encodes special pieces within a
text as special ids.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import unicodedata
from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.json_files import read_object
from pretrainax.files.regular_files import read_bytes

DESCRIPTION = "vocabulary.json"  # saved next to the tokenizer's model file


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The number of ids of a tokenizer, and its special ids; None: the tokenizer has no such special id."""

    size: int  # number of ids, special ids included
    pad: Optional[int] = None
    bos: Optional[int] = None
    eos: Optional[int] = None
    unk: Optional[int] = None
    cls: Optional[int] = None
    sep: Optional[int] = None
    mask: Optional[int] = None
    sentinels: tuple[int, ...] = ()  # <extra_id_0>, <extra_id_1>, ... in this order

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """All special ids, unk included. Masked language modeling never masks them or inserts them as random tokens."""
        named = (self.pad, self.bos, self.eos, self.unk, self.cls, self.sep, self.mask)
        return frozenset(i for i in (*named, *self.sentinels) if i is not None)

    @property
    def separator(self) -> Optional[int]:
        """The id after each document of a corpus: eos, or sep without eos, or None without both."""
        return self.sep if self.eos is None else self.eos


class TextTable(NamedTuple):
    """For each id of a vocabulary: a flag for text, and the number of text bytes that the id represents."""

    is_text: np.ndarray  # [V] bool: False for special ids except unk, True for all other ids
    num_bytes: np.ndarray  # [V] int32, bytes in UTF-8; 0 for special ids and unk
    adds_space: bool  # True if the tokenizer adds a space before a text


class Tokenizer:
    """Base class of tokenizers, which convert text to ids and back."""

    vocabulary: Vocabulary
    fingerprint: str  # hash of everything that determines the ids; equal fingerprints mean equal ids for every text
    file: ClassVar[str]  # name of the model file in the directory that `save` writes
    _between: ClassVar[str] = ""  # string between text and special pieces in the result of `decode`

    def __init__(
        self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str], decisive: Optional[bytes] = None
    ):
        """Stores the model and checks that the vocabulary matches it.

        Args:
          model: content of the model file.
          vocabulary: the number of ids and the special ids of the model.
          special_pieces: special id -> its text, such as "[MASK]".
          decisive: the part of `model` that determines the ids; None: the whole model.

        Raises:
          ValueError: the vocabulary does not match the model. Libraries that parse the model may raise other errors.
        """
        max_ids = len(model) + len(special_pieces)  # upper bound on the number of ids; a piece has at least one byte
        if not (type(vocabulary.size) is int and 0 < vocabulary.size <= max_ids):
            raise ValueError(f"a model of {len(model)} bytes cannot have {vocabulary.size} ids")
        if wrong := [i for i in vocabulary.special_ids if type(i) is not int or not 0 <= i < vocabulary.size]:
            raise ValueError(f"special ids {wrong} are not ids below {vocabulary.size}")
        self.vocabulary, self.special_pieces, self.model = vocabulary, special_pieces, model
        self._text = self._describe()
        self.fingerprint = hashlib.blake2b(self._text.encode() + (decisive or model), digest_size=16).hexdigest()
        self._is_special = np.zeros(vocabulary.size, bool)
        self._is_special[list(vocabulary.special_ids - {vocabulary.unk})] = True

    def _check_size(self, needed: int) -> None:
        if needed > self.vocabulary.size:
            raise ValueError(f"the model has {needed} ids, but the vocabulary {self.vocabulary.size}")

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 [tokens], without special ids except unk."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the result of `encode` for each text."""
        return [self._without_special(ids) if self._is_special[ids].any() else ids for ids in self._encode_batch(texts)]

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of `encode`, int32 [tokens], and the position of each token in the text, int32 [tokens, 2].

        A position is (index of the first character, index after the last character) in the original text, before any
        change of case, accents or spaces. A token that includes the space before a word starts at the space. All byte
        tokens of a character have the position of the character. Tokens that the tokenizer adds have empty ranges.
        """
        ids, offsets = self._locate(text)
        parts = self._split_special(ids)
        return _concatenated(parts), np.repeat(offsets, [len(part) for part in parts], axis=0)

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _without_special(self, ids: np.ndarray) -> np.ndarray:
        """Replaces each special id (except unk) by the ids of two parts of its piece, which have no special ids.

        This is necessary because the unigram models of mT5 and of the library tokenizers list special pieces among the
        pieces for text, so a text such as "</s>" is encoded as a special id.
        """
        return _concatenated(self._split_special(ids))

    def _split_special(self, ids: np.ndarray) -> list[list[int]]:
        return [self._split_piece(self.special_pieces[i]) if self._is_special[i] else [i] for i in ids.tolist()]

    def _split_piece(self, piece: str) -> list[int]:
        for cut in range(1, len(piece)):
            ids = self._encode_part(piece[:cut]) + self._encode_part(piece[cut:])
            if not self._is_special[ids].any():
                return ids
        return [] if self.vocabulary.unk is None else [self.vocabulary.unk]

    def _encode_part(self, part: str) -> list[int]:
        """Returns the ids of a part of a special piece, which is a part of a word."""
        return self._encode_batch([part])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids for display: special ids as their pieces, ids outside the vocabulary as U+FFFD."""
        parts = []
        for is_text, run in itertools.groupby(map(int, ids), self._is_text):
            run = list(run)
            parts += [self._decode(run)] if is_text else [self.special_pieces.get(i, "\ufffd") for i in run]
        return self._between.join(parts)

    @functools.cached_property
    def word_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Two flags per id, [V] bool each: True if the id always begins a word; True if the id always ends a word.

        A word is defined as in BERT for all tokenizers: words are separated by white space, and each punctuation mark
        and each Chinese character is a separate word. Special ids are words.
        """
        edges = np.array([_edges(spelling) for spelling in self.spellings()], bool)  # [V, 2]
        edges[list(self.vocabulary.special_ids)] = True
        return edges[:, 0], edges[:, 1]

    @functools.cached_property
    def text_table(self) -> TextTable:
        """The text flag and the number of text bytes of each id, computed once."""
        spellings = self.spellings()
        num_bytes = np.array([len(spelling) for spelling in spellings], np.int32)
        num_bytes[list(self.vocabulary.special_ids)] = 0
        first = self.encode("a")[:1]
        return TextTable(~self._is_special, num_bytes, any(spellings[i].startswith(b" ") for i in first))

    @property
    def unknown_ids(self) -> list[int]:
        """The ids that represent text outside the vocabulary: unk and, in SentencePiece models, byte pieces."""
        return [] if self.vocabulary.unk is None else [self.vocabulary.unk]

    def spellings(self) -> list[bytes]:
        """Returns the UTF-8 bytes of the text of each id, [V].

        The bytes include the space before a word and may end inside a character.
        """
        raise NotImplementedError

    def save(self, directory: str) -> None:
        """Writes the model file and the vocabulary to a directory, for `load_tokenizer`."""
        os.makedirs(directory, exist_ok=True)
        for name, content in ((self.file, self.model), (DESCRIPTION, self._text.encode())):
            with open(os.path.join(directory, name), "wb") as f:
                f.write(content)

    def _is_text(self, i: int) -> bool:
        return 0 <= i < self.vocabulary.size and i not in self.special_pieces

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def _describe(self) -> str:
        description = {"kind": type(self).__name__, "vocabulary": dataclasses.asdict(self.vocabulary)}
        return json.dumps(description | {"special_pieces": self.special_pieces}, indent=2) + "\n"


def _concatenated(parts: list[list[int]]) -> np.ndarray:
    return np.array(list(itertools.chain.from_iterable(parts)), np.int32)


def _edges(spelling: bytes) -> tuple[bool, bool]:
    """Returns two flags for a piece with these bytes: it always begins a word; it always ends a word."""
    if not spelling:
        return False, False
    text = spelling.decode("utf-8", "replace")
    first, last = text[0], text[-1]
    if first == "\ufffd":  # an incomplete character; its first byte identifies Chinese and full-width punctuation
        begins = 0xE3 <= spelling[0] <= 0xE9 or spelling[0] == 0xEF
    else:
        begins = first == " " or _is_separate_word(first)
    return begins, last != "\ufffd" and _is_separate_word(last)


def _is_separate_word(character: str) -> bool:
    """Returns True for line breaks, punctuation, symbols and Chinese characters, which are separate words in BERT."""
    code = ord(character)
    is_chinese = 0x3400 <= code < 0xA000 or 0xF900 <= code < 0xFB00 or 0x20000 <= code < 0x32000
    return is_chinese or (character.isspace() and character != " ") or unicodedata.category(character)[0] in "PS"


def load_tokenizer(directory: str) -> Tokenizer:
    """Loads a tokenizer from a directory that `Tokenizer.save` wrote.

    Raises:
      UserError: a file is missing or damaged.
    """
    if not os.path.exists(os.path.join(directory, DESCRIPTION)):
        raise UserError(f"{directory} holds no tokenizer: {DESCRIPTION} is missing")
    try:
        description = read_object(os.path.join(directory, DESCRIPTION))
        kind = {kind.__name__: kind for kind in Tokenizer.__subclasses__()}[description["kind"]]
        fields = description["vocabulary"]
        vocabulary = Vocabulary(**fields | {"sentinels": tuple(fields["sentinels"])})
        model = read_bytes(os.path.join(directory, kind.file))
        return kind(model, vocabulary, {int(i): str(p) for i, p in description["special_pieces"].items()})
    except FileNotFoundError as e:
        raise UserError(f"{directory} holds no tokenizer: {e.filename} is missing") from e
    except Exception as e:  # errors of the libraries, and errors from values of wrong types
        reason = e if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        raise UserError(f"the tokenizer in {directory} is damaged ({reason}); delete this folder and run again") from e


def unknown_share(counts: np.ndarray, tokenizer: Tokenizer) -> float:
    """Returns the share of tokens that are unk or, in SentencePiece, bytes of a character without a piece.

    Args:
      counts: [V] number of occurrences of each id.
    """
    return int(counts[tokenizer.unknown_ids].sum()) / max(int(counts.sum()), 1)
