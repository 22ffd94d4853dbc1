"""Defines `Vocabulary` and the base class of tokenizers, which convert text to token ids and back.

Each kind of tokenizer and its config share a module: `sentencepiece`, `subwords` (WordPiece, byte-level BPE and any
other tokenizer.json), `characters` and `words`. `huggingface` reads published tokenizers.

Encoding text never returns special ids except unk. For example, `<extra_id_0>` in a document is encoded as ordinary
characters, not as a sentinel. This is the only difference from transformers, which encodes special pieces within a text
as special ids.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.errors import shortened
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.files.regular_files import read_bytes
from pretrainax.tokenization.frames import SpecialTokenFrame

# fields of `Vocabulary` that the files of an imported model determine
_MODEL_TOKENS = ("frame", "decoder_start", "left_sides")
DESCRIPTION = "vocabulary.json"  # file name; saved next to the tokenizer's model file


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's number of token ids and its special ids, which are None if the tokenizer lacks them."""

    size: int  # number of token ids, special ids included
    pad: Optional[int] = None
    bos: Optional[int] = None
    eos: Optional[int] = None
    unk: Optional[int] = None
    cls: Optional[int] = None
    sep: Optional[int] = None
    mask: Optional[int] = None
    sentinels: tuple[int, ...] = ()  # ids of <extra_id_0>, <extra_id_1>, … in order
    # The last three fields affect neither the ids of a text nor the fingerprint, and equality ignores them.
    # Special tokens that the tokenizer itself adds around a text. None: the model family determines them.
    frame: Optional[SpecialTokenFrame] = dataclasses.field(default=None, compare=False)
    # First decoder token of an encoder-decoder with this tokenizer. None: the training objective determines the token.
    decoder_start: Optional[int] = dataclasses.field(default=None, compare=False)
    # The fields of tokenizer_config.json ("padding_side", "truncation_side") that an export sets to "left".
    left_sides: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """All special ids, including unk. Masked language modeling never masks them or uses them as random tokens."""
        field_ids = (self.pad, self.bos, self.eos, self.unk, self.cls, self.sep, self.mask)
        return frozenset(i for i in (*field_ids, *self.sentinels) if i is not None)

    @property
    def separator(self) -> Optional[int]:
        """The id that follows each document in a corpus: eos, or sep if there is no eos, or None without either."""
        return self.sep if self.eos is None else self.eos

    @property
    def model_tokens(self) -> JsonObject:
        """The fields `frame`, `decoder_start` and `left_sides` by name, without those that are None or empty."""
        return {name: value for name in _MODEL_TOKENS if (value := getattr(self, name)) not in (None, ())}


class TextTable(NamedTuple):
    """For each id in a vocabulary, whether it represents text and how many bytes of text it represents."""

    is_text: np.ndarray  # [V] bool: False for special ids except unk, True for all other ids
    num_bytes: np.ndarray  # [V] int32, UTF-8 bytes of the text of each id; 0 for special ids and unk
    adds_space: bool  # True if the tokenizer adds a space before a text


