"""Tests that tokenizers are exact if they claim so, separate text from special ids, and report unsuitable settings."""

import dataclasses
import functools
import os
import random
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.config import ModelConfig, UserError
from pretrainax.tokenization import BPE, ByteBPE, Characters, PretrainedTokenizer, Unigram, WordPiece, Words
from pretrainax.tokenization.base import Vocabulary, load_tokenizer
from pretrainax.tokenization.choices import check_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from pretrainax.tokenization.sentencepiece import SPECIALS
from tests.support.huggingface_directories import FIELDS, assert_places, auto, same_ids, unigram_scores

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONFIGS = {
    "unigram": Unigram(vocab_size=500, num_sentinels=5),
    "albert": Unigram(vocab_size=500, num_sentinels=0, special_pieces="albert"),
    "sentencepiece_bpe": BPE(vocab_size=500, num_sentinels=5),
    "wordpiece": WordPiece(vocab_size=300),
    "bpe": ByteBPE(vocab_size=400),
    "masked_bpe": ByteBPE(vocab_size=400, special_pieces="roberta"),
    "bpe_with_sentinels": ByteBPE(vocab_size=400, num_sentinels=3),
    "characters": Characters(),
    "words": Words(vocab_size=500),
}
LOSSLESS = ("unigram", "albert", "sentencepiece_bpe", "bpe", "masked_bpe", "bpe_with_sentinels")
SPECIAL_TEXT = "a [MASK] [UNK] </s> <unk> <pad> <extra_id_0> <|endoftext|> z"


def text():
    """Makes 60 kB of words of an artificial language, in lines."""
    rng = random.Random(0)
    words = ["".join(rng.choices(ALPHABET, k=rng.randint(1, 8))) for _ in range(600)]
    return [" ".join(rng.choices(words, k=10)) + ".\n" for _ in range(1000)]


@functools.cache
def trained(name):
    return CONFIGS[name].build(iter(text()))


every = pytest.mark.parametrize("name", CONFIGS)


# --- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [Unigram, BPE])
def test_more_characters_than_pieces_says_what_to_take(choice):
    text = "".join(chr(0x4E00 + i % 3000) for i in range(9000))
    message = r"vocab_size is 500, but the characters of this text alone need \d+.*use .*ByteBPE\(vocab_size="
    with pytest.raises(UserError, match=message):
        choice(vocab_size=500).build(iter([text]))


def test_a_text_that_is_one_line_is_learned_from():
    """The line has 1.4 MB, and SentencePiece would skip it completely."""
    words = ["".join(random.Random(i).choices("abcdefghij", k=i % 7 + 2)) for i in range(500)]
    line = " ".join(random.Random(0).choices(words, k=220_000))
    tokenizer = Unigram(vocab_size=500, num_sentinels=0).build(iter([line]))
    assert len(tokenizer.encode(" ".join(words))) < 4 * len(words)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=300, deadline=None)
@given(st.text(), st.sampled_from(["", " ", "\n", "\u2581", "\u2585", "\t", "\0", "<extra_id_0>", "\r\n"]))
def test_any_text_comes_back(name, said, between):
    said = between.join([said, said[::-1], ""])
    assert trained(name).decode(trained(name).encode(said)) == said


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=ALPHABET + " .\n"))
def test_known_characters_come_back(said):
    assert trained("characters").decode(trained("characters").encode(said)) == said


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet=ALPHABET, min_size=1), max_size=8))
def test_wordpiece_keeps_lowercase_words(words):
    assert trained("wordpiece").decode(trained("wordpiece").encode(" ".join(words))) == " ".join(words)


@every
def test_batch_gives_what_single_texts_give(name):
    texts = [*text()[:20], "", "a\u2581b"]
    for together, said in zip(trained(name).encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(together, trained(name).encode(said))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "words"])  # Has unk for any other word.
def test_an_unpaired_surrogate_is_one_line(name):
    for encode in (trained(name).encode, trained(name).locate):
        with pytest.raises(UserError, match=r"the text 'a .ud800 b' has an unpaired surrogate"):
            encode("a \ud800 b")


