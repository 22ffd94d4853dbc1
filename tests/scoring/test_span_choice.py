"""Tests the choice of spans, which depends only on the bytes of a text, and not on the tokenizer."""

import re

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.scoring.span_choice import SpanChoice, words

CHOICE = SpanChoice(share=0.2, mean_bytes=10, context=40)


def text_of(seed, count):
    """Draws words of one to nine letters, some of which have two bytes, and line breaks."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdeö"))
    drawn = ("".join(rng.choice(letters, n)) for n in rng.integers(1, 10, count))
    return "".join(word + ("\n\n" if rng.random() < 0.05 else " ") for word in drawn)


LONG = text_of(0, 20_000)


def places(text, choice=CHOICE):
    """Returns (left context, span, right context) of each chosen span of a text."""
    return [(s.left, s.text, s.right) for s in choice.spans([text])]


def test_words_are_parted_before_white_space_and_around_chinese_characters():
    assert words(" On the\n\nmat, 中文 ok中x ") == [" On", " the", "\n\nmat,", " 中", "文", " ok", "中", "x"]


def test_a_span_and_its_sides_are_a_part_of_the_text():
    for left, span, right in places(LONG):
        assert left + span + right in LONG
        assert span[0].isspace() and not span[-1].isspace() and right[0].isspace()
        assert len(left.encode()) <= 40 and len(right.encode()) <= 40


def test_spans_take_their_share_of_the_bytes_and_have_the_mean_length():
    sizes = np.array([span.num_bytes for span in CHOICE.spans([LONG])])
    assert sizes.mean() == pytest.approx(10, abs=4 * sizes.std() / len(sizes) ** 0.5)
    assert sizes.sum() / len(LONG.encode()) == pytest.approx(0.2, rel=0.05)


def test_spans_do_not_touch_and_leave_the_first_and_the_last_word():
    text = " ".join(f"w{n}" for n in range(3000))
    numbers = [[int(n) for n in re.findall(r"\d+", span.text)] for span in SpanChoice(0.6, 8).spans([text])]
    assert numbers[0][0] >= 1 and numbers[-1][-1] <= 2998
    assert all(before[-1] + 1 < after[0] for before, after in zip(numbers, numbers[1:], strict=False))


def test_the_spans_of_a_text_follow_from_it_and_the_seed_alone():
    alone = [span._replace(document=7) for span in CHOICE.spans([LONG])]
    others = [text_of(n, 30) for n in range(7)]
    assert [span for span in CHOICE.spans([*others, LONG]) if span.document == 7] == alone
    texts_alone = [span.text for span in alone]
    assert [s.text for s in SpanChoice(0.2, 10, context=9, seed=0).spans([LONG])] == texts_alone
    assert [s.text for s in SpanChoice(0.2, 10, seed=1).spans([LONG])] != texts_alone


def test_surroundings_have_a_word_at_least_and_know_where_the_text_begins():
    spans = list(SpanChoice(share=0.5, mean_bytes=3, context=1).spans(["one two three four five"]))
    assert spans and all(words(s.left)[-1:] == [s.left] and words(s.right) == [s.right] for s in spans)
    assert [s.is_start for s in spans] == [s.left == "one" for s in spans]


def test_a_document_of_two_words_has_no_span_and_stops_none_after_it():
    long = " ".join(f"word{n}" for n in range(400))
    alone = list(SpanChoice().spans([long]))
    after = list(SpanChoice().spans(["two words", long, ""]))
    assert alone and [span._replace(document=0) for span in after] == alone
    assert {span.document for span in after} == {1}


def test_a_text_without_spaces_has_spans_if_its_characters_are_words():
    assert list(CHOICE.spans(["春眠不覺曉處處聞啼鳥夜來風雨聲花落知多少" * 3]))
    assert list(CHOICE.spans(["a" * 500, "two words", "", "  "])) == []


@pytest.mark.parametrize(
    "fields, words_of_error",
    [
        ({"share": 0.0}, "share of the bytes in spans is 0.0, it must be in (0, 1)"),
        ({"share": 1.0}, "it must be in (0, 1)"),
        ({"mean_bytes": 0.5}, "mean_bytes of the spans is 0.5, it must be at least 1"),
        ({"mean_bytes": float("nan")}, "mean_bytes"),
        ({"context": 0}, "context of the spans is 0, it must be at least 1"),
        ({"seed": -1}, "seed of the spans is -1, it must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_one_clear_line(fields, words_of_error):
    with pytest.raises(UserError, match=re.escape(words_of_error)):
        SpanChoice(**fields)
