"""Implements the classification of words that are marked with symbols in a text."""

import dataclasses
import numbers
import re
from collections.abc import Mapping
from typing import Literal, Optional

from pretrainax.data.sources.records import value_of
from pretrainax.tasks.base import text_in
from pretrainax.tasks.classification import Classification

SYMBOLS = "*#"  # the symbols around the words of the first and of the second mark


@dataclasses.dataclass
class MarkedWords(Classification):
    """Classifies marked words in a text or text pair (WiC, Pilehvar and Camacho-Collados 2019; WSC).

    With marks=("text span1_index span1_text", "text span2_index span2_text") and position_unit="words", the record
    {"text": "Ann saw Eve before she left", "span1_index": 0, "span1_text": "Ann", "span2_index": 4, "span2_text":
    "she", "label": 1} becomes the text

        * Ann * saw Eve before # she # left

    With marks=("one start1 end1", "two start2 end2"), the characters from start to end are marked in each text of a
    pair. The symbols are part of the text, so any classification head can be used. T5 used the same format for WSC
    (Raffel et al. 2020, section 2.4). In the baselines of SuperGLUE (Wang et al. 2019, section 4.1), the classifier
    instead reads the hidden states of the words together with the hidden state of [CLS].
    """

    # each mark has the names of three fields: the text (text_field or pair_field), the start of the words, and the end
    # of the words. With position_unit="words", the third field contains the words instead; only their number is used
    marks: tuple[str, ...] = ()
    # unit of the positions, from 0; words are separated by spaces
    position_unit: Literal["characters", "words"] = "characters"

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*super().fields, *(name for mark in self.marks for name in mark.split())]))

    def read_texts(self, record: Mapping) -> tuple[str, ...]:
        texts = super().read_texts(record)
        names = (self.text_field, self.pair_field)
        return tuple(self._mark_words(record, name, text) for name, text in zip(names, texts, strict=False))

    def _mark_words(self, record: Mapping, name: Optional[str], text: str) -> str:
        marks = [(*mark.split(), symbol) for mark, symbol in zip(self.marks, SYMBOLS, strict=False)]
        text_marks = [(begin, end, symbol) for field, begin, end, symbol in marks if field == name]
        spans = [(*self._read_span(record, text, begin, end), symbol) for begin, end, symbol in text_marks]
        edges = [edge for begin, end, symbol in spans for edge in ((begin, 1, f"{symbol} "), (end, 0, f" {symbol}"))]
        for offset, _, edge in sorted(edges, reverse=True):  # one mark may be inside of the other
            text = text[:offset] + edge + text[offset:]
        return text

    def _read_span(self, record: Mapping, text: str, begin_field: str, end_field: str) -> tuple[int, int]:
        """Reads the character range (start, end) of marked words; raises ValueError if the range is invalid.

        Args:
          text: the text that contains the words.
          begin_field: field with the start of the words.
          end_field: field with the end of the words or, with position_unit="words", with the words themselves.
        """
        values = [value_of(record, field, "config.objective.marks") for field in (begin_field, end_field)]
        if self.position_unit == "words":
            words = [word.span() for word in re.finditer(r"\S+", text)]
            count = len(text_in(record, end_field, "marks").split())
            begin, end = _as_index(values[0]), _as_index(values[0]) + count
            if 0 <= begin < end <= len(words):
                return words[begin][0], words[end - 1][1]
        elif 0 <= (begin := _as_index(values[0])) < (end := _as_index(values[1])) <= len(text):
            return begin, end
        raise ValueError(
            f"fields {begin_field!r} and {end_field!r} hold {values[0]!r} and {values[1]!r}, which are no "
            f"{self.position_unit} of the text (config.objective.marks)"
        )

    def field_problems(self):
        yield from super().field_problems()
        text_fields = [name for name in (self.text_field, self.pair_field) if name is not None]
        invalid = [mark for mark in self.marks if len(mark.split()) != 3 or mark.split()[0] not in text_fields]
        if invalid or not 1 <= len(self.marks) <= len(SYMBOLS):
            yield (
                f"config.objective.marks is {self.marks}, it must be one or two marks of three fields each: one of "
                f"{', '.join(text_fields)}, the start of the words in it, and their end"
            )


def _as_index(value: object) -> int:
    """Converts an integer or a string of digits (as in TSV files) to an int; returns -1 for all other values."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else -1
