"""Our tokenizers as a tokenizer.json of the library tokenizers, which transformers reads.

What is in a SentencePiece model: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import json
import struct
from collections.abc import Iterator
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from pretrainax.config import ModelConfig, UserError
from pretrainax.tokenization.base import (
    SPACE_MARK,
    CharacterTokenizer,
    SentencePieceTokenizer,
    SubwordTokenizer,
    Tokenizer,
)

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # SentencePiece.Type


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """What the library tokenizers reads."""
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer.model
    if isinstance(tokenizer, SentencePieceTokenizer):
        converted = _from_sentencepiece(tokenizer)
    else:
        converted = _from_characters(tokenizer)
    return converted.to_str().encode()


def with_template(tokenizer: Tokenizer, architecture: ModelConfig) -> bytes:
    """The tokenizer.json with what transformers puts around a text, where it says nothing of that."""
    model, v = tokenizer_json(tokenizer), tokenizer.vocabulary
    described = json.loads(model)
    if described["post_processor"] is not None:
        return model
    for token in described["added_tokens"]:
        token["lstrip"] |= token["id"] == v.mask  # a word was masked together with the space before it
    if v.cls is not None and v.sep is not None:
        cls, sep = tokenizer.special_pieces[v.cls], tokenizer.special_pieces[v.sep]
        single, pair = f"{cls}:0 $A:0 {sep}:0", f" $B:1 {sep}:1"
        if v.sep == v.eos:  # RoBERTa, BART
            pair = f" {sep}:0 $B:0 {sep}:0"
        pair = single + pair
    elif architecture.family == "encoder_decoder" and v.eos is not None:
        eos = tokenizer.special_pieces[v.eos]
        single, pair = f"$A:0 {eos}:0", f"$A:0 {eos}:0 $B:0 {eos}:0"
    elif v.bos is not None and v.bos != v.eos:
        bos = tokenizer.special_pieces[v.bos]
        single, pair = f"{bos}:0 $A:0", f"{bos}:0 $A:0 $B:1"
    else:
        return model
    special = [(piece, i) for i, piece in tokenizer.special_pieces.items()]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    described["post_processor"] = json.loads(template.__getstate__())
    return json.dumps(described, ensure_ascii=False).encode()


def add_special(converted: tokenizers.Tokenizer, special_pieces: dict[int, str]) -> None:
    """Names the pieces, which its vocabulary has, as special ones."""
    specials = [piece for _, piece in sorted(special_pieces.items())]
    converted.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in specials])


def _from_characters(tokenizer: CharacterTokenizer) -> tokenizers.Tokenizer:
    """Byte pair encoding without a pair."""
    ids = {piece: i for i, piece in tokenizer.special_pieces.items()}
    ids |= {character: len(ids) + i for i, character in enumerate(json.loads(tokenizer.model))}
    converted = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=tokenizer.special_pieces[tokenizer.vocabulary.unk]))
    converted.decoder = decoders.Fuse()
    add_special(converted, tokenizer.special_pieces)
    return converted


# --- from SentencePiece ---------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Gives the ids that `tokenizer` gives; UserError where tokenizers has no such rule.

    Two things stay different. tokenizers adds scores up in float64 and SentencePiece in float32, so that far into a
    long text they may choose differently between two segmentations that are nearly as good. And a text that spells a
    special piece or a byte piece ("</s>", "<0x41>") gives that piece there, the pieces of its characters here.
    """
    kind, pieces, rules = _parse(tokenizer.model)
    if kind not in (_UNIGRAM, _BPE):
        raise UserError("of SentencePiece's models, only unigram and BPE ones can be written for transformers")
    if any(piece.kind == _UNUSED for piece in pieces):
        raise UserError("a SentencePiece model with unused pieces cannot be written for transformers")
    unk = next(i for i, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    texts, marks_are_text = [piece.text for piece in pieces], tokenizer.encodes_marks
    if marks_are_text:  # U+2581 in a text is bytes then, and no space
        texts = [text.replace(SPACE_MARK, " ") for text in texts]
    appended = [piece for i, piece in sorted(tokenizer.special_pieces.items()) if i >= len(pieces)]
    has_bytes = any(piece.kind == _BYTE for piece in pieces)
    if kind == _UNIGRAM:
        scored = [*zip(texts, _scores(pieces), strict=True), *((piece, 0.0) for piece in appended)]
        core = models.Unigram(scored, unk, byte_fallback=has_bytes)
    else:
        ids = {text: i for i, text in enumerate([*texts, *appended])}
        core = models.BPE(
            ids, _merges(texts, pieces, ids), unk_token=texts[unk], fuse_unk=True, byte_fallback=has_bytes
        )
    converted = tokenizers.Tokenizer(core)
    if not marks_are_text:
        try:
            converted.normalizer = normalizers.Sequence(list(_normalizers(rules)))
        except Exception as e:  # tokenizers raises nothing more special
            raise UserError(f"the SentencePiece model's normalization cannot be written for transformers: {e}") from e
    back = [] if marks_are_text else [decoders.Replace(SPACE_MARK, " ")]
    back += [decoders.ByteFallback(), decoders.Fuse()]
    if rules.adds_space:
        back.append(decoders.Strip(" ", 1, 0))
    converted.decoder = decoders.Sequence(back)
    if kind == _BPE:  # in a unigram model their score makes sure that they are taken
        own = [text for text, piece in zip(texts, pieces, strict=True) if piece.kind == _USER_DEFINED]
        converted.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in own])
    add_special(converted, tokenizer.special_pieces)
    return converted


