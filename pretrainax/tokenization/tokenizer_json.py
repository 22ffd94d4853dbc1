"""Converts tokenizers to a tokenizer.json of the `tokenizers` library, which transformers reads.

Format of a SentencePiece model: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

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
    elif isinstance(tokenizer, CharacterTokenizer):
        converted = _from_characters(tokenizer)
    else:
        raise UserError(f"{type(tokenizer).__name__} has no tokenizer.json; use a tokenizer of characters or subwords")
    return converted.to_str().encode()


def library_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Converts `tokenizer` to a tokenizer of the `tokenizers` library, without truncation and padding.

    Raises:
      UserError: a rule of the tokenizer cannot be expressed in a tokenizer.json.
    """
    library = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer).decode())
    library.no_truncation()  # a tokenizer.json stores the truncation and padding of transformers' last call
    library.no_padding()
    return library


@functools.lru_cache(maxsize=2)
def special_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Converts `tokenizer` to a tokenizer of the `tokenizers` library that encodes special pieces as special ids.

    Its ids are equal to the ids of transformers. The result is cached.

    Raises:
      UserError: as in `library_tokenizer`.
    """
    library = library_tokenizer(tokenizer)
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    others = [piece for piece in tokenizer.special_pieces.values() if piece not in known]
    library.add_special_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in others])
    if tokenizer.prefix_spaces is not None:
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, tokenizer.prefix_spaces, split=False)
    return library


def add_special(converted: tokenizers.Tokenizer, special_pieces: dict[int, str]) -> None:
    """Adds `special_pieces` ({id: piece}) to `converted` as special tokens, in the order of their ids."""
    specials = [piece for _, piece in sorted(special_pieces.items())]
    converted.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in specials])


def adds_prefix_space(tokenizer: SentencePieceTokenizer) -> bool:
    """Returns True if a SentencePiece tokenizer adds a space before a text."""
    return _parse(tokenizer.model).normalizer_spec.add_dummy_prefix


def _from_characters(tokenizer: CharacterTokenizer) -> tokenizers.Tokenizer:
    """Converts a character tokenizer to a BPE model without merges, which encodes each character separately."""
    ids = {piece: i for i, piece in tokenizer.special_pieces.items()}
    ids |= {character: len(ids) + i for i, character in enumerate(json.loads(tokenizer.model))}
    converted = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=tokenizer.special_pieces[tokenizer.vocabulary.unk]))
    converted.decoder = decoders.Fuse()
    add_special(converted, tokenizer.special_pieces)
    return converted


# --- from SentencePiece ---------------------------------------------------------------------------------------------


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Converts a SentencePiece tokenizer to a tokenizer of the `tokenizers` library with the same ids.

    Two differences remain:

    - `tokenizers` adds scores in float64, SentencePiece in float32. In a long text, the two libraries may select
      different segmentations whose scores are nearly equal.
    - A text may contain a special piece or a byte piece as a string ("</s>", "<0x41>"). `tokenizers` encodes the string
      as that piece, whereas `tokenizer` encodes its characters.

    Raises:
      UserError: the `tokenizers` library does not support a rule of the SentencePiece model.
    """
    model = _parse(tokenizer.model)
    pieces, trainer_spec, normalizer_spec = model.pieces, model.trainer_spec, model.normalizer_spec
    is_unigram = trainer_spec.model_type == trainer_spec.UNIGRAM
    _check_rules(model)
    unk = next(i for i, piece in enumerate(pieces) if piece.type == piece.UNKNOWN)
    strings, encodes_marks = [piece.piece for piece in pieces], tokenizer.encodes_marks
    if encodes_marks:  # U+2581 in a text is encoded as bytes, so the pieces contain spaces
        strings = [string.replace(SPACE_MARK, " ") for string in strings]
    appended = [piece for i, piece in sorted(tokenizer.special_pieces.items()) if i >= len(pieces)]
    has_bytes = any(piece.type == piece.BYTE for piece in pieces)
    if is_unigram:
        scored_pieces = [*zip(strings, _scores(pieces), strict=True), *((piece, 0.0) for piece in appended)]
        library_model = models.Unigram(scored_pieces, unk, byte_fallback=has_bytes)
    else:
        ids = {string: i for i, string in enumerate([*strings, *appended])}
        library_model = models.BPE(
            ids, _merges(strings, pieces, ids), unk_token=strings[unk], fuse_unk=True, byte_fallback=has_bytes
        )
    converted = tokenizers.Tokenizer(library_model)
    if not encodes_marks:
        try:
            converted.normalizer = normalizers.Sequence(list(_normalizers(normalizer_spec)))
        except Exception as e:  # tokenizers raises no specific type
            raise UserError(f"cannot write the normalization of the SentencePiece model for transformers: {e}") from e
    decoding_steps = [] if encodes_marks else [decoders.Replace(SPACE_MARK, " ")]
    decoding_steps += [decoders.ByteFallback(), decoders.Fuse()]
    if normalizer_spec.add_dummy_prefix:  # decoding removes the space before a text
        decoding_steps.append(decoders.Strip(" ", 1, 0))
    converted.decoder = decoders.Sequence(decoding_steps)
    if not is_unigram:  # in a unigram model, the scores of `_scores` ensure that these pieces are always used
        user_defined = [
            string for string, piece in zip(strings, pieces, strict=True) if piece.type == piece.USER_DEFINED
        ]
        converted.add_tokens([tokenizers.AddedToken(string, normalized=False) for string in user_defined])
    add_special(converted, tokenizer.special_pieces)
    return converted


