"""Converts tokenizers to a tokenizer.json of the library tokenizers, which transformers reads.

Format of a SentencePiece model: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
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
    """Returns the content of a tokenizer.json that encodes text with the same ids as `tokenizer`.

    Raises:
      UserError: a rule of the tokenizer cannot be expressed in a tokenizer.json.
    """
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer.model
    if isinstance(tokenizer, SentencePieceTokenizer):
        converted = _from_sentencepiece(tokenizer)
    else:
        converted = _from_characters(tokenizer)
    return converted.to_str().encode()


def add_special(converted: tokenizers.Tokenizer, special_pieces: dict[int, str]) -> None:
    """Marks the pieces of `special_pieces` (id -> piece) as special tokens in `converted`."""
    specials = [piece for _, piece in sorted(special_pieces.items())]
    converted.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in specials])


def _from_characters(tokenizer: CharacterTokenizer) -> tokenizers.Tokenizer:
    """Converts a character tokenizer to a BPE model without merges, which encodes single characters."""
    ids = {piece: i for i, piece in tokenizer.special_pieces.items()}
    ids |= {character: len(ids) + i for i, character in enumerate(json.loads(tokenizer.model))}
    converted = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=tokenizer.special_pieces[tokenizer.vocabulary.unk]))
    converted.decoder = decoders.Fuse()
    add_special(converted, tokenizer.special_pieces)
    return converted


# --- from SentencePiece ---------------------------------------------------------------------------------------------


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Converts a SentencePiece tokenizer to a tokenizer of the library tokenizers with the same ids.

    Two differences remain:

    - tokenizers adds scores in float64, SentencePiece in float32. In a long text, the two libraries may select
      different segmentations if the scores of two segmentations are nearly equal.
    - If a text contains the name of a special piece or a byte piece ("</s>", "<0x41>"), tokenizers encodes it as this
      piece. `tokenizer` encodes its characters.

    Raises:
      UserError: the library tokenizers does not support a rule of the SentencePiece model.
    """
    model = _parse(tokenizer.model)
    pieces, trained, rules = model.pieces, model.trainer_spec, model.normalizer_spec
    is_unigram = trained.model_type == trained.UNIGRAM
    _check_rules(model)
    unk = next(i for i, piece in enumerate(pieces) if piece.type == piece.UNKNOWN)
    texts, marks_are_text = [piece.piece for piece in pieces], tokenizer.encodes_marks
    if marks_are_text:  # U+2581 in a text is encoded as bytes, not as a space
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
        except Exception as e:  # tokenizers raises no specific type
            raise UserError(f"cannot write the normalization of the SentencePiece model for transformers: {e}") from e
    back = [] if marks_are_text else [decoders.Replace(SPACE_MARK, " ")]
    back += [decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:  # removes the space before a text
        back.append(decoders.Strip(" ", 1, 0))
    converted.decoder = decoders.Sequence(back)
    if not is_unigram:  # in a unigram model, `_scores` ensures that these pieces are always used
        user_defined = [text for text, piece in zip(texts, pieces, strict=True) if piece.type == piece.USER_DEFINED]
        converted.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in user_defined])
    add_special(converted, tokenizer.special_pieces)
    return converted


def _scores(pieces: Any) -> Iterator[float]:
    """Yields the score of each piece of a unigram model.

    User-defined symbols have the score that SentencePiece computes for them, so they are always used.
    """
    best = max(piece.score for piece in pieces if piece.type == piece.NORMAL)
    for piece in pieces:
        yield len(piece.piece.encode()) * best - 0.1 if piece.type == piece.USER_DEFINED else piece.score


def _merges(texts: list[str], pieces: Any, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model: all pairs of pieces whose concatenation is a piece, by descending score.

    Args:
      texts: the string of each piece.
      pieces: the pieces of the ModelProto, with scores.
      ids: string of a piece -> id.
    """
    by_score = sorted((-piece.score, i) for i, piece in enumerate(pieces) if piece.type == piece.NORMAL)
    cuts = ((texts[i][:cut], texts[i][cut:]) for _, i in by_score for cut in range(1, len(texts[i])))
    return [(left, right) for left, right in cuts if left in ids and right in ids]


def _normalizers(rules: Any) -> Iterator[normalizers.Normalizer]:
    """Yields the normalization steps of a SentencePiece NormalizerSpec as normalizers of the library tokenizers."""
    if rules.precompiled_charsmap:
        yield normalizers.Precompiled(rules.precompiled_charsmap)
    if rules.remove_extra_whitespaces:  # spaces at both ends, and runs of spaces
        yield normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if rules.add_dummy_prefix:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)


def _parse(model: bytes) -> Any:
    """Parses the content of a SentencePiece model file as a ModelProto; raises UserError if it is damaged."""
    # A local import, because only the export to transformers needs it. The import fails if protobuf is older than the
    # version that generated the module (7.36 for sentencepiece 0.2.3), and Apache Beam requires an older protobuf.
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except Exception as e:  # protobuf is missing, or has another version, whose error is not an ImportError
        raise UserError(
            f"reading a SentencePiece model requires a newer protobuf: pip install -U protobuf ({e})"
        ) from e
    try:
        return ModelProto.FromString(model)
    except DecodeError as e:
        raise UserError(f"the SentencePiece model is damaged: {e}") from e


def _check_rules(model: Any) -> None:
    """Raises UserError for a ModelProto with features that a tokenizer.json cannot express."""
    trained = model.trainer_spec
    if trained.treat_whitespace_as_suffix:
        raise UserError("cannot write a SentencePiece model with spaces at the end of pieces for transformers")
    if not model.normalizer_spec.escape_whitespaces:
        raise UserError("cannot write a SentencePiece model that does not escape spaces for transformers")
    if trained.model_type not in (trained.UNIGRAM, trained.BPE):
        raise UserError("cannot write this SentencePiece model for transformers: it must be unigram or BPE")
    if any(piece.type == piece.UNUSED for piece in model.pieces):
        raise UserError("cannot write a SentencePiece model with unused pieces for transformers")