def _scores(pieces: list[_Piece]) -> Iterator[float]:
    """Of a unigram model; a user's symbol has the one that SentencePiece gives it, of which it always is taken."""
    best = max(piece.score for piece in pieces if piece.kind == _NORMAL)
    for piece in pieces:
        yield len(piece.text.encode()) * best - 0.1 if piece.kind == _USER_DEFINED else piece.score


def _merges(texts: list[str], pieces: list[_Piece], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, in the order in which a BPE model merges: by its score."""
    made = sorted((-piece.score, i) for i, piece in enumerate(pieces) if piece.kind == _NORMAL)
    cuts = ((texts[i][:place], texts[i][place:]) for _, i in made for place in range(1, len(texts[i])))
    return [(left, right) for left, right in cuts if left in ids and right in ids]


# --- the model file ------------------------------------------------------------------------------------------------


class _Rules(NamedTuple):
    """NormalizerSpec."""

    charsmap: bytes
    adds_space: bool  # before a text
    squeezes: bool  # runs of spaces, and those at both ends


def _parse(model: bytes) -> tuple[int, list[_Piece], _Rules]:
    pieces, kind, rules = [], _UNIGRAM, {}
    for number, content in _fields(model):
        if number == 1:
            piece = dict(_fields(content))
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append(_Piece(piece[1].decode(), score, piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(content))
            kind = trainer.get(3, _UNIGRAM)
            if trainer.get(24, 0):
                raise UserError("a SentencePiece model with spaces at the end of pieces cannot be written")
        elif number == 3:
            rules = dict(_fields(content))
    if not rules.get(5, 1):
        raise UserError("a SentencePiece model that does not escape spaces cannot be written for transformers")
    return kind, pieces, _Rules(rules.get(2, b""), bool(rules.get(3, 1)), bool(rules.get(4, 1)))


def _normalizers(rules: _Rules) -> Iterator[normalizers.Normalizer]:
    if rules.charsmap:
        yield normalizers.Precompiled(rules.charsmap)
    if rules.squeezes:
        yield normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if rules.adds_space:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer, https://protobuf.dev/programming-guides/encoding."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place, value, shift = place + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while place < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        else:
            length = varint() if wire == 2 else {1: 8, 5: 4}[wire]
            yield number, message[place : place + length]
            place += length
