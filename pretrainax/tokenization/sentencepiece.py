"""Implements SentencePiece tokenizers: unigram and BPE models, trained so that decoding restores a text exactly."""

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

SPACE_MARK = "\u2581"  # represents a space in SentencePiece, which treats this character in a text as a space, too
# config.tokenizer.special_pieces -> {Vocabulary field: piece}, in the order of the ids.
SPECIALS = {
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "albert": {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "llama": {"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    "gemma": {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
}
_DEFAULTS = {
    "pad": "<pad>",
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
}  # pieces with their own trainer settings in SentencePiece
_MAX_LINE_BYTES = 1 << 20  # bytes
# If the fraction of spaces in a text is lower, the space is declared as a required character. SentencePiece omits the
# rarest characters, up to a fraction of 5e-4 of the text.
_MIN_SPACE_FRACTION = 1e-3


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer that runs a SentencePiece model (unigram or BPE)."""

    file = "spiece.model"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        super().__init__(model, vocabulary, special_pieces)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._check_size(self._processor.get_piece_size())
        self._mark_ids = self._find_mark_ids()
        self.spellings()  # raises an error if a piece is not valid text

    @property
    def encodes_marks(self) -> bool:
        """Returns True if the character U+2581 (SPACE_MARK) in a text is encoded differently from a space."""
        return bool(self._mark_ids)

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._processor.encode(texts, out_type="numpy", num_threads=1)
        if self._mark_ids:
            for i, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[i] = self._encode_with_marks(text)
        return [np.asarray(ids, np.int32) for ids in encoded]

    def _encode_with_marks(self, text: str) -> list[int]:
        ids = []
        for segment_ids in self._processor.encode(text.split(SPACE_MARK), out_type=int):
            ids += segment_ids + self._mark_ids
        return ids[: -len(self._mark_ids)]

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids, spans, segment_start = [], [], 0
        for segment in text.split(SPACE_MARK) if self._mark_ids else [text]:
            encoding = self._processor.encode(segment, return_type="offset_mapping")
            offsets = encoding["offsets"]
            for i in reversed(range(len(offsets) - 1)):  # only the last byte token of a character has a nonempty span
                if self._processor.is_byte(encoding["ids"][i]) and offsets[i][0] == offsets[i][1]:
                    offsets[i] = offsets[i + 1]
            ids += encoding["ids"] + self._mark_ids
            spans += [(segment_start + begin, segment_start + end) for begin, end in offsets]
            segment_start += len(segment) + 1
            spans += [(segment_start - 1, segment_start)] * len(self._mark_ids)
        num_ids = len(ids) - len(self._mark_ids)  # no mark follows the last segment
        return np.array(ids[:num_ids], np.int32), np.array(spans[:num_ids], np.int32).reshape(-1, 2)

    def _find_mark_ids(self) -> list[int]:
        """Returns the ids of U+2581's three bytes, or [] if the model lacks byte pieces or adds an initial space."""
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
    """Returns the UTF-8 bytes that a SentencePiece piece represents; the byte piece "<0xE5>" is a single byte."""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(SPACE_MARK, " ").encode()


# --- training and loading ------------------------------------------------------------------------------------------


def learn(texts: Iterator[str], model_type: str, vocab_size: int, specials: Mapping[str, str]) -> bytes:
    """Trains a SentencePiece model on documents; returns the content of the model file.

    Args:
      model_type: "unigram" or "bpe".
      vocab_size: number of pieces, including special pieces and 256 byte pieces.
      specials: maps Vocabulary fields to special pieces, in the order of the ids.
    """
    model = io.BytesIO()
    settings = {f"{field}_id": -1 for field in _DEFAULTS}
    for i, (field, piece) in enumerate(specials.items()):
        if field in _DEFAULTS:
            settings[f"{field}_id"] = i
            if piece != _DEFAULTS[field]:  # the model stores this setting, so it changes the fingerprint
                settings[f"{field}_piece"] = piece
    lines = [line_part for text in texts for line in text.split("\n") if line for line_part in _split_long_line(line)]
    if sum(line.count(" ") for line in lines) < _MIN_SPACE_FRACTION * sum(map(len, lines)):  # as in Chinese
        settings["required_chars"] = (
            SPACE_MARK  # otherwise a space would be encoded as three bytes that decode to U+2581
        )
    if control_pieces := [piece for field, piece in specials.items() if field not in _DEFAULTS]:
        settings["control_symbols"] = control_pieces  # SentencePiece assigns the next free ids to them
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
            max_sentence_length=_MAX_LINE_BYTES,  # bytes; SentencePiece skips longer lines
            num_threads=4,  # fixed on every machine, because the result depends on it
            minloglevel=2,
        )
    except RuntimeError as e:
        raise UserError(_training_error_message(str(e), vocab_size)) from e
    return model.getvalue()


def _split_long_line(line: str) -> list[str]:
    """Splits a line that is too long for SentencePiece into shorter strings, before spaces where possible."""
    if len(line) <= _MAX_LINE_BYTES // 4 or len(line.encode()) <= _MAX_LINE_BYTES:
        return [line]
    return re.findall(r"(?s).{1,4096}(?= |\Z)|.{1,4096}", line)


def read(model: bytes, specials: Mapping[str, str], num_sentinels: int, path: str | None) -> SentencePieceTokenizer:
    """Builds a tokenizer from a SentencePiece model and adds sentinels.

    The model defines the ids of pad, bos, eos and unk. The ids of the sentinels follow the ids of the model's pieces,
    in descending order: <extra_id_0> has the highest id.

    Args:
      model: content of the model file.
      specials: maps Vocabulary fields to special pieces, for example [CLS]; pad, bos, eos and unk are ignored.
      path: path of the model, for error messages, or None for a newly trained model.

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


def _training_error_message(error: str, vocab_size: int) -> str:
    """Converts an error message of SentencePiece's trainer to a message that users understand."""
    max_size = re.search(r"to a value <= (\d+)", error)
    min_size = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if max_size:
        return too_little_text(vocab_size, int(max_size[1]))
    if min_size:
        return (
            f"config.tokenizer.vocab_size is {vocab_size}, but the characters of this text alone need {min_size[1]}, "
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

    Characters outside the vocabulary are encoded as bytes. By default, the special ids are the same as in T5: pad = 0,
    eos = 1, unk = 2. The sentinels follow the `vocab_size` pieces, and <extra_id_0> has the highest id. With 32,000
    pieces and 100 sentinels, the tokenizer has 32,100 ids.
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
    Characters outside the vocabulary are encoded as bytes. By default, the special ids are the same as in LLaMA:
    unk = 0, bos = 1, eos = 2.
    """

    vocab_size: int = 32_000  # pieces to learn, without the sentinels
    path: Optional[str] = None  # a saved tokenizer or .model file (LLaMA, Gemma) to load instead of training
    num_sentinels: int = 0  # number of sentinels (<extra_id_0>, …) for span corruption
    train_bytes: int = 10_000_000  # bytes of text to train on
    special_pieces: str = "llama"  # llama: <unk> <s> </s> | gemma: <pad> <eos> <bos> <unk> | t5 | albert

    model_type = "bpe"