def _scores(pieces: Any) -> Iterator[float]:
    """Yields the score of each piece in a unigram model.

    User-defined symbols get the score that SentencePiece computes for them, with which they are always used.
    """
    best = max(piece.score for piece in pieces if piece.type == piece.NORMAL)
    for piece in pieces:
        yield len(piece.piece.encode()) * best - 0.1 if piece.type == piece.USER_DEFINED else piece.score


def _merges(strings: list[str], pieces: Any, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Returns a BPE model's merges: all pairs of pieces whose concatenation is a piece, in order of descending score.

    Args:
      strings: the string of each piece.
      pieces: the pieces of the ModelProto, with their scores.
      ids: maps each piece's string to its id.
    """
    by_score = sorted((-piece.score, i) for i, piece in enumerate(pieces) if piece.type == piece.NORMAL)
    splits = ((strings[i][:cut], strings[i][cut:]) for _, i in by_score for cut in range(1, len(strings[i])))
    return [(left, right) for left, right in splits if left in ids and right in ids]


def _normalizers(normalizer_spec: Any) -> Iterator[normalizers.Normalizer]:
    """Converts the steps of a SentencePiece NormalizerSpec to normalizers of the `tokenizers` library."""
    if normalizer_spec.precompiled_charsmap:
        yield normalizers.Precompiled(normalizer_spec.precompiled_charsmap)
    if normalizer_spec.remove_extra_whitespaces:  # removes spaces at both ends, and merges runs of spaces
        yield normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if normalizer_spec.add_dummy_prefix:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)


def _parse(model: bytes) -> Any:
    """Parses a SentencePiece model file's content as a ModelProto; raises UserError if it is damaged."""
    # A local import, because only the export to transformers needs the module. The import fails if protobuf is older
    # than the version that generated the module (7.36 for sentencepiece 0.2.3). Apache Beam requires an older protobuf.
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except Exception as e:  # protobuf is missing (ImportError), or has another version (other errors)
        raise UserError(
            f"reading a SentencePiece model requires a newer protobuf: pip install -U protobuf ({e})"
        ) from e
    try:
        return ModelProto.FromString(model)
    except DecodeError as e:
        raise UserError(f"the SentencePiece model is damaged: {e}") from e


def _check_rules(model: Any) -> None:
    """Raises UserError if a ModelProto has features that a tokenizer.json cannot express."""
    trainer_spec = model.trainer_spec
    if trainer_spec.treat_whitespace_as_suffix:
        raise UserError("cannot write a SentencePiece model with spaces at the end of pieces for transformers")
    if not model.normalizer_spec.escape_whitespaces:
        raise UserError("cannot write a SentencePiece model that does not escape spaces for transformers")
    if trainer_spec.model_type not in (trainer_spec.UNIGRAM, trainer_spec.BPE):
        raise UserError("cannot write this SentencePiece model for transformers: it must be unigram or BPE")
    if any(piece.type == piece.UNUSED for piece in model.pieces):
        raise UserError("cannot write a SentencePiece model with unused pieces for transformers")
