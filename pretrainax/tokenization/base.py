"""The vocabulary of a model, and what every tokenizer has that turns text into its ids and back.

A kind is a file of its own, with the choice that learns it: `sentencepiece`, `subwords` (WordPiece, byte-level BPE, all
that has a tokenizer.json), `characters`. `huggingface` reads those of others.

Text never turns into a special id, whatever it says: a document about `<extra_id_0>` is a document, not a mask. In this
alone the ids are not those of transformers, which makes special ids of such pieces within a text.
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

DESCRIPTION = "vocabulary.json"  # beside the model's own file in a saved tokenizer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The number of ids, and which of them are no text."""

    size: int
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
        """All ids that are no text. Masking neither replaces nor draws them."""
        named = (self.pad, self.bos, self.eos, self.unk, self.cls, self.sep, self.mask)
        return frozenset(i for i in (*named, *self.sentinels) if i is not None)

    @property
    def separator(self) -> Optional[int]:
        """The id after each document of a corpus."""
        return self.sep if self.eos is None else self.eos


class TextTable(NamedTuple):
    """Tells which ids are text, and how much of it each is."""

    is_text: np.ndarray  # [V] bool: all but special ids, of which unk stands for text
    num_bytes: np.ndarray  # [V] int32, of what each spells in UTF-8; 0 of special ids, unk too
    adds_space: bool  # texts are tokenized with a space before them that they do not have


