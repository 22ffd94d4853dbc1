"""Tests `Holes`: the ids that the model reads around the holes of a text, and the text with filled holes."""

import pytest

from pretrainax.config import UserError
from pretrainax.inference.holes import Holes
from pretrainax.inference.prompts import ids_of
from pretrainax.tokenization import ByteBPE, Unigram, WordPiece
from tests.support.loaded import letters
from tests.support.runs import ROOT

SENTENCES = ["The cat sat on the mat; the dog walked in the park, (a walk).", "A fox jumps over the lazy dog"] * 50
TEXT = [*SENTENCES, *(ROOT / "CONTRIBUTING.md").read_text().splitlines()]
KINDS = {
    "WordPiece": WordPiece(vocab_size=400),
    "ByteBPE": ByteBPE(vocab_size=300, special_pieces="roberta"),
    "Unigram": Unigram(vocab_size=500, special_pieces="albert", num_sentinels=0),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: kind.build(iter(TEXT)) for name, kind in KINDS.items()} | {"letters": letters()}


EVERY = pytest.mark.parametrize("kind", [*KINDS, "letters"])


def read(tokenizer, text: str) -> list[int]:
    """Returns the ids of a text with masks."""
    first, *others = (part.tolist() for part in Holes(tokenizer, text).ids())
    return [*first, *(i for part in others for i in (tokenizer.vocabulary.mask, *part))]


@EVERY
def test_a_mask_stands_for_one_token_of_the_whole_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "the cat sat in the park."
    ids = tokenizer.encode(text).tolist()
    word = tokenizer.encode(" sat").tolist() if kind != "letters" else tokenizer.encode("s").tolist()
    start = next(i for i in range(len(ids)) if ids[i : i + len(word)] == word)
    hidden = [*ids[:start], tokenizer.vocabulary.mask, *ids[start + len(word) :]]
    assert read(tokenizer, text.replace("sat" if kind != "letters" else "s", "[MASK]")) == hidden


@EVERY
@pytest.mark.parametrize("text", ["the [MASK] sat.", "[MASK] sat", "the cat[MASK].", "a  [MASK] [MASK]", "THE [MASK]"])
def test_a_prompt_with_masks_is_read_as_a_text_with_holes(tokenizers, kind, text):
    assert ids_of(text, tokenizers[kind]).tolist() == read(tokenizers[kind], text)


@EVERY
def test_what_was_hidden_comes_back_as_it_was_written(tokenizers, kind):
    tokenizer = tokenizers[kind]
    spans = [tokenizer.encode(word).tolist() for word in (" cat" if kind != "letters" else "cat", " walk")]
    holes = Holes(tokenizer, "THE [MASK], and: in the [MASK].")
    walk = "walk" if kind != "letters" else " walk"  # its space is a separate token
    assert holes.filled(spans) == f"THE cat, and: in the {walk}."


def test_without_spaces_among_the_ids_those_of_the_text_stay(tokenizers):
    tokenizer = tokenizers["WordPiece"]
    cat, ing = tokenizer.encode("cat").tolist(), tokenizer.encode("walk").tolist()[1:]
    assert Holes(tokenizer, "([MASK]) [MASK]").filled([cat, cat]) == "(cat) cat"
    assert Holes(tokenizer, "a w[MASK] [MASK]").filled([ing[:1], ing[1:2]]).replace(" ", "").startswith("aw")
    assert Holes(tokenizer, "a[MASK]").filled([cat]) == "a cat"  # the ids contain this space
    part = [i for i, piece in enumerate(tokenizer.spellings()) if piece == b"a"]  # ##a
    assert Holes(tokenizer, "cat [MASK]!").filled([part]) == "cata!"


def test_a_piece_with_its_space_brings_it_and_one_without_takes_it_away(tokenizers):
    tokenizer = tokenizers["ByteBPE"]
    assert Holes(tokenizer, "the [MASK].").filled([tokenizer.encode(" cat").tolist()]) == "the cat."
    assert Holes(tokenizer, "the [MASK].").filled([tokenizer.encode("s").tolist()]) == "thes."
    assert Holes(tokenizer, "([MASK]").filled([tokenizer.encode(" cat").tolist()]) == "( cat"
    assert Holes(tokenizer, "[MASK] sat").filled([tokenizer.encode(" cat").tolist()]) == "cat sat"
    assert Holes(tokenizer, "the [MASK] cat").filled([[]]) == "the cat"


def test_the_own_piece_of_a_tokenizer_and_the_plain_one_are_the_same(tokenizers):
    tokenizer = tokenizers["ByteBPE"]
    assert read(tokenizer, "the <mask> sat") == read(tokenizer, "the [MASK] sat")


def test_of_a_tokenizer_that_begins_each_text_with_a_space_only_the_first_part_does(tmp_path):
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(SENTENCES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=40, unk_id=2, eos_id=1, pad_id=0,
        bos_id=-1, minloglevel=2, user_defined_symbols="[CLS],[SEP],[MASK]",
    )  # fmt: skip
    tokenizer = Unigram(path=str(tmp_path / "m.model")).load()
    assert tokenizer.decode(tokenizer.encode("cat")) == "cat"
    first, second = Holes(tokenizer, "the cat<extra_id_0>. The").ids()
    assert tokenizer.spellings()[first[0]].startswith(b" ")
    assert tokenizer.spellings()[second[0]] == b"."
    assert Holes(tokenizer, "a [MASK] [MASK]").sentinels() == list(tokenizer.vocabulary.sentinels[:2])


def test_holes_are_numbered_like_the_sentinels_of_training():
    tokenizer = letters(0, 3)
    zero, one, two = tokenizer.vocabulary.sentinels
    assert Holes(tokenizer, "a<extra_id_0>b<extra_id_1>").sentinels() == [zero, one]
    assert Holes(tokenizer, "a [MASK] b <extra_id_1> c <mask>").sentinels() == [zero, one, two]


@pytest.mark.parametrize(
    "text, said",
    [
        ("<extra_id_1> a", "hole 1 is <extra_id_1>, it must be <extra_id_0>"),
        ("<extra_id_0> a <extra_id_0>", "hole 2 is <extra_id_0>, it must be <extra_id_1>"),
        ("<extra_id_3>", "the tokenizer has <extra_id_0> to <extra_id_2>"),
        ("[MASK] [MASK] [MASK] [MASK]", "hole 4 is \\[MASK\\], the tokenizer has <extra_id_0> to <extra_id_2>"),
        ("no hole", "no hole to fill in: write <mask>"),
    ],
)
def test_a_sentinel_that_training_has_not_is_one_line(text, said):
    with pytest.raises(UserError, match=said):
        Holes(letters(0, 3), text).sentinels()
