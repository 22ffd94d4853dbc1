"""Implements SentencePiece tokenizers: unigram and BPE models, trained so that decoding restores the text exactly."""

import dataclasses
import io
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Optional

import numpy as np
import sentencepiece

from pretrainax.config import Experiment, UserError
from pretrainax.tokenization.base import Tokenizer, Vocabulary
from pretrainax.tokenization.choices import TokenizerConfig, special_piece_problems, too_little_text

SPACE_MARK = "\u2581"  # represents a space in SentencePiece, which therefore treats this character in a text as a space
# config.tokenizer.special_pieces -> {Vocabulary field: piece}, in the order of the ids
SPECIALS = {
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "albert": {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "llama": {"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    "gemma": {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
}
_DEFAULTS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}  # SentencePiece has settings for these pieces
_LONGEST_LINE = 1 << 20  # bytes
# If the share of spaces is lower, they are declared as required: SentencePiece omits the rarest characters, which are
# up to 5e-4 of a text.
_RARE = 1e-3


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with a SentencePiece model, unigram or BPE."""

    file = "spiece.model"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._check_size(self._processor.get_piece_size())
        self._mark_ids = self._ids_of_mark()
        self.spellings()  # raises an error if a piece is not valid text

    @property
    def encodes_marks(self) -> bool:
        """True if U+2581 (SPACE_MARK) in a text has different ids than a space."""
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

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids, places, start = [], [], 0
        for part in text.split(SPACE_MARK) if self._mark_ids else [text]:
            found = self._processor.encode(part, return_type="offset_mapping")
            offsets = found["offsets"]
            for i in reversed(range(len(offsets) - 1)):  # only the last byte token of a character has a nonempty range
                if self._processor.is_byte(found["ids"][i]) and offsets[i][0] == offsets[i][1]:
                    offsets[i] = offsets[i + 1]
            ids += found["ids"] + self._mark_ids
            places += [(start + begin, start + end) for begin, end in offsets]
            start += len(part) + 1
            places += [(start - 1, start)] * len(self._mark_ids)
        count = len(ids) - len(self._mark_ids)  # the last part has no mark after it
        return np.array(ids[:count], np.int32), np.array(places[:count], np.int32).reshape(-1, 2)

    def _ids_of_mark(self) -> list[int]:
        """Returns the ids of the three bytes of U+2581; [] if the model lacks byte pieces or adds a space to a text."""
        processor = self._processor
        ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        adds_a_space = processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        return ids if all(map(processor.is_byte, ids)) and not adds_a_space else []

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    @property
    def unknown_ids(self) -> list[int]:
        processor = self._processor
        return [*super().unknown_ids, *filter(processor.is_byte, range(processor.get_piece_size()))]

    def spellings(self) -> list[bytes]:
        pieces = [self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())]
        return [piece_bytes(piece) for piece in pieces] + [b""] * (self.vocabulary.size - len(pieces))


_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def piece_bytes(piece: str) -> bytes:
    """Returns the UTF-8 bytes of the text of a SentencePiece piece; the byte piece "<0xE5>" is a single byte."""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(SPACE_MARK, " ").encode()


# --- training and loading ------------------------------------------------------------------------------------------


def learn(texts: Iterator[str], model_type: str, vocab_size: int, specials: Mapping[str, str]) -> bytes:
    """Trains a SentencePiece model on text; returns the content of the model file.

    Args:
      model_type: unigram | bpe.
      vocab_size: number of pieces, including the special pieces and 256 byte pieces.
      specials: Vocabulary field -> special piece, in the order of the ids.
    """
    model = io.BytesIO()
    settings = {f"{field}_id": -1 for field in _DEFAULTS}
    for i, (field, piece) in enumerate(specials.items()):
        if field in _DEFAULTS:
            settings[f"{field}_id"] = i
            if piece != _DEFAULTS[field]:  # a setting is stored in the model and changes its fingerprint
                settings[f"{field}_piece"] = piece
    lines = [part for text in texts for line in text.split("\n") if line for part in _parts(line)]
    if sum(line.count(" ") for line in lines) < _RARE * sum(map(len, lines)):  # as in Chinese
        settings["required_chars"] = SPACE_MARK  # otherwise a space is encoded as three bytes that decode to U+2581
    if others := [piece for field, piece in specials.items() if field not in _DEFAULTS]:
        settings["control_symbols"] = others  # they get the next free ids
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            **settings,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation
            byte_fallback=True,
            user_defined_symbols=["\n", "\n\n"],
            max_sentence_length=_LONGEST_LINE,  # bytes; SentencePiece skips longer lines
            num_threads=4,  # fixed on every machine, because the result depends on it
            minloglevel=2,
        )
    except RuntimeError as e:
        raise UserError(_explain(str(e), vocab_size)) from e
    return model.getvalue()


def _parts(line: str) -> list[str]:
    """Splits a line that is too long for SentencePiece into shorter strings, before spaces if possible."""
    if len(line) <= _LONGEST_LINE // 4 or len(line.encode()) <= _LONGEST_LINE:
        return [line]
    return re.findall(r"(?s).{1,4096}(?= |\Z)|.{1,4096}", line)


def read(model: bytes, specials: Mapping[str, str], num_sentinels: int, path: str | None) -> SentencePieceTokenizer:
    """Returns the tokenizer of a SentencePiece model, with sentinels.

    The model defines the ids of pad, bos, eos and unk. The sentinels follow the pieces of the model in descending
    order, so <extra_id_0> has the highest id.

    Args:
      model: content of the model file.
      specials: Vocabulary field -> piece, for all further special pieces, such as [CLS].
      path: path of the model, for error messages; None: a newly trained model.

    Raises:
      UserError: `model` is not a SentencePiece model or lacks a special piece.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except RuntimeError as e:
        raise UserError(f"config.tokenizer.path={path} is not a SentencePiece model") from e
    ids = {field: i for field in _DEFAULTS if (i := getattr(processor, f"{field}_id")()) >= 0}
    ids |= {field: processor.piece_to_id(piece) for field, piece in specials.items() if field not in _DEFAULTS}
    missing = [specials[field] for field in ids.keys() - _DEFAULTS.keys() if not processor.is_control(ids[field])]
    if missing:
        raise UserError(
            f"config.tokenizer.path={path} has no {', '.join(sorted(missing))}; see config.tokenizer.special_pieces"
        )
    size = processor.get_piece_size() + num_sentinels
    sentinels = tuple(size - 1 - n for n in range(num_sentinels))
    pieces = {i: processor.id_to_piece(i) for i in ids.values()}
    pieces |= {i: f"<extra_id_{n}>" for n, i in enumerate(sentinels)}
    return SentencePieceTokenizer(model, Vocabulary(size, **ids, sentinels=sentinels), pieces)


def _explain(error: str, vocab_size: int) -> str:
    """Returns the error line for the user for an error message of SentencePiece's trainer."""
    too_high = re.search(r"to a value <= (\d+)", error)
    too_low = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if too_high:
        return too_little_text(vocab_size, int(too_high[1]))
    if too_low:
        return (
            f"config.tokenizer.vocab_size is {vocab_size}, but the characters of this text alone need {too_low[1]}, "
            "as in Chinese: set it to at least twice that number, or use config.tokenizer="
            f'"ByteBPE(vocab_size={vocab_size})", which represents characters as bytes'
        )
    return f"SentencePiece cannot train on this text, config.tokenizer.vocab_size={vocab_size}: {error.split('] ')[-1]}"


# --- configs --------------------------------------------------------------------------------------------------------


class _SentencePiece(TokenizerConfig):
    """Base class of the configs of SentencePiece tokenizers."""

    kind = SentencePieceTokenizer
    model_type: ClassVar[str]

    @property
    def size(self) -> int:
        return self.vocab_size + self.num_sentinels

    @property
    def specials(self) -> dict[str, str]:
        return SPECIALS[self.special_pieces]

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        yield from special_piece_problems(self, SPECIALS)

    def build(self, texts: Iterator[str]) -> Tokenizer:
        return self._read(learn(texts, self.model_type, self.vocab_size, self.specials))

    def _read(self, model: bytes) -> Tokenizer:
        return read(model, self.specials, self.num_sentinels, self.path)


@dataclasses.dataclass
class Unigram(_SentencePiece):
    """Trains SentencePiece's unigram language model (Kudo 2018). Decoding restores the text exactly.

    Characters outside the vocabulary are encoded as bytes. By default, the ids are the same as in T5: pad = 0, eos = 1,
    unk = 2. The sentinels follow the `vocab_size` pieces, and <extra_id_0> has the highest id, so 32,000 pieces and 100
    sentinels are 32,100 ids.
    """

    vocab_size: int = 32_000  # pieces to learn, without the sentinels
    path: Optional[str] = None  # a saved tokenizer or .model file (T5, LLaMA) to load instead of training
    num_sentinels: int = 100  # number of sentinels (<extra_id_0>, …) for span corruption
    train_bytes: int = 10_000_000  # bytes of text to train on
    special_pieces: str = "t5"  # t5: <pad> </s> <unk> | albert: <pad> <unk> [CLS] [SEP] [MASK] | llama | gemma

    model_type = "unigram"


@dataclasses.dataclass
class BPE(_SentencePiece):
    """Trains SentencePiece's byte pair encoding (Kudo and Richardson 2018), as in LLaMA 1 and 2, Mistral and Gemma.

    Decoding restores the text exactly. BPE merges characters, not bytes, within a word and the space before the word.
    Characters outside the vocabulary are encoded as bytes. By default, the ids are the same as in LLaMA: unk = 0, bos =
    1, eos = 2.
    """

    vocab_size: int = 32_000  # pieces to learn, without the sentinels
    path: Optional[str] = None  # a saved tokenizer or .model file (LLaMA, Gemma) to load instead of training
    num_sentinels: int = 0  # number of sentinels (<extra_id_0>, …) for span corruption
    train_bytes: int = 10_000_000  # bytes of text to train on
    special_pieces: str = "llama"  # llama: <unk> <s> </s> | gemma: <pad> <eos> <bos> <unk> | t5 | albert

    model_type = "bpe"
