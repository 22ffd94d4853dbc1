"""Our tokenizers as a tokenizer.json of the library tokenizers, which transformers reads.

What is in a SentencePiece model: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from pretrainax.config import UserError
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.characters import CharacterTokenizer
from pretrainax.tokenization.sentencepiece import SPACE_MARK, SentencePieceTokenizer
from pretrainax.tokenization.subwords import SubwordTokenizer


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Returns what the library tokenizers reads."""
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer.model
    if isinstance(tokenizer, SentencePieceTokenizer):
        converted = _from_sentencepiece(tokenizer)
    else:
        converted = _from_characters(tokenizer)
    return converted.to_str().encode()


def add_special(converted: tokenizers.Tokenizer, special_pieces: dict[int, str]) -> None:
    """Names the pieces, which its vocabulary has, as special ones."""
    specials = [piece for _, piece in sorted(special_pieces.items())]
    converted.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in specials])


def _from_characters(tokenizer: CharacterTokenizer) -> tokenizers.Tokenizer:
    """Makes byte pair encoding without a pair."""
    ids = {piece: i for i, piece in tokenizer.special_pieces.items()}
    ids |= {character: len(ids) + i for i, character in enumerate(json.loads(tokenizer.model))}
    converted = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=tokenizer.special_pieces[tokenizer.vocabulary.unk]))
    converted.decoder = decoders.Fuse()
    add_special(converted, tokenizer.special_pieces)
    return converted


# --- from SentencePiece ---------------------------------------------------------------------------------------------


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Makes one that gives the ids that `tokenizer` gives; UserError where tokenizers has no such rule.

    Two things stay different. tokenizers adds scores up in float64 and SentencePiece in float32, so that far into a
    long text they may choose differently between two segmentations that are nearly as good. And a text that spells a
    special piece or a byte piece ("</s>", "<0x41>") gives that piece there, the pieces of its characters here.
    """
    model = _parse(tokenizer.model)
    pieces, trained, rules = model.pieces, model.trainer_spec, model.normalizer_spec
    is_unigram = trained.model_type == trained.UNIGRAM
    _check_rules(model)
    unk = next(i for i, piece in enumerate(pieces) if piece.type == piece.UNKNOWN)
    texts, marks_are_text = [piece.piece for piece in pieces], tokenizer.encodes_marks
    if marks_are_text:  # U+2581 in a text is bytes then, and no space
        texts = [text.replace(SPACE_MARK, " ") for text in texts]
    appended = [piece for i, piece in sorted(tokenizer.special_pieces.items()) if i >= len(pieces)]
    has_bytes = any(piece.type == piece.BYTE for piece in pieces)
    if is_unigram:
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
    if rules.add_dummy_prefix:  # a space before a text
        back.append(decoders.Strip(" ", 1, 0))
    converted.decoder = decoders.Sequence(back)
    if not is_unigram:  # in a unigram model their score makes sure that they are taken
        own = [text for text, piece in zip(texts, pieces, strict=True) if piece.type == piece.USER_DEFINED]
        converted.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in own])
    add_special(converted, tokenizer.special_pieces)
    return converted


def _scores(pieces: Any) -> Iterator[float]:
    """Yields the scores of a unigram model; a user's symbol has that by which SentencePiece always takes it."""
    best = max(piece.score for piece in pieces if piece.type == piece.NORMAL)
    for piece in pieces:
        yield len(piece.piece.encode()) * best - 0.1 if piece.type == piece.USER_DEFINED else piece.score


def _merges(texts: list[str], pieces: Any, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Lists all pairs of pieces that make a piece, in the order in which a BPE model merges: by its score."""
    made = sorted((-piece.score, i) for i, piece in enumerate(pieces) if piece.type == piece.NORMAL)
    cuts = ((texts[i][:place], texts[i][place:]) for _, i in made for place in range(1, len(texts[i])))
    return [(left, right) for left, right in cuts if left in ids and right in ids]


def _normalizers(rules: Any) -> Iterator[normalizers.Normalizer]:
    """Yields the steps of a NormalizerSpec."""
    if rules.precompiled_charsmap:
        yield normalizers.Precompiled(rules.precompiled_charsmap)
    if rules.remove_extra_whitespaces:  # runs of spaces, and those at both ends
        yield normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if rules.add_dummy_prefix:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)


def _parse(model: bytes) -> Any:
    """Reads a ModelProto."""
    # Here: it refuses a protobuf older than the one it was made with (7.36 for sentencepiece 0.2.3), which Apache Beam
    # holds back, and what does not write for transformers needs none.
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except Exception as e:  # no protobuf, or a protobuf of another version: its error is no ImportError
        raise UserError(f"to read a SentencePiece model takes a newer protobuf: pip install -U protobuf ({e})") from e
    try:
        return ModelProto.FromString(model)
    except DecodeError as e:
        raise UserError(f"the SentencePiece model is damaged: {e}") from e


def _check_rules(model: Any) -> None:
    """Raises UserError for a ModelProto that does what a tokenizer.json cannot say."""
    trained = model.trainer_spec
    if trained.treat_whitespace_as_suffix:
        raise UserError("a SentencePiece model with spaces at the end of pieces cannot be written")
    if not model.normalizer_spec.escape_whitespaces:
        raise UserError("a SentencePiece model that does not escape spaces cannot be written for transformers")
    if trained.model_type not in (trained.UNIGRAM, trained.BPE):
        raise UserError("of SentencePiece's models, only unigram and BPE ones can be written for transformers")
    if any(piece.type == piece.UNUSED for piece in model.pieces):
        raise UserError("a SentencePiece model with unused pieces cannot be written for transformers")