@every
@settings(max_examples=60, deadline=None)
@given(st.text(), st.sampled_from(["", "  ", "\u2581", "e\u0301\u00e9", "\u6771\u4eac", "\U0001f600", SPECIAL_TEXT]))
def test_places_are_those_of_the_text_as_it_is_given(name, said, between):
    assert_places(trained(name), between.join([said, said[::-1], ""]))


@every
def test_ids_are_int32_below_the_size(name):
    ids = trained(name).encode("".join(text()))
    assert ids.dtype == np.int32 and 0 <= ids.min() and ids.max() < trained(name).vocabulary.size


@every
def test_training_is_repeatable(name):
    assert CONFIGS[name].build(iter(text())).fingerprint == trained(name).fingerprint


@pytest.mark.parametrize("config", [Unigram(vocab_size=284), BPE(vocab_size=284)], ids=lambda c: type(c).__name__)
def test_a_space_comes_back_though_the_training_text_had_none(config):
    tokenizer = config.build(iter(["白日依山尽，黄河入海流。\n欲穷千里目，更上一层楼。\n"] * 20))
    said = "更上 一层楼  \u2581\n ok "
    assert tokenizer.decode(tokenizer.encode(said)) == said


def test_sentencepiece_bpe_merges_the_most_frequent_pairs_first():
    """Reproduces the merges of Sennrich et al. 2016 (arXiv 1508.07909), algorithm 1, for the words there."""
    said = "low " * 5 + "lower " * 2 + "newest " * 6 + "widest " * 3
    tokenizer = BPE(vocab_size=285).build(iter([said]))
    first = 3 + 2 + 256  # After special tokens, line ends and bytes.
    assert [tokenizer.decode([first + i]) for i in range(4)] == ["es", "est", "lo", "low"]


def test_characters_are_sorted_after_the_special_ids():
    tokenizer = Characters().build(iter(["ba", "cé"]))
    np.testing.assert_array_equal(tokenizer.encode("abcé?"), [3, 4, 5, 6, tokenizer.vocabulary.unk])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(3, 499), max_size=8), st.sampled_from([" ", "\n", " \t "]))
def test_known_words_come_back_whatever_white_space_parts_them(ids, between):
    tokenizer = trained("words")
    said = between.join(tokenizer.decode([i]) for i in ids)
    np.testing.assert_array_equal(tokenizer.encode(said), ids)
    assert tokenizer.decode(ids) == " ".join(said.split())


def test_words_are_numbered_by_how_often_they_occur():
    tokenizer = Words(vocab_size=5).build(iter(["b a </S>", "c a b a"]))
    np.testing.assert_array_equal(tokenizer.encode("a b c <S>"), [3, 4, 2, 2])
    assert tokenizer.decode([0, 3, 4, 2]) == "</S> a b <UNK>"


def test_a_vocabulary_of_words_is_a_file_with_a_word_a_line(tmp_path):
    file = tmp_path / "vocabulary.txt"
    file.write_text("</S>\n<S>\n<UNK>\nthe\nMüller\n")
    tokenizer = Words(path=str(file)).load()
    np.testing.assert_array_equal(tokenizer.encode("the Müller house"), [3, 4, 2])
    file.write_text("the\n<UNK>\n")
    with pytest.raises(UserError, match="has no line </S>, <S>: it is not a word vocabulary"):
        Words(path=str(file)).load()


def test_wordpiece_lowercase_is_a_choice():
    upper = [line.upper() for line in text()] + text()
    cased = WordPiece(vocab_size=600, lowercase=False).build(iter(upper))
    assert cased.decode(cased.encode("aBc")) == "aBc"


def test_wordpiece_reads_texts_of_many_characters():
    chinese = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    tokenizer = WordPiece(vocab_size=505).build(iter([chinese] * 3))
    assert tokenizer.vocabulary.unk not in tokenizer.encode(chinese)


# --- special ids ---------------------------------------------------------------------------------------------------


@every
def test_text_never_gives_a_special_id(name):
    vocabulary = trained(name).vocabulary
    assert not set(trained(name).encode(SPECIAL_TEXT).tolist()) & (vocabulary.special_ids - {vocabulary.unk})


