"""Tests that untrusted text cannot control a terminal."""

import pytest

from pretrainax.reporting.visible import visible
from pretrainax.tokenization import Characters
from pretrainax.tokenization.segmentation import describe_segmentation
from pretrainax.training.metrics_writer import MetricsWriter

EVIL = "a\x1b[2Jb\x07\x9b31m\u202ec\rd\x7f\ud800"
SEEN = "a␛[2Jb␇<U+009B>31m<U+202E>c␍d␡<U+D800>"


def test_each_sign_that_a_terminal_obeys_is_seen():
    assert visible(EVIL) == SEEN
    assert all(c in "\n\t" or visible(chr(i)) != c for i in [*range(32), *range(127, 160)] for c in [chr(i)])


@pytest.mark.parametrize("text", ["two\nlines\tand a tab", "é 漢字 😀 👩\u200d🚀 عربى"])
def test_text_stays_as_it_is(text):
    assert visible(text) == text


def test_notes_of_a_run_are_seen(tmp_path, capsys):
    writer = MetricsWriter(str(tmp_path), total_steps=1)
    writer.note(f"  · {EVIL}")
    writer.close()
    assert f"  · {SEEN}\n" == capsys.readouterr().err


def test_pieces_of_a_tokenizer_are_seen():
    text = "\x9b\u202e\x1b"
    shown = describe_segmentation(Characters().build(iter([text])), text)
    assert "<U+009B>" in shown and "<U+202E>" in shown and not set(text) & set(shown)