class Tokenizer:
    """Base class of tokenizers, which convert text to token ids and back."""

    vocabulary: Vocabulary
    fingerprint: str  # hash of everything that determines the ids; equal fingerprints imply equal ids for every text
    file: ClassVar[str]  # name of the model file in the directory that `save` writes
    # The positions at which the tokenizer class of transformers adds a space, if the class ignores the tokenizer files.
    # "first": before a text; "always": also after each special token in the text. Text that begins with a space gets
    # no second space.
    prefix_spaces: Optional[Literal["first", "always"]] = None
    _separator: ClassVar[str] = ""  # string that separates text and special pieces in the result of `decode`

    def __init__(
        self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str], decisive: Optional[bytes] = None
    ):
        """Stores the model and checks that the vocabulary matches it.

        Args:
          model: content of the model file.
          vocabulary: the model's number of ids and its special ids.
          special_pieces: maps each special id to its piece, such as "[MASK]".
          decisive: the part of `model` that determines the ids, used for the fingerprint; None means all of `model`.

        Raises:
          ValueError: the vocabulary does not match the model. Libraries that parse the model may raise other errors.
        """
        max_ids = len(model) + len(
            special_pieces
        )  # upper bound on the number of ids, because each piece has at least one byte
        if not (type(vocabulary.size) is int and 0 < vocabulary.size <= max_ids):
            raise ValueError(f"a model of {len(model)} bytes cannot have {vocabulary.size} ids")
        ids = vocabulary.special_ids | (set() if vocabulary.frame is None else vocabulary.frame.ids)
        if invalid_ids := [i for i in ids if type(i) is not int or not 0 <= i < vocabulary.size]:
            raise ValueError(f"special ids {invalid_ids} are not ids below {vocabulary.size}")
        self.vocabulary, self.special_pieces, self.model = vocabulary, special_pieces, model
        description = self._describe().encode()
        self.fingerprint = hashlib.blake2b(description + (decisive or model), digest_size=16).hexdigest()
        self._is_special = np.zeros(vocabulary.size, bool)
        self._is_special[list(vocabulary.special_ids - {vocabulary.unk})] = True

    def _check_size(self, num_ids: int) -> None:
        if num_ids > self.vocabulary.size:
            raise ValueError(f"the model has {num_ids} ids, but the vocabulary {self.vocabulary.size}")

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 [T], which include no special ids except unk."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encodes each text in a list, like `encode`; returns the token ids of each text.

        Raises:
          UserError: a text has an unpaired surrogate, for example the JSON string "\\ud800".
        """
        with surrogates_as_errors(texts):
            batch = self._encode_batch(texts)
        return [self._replace_special(ids) if self._is_special[ids].any() else ids for ids in batch]

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same token ids as `encode`, int32 [T], and each token's character span, int32 [T, 2].

        A span is (index of the first character, index after the last character) in the original text, before any
        change of case, accents or spaces. If a token includes the space before a word, its span starts at the space.
        All byte tokens of a character have the character's span. Tokens that the tokenizer adds have empty spans.
        """
        with surrogates_as_errors([text]):
            ids, offsets = self._locate(text)
        ids_of_tokens = self._split_special_ids(ids)
        return _concatenate(ids_of_tokens), np.repeat(offsets, [len(token_ids) for token_ids in ids_of_tokens], axis=0)

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _replace_special(self, ids: np.ndarray) -> np.ndarray:
        """Replaces each special id (except unk) with the ids of its piece, encoded as two fragments of ordinary text.

        Unigram models of mT5 and of the `tokenizers` library list special pieces among the pieces for text. Without the
        replacement, these models would encode the text "</s>" as a special id.
        """
        return _concatenate(self._split_special_ids(ids))

    def _split_special_ids(self, ids: np.ndarray) -> list[list[int]]:
        return [
            self._encode_special_piece(self.special_pieces[i]) if self._is_special[i] else [i] for i in ids.tolist()
        ]

    def _encode_special_piece(self, piece: str) -> list[int]:
        for cut in range(1, len(piece)):
            ids = self._encode_fragment(piece[:cut]) + self._encode_fragment(piece[cut:])
            if not self._is_special[ids].any():
                return ids
        return [] if self.vocabulary.unk is None else [self.vocabulary.unk]

    def _encode_fragment(self, fragment: str) -> list[int]:
        """Returns the ids of a fragment of a special piece, encoded as if it were part of a word."""
        return self._encode_batch([fragment])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids for display, with special ids as their pieces and ids outside the vocabulary as U+FFFD."""
        strings = []
        for is_text, id_run in itertools.groupby(map(int, ids), self._is_text):
            id_run = list(id_run)
            strings += [self._decode(id_run)] if is_text else [self.special_pieces.get(i, "\ufffd") for i in id_run]
        return self._separator.join(strings)

    @functools.cached_property
    def special_patterns(self) -> dict[str, int]:
        """Maps a regular expression for each special token in a prompt to the token's id.

        A tokenizer.json can have special tokens in addition to `special_pieces`, for example <|im_start|> in chat
        formats.
        """
        return {re.escape(piece): i for i, piece in self.special_pieces.items() if piece}

    @functools.cached_property
    def word_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Two bool arrays [V]: whether each id always begins a word, and whether it always ends one.

        For all tokenizers, words are defined as in BERT: white space separates words, and each punctuation mark and
        each Chinese character is a separate word. Special ids also count as words.
        """
        edges = np.array([_word_edges(spelling) for spelling in self.spellings()], bool)  # [V, 2]
        edges[list(self.vocabulary.special_ids)] = True
        return edges[:, 0], edges[:, 1]

    @functools.cached_property
    def text_table(self) -> TextTable:
        """The `TextTable` of the vocabulary, computed on first use."""
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
        """Returns the UTF-8 bytes of the text that each id represents; a list of length V.

        The bytes include the space before a word, and may begin or end in the middle of a character.
        """
        raise NotImplementedError

    def save(self, directory: str) -> None:
        """Saves the model file and the vocabulary to a directory, from which `load_tokenizer` loads the tokenizer."""
        os.makedirs(directory, exist_ok=True)
        description = self._describe(self.vocabulary.model_tokens)
        for name, content in ((self.file, self.model), (DESCRIPTION, description.encode())):
            with open(os.path.join(directory, name), "wb") as f:
                f.write(content)

    def _is_text(self, i: int) -> bool:
        return 0 <= i < self.vocabulary.size and i not in self.special_pieces

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def _describe(self, model_tokens: Optional[JsonObject] = None) -> str:
        """Returns the content of vocabulary.json; the fingerprint hashes it without `Vocabulary.model_tokens`."""
        fields = dataclasses.asdict(dataclasses.replace(self.vocabulary, **dict.fromkeys(_MODEL_TOKENS)))
        fields = {name: value for name, value in fields.items() if name not in _MODEL_TOKENS}
        description = {"kind": type(self).__name__, "vocabulary": fields | (model_tokens or {})}
        return json.dumps(description | {"special_pieces": self.special_pieces}, indent=2) + "\n"


