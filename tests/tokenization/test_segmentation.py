"""A text as a tokenizer splits it, for people to read."""

from pretrainax.tokenization import ByteBPE, Characters
from pretrainax.tokenization.segmentation import describe_segmentation

LETTERS = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz \n"]))


def test_encode_shows_ids_and_what_they_say():
    assert describe_segmentation(LETTERS, "a b\n").splitlines() == [
        '5  "a"',
        '4  " "',
        '6  "b"',
        '3  "\\n"',
        "4 tokens of 4 bytes, 1.00 a token; the text comes back exactly",
    ]


def test_encode_says_what_is_lost():
    last = describe_segmentation(LETTERS, "aB").splitlines()[-1]
    assert last == '2 tokens of 2 bytes, 1.00 a token; what comes back is "a<unk>"'


def test_encode_joins_the_bytes_of_a_character():
    tokenizer = ByteBPE(vocab_size=259).build(iter(["ab " * 50]))
    lines = describe_segmentation(tokenizer, "a漢😀\ufffd").splitlines()
    assert [line.split("  ")[-1] for line in lines[:-1]] == ['"a"', '"漢"', '"😀"', *['"\ufffd"'] * 3]
    assert lines[-1].startswith("11 tokens of 11 bytes") and lines[-1].endswith("exactly")


def test_encode_of_nothing():
    assert describe_segmentation(LETTERS, "") == "0 tokens of 0 bytes; the text comes back exactly"
