"""Describes the special tokens that a tokenizer adds around a text or a pair (two texts in one row).

The post-processor of a tokenizer.json adds these tokens. `probe_frame` finds them in the output of a post-processor,
and `post_processor` builds a post-processor that adds them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np
import tokenizers

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject

_PROBES = ("a", "b c", "e", "1", "the", ".")  # several, because a vocabulary may lack some of the characters


class RowFrame(NamedTuple):
    """The special tokens of a row: before the first text, between two texts, and after the last text."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    # Token type of each special token and each text, in the order of the row. (): the token type is the 0-based index
    # of the text; special tokens between two texts belong to the first text.
    types: tuple[int, ...] = ()

    @classmethod
    def typed(
        cls, before: Sequence[int], between: Sequence[int], after: Sequence[int], types: Sequence[int]
    ) -> "RowFrame":
        """Builds a frame with the given token types; stores them only if they differ from the default types."""
        row = cls(tuple(before), tuple(between), tuple(after))
        texts = len(types) - len(row.before + row.between + row.after)
        return row if tuple(types) == row.types_of(texts) else row._replace(types=tuple(types))

    def types_of(self, texts: int) -> tuple[int, ...]:
        """Returns the token type of each special token and each text in a row; `texts` is 1 or 2."""
        second = [1] * (1 + len(self.after)) if texts == 2 else [0] * len(self.after)
        return self.types or (0,) * (len(self.before) + 1 + len(self.between)) + tuple(second)


class SpecialTokenFrame(NamedTuple):
    """The special tokens of a row with a single text, and of a row with a pair."""

    single: RowFrame
    pair: Optional[RowFrame]  # None: the tokenizer's row for a pair is not one text followed by the other

    def row(self, texts: int) -> RowFrame:
        """Returns the frame of a row; `texts` is 1 or 2. Raises UserError if the tokenizer has no frame for a pair."""
        if texts > 1 and self.pair is None:
            raise UserError(
                "the tokenizer's post_processor does not put the second text of a pair after the first, so tasks with "
                'two texts cannot use it: change "pair" in the post_processor of tokenizer.json'
            )
        return self.single if texts == 1 or self.pair is None else self.pair

    def count(self, texts: int) -> int:
        """Returns the number of special tokens in a row; `texts` is 1 or 2."""
        row = self.row(texts)
        return len(row.before) + len(row.between) * (texts - 1) + len(row.after)

    @property
    def max_count(self) -> int:
        """The largest number of special tokens in a row, with a single text or a pair."""
        return max(self.count(1), 0 if self.pair is None else self.count(2))

    def wrap(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Adds the special tokens to the tokens of each text in a row.

        Returns:
          The tokens and the token types of the row, both int32 [n].
        """
        row = self.row(len(texts))
        pieces, sizes = [np.array(row.before)], [1] * len(row.before)
        for i, text in enumerate(texts):
            special_ids = row.after if i == len(texts) - 1 else row.between
            pieces += [text, np.array(special_ids)]
            sizes += [len(text), *[1] * len(special_ids)]
        types = np.repeat(np.array(row.types_of(len(texts)), np.int32), sizes)
        return np.concatenate(pieces).astype(np.int32), types

    @property
    def ids(self) -> set[int]:
        """The ids of all special tokens of the frame."""
        return {i for row in (self.single, self.pair) if row for i in (*row.before, *row.between, *row.after)}

    @classmethod
    def from_json(cls, rows: Sequence) -> "SpecialTokenFrame":
        """Converts a frame that was stored as JSON."""
        single, pair = (None if row is None else RowFrame(*map(tuple, row)) for row in rows)
        return cls(single, pair)  # pyright: ignore[reportArgumentType]


def probe_frame(tokenizer: tokenizers.Tokenizer) -> Optional[SpecialTokenFrame]:
    """Returns the frame that a tokenizer's post-processor adds to a row.

    Returns None if the post-processor splits a text, or if the special tokens depend on the text.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = [text for text in _PROBES if tokenizer.encode(text, add_special_tokens=False).ids]
    singles = {_probe_row(tokenizer, text) for text in texts}
    pairs = {_probe_row(tokenizer, *pair) for pair in zip(texts, texts[1:], strict=False)}
    single, pair = (rows.pop() if len(rows) == 1 else None for rows in (singles, pairs))
    return None if single is None else SpecialTokenFrame(single, pair)


def _probe_row(tokenizer: tokenizers.Tokenizer, *texts: str) -> Optional[RowFrame]:
    encoding, parts, start = tokenizer.encode(texts[0], texts[1] if len(texts) > 1 else None), [], 0
    ids, types = encoding.ids, []
    for text in texts:
        text_ids = tokenizer.encode(text, add_special_tokens=False).ids
        ends = [i for i in range(start, len(ids) - len(text_ids) + 1) if ids[i : i + len(text_ids)] == text_ids]
        if not ends:
            return None
        parts.append(tuple(ids[start : ends[0]]))
        types += [*encoding.type_ids[start : ends[0]], encoding.type_ids[ends[0]]]
        start = ends[0] + len(text_ids)
    types += encoding.type_ids[start:]
    return RowFrame.typed(parts[0], parts[1] if len(parts) > 1 else (), ids[start:], types)


def post_processor(frame: SpecialTokenFrame, piece_of: Mapping[int, str]) -> JsonObject:
    """Returns the post-processor of a tokenizer.json that adds a frame; `piece_of` maps the frame's ids to pieces."""

    def template(row: RowFrame, sequences: str) -> list[dict]:
        types, elements = iter(row.types_of(len(sequences))), []
        special = [row.before, *[row.between] * (len(sequences) - 1), row.after]
        for ids, sequence in zip(special, [*sequences, None], strict=True):
            elements += [{"SpecialToken": {"id": piece_of[i], "type_id": next(types)}} for i in ids]
            elements += [{"Sequence": {"id": sequence, "type_id": next(types)}}] if sequence else []
        return elements

    pieces = {piece_of[i]: i for i in sorted(frame.ids)}
    return {
        "type": "TemplateProcessing",
        "single": template(frame.single, "A"),
        "pair": template(frame.row(2), "AB"),
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in pieces.items()},
    }
