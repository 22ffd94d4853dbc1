"""Classification of words in a text: which are meant is marked in the text itself."""

import dataclasses
import numbers
import re
from collections.abc import Mapping
from typing import Literal, Optional

from pretrainax.data.sources.records import value_of
from pretrainax.tasks.base import text_in
from pretrainax.tasks.classification import Classification

SYMBOLS = "*#"  # around the words of the first mark, and of the second


@dataclasses.dataclass
class MarkedWords(Classification):
    """The class of words in a text, or of a word in each of two texts (WiC, Pilehvar and Camacho-Collados 2019; WSC).

    With marks=("text span1_index span1_text", "text span2_index span2_text") and unit="words" the record {"text": "Ann
    saw Eve before she left", "span1_index": 0, "span1_text": "Ann", "span2_index": 4, "span2_text": "she", "label": 1}
    is read as

        * Ann * saw Eve before # she # left

    and with marks=("one start1 end1", "two start2 end2") the characters from start to end of each of a pair of texts
    are marked. So any head of a whole row sees them, as T5 was asked about WSC (Raffel et al. 2020, section 2.4). The
    baselines of SuperGLUE (Wang et al. 2019, section 4.1) gave the classifier the states of these words beside that of
    [CLS] instead.
    """

    # of each mark three fields: a text (text_field, pair_field), where words begin in it, and where they end; in words,
    # where they end is told by the words themselves, of which only the number counts
    marks: tuple[str, ...] = ()
    unit: Literal["characters", "words"] = "characters"  # what places count, from 0; words are parted by spaces

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*super().fields, *(name for mark in self.marks for name in mark.split())]))

    def read_texts(self, record: Mapping) -> tuple[str, ...]:
        texts = super().read_texts(record)
        names = (self.text_field, self.pair_field)
        return tuple(self._marked(record, name, text) for name, text in zip(names, texts, strict=False))

    def _marked(self, record: Mapping, name: Optional[str], text: str) -> str:
        marks = [(*mark.split(), symbol) for mark, symbol in zip(self.marks, SYMBOLS, strict=False)]
        mine = [(begin, end, symbol) for of_text, begin, end, symbol in marks if of_text == name]
        spans = [(*self._span(record, text, begin, end), symbol) for begin, end, symbol in mine]
        for begin, end, symbol in sorted(spans, reverse=True):
            text = f"{text[:begin]}{symbol} {text[begin:end]} {symbol}{text[end:]}"
        return text

    def _span(self, record: Mapping, text: str, begin_field: str, end_field: str) -> tuple[int, int]:
        """Returns the characters that fields say; ValueError where there are no such ones."""
        held = [value_of(record, field, "config.objective.marks") for field in (begin_field, end_field)]
        if self.unit == "words":
            words = [word.span() for word in re.finditer(r"\S+", text)]
            count = len(text_in(record, end_field, "marks").split())
            begin, end = _whole(held[0]), _whole(held[0]) + count
            if 0 <= begin < end <= len(words):
                return words[begin][0], words[end - 1][1]
        elif 0 <= (begin := _whole(held[0])) < (end := _whole(held[1])) <= len(text):
            return begin, end
        raise ValueError(
            f"fields {begin_field!r} and {end_field!r} hold {held[0]!r} and {held[1]!r}, which are no {self.unit} of "
            "the text (config.objective.marks)"
        )

    def field_problems(self):
        yield from super().field_problems()
        texts = [name for name in (self.text_field, self.pair_field) if name is not None]
        wrong = [mark for mark in self.marks if len(mark.split()) != 3 or mark.split()[0] not in texts]
        if wrong or not 1 <= len(self.marks) <= len(SYMBOLS):
            yield (
                f"config.objective.marks is {self.marks}, it must be one or two of three fields each: one of "
                f"{', '.join(texts)}, where words begin in it, and where they end"
            )


def _whole(value: object) -> int:
    """Returns a whole number, of its digits too, as the columns of a table have it; -1 where there is none."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else -1