@contextlib.contextmanager
def surrogates_as_errors(texts: Iterable[str]) -> Iterator[None]:
    """Converts the error that a library raises for an unpaired surrogate in a text to a UserError."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError):
        for text in texts:
            if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(
                    f"the text {shortened(ascii(text))} has an unpaired surrogate, which is no character: remove it"
                ) from None
        raise


def _concatenate(id_lists: list[list[int]]) -> np.ndarray:
    return np.array(list(itertools.chain.from_iterable(id_lists)), np.int32)


def _word_edges(spelling: bytes) -> tuple[bool, bool]:
    """Returns two flags for the piece with UTF-8 bytes `spelling`: it always begins a word, it always ends a word."""
    if not spelling:
        return False, False
    text = spelling.decode("utf-8", "replace")
    first, last = text[0], text[-1]
    if (
        first == "\ufffd"
    ):  # an incomplete character; the first byte identifies Chinese characters and full-width punctuation
        begins = 0xE3 <= spelling[0] <= 0xE9 or spelling[0] == 0xEF
    else:
        begins = first == " " or _is_always_word(first)
    ends = last == " " and not text.isspace()  # the last piece of a word in GPT-1
    return begins, ends or (last != "\ufffd" and _is_always_word(last))


def _is_always_word(character: str) -> bool:
    """Returns True if BERT always treats a character as a word: line breaks, punctuation, symbols, Chinese."""
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
        fields["sentinels"] = tuple(fields["sentinels"])
        if "frame" in fields:
            fields["frame"] = SpecialTokenFrame.from_json(fields["frame"])
        vocabulary = Vocabulary(**fields)
        model = read_bytes(os.path.join(directory, kind.file))
        return kind(model, vocabulary, {int(i): str(p) for i, p in description["special_pieces"].items()})
    except FileNotFoundError as e:
        raise UserError(f"{directory} holds no tokenizer: {e.filename} is missing") from e
    except Exception as e:  # errors of the libraries, and errors from values of wrong types
        reason = e if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        raise UserError(f"the tokenizer in {directory} is damaged ({reason}); delete this folder and run again") from e


def unknown_share(counts: np.ndarray, tokenizer: Tokenizer) -> float:
    """Returns the fraction of tokens that are unk or, with SentencePiece, bytes of characters without a piece.

    Args:
      counts: number of occurrences of each id, [V].
    """
    return int(counts[tokenizer.unknown_ids].sum()) / max(int(counts.sum()), 1)


def check_no_run(directory: str) -> None:
    """Raises UserError if `directory` is the folder of a run, whose tokenizer is in a folder below it."""
    if os.path.exists(os.path.join(directory, "tokenizer", DESCRIPTION)):
        raise UserError(f"{directory} is the folder of a run: give {os.path.join(directory, 'tokenizer')}")