class Tokenizer:
    """Gives ids for text. `fingerprint` is equal for two tokenizers if and only if they give the same ids."""

    vocabulary: Vocabulary
    fingerprint: str
    file: ClassVar[str]  # name of the model in a saved directory
    _between: ClassVar[str] = ""  # put between text and special pieces when decoding

    def __init__(
        self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str], decisive: Optional[bytes] = None
    ):
        """special_pieces: how the special ids are written; decisive: what of `model` the ids follow from, if not all.

        Raises a ValueError, or what the library of the model does, where they do not fit.
        """
        most = len(model) + len(special_pieces)  # ids: each takes a byte at least
        if not (type(vocabulary.size) is int and 0 < vocabulary.size <= most):
            raise ValueError(f"{vocabulary.size} ids of a model of {len(model)} bytes")
        if wrong := [i for i in vocabulary.special_ids if type(i) is not int or not 0 <= i < vocabulary.size]:
            raise ValueError(f"special ids {wrong} of {vocabulary.size}")
        self.vocabulary, self.special_pieces, self.model = vocabulary, special_pieces, model
        self._text = self._describe()
        self.fingerprint = hashlib.blake2b(self._text.encode() + (decisive or model), digest_size=16).hexdigest()
        self._is_special = np.zeros(vocabulary.size, bool)
        self._is_special[list(vocabulary.special_ids - {vocabulary.unk})] = True

    def _check_size(self, needed: int) -> None:
        if needed > self.vocabulary.size:
            raise ValueError(f"the model has {needed} ids, the vocabulary {self.vocabulary.size}")

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [tokens], no special ids added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self._spelled(ids) if self._is_special[ids].any() else ids for ids in self._encode_batch(texts)]

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of `encode`, int32 [tokens], and which characters of the text each stands for, from start to
        end, int32 [tokens, 2].

        The places are in the text as it is given, whatever the tokenizer makes of case, accents or spaces. A token that
        has a space before its word begins with that; those of the bytes of one character have the same place; what a
        tokenizer adds is empty.
        """
        ids, places = self._locate(text)
        parts = self._parts(ids)
        return _joined(parts), np.repeat(places, [len(part) for part in parts], axis=0)

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _spelled(self, ids: np.ndarray) -> np.ndarray:
        """Returns the ids of a text in which a special piece was taken for one: that piece in two parts.

        The unigram models of tokenizers and of mT5 have their special pieces among the ordinary ones.
        """
        return _joined(self._parts(ids))

    def _parts(self, ids: np.ndarray) -> list[list[int]]:
        return [self._in_two(self.special_pieces[i]) if self._is_special[i] else [i] for i in ids.tolist()]

    def _in_two(self, piece: str) -> list[int]:
        for place in range(1, len(piece)):
            ids = self._encode_part(piece[:place]) + self._encode_part(piece[place:])
            if not self._is_special[ids].any():
                return ids
        return [] if self.vocabulary.unk is None else [self.vocabulary.unk]

    def _encode_part(self, part: str) -> list[int]:
        """Returns the ids of a part of a word."""
        return self._encode_batch([part])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Writes ids as text for people to read: special ids as their pieces, ids past the vocabulary as U+FFFD."""
        parts = []
        for is_text, run in itertools.groupby(map(int, ids), self._is_text):
            run = list(run)
            parts += [self._decode(run)] if is_text else [self.special_pieces.get(i, "\ufffd") for i in run]
        return self._between.join(parts)

    @functools.cached_property
    def word_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Tells of each id if a word begins with it whatever comes before, and ends whatever follows: [V] bool both.

        Words are those of BERT for every tokenizer: what white space parts, and each punctuation mark and each Chinese
        character by itself. Special ids are words.
        """
        edges = np.array([_edges(spelling) for spelling in self.spellings()], bool)  # [V, 2]
        edges[list(self.vocabulary.special_ids)] = True
        return edges[:, 0], edges[:, 1]

    @functools.cached_property
    def text_table(self) -> TextTable:
        """Tells of each id whether it is text, and how many bytes of it."""
        spellings = self.spellings()
        num_bytes = np.array([len(spelling) for spelling in spellings], np.int32)
        num_bytes[list(self.vocabulary.special_ids)] = 0
        first = self.encode("a")[:1]
        return TextTable(~self._is_special, num_bytes, any(spellings[i].startswith(b" ") for i in first))

    @property
    def unknown_ids(self) -> list[int]:
        """The ids that stand for what the vocabulary lacks."""
        return [] if self.vocabulary.unk is None else [self.vocabulary.unk]

    def spellings(self) -> list[bytes]:
        """Returns what each id writes, [V]: UTF-8, perhaps parts of characters; a space where a word begins."""
        raise NotImplementedError

    def save(self, directory: str) -> None:
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


def _joined(parts: list[list[int]]) -> np.ndarray:
    return np.array(list(itertools.chain.from_iterable(parts)), np.int32)


def _edges(spelling: bytes) -> tuple[bool, bool]:
    """Tells if a piece begins and ends a word, by its first and last character."""
    if not spelling:
        return False, False
    text = spelling.decode("utf-8", "replace")
    first, last = text[0], text[-1]
    if first == "\ufffd":  # a part of a character; its first byte tells the script: Chinese, or full-width punctuation
        begins = 0xE3 <= spelling[0] <= 0xE9 or spelling[0] == 0xEF
    else:
        begins = first == " " or _stands_alone(first)
    return begins, last != "\ufffd" and _stands_alone(last)


def _stands_alone(character: str) -> bool:
    """Tells words by themselves, as in BERT's tokenizer: line breaks, punctuation, symbols, Chinese characters."""
    code = ord(character)
    is_chinese = 0x3400 <= code < 0xA000 or 0xF900 <= code < 0xFB00 or 0x20000 <= code < 0x32000
    return is_chinese or (character.isspace() and character != " ") or unicodedata.category(character)[0] in "PS"


def load_tokenizer(directory: str) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote."""
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
    except Exception as e:  # what the libraries raise, and what follows from a value of a wrong type
        reason = e if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        raise UserError(f"the tokenizer in {directory} is damaged ({reason}); delete that folder and run again") from e


def unknown_share(counts: np.ndarray, tokenizer: Tokenizer) -> float:
    """Returns the share of the tokens that are unk, or in SentencePiece a byte of a character that is no piece."""
    return int(counts[tokenizer.unknown_ids].sum()) / max(int(counts.sum()), 1)