def test_unigram_ids_are_those_of_t5():
    vocabulary = trained("unigram").vocabulary
    assert (vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.bos) == (0, 1, 2, None)
    assert vocabulary.size == 505 and vocabulary.sentinels == (504, 503, 502, 501, 500)


@pytest.mark.parametrize(
    "pieces, ids",
    [
        ("t5", {"pad": 0, "eos": 1, "unk": 2}),
        ("albert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
        ("llama", {"unk": 0, "bos": 1, "eos": 2}),
        ("gemma", {"pad": 0, "eos": 1, "bos": 2, "unk": 3}),
    ],
)
@pytest.mark.parametrize("kind", [Unigram, BPE])
def test_sentencepiece_takes_the_special_pieces_of_others(kind, pieces, ids):
    tokenizer = kind(vocab_size=400, num_sentinels=0, special_pieces=pieces).build(iter(text()))
    assert tokenizer.vocabulary == Vocabulary(400, **ids)
    assert tokenizer.special_pieces == {ids[field]: piece for field, piece in SPECIALS[pieces].items()}


def test_wordpiece_ids_are_those_of_bert_in_order():
    vocabulary = trained("wordpiece").vocabulary
    assert (vocabulary.pad, vocabulary.unk, vocabulary.cls, vocabulary.sep, vocabulary.mask) == (0, 1, 2, 3, 4)


def test_bpe_ends_and_starts_with_the_same_id():
    vocabulary = trained("bpe").vocabulary
    assert vocabulary.eos == vocabulary.bos == 0 and vocabulary.pad is None


@pytest.mark.parametrize(
    "pieces, ids",
    [
        ("roberta", {"bos": 0, "cls": 0, "pad": 1, "eos": 2, "sep": 2, "unk": 3, "mask": 4}),
        ("bert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}),
    ],
)
def test_bpe_takes_the_special_pieces_of_others(pieces, ids):
    tokenizer = ByteBPE(vocab_size=300, special_pieces=pieces).build(iter(text()))
    vocabulary = tokenizer.vocabulary
    assert {field: getattr(vocabulary, field) for field in ids} == ids
    assert vocabulary.special_ids == set(range(5)) and vocabulary.size == 300


def test_sentinels_come_after_the_pieces_of_bpe_and_change_none():
    plain, with_sentinels = trained("bpe"), trained("bpe_with_sentinels")
    vocabulary = with_sentinels.vocabulary
    assert vocabulary.sentinels == (400, 401, 402) and vocabulary.size == 403 == CONFIGS["bpe_with_sentinels"].size
    assert [with_sentinels.special_pieces[i] for i in vocabulary.sentinels] == [f"<extra_id_{n}>" for n in range(3)]
    np.testing.assert_array_equal(with_sentinels.encode("".join(text())), plain.encode("".join(text())))
    assert with_sentinels.fingerprint != plain.fingerprint


def test_sentinels_are_added_to_a_bpe_that_is_read(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(trained("bpe").model)
    read = ByteBPE(path=str(tmp_path), num_sentinels=3).load()
    assert read.fingerprint == trained("bpe_with_sentinels").fingerprint


def test_fewer_than_no_sentinels_are_a_problem():
    (problem,) = ByteBPE(vocab_size=300, num_sentinels=-1).problems(experiment(300))
    assert problem == "config.tokenizer.num_sentinels is -1, it must be at least 0"


def test_unknown_special_pieces_are_a_problem():
    (problem,) = ByteBPE(vocab_size=300, special_pieces="robert").problems(experiment(300))
    assert problem == "config.tokenizer.special_pieces is 'robert', did you mean 'roberta' or 'bert'?"
    (problem,) = BPE(vocab_size=300, special_pieces="bert").problems(experiment(300))
    assert problem == "config.tokenizer.special_pieces is 'bert', did you mean 'albert'?"


@every
def test_separator_is_eos_or_else_sep(name):
    vocabulary = trained(name).vocabulary
    assert vocabulary.separator == (vocabulary.sep if name in ("wordpiece", "albert") else vocabulary.eos)


def test_special_ids_are_all_of_them():
    vocabulary = Vocabulary(20, pad=0, eos=1, mask=4, sentinels=(19, 18))
    assert vocabulary.special_ids == {0, 1, 4, 18, 19}


DECODED = {
    "unigram": (["eos", "sentinels", "pad"], "ab</s><extra_id_0><pad>ab"),
    "albert": (["mask", "sep", "pad"], "ab[MASK][SEP]<pad>ab"),
    "sentencepiece_bpe": (["eos", "sentinels", "bos"], "ab</s><extra_id_0><s>ab"),
    "wordpiece": (["mask", "sep"], "ab [MASK] [SEP] ab"),
    "bpe": (["eos"], "ab<|endoftext|>ab"),
    "masked_bpe": (["mask", "sep", "pad"], "ab<mask></s><pad>ab"),
    "bpe_with_sentinels": (["eos", "sentinels"], "ab<|endoftext|><extra_id_0>ab"),
    "characters": (["eos", "unk"], "ab</s><unk>ab"),
    "words": (["eos", "bos"], "<UNK> </S> <S> <UNK>"),  # no word of the text is "ab"
}


@every
def test_decode_shows_special_ids_as_their_pieces(name):
    fields, wanted = DECODED[name]
    tokenizer = trained(name)
    special = [np.atleast_1d(getattr(tokenizer.vocabulary, field))[0] for field in fields]
    assert tokenizer.decode([*tokenizer.encode("ab"), *special, *tokenizer.encode("ab")]) == wanted


@every
def test_decode_survives_ids_past_the_vocabulary(name):
    size = trained(name).vocabulary.size
    assert trained(name).decode([size, size + 7]).replace(" ", "") == "\ufffd\ufffd"


# --- files ---------------------------------------------------------------------------------------------------------


@every
def test_saved_tokenizer_is_the_same(name, tmp_path):
    trained(name).save(str(tmp_path))
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.fingerprint, loaded.vocabulary) == (trained(name).fingerprint, trained(name).vocabulary)
    np.testing.assert_array_equal(loaded.encode(SPECIAL_TEXT), trained(name).encode(SPECIAL_TEXT))


@every
def test_path_takes_a_saved_directory(name, tmp_path):
    trained(name).save(str(tmp_path))
    assert type(CONFIGS[name])(path=str(tmp_path)).load().fingerprint == trained(name).fingerprint


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "characters"])
def test_path_takes_the_file_of_the_library(name, tmp_path):
    trained(name).save(str(tmp_path))
    os.remove(tmp_path / "vocabulary.json")
    config = dataclasses.replace(CONFIGS[name], path=str(tmp_path / trained(name).file))
    assert config.load().fingerprint == trained(name).fingerprint


