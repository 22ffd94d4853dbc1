"""Compares PretrainAX's token ids for probe text with the ids of transformers' AutoTokenizer."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pretrainax.data.framing import special_token_frame
from pretrainax.inference.verification.comparison import Comparison, exact, not_compared
from pretrainax.inference.verification.subject import Subject
from pretrainax.tokenization.huggingface import FIELDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IdRow = np.ndarray | Sequence[int]
TEXTS = (  # empty, prose, white space, digits, code, Unicode in several forms, a long word
    "",
    " ",
    "The cat sat on the mat. It's 1234 o'clock!",
    "  two  spaces, a\ttab\r\nand lines\n\n end",
    "3.14 1,000,000 2026-11-28 0x1F",
    "    def f(x):\n        return {'a': x[0]}  # 10 %\n",
    "héllo wörld ﬁ ½ İstanbul e\u0301",
    "漢字かな交じり文。，年年歲歲花相似 안녕하세요 привет مرحبا",
    "😀👩‍👩‍👧 \U0001f1e9\U0001f1ea \u200b\u3000\u2028x",
    "x" * 200,
)
_MAX_SPECIAL_PIECES = 16  # special pieces whose spelling inside a text is compared; T5 has 100 sentinels


def compare_tokens(subject: Subject) -> Iterator[Comparison]:
    """Compares the ids of single texts, pairs and special tokens."""
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(subject.directory, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # a class that transformers lacks, or files that it does not read
        yield not_compared("token ids", f"AutoTokenizer of transformers does not load: {type(e).__name__}: {e}")
        return
    yield _compare_special_tokens(subject, theirs)
    yield _compare_texts(subject, theirs)
    yield _compare_pairs(subject, theirs)
    yield _compare_spelled_tokens(subject, theirs)


def _compare_special_tokens(subject: Subject, theirs: "PreTrainedTokenizerBase") -> Comparison:
    """Compares the ids of the special tokens that transformers' tokenizer names, and of all special pieces."""
    vocabulary, pieces, found, count = subject.tokenizer.vocabulary, subject.tokenizer.special_pieces, [], 0
    for name in FIELDS:
        their_id, our_id = getattr(theirs, f"{name}_token_id", None), getattr(vocabulary, name)
        # Byte-level BPE never encodes a text as unk, although transformers names a token for it.
        if their_id is not None and not (name == "unk" and our_id is None):
            count += 1
            found += [] if our_id == their_id else [f"{name} is id {our_id}, in transformers {their_id}"]
    for our_id, piece in pieces.items():
        their_id, count = theirs.convert_tokens_to_ids(piece), count + 1
        found += [] if our_id == their_id else [f"{piece!r} is id {our_id}, in transformers {their_id}"]
    return exact("special tokens", count, "ids", found)


def _compare_texts(subject: Subject, theirs: "PreTrainedTokenizerBase") -> Comparison:
    frame = special_token_frame(subject.model.family, subject.tokenizer.vocabulary)
    ours = [frame.wrap([ids])[0] for ids in subject.tokenizer.encode_batch([*TEXTS])]
    pairs = ((text, ids, theirs(text).input_ids) for text, ids in zip(TEXTS, ours, strict=True))
    return exact("ids of texts", len(TEXTS), "texts", [*_id_differences(pairs)])


def _compare_pairs(subject: Subject, theirs: "PreTrainedTokenizerBase") -> Comparison:
    """Compares the ids and the token types of pairs; token types that the model lacks count as its last type."""
    what, pairs = "ids of pairs", [*itertools.pairwise(TEXTS[2:]), ("", TEXTS[2])]
    frame = special_token_frame(subject.model.family, subject.tokenizer.vocabulary)
    if frame.pair is None:
        return not_compared(what, "the post_processor does not put the second text after the first")
    found, last_type = [], max(subject.model.num_token_types - 1, 0)
    for pair in pairs:
        ids, types = frame.wrap(subject.tokenizer.encode_batch([*pair]))
        encoding = theirs(*pair)
        found += _id_differences([(" | ".join(pair), ids, encoding.input_ids)])
        if "token_type_ids" in encoding:
            their_types = np.minimum(encoding.token_type_ids, last_type)
            found += _id_differences([(" | ".join(pair), np.minimum(types, last_type), their_types)], "token types")
    return exact(what, len(pairs), "pairs", found)


def _compare_spelled_tokens(subject: Subject, theirs: "PreTrainedTokenizerBase") -> Comparison:
    """Compares the ids of a text that contains the spelling of a special token, for example "a [MASK] b".

    PretrainAX encodes the spelling as ordinary characters, as transformers does with `split_special_tokens=True`.
    If the model of the tokenizer itself has the special token as a piece (T5's sentinels), the ids may differ.
    """
    what = "ids of special tokens spelled in texts"
    pieces = dict([*subject.tokenizer.special_pieces.items()][:_MAX_SPECIAL_PIECES])
    special = subject.tokenizer.vocabulary.special_ids - {subject.tokenizer.vocabulary.unk}
    texts = [f"a {piece} b{piece}c" for piece in pieces.values()]
    found = []
    for piece_id, text, ids in zip(pieces, texts, subject.tokenizer.encode_batch(texts), strict=True):
        if found_ids := special & {*ids.tolist()}:
            found.append(f"{text!r} has the special ids {sorted(found_ids)}")
        their_ids = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if not (special | {piece_id}) & {*their_ids}:  # the spelling of the unknown token is one of its pieces too
            found += _id_differences([(text, ids, their_ids)])
    return exact(what, len(texts), "texts", found)


def _id_differences(rows: Iterable[tuple[str, IdRow, IdRow]], unit: str = "ids") -> Iterator[str]:
    """Yields a description of each text whose ids differ; `rows` are (text, our ids, their ids)."""
    for text, ours, theirs in rows:
        ours, theirs = [*map(int, ours)], [*map(int, theirs)]
        if ours != theirs:
            first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            first = min(len(ours), len(theirs)) if first < 0 else first
            sides = (f"{ids[first : first + 8]} of {len(ids)}" for ids in (ours, theirs))
            yield f"{text[:40]!r}, from token {first}: {unit} {' in PretrainAX, '.join(sides)} in transformers"
