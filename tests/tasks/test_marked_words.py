"""Tests marking the words in question in their text, for every way to specify them, and the errors."""

import pytest

from pretrainax.tasks import MarkedWords

OF_WORDS = MarkedWords("text", labels=("no", "yes"), marks=("text i a", "text j b"), position_unit="words")
OF_CHARACTERS = MarkedWords("one", "two", labels=("no", "yes"), marks=("one s e", "two t f"))
RECORD = {"text": "Ann  saw\nEve", "i": 2, "a": "Eve", "j": 0, "b": "Ann saw", "label": "yes"}
PAIR = {"one": "a bank", "s": 2, "e": 6, "two": "Zürich", "t": "0", "f": "6", "label": 0}


def test_words_are_marked_from_the_last_to_the_first():
    read = OF_WORDS.read(RECORD)
    assert read.texts == ("# Ann  saw #\n* Eve *",) and read.note == {"label": 1}


def test_words_inside_of_other_marked_words_are_marked():
    record = {"text": "Ann and Eve saw her", "i": 0, "a": "Ann and Eve", "j": 2, "b": "Eve", "label": "yes"}
    assert OF_WORDS.read(record).texts == ("* Ann and # Eve # * saw her",)


def test_characters_of_a_pair_are_marked_each_in_its_text():
    assert OF_CHARACTERS.read(PAIR).texts == ("a * bank *", "# Zürich #")
    assert set(OF_CHARACTERS.fields) == PAIR.keys()


@pytest.mark.parametrize(
    "task, record, said",
    [
        (OF_WORDS, {**RECORD, "i": 3}, "fields 'i' and 'a' hold 3 and 'Eve', which are no words of the text"),
        (OF_WORDS, {**RECORD, "i": -1}, "hold -1"),
        (OF_WORDS, {**RECORD, "i": None}, "hold None"),
        (OF_WORDS, {**RECORD, "j": 2}, "hold 2 and 'Ann saw'"),
        (OF_WORDS, {**RECORD, "a": " "}, "hold 2 and ' '"),
        (OF_CHARACTERS, {**PAIR, "e": 7}, "'s' and 'e' hold 2 and 7, which are no characters of the text"),
        (OF_CHARACTERS, {**PAIR, "s": 6}, "hold 6 and 6"),
        (OF_CHARACTERS, {**PAIR, "f": True}, "hold '0' and True"),
        (OF_CHARACTERS, {name: x for name, x in PAIR.items() if name != "f"}, "no field 'f'.*config.objective.marks"),
    ],
)
def test_a_place_that_is_not_in_the_text_is_refused(task, record, said):
    with pytest.raises(ValueError, match=said):
        task.read(record)


@pytest.mark.parametrize("marks", [(), ("text i",), ("other i a",), ("text i a",) * 3])
def test_marks_that_name_no_words_are_refused(marks):
    (said,) = MarkedWords("text", labels=("no", "yes"), marks=marks).field_problems()
    assert said.startswith(
        f"config.objective.marks is {marks}, it must be one or two marks of three fields each: one of text,"
    )