def test_path_of_another_kind_is_refused(tmp_path):
    trained("bpe").save(str(tmp_path))
    with pytest.raises(UserError, match=r"config\.tokenizer\.path=.* is not a Unigram tokenizer"):
        Unigram(path=str(tmp_path)).load()


@pytest.mark.parametrize("config", [ByteBPE, PretrainedTokenizer])
def test_the_path_of_a_run_names_the_folder_of_its_tokenizer(config, tmp_path):
    trained("bpe").save(str(tmp_path / "run" / "tokenizer"))
    with pytest.raises(UserError, match=f"{tmp_path}/run is the folder of a run: give {tmp_path}/run/tokenizer$"):
        config(path=str(tmp_path / "run")).load()


@pytest.mark.parametrize("config", [Unigram, BPE, WordPiece, ByteBPE], ids=lambda c: c.__name__)
def test_path_of_something_else_is_refused(config, tmp_path):
    (tmp_path / "model").write_text("something else")
    with pytest.raises(UserError, match=r"config\.tokenizer\.path=.* is not a "):
        config(path=str(tmp_path / "model")).load()


def test_path_without_the_special_pieces_is_refused(tmp_path):
    trained("bpe").save(str(tmp_path))
    with pytest.raises(UserError, match=r"has no \[CLS\], \[MASK\], \[PAD\], \[SEP\], \[UNK\]: it is not a WordPiece"):
        WordPiece(path=str(tmp_path / "tokenizer.json")).load()


