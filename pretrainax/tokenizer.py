"""Text to token ids and back: one face over SentencePiece (unigram), tokenizers (WordPiece, byte-level BPE) and plain
characters. A config either trains a vocabulary (`build`) or reads one (`load`).

Text never turns into a special id, whatever it says: a document about `<extra_id_0>` is a document, not a mask.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Optional

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pretrainax.config import Choice, UserError

_DESCRIPTION = "vocabulary.json"  # beside the model's own file in a saved tokenizer
_SPACE_MARK = "\u2581"  # what SentencePiece writes for a space, and so cannot tell from one


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

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        self.vocabulary, self._model, self._special_pieces = vocabulary, model, special_pieces
        self._text = self._describe()
        self.fingerprint = hashlib.blake2b(self._text.encode() + model, digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens], no special ids added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, for people to read: special ids as their pieces, ids past the vocabulary as U+FFFD."""
        parts = []
        for is_text, run in itertools.groupby(map(int, ids), self._is_text):
            run = list(run)
            parts += [self._decode(run)] if is_text else [self._special_pieces.get(i, "\ufffd") for i in run]
        return self._between.join(parts)

    def save(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        for name, content in ((self.file, self._model), (_DESCRIPTION, self._text.encode())):
            with open(os.path.join(directory, name), "wb") as f:
                f.write(content)

    def _is_text(self, i: int) -> bool:
        return 0 <= i < self.vocabulary.size and i not in self._special_pieces

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def _describe(self) -> str:
        description = {"kind": type(self).__name__, "vocabulary": dataclasses.asdict(self.vocabulary)}
        return json.dumps(description | {"special_pieces": self._special_pieces}, indent=2) + "\n"


class SentencePieceTokenizer(Tokenizer):
    file = "spiece.model"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._mark_ids = self._ids_of_mark()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._processor.encode(texts, out_type=int, num_threads=1)
        if self._mark_ids:
            for i, text in enumerate(texts):
                if _SPACE_MARK in text:
                    encoded[i] = self._encode_around_marks(text)
        return [np.array(ids, np.int32) for ids in encoded]

    def _encode_around_marks(self, text: str) -> list[int]:
        ids = []
        for part in self._processor.encode(text.split(_SPACE_MARK), out_type=int):
            ids += part + self._mark_ids
        return ids[: -len(self._mark_ids)]

    def _ids_of_mark(self) -> list[int]:
        """U+2581 as three byte pieces, where the model has them and leaves the start of a text alone."""
        processor = self._processor
        ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        adds_a_space = processor.encode("a", out_type=str)[0].startswith(_SPACE_MARK)
        return ids if all(map(processor.is_byte, ids)) and not adds_a_space else []

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class SubwordTokenizer(Tokenizer):
    """A tokenizers file: WordPiece or byte-level BPE."""

    file = "tokenizer.json"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
        self._tokenizer.encode_special_tokens = True  # "[MASK]" in a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._between = " " if isinstance(self._tokenizer.model, models.WordPiece) else ""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encoded]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class CharacterTokenizer(Tokenizer):
    """One id a character; a character outside of the vocabulary is unk."""

    file = "characters.json"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._characters = json.loads(model)
        self._first = vocabulary.size - len(self._characters)
        self._codes = np.array([ord(c) for c in self._characters], np.uint32)  # sorted

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[places] == codes, places + self._first, self.vocabulary.unk).astype(np.int32)

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._characters[i - self._first] for i in ids)


_KINDS = {kind.__name__: kind for kind in (SentencePieceTokenizer, SubwordTokenizer, CharacterTokenizer)}


