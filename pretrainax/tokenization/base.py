"""The vocabulary of a model, and the tokenizers that turn text into its ids and back: SentencePiece, tokenizers
(WordPiece, byte-level BPE, all that has a tokenizer.json), plain characters. `pretrainax.tokenizer` trains them,
`pretrainax.tokenization.huggingface` reads and writes those of others.

Text never turns into a special id, whatever it says: a document about `<extra_id_0>` is a document, not a mask.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from typing import ClassVar, Optional

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import models

from pretrainax.config import UserError
from pretrainax.config.json_files import read_object

DESCRIPTION = "vocabulary.json"  # beside the model's own file in a saved tokenizer
SPACE_MARK = "\u2581"  # what SentencePiece writes for a space, and so cannot tell from one
_RARE = "\U0002a6d6 \ua66e \u0f3a"  # characters that hardly a vocabulary has


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How many ids there are, and which of them are no text."""

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
        """Every id that is no text. Masking neither replaces nor draws them."""
        named = (self.pad, self.bos, self.eos, self.unk, self.cls, self.sep, self.mask)
        return frozenset(i for i in (*named, *self.sentinels) if i is not None)

    @property
    def separator(self) -> Optional[int]:
        """The id after each document of a corpus."""
        return self.sep if self.eos is None else self.eos


class Tokenizer:
    """Ids for text. `fingerprint` is equal for two tokenizers if and only if they give the same ids."""

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
        """int32 [tokens], no special ids added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self._spelled(ids) if self._is_special[ids].any() else ids for ids in self._encode_batch(texts)]

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def _spelled(self, ids: np.ndarray) -> np.ndarray:
        """The ids of a text in which a special piece was taken for one: that piece in two parts.

        The unigram models of tokenizers and of mT5 have their special pieces among the ordinary ones.
        """
        parts = [self._in_two(self.special_pieces[i]) if self._is_special[i] else [i] for i in ids.tolist()]
        return np.array(list(itertools.chain.from_iterable(parts)), np.int32)

    def _in_two(self, piece: str) -> list[int]:
        for place in range(1, len(piece)):
            ids = self._encode_part(piece[:place]) + self._encode_part(piece[place:])
            if not self._is_special[ids].any():
                return ids
        return [] if self.vocabulary.unk is None else [self.vocabulary.unk]

    def _encode_part(self, part: str) -> list[int]:
        """The ids of a part of a word."""
        return self._encode_batch([part])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, for people to read: special ids as their pieces, ids past the vocabulary as U+FFFD."""
        parts = []
        for is_text, run in itertools.groupby(map(int, ids), self._is_text):
            run = list(run)
            parts += [self._decode(run)] if is_text else [self.special_pieces.get(i, "\ufffd") for i in run]
        return self._between.join(parts)

    @functools.cached_property
    def word_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether a word begins with an id whatever comes before, and ends with it whatever follows: [V] bool both.

        Words are those of BERT for every tokenizer: what white space parts, and each punctuation mark and each Chinese
        character by itself. Special ids are words.
        """
        edges = np.array([_edges(spelling) for spelling in self.spellings()], bool)  # [V, 2]
        edges[list(self.vocabulary.special_ids)] = True
        return edges[:, 0], edges[:, 1]

    def spellings(self) -> list[bytes]:
        """What each id writes, [V]: UTF-8, perhaps parts of characters; a space in front of the beginning of a word."""
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


class SentencePieceTokenizer(Tokenizer):
    file = "spiece.model"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._check_size(self._processor.get_piece_size())
        self._mark_ids = self._ids_of_mark()
        self.spellings()  # raises where a piece is no text

    @property
    def encodes_marks(self) -> bool:
        """U+2581 in a text is other ids than a space."""
        return bool(self._mark_ids)

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._processor.encode(texts, out_type="numpy", num_threads=1)
        if self._mark_ids:
            for i, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[i] = self._encode_around_marks(text)
        return [np.asarray(ids, np.int32) for ids in encoded]

    def _encode_around_marks(self, text: str) -> list[int]:
        ids = []
        for part in self._processor.encode(text.split(SPACE_MARK), out_type=int):
            ids += part + self._mark_ids
        return ids[: -len(self._mark_ids)]

    def _ids_of_mark(self) -> list[int]:
        """U+2581 as three byte pieces, where the model has them and leaves the start of a text alone."""
        processor = self._processor
        ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        adds_a_space = processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        return ids if all(map(processor.is_byte, ids)) and not adds_a_space else []

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def spellings(self) -> list[bytes]:
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        return [_unmarked(piece) for piece in pieces] + [b""] * (self.vocabulary.size - len(pieces))


class SubwordTokenizer(Tokenizer):
    """A tokenizers file: WordPiece, byte-level BPE, Unigram, …"""

    file = "tokenizer.json"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        decisive = decisive_part(model, vocabulary)
        super().__init__(model, vocabulary, special_pieces, decisive.encode())
        self._tokenizer = tokenizers.Tokenizer.from_str(decisive)
        self._tokenizer.encode_special_tokens = True  # "[MASK]" in a text is text
        self._check_size(max(self._tokenizer.get_vocab().values(), default=-1) + 1)
        self._tokenizer.encode(_RARE)  # raises where it has no piece for what it does not know
        self._between = " " if isinstance(self._tokenizer.model, models.WordPiece) else ""

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encoded]

    def _encode_part(self, part: str) -> list[int]:
        return [token.id for token in self._tokenizer.model.tokenize(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def spellings(self) -> list[bytes]:
        pieces = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocabulary.size)]
        if isinstance(self._tokenizer.model, models.WordPiece):
            prefix = self._tokenizer.model.continuing_subword_prefix
            return [(p.removeprefix(prefix) if p.startswith(prefix) else f" {p}").encode() for p in pieces]
        described = json.loads(self.model)
        if '"ByteLevel"' in json.dumps([described["pre_tokenizer"], described["decoder"]]):
            byte_of = {byte_character(byte): byte for byte in range(256)}
            return [bytes(byte_of[c] for c in p if c in byte_of) for p in pieces]
        return [_unmarked(piece) for piece in pieces]


def decisive_part(model: bytes, vocabulary: Vocabulary) -> str:
    """A tokenizer.json without what changes no id of a text, and with all special ids marked as such."""
    described = json.loads(model) | {"truncation": None, "padding": None, "post_processor": None}
    for token in described["added_tokens"]:
        token["special"] |= token["id"] in vocabulary.special_ids
        if token["special"]:  # a text never is one, whatever stands around it
            token |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(described, ensure_ascii=False)


class CharacterTokenizer(Tokenizer):
    """One id a character; a character outside of the vocabulary is unk."""

    file = "characters.json"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._characters = json.loads(model)
        "".join(self._characters).encode()  # raises where one is half of a pair of surrogates
        self._check_size(len(self._characters) + len(vocabulary.special_ids))
        if vocabulary.unk is None:
            raise ValueError("no id for unknown characters")
        self._first = vocabulary.size - len(self._characters)
        self._codes = np.array([ord(c) for c in self._characters], np.uint32)  # sorted

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[places] == codes, places + self._first, self.vocabulary.unk).astype(np.int32)

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._characters[i - self._first] for i in ids)

    def spellings(self) -> list[bytes]:
        return [b""] * self._first + [c.encode() for c in self._characters]


def byte_character(byte: int) -> str:
    """What byte-level BPE writes for a byte (Radford et al. 2019): itself where it can be seen, else from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in seen else chr(0x100 + sorted(set(range(256)) - set(seen)).index(byte))