def test_path_with_other_special_pieces_is_refused(tmp_path):
    trained("bpe").save(str(tmp_path))
    with pytest.raises(UserError, match="<pad>, <s>, <unk>: it is not a ByteBPE; see config.tokenizer.special_pieces"):
        ByteBPE(path=str(tmp_path / "tokenizer.json"), special_pieces="roberta").load()


def test_model_without_the_special_pieces_is_refused(tmp_path):
    trained("unigram").save(str(tmp_path))
    with pytest.raises(UserError, match=r"has no \[CLS\], \[MASK\], \[SEP\]; see config.tokenizer.special_pieces"):
        Unigram(path=str(tmp_path / "spiece.model"), special_pieces="albert").load()


@pytest.mark.parametrize("name", ["albert", "sentencepiece_bpe"])
def test_transformers_reads_what_was_exported(name, tmp_path):
    tokenizer = trained(name)
    write_tokenizer(tokenizer, str(tmp_path), ModelConfig())
    scores = unigram_scores(tokenizer.model) if name == "albert" else None
    same_ids(tokenizer, auto(tmp_path), scores=scores)
    vocabulary, theirs = tokenizer.vocabulary, auto(tmp_path)
    assert {f: getattr(theirs, f"{f}_token_id") for f in FIELDS} == {f: getattr(vocabulary, f) for f in FIELDS}
    assert read_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_damaged_directory_is_refused(tmp_path):
    trained("characters").save(str(tmp_path))
    (tmp_path / "vocabulary.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer(str(tmp_path))


# --- errors --------------------------------------------------------------------------------------------------------


def experiment(vocab_size, objective=None):
    accepts = types.SimpleNamespace(check_vocabulary=lambda vocabulary, sequence_length: None)
    return types.SimpleNamespace(
        model=types.SimpleNamespace(vocab_size=vocab_size),
        data=types.SimpleNamespace(sequence_length=64),
        objective=objective or accepts,
        evaluate=types.SimpleNamespace(objective=None),
    )


@pytest.mark.parametrize("name", ["unigram", "sentencepiece_bpe", "wordpiece", "bpe"])
def test_too_little_text_is_explained(name):
    config = type(CONFIGS[name])(vocab_size=30_000)
    with pytest.raises(
        UserError, match=r"config\.tokenizer\.vocab_size is 30000, but this text is enough for at most \d+"
    ):
        config.build(iter(text()))


@pytest.mark.parametrize("config", [c(vocab_size=200) for c in (Unigram, BPE, ByteBPE)], ids=lambda c: type(c).__name__)
def test_vocabulary_too_small_for_the_alphabet_is_explained(config):
    with pytest.raises(UserError, match=r"config\.tokenizer\.vocab_size is 200, but the .* need \d+"):
        config.build(iter(text()))


def test_no_text_is_explained():
    with pytest.raises(UserError, match=r"config\.data\.source"):
        Characters().build(iter([]))


def test_config_larger_than_the_model_is_a_problem():
    (problem,) = Unigram(vocab_size=1000).problems(experiment(1000))
    assert problem.startswith("config.model.vocab_size is 1000, but the tokenizer will have 1100 ids")


def test_missing_path_is_a_problem():
    (problem,) = Unigram(path="/no/such").problems(experiment(10))
    assert problem == "config.tokenizer.path is '/no/such', which does not exist"


def test_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(UserError, match=r"has 505 ids, config\.model\.vocab_size is 504: it must be at least 505"):
        check_tokenizer(trained("unigram"), experiment(504))


def test_tokenizer_that_fills_the_model_is_accepted():
    assert check_tokenizer(trained("unigram"), experiment(505)) is None


def test_objective_has_its_say():
    def refuse(vocabulary, sequence_length):
        raise UserError(f"no mask among {vocabulary.size} ids for {sequence_length}")

    with pytest.raises(UserError, match="no mask among 505 ids for 64"):
        check_tokenizer(trained("unigram"), experiment(505, types.SimpleNamespace(check_vocabulary=refuse)))