def load_tokenizer(directory: str) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote."""
    try:
        with open(os.path.join(directory, _DESCRIPTION), encoding="utf-8") as f:
            description = json.load(f)
        kind = _KINDS[description["kind"]]
        fields = description["vocabulary"]
        vocabulary = Vocabulary(**fields | {"sentinels": tuple(fields["sentinels"])})
        with open(os.path.join(directory, kind.file), "rb") as f:
            return kind(f.read(), vocabulary, {int(i): piece for i, piece in description["special_pieces"].items()})
    except FileNotFoundError as e:
        raise UserError(f"{directory} holds no tokenizer: {e.filename} is missing") from e
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"the tokenizer in {directory} is damaged ({e!r}); delete that folder and run again") from e


def check_tokenizer(tokenizer: Tokenizer, experiment: Any) -> None:
    """Raises a UserError where the vocabulary does not fit the model or the objective."""
    size, rows = tokenizer.vocabulary.size, experiment.model.vocab_size
    if size > rows:
        raise UserError(f"the tokenizer has {size} ids, config.model.vocab_size is {rows}: it must be at least {size}")
    experiment.objective.check_vocabulary(tokenizer.vocabulary, experiment.data.sequence_length)


# --- configs -------------------------------------------------------------------------------------------------------


class TokenizerConfig(Choice):
    """Base of the tokenizer choices."""

    kind: ClassVar[type[Tokenizer]]
    path: Optional[str]
    train_bytes: Optional[int]  # how much text `build` needs; None: all there is

    @property
    def size(self) -> Optional[int]:
        """Ids of a vocabulary trained from this config, special ones included; None: only the text can tell."""
        return None

    def build(self, texts: Iterator[str]) -> Tokenizer:
        """Learns a vocabulary from text."""
        raise NotImplementedError

    def load(self) -> Tokenizer:
        """Reads `path`: a directory that `Tokenizer.save` wrote, a model file, or a directory that holds one."""
        path = os.path.expanduser(self.path)
        if os.path.exists(os.path.join(path, _DESCRIPTION)):
            tokenizer = load_tokenizer(path)
            if type(tokenizer) is not self.kind:
                raise UserError(f"config.tokenizer.path={self.path} is no {type(self).__name__} tokenizer")
            return tokenizer
        file = os.path.join(path, self.kind.file) if os.path.isdir(path) else path
        try:
            with open(file, "rb") as f:
                return self._read(f.read())
        except OSError as e:
            raise UserError(f"config.tokenizer.path={self.path}: cannot read {file} ({e.strerror})") from e

    def problems(self, experiment: Any) -> Iterator[str]:
        if self.path is not None:
            if not os.path.exists(os.path.expanduser(self.path)):
                yield f"config.tokenizer.path is {self.path!r}, which does not exist"
            return
        if self.train_bytes is not None and self.train_bytes < 1:
            yield f"config.tokenizer.train_bytes is {self.train_bytes}, it must be at least 1"
        if self.size is not None and self.size > experiment.model.vocab_size:
            yield (
                f"config.model.vocab_size is {experiment.model.vocab_size}, the tokenizer will have {self.size} ids: "
                "make it at least that, or config.tokenizer.vocab_size smaller"
            )

    def _read(self, model: bytes) -> Tokenizer:
        raise NotImplementedError


@dataclasses.dataclass
class Unigram(TokenizerConfig):
    """SentencePiece's unigram language model (Kudo 2018), lossless: bytes stand in for unknown characters.

    As in T5, pad = 0, eos = 1, unk = 2, and the sentinels come after the `vocab_size` pieces, <extra_id_0> last:
    32,000 pieces and 100 sentinels are 32,100 ids.
    """

    vocab_size: int = 32_000  # pieces to learn, without the sentinels
    path: Optional[str] = None  # read this instead: a saved tokenizer or a .model file (T5's, LLaMA's)
    num_sentinels: int = 100  # <extra_id_0> ... for span corruption
    train_bytes: int = 10_000_000  # of text to learn from

    kind = SentencePieceTokenizer

    @property
    def size(self) -> int:
        return self.vocab_size + self.num_sentinels

    def problems(self, experiment: Any) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.num_sentinels < 0:
            yield f"config.tokenizer.num_sentinels is {self.num_sentinels}, it must be at least 0"

    def build(self, texts: Iterator[str]) -> Tokenizer:
        model = io.BytesIO()
        lines = (line for text in texts for line in text.split("\n") if line)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                model_type="unigram",
                vocab_size=self.vocab_size,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,  # indentation
                byte_fallback=True,
                user_defined_symbols=["\n", "\n\n"],
                max_sentence_length=1 << 20,  # bytes of a line; longer ones are left out
                num_threads=4,  # the result depends on it: the same on every machine
                minloglevel=2,
            )
        except RuntimeError as e:
            raise UserError(_explain_sentencepiece(str(e), self.vocab_size)) from e
        return self._read(model.getvalue())

    def _read(self, model: bytes) -> Tokenizer:
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.load_from_serialized_proto(model)
        except RuntimeError as e:
            raise UserError(f"config.tokenizer.path={self.path} is no SentencePiece model") from e
        ids = {"pad": processor.pad_id(), "bos": processor.bos_id(), "eos": processor.eos_id()}
        ids = {name: i for name, i in ids.items() if i >= 0} | {"unk": processor.unk_id()}
        size = processor.get_piece_size() + self.num_sentinels
        sentinels = tuple(size - 1 - n for n in range(self.num_sentinels))
        pieces = {i: processor.id_to_piece(i) for i in ids.values()}
        pieces |= {i: f"<extra_id_{n}>" for n, i in enumerate(sentinels)}
        return SentencePieceTokenizer(model, Vocabulary(size, **ids, sentinels=sentinels), pieces)


def _explain_sentencepiece(error: str, vocab_size: int) -> str:
    too_high = re.search(r"to a value <= (\d+)", error)
    too_low = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if too_high:
        return _too_little_text(vocab_size, int(too_high[1]))
    if too_low:
        return f"config.tokenizer.vocab_size is {vocab_size}, the characters alone of this text need {too_low[1]}"
    return (
        f"SentencePiece cannot learn from this text, config.tokenizer.vocab_size={vocab_size}: {error.split('] ')[-1]}"
    )


def _too_little_text(vocab_size: int, most: int) -> str:
    return (
        f"config.tokenizer.vocab_size is {vocab_size}, this text is enough for {most} at most: "
        "set it lower, or give more text"
    )


class _Subword(TokenizerConfig):
    kind = SubwordTokenizer
    specials: ClassVar[dict[str, str]]  # Vocabulary field -> piece

    @property
    def size(self) -> int:
        return self.vocab_size

    def _train(self, tokenizer: tokenizers.Tokenizer, trainer: Any, texts: Iterator[str]) -> Tokenizer:
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() < self.vocab_size:
            raise UserError(_too_little_text(self.vocab_size, tokenizer.get_vocab_size()))
        if tokenizer.get_vocab_size() > self.vocab_size:
            raise UserError(
                f"config.tokenizer.vocab_size is {self.vocab_size}, the alphabet and the special pieces alone need "
                f"{tokenizer.get_vocab_size()}"
            )
        model = json.loads(tokenizer.to_str())
        model["added_tokens"] = [t for t in model["added_tokens"] if t["content"] in self.specials.values()]
        return self._read(json.dumps(model, ensure_ascii=False).encode())

    def _read(self, model: bytes) -> Tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(model)
        except Exception as e:  # the library raises nothing more precise
            raise UserError(f"config.tokenizer.path={self.path} is no tokenizer.json of tokenizers ({e})") from e
        ids = {field: tokenizer.token_to_id(piece) for field, piece in self.specials.items()}
        missing = sorted({piece for field, piece in self.specials.items() if ids[field] is None})
        if missing:
            raise UserError(f"config.tokenizer.path={self.path} has no {', '.join(missing)}: no {type(self).__name__}")
        pieces = {i: self.specials[field] for field, i in ids.items()}
        return SubwordTokenizer(model, Vocabulary(tokenizer.get_vocab_size(), **ids), pieces)


@dataclasses.dataclass
class WordPiece(_Subword):
    """BERT's word pieces (Devlin et al. 2018, section 3). Lossy: white space, and with `lowercase` case and accents."""

    vocab_size: int = 30_522  # special pieces included
    lowercase: bool = True  # and strip accents ("uncased")
    path: Optional[str] = None  # read this instead: a saved tokenizer or a tokenizer.json
    train_bytes: int = 10_000_000  # of text to learn from

    specials = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}

    def build(self, texts: Iterator[str]) -> Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##")
        texts = list(texts)
        alphabet = self._alphabet(tokenizer.normalizer, texts)
        # The trainer numbers pieces as it meets them, in an order that changes from run to run. Named beforehand as
        # special ones, the pieces of one character have fixed ids, and with them all that is built of them.
        within = [f"##{c}" for c in alphabet if _joins_words(tokenizer, c)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[*self.specials.values(), *within],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            min_frequency=2,
            show_progress=False,
        )
        return self._train(tokenizer, trainer, texts)

    def _alphabet(self, normalizer: normalizers.Normalizer, texts: list[str]) -> list[str]:
        """The most frequent characters, sorted; the others become [UNK]."""
        counts = collections.Counter()
        for text in texts:
            counts.update(normalizer.normalize_str(text))
        frequent = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
        return sorted(frequent[: min(1000, self.vocab_size // 4)])


def _joins_words(tokenizer: tokenizers.Tokenizer, character: str) -> bool:
    """Whether a character can stand within a word: punctuation and Chinese characters are words of their own."""
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(f"a{character}"))) == 1


@dataclasses.dataclass
class ByteBPE(_Subword):
    """GPT-2's byte-level byte pair encoding (Radford et al. 2019, section 2.2), lossless."""

    vocab_size: int = 50_257  # <|endoftext|> included
    path: Optional[str] = None  # read this instead: a saved tokenizer or a tokenizer.json
    train_bytes: int = 10_000_000  # of text to learn from

    specials = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}

    def build(self, texts: Iterator[str]) -> Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            min_frequency=2,
            show_progress=False,
        )
        return self._train(tokenizer, trainer, texts)


@dataclasses.dataclass
class Characters(TokenizerConfig):
    """Every character of the text, in sorted order, after pad, eos and unk."""

    path: Optional[str] = None  # read this instead: a saved tokenizer

    kind = CharacterTokenizer
    train_bytes = None

    def build(self, texts: Iterator[str]) -> Tokenizer:
        characters = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise UserError("there is no text to take the characters from; see config.data.source")
        return self._read(json.dumps(sorted(characters)).encode())

    def _read(self, model: bytes) -> Tokenizer:
        pieces = {0: "<pad>", 1: "</s>", 2: "<unk>"}
        vocabulary = Vocabulary(len(pieces) + len(json.loads(model)), pad=0, eos=1, unk=2)
        return CharacterTokenizer(model, vocabulary, pieces)