_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def _unmarked(piece: str) -> bytes:
    """What a piece of SentencePiece writes; "<0xE5>" is a byte."""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(SPACE_MARK, " ").encode()


def _edges(spelling: bytes) -> tuple[bool, bool]:
    """Whether a piece begins and ends a word, by its first and last character."""
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
    """A word by itself, as in BERT's tokenizer: line breaks, punctuation, symbols, Chinese characters."""
    code = ord(character)
    is_chinese = 0x3400 <= code < 0xA000 or 0xF900 <= code < 0xFB00 or 0x20000 <= code < 0x32000
    return is_chinese or (character.isspace() and character != " ") or unicodedata.category(character)[0] in "PS"


_KINDS = {kind.__name__: kind for kind in (SentencePieceTokenizer, SubwordTokenizer, CharacterTokenizer)}


def load_tokenizer(directory: str) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote."""
    if not os.path.exists(os.path.join(directory, DESCRIPTION)):
        raise UserError(f"{directory} holds no tokenizer: {DESCRIPTION} is missing")
    try:
        description = read_object(os.path.join(directory, DESCRIPTION))
        kind = _KINDS[description["kind"]]
        fields = description["vocabulary"]
        vocabulary = Vocabulary(**fields | {"sentinels": tuple(fields["sentinels"])})
        with open(os.path.join(directory, kind.file), "rb") as f:
            return kind(f.read(), vocabulary, {int(i): str(p) for i, p in description["special_pieces"].items()})
    except FileNotFoundError as e:
        raise UserError(f"{directory} holds no tokenizer: {e.filename} is missing") from e
    except Exception as e:  # what the libraries raise, and what follows from a value of a wrong type
        reason = e if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        raise UserError(f"the tokenizer in {directory} is damaged ({reason}); delete that folder and run again") from e


def unknown_share(counts: np.ndarray, tokenizer: Tokenizer) -> float:
    """Of the tokens: those that are unk, or in SentencePiece a byte of a character that is no piece."""
    unk = tokenizer.vocabulary.unk
    unknown = [] if unk is None else [unk]
    if isinstance(tokenizer, SentencePieceTokenizer):
        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
        unknown += filter(processor.is_byte, range(processor.get_piece_size()))
    return int(counts[unknown].sum()) / max(int(counts.sum()), 1)
