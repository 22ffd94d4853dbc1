"""Tests the readable display of the tokens of a text."""

from pretrainax.tokenization import ByteBPE, Characters
from pretrainax.tokenization.segmentation import describe_segmentation

LETTERS = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz \n"]))


def test_encode_shows_ids_and_what_they_say():
    assert describe_segmentation(LETTERS, "a b\n").splitlines() == [
        '5  "a"',
        '4  " "',
        '6  "b"',
        '3  "\\n"',
        "4 tokens for 4 bytes, 1.00 bytes per token; decoding restores the text exactly",
    ]


def test_encode_says_what_is_lost():
    last = describe_segmentation(LETTERS, "aB").splitlines()[-1]
    assert last == '2 tokens for 2 bytes, 1.00 bytes per token; decoding gives "a<unk>"'


def test_encode_joins_the_bytes_of_a_character():
    tokenizer = ByteBPE(vocab_size=259).build(iter(["ab " * 50]))
    lines = describe_segmentation(tokenizer, "a漢😀\ufffd").splitlines()
    assert [line.split("  ")[-1] for line in lines[:-1]] == ['"a"', '"漢"', '"😀"', *['"\ufffd"'] * 3]
    assert lines[-1].startswith("11 tokens for 11 bytes") and lines[-1].endswith("exactly")


def test_encode_of_nothing():
    assert describe_segmentation(LETTERS, "") == "0 tokens for 0 bytes; decoding restores the text exactly"
