"""Tests the masking units (whole words of any tokenizer, n-grams, spans) and replacement by similar words."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from pretrainax.config import UserError
from pretrainax.data.objectives import MaskedLM, NGrams, Spans, Tokens, WholeWords
from pretrainax.data.objectives.masking_units import Chosen
from pretrainax.data.words import Words
from pretrainax.tokenization import WordPiece
from tests.data.conftest import ENGLISH
from tests.support.masking import (
    MASK,
    SEP,
    VOCABULARY,
    Numbers,
    example,
    examples,
    first_with,
    of_each_unit,
    statistics,
    text_of,
    windows,
)

# --- published examples and statistics -----------------------------------------------------------------------------


def test_the_whole_words_of_berts_readme():
    """Reproduces google-research/bert, README: the man [MASK] up , put his [MASK] on [MASK] [MASK] [MASK] ' s head."""
    sentence = "the man jumped up , put his basket on phil ##am ##mon ' s head".split()
    pieces = [*WordPiece.specials.values(), *sentence]
    tokenizer = wordpiece_of(pieces)
    ids = [pieces.index(piece) for piece in sentence]
    objective = MaskedLM(rate=5 / 15, mask_fraction=1.0, random_fraction=0.0, mask_unit=WholeWords())
    row = next(first_with(objective, ids, [3, 8, 10, 11, 12], tokenizer, tokenizer.vocabulary))
    masked = "the man [MASK] up , put his [MASK] on [MASK] [MASK] [MASK] ' s head"
    assert " ".join(pieces[i] for i in row["tokens"][1:-1]) == masked


def test_the_span_of_spanberts_figure():
    """Checks Joshi et al. 2019, figure 1: Super Bowl 50 was [an American football game] to determine the champion."""
    sentence = np.arange(10, 22)
    tokenizer = dataclasses.make_dataclass("All", [])()
    tokenizer.vocabulary, tokenizer.word_edges = VOCABULARY, (np.ones(1000, bool), np.ones(1000, bool))
    objective = MaskedLM(rate=4 / 12, mask_unit=Spans())
    seen = list(itertools.islice(first_with(objective, sentence, [5, 6, 7, 8], tokenizer), 10))
    masked = [row for row in seen if MASK in row["tokens"]]
    assert masked and all((row["tokens"][5:9] == MASK).all() for row in masked)  # One replacement for the span.
    assert masked[0]["targets"].tolist() == sentence[4:8].tolist()


def wordpiece_of(pieces):
    tokenizer = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    return WordPiece()._read(tokenizer.to_str().encode())


def mean_of(unit):
    return np.average(np.arange(1, len(unit.shares) + 1), weights=unit.shares)


@pytest.mark.parametrize(
    "unit", [NGrams(), NGrams(weights=(0.4, 0.3, 0.2, 0.1)), Spans()], ids=["1/n", "MacBERT", "Geo"]
)
def test_published_lengths(unit):
    # The documents are long, so the one run that the budget cuts in each document has little weight.
    objective = MaskedLM(mask_unit=unit)
    found = statistics(objective, examples(objective, windows(20, 50_000)))["words in a row"]
    published = {3: 18 / 11, 4: 2.0, 10: 3.797}[len(unit.shares)]
    assert mean_of(unit) == pytest.approx(published, abs=1e-3)
    assert found.expected == pytest.approx(published, abs=5e-3)  # The budget cuts one run in about 2,000.
    runs = 150_000 / 1.5 / found.expected  # Words have 1.5 tokens.
    words = np.arange(1, len(unit.shares) + 1)
    deviation = np.sqrt(np.average((words - found.expected) ** 2, weights=unit.shares))
    assert abs(found.measured - found.expected) < 5 * deviation / np.sqrt(runs)  # 5 standard deviations


@pytest.mark.slow
@pytest.mark.parametrize("unit", [NGrams(), Spans()])
def test_every_place_but_the_ends_is_chosen_alike(unit):
    counts = np.zeros(128)
    for row in examples(MaskedLM(mask_unit=unit), windows(6000, 126)):
        counts[row["masked_positions"]] += 1
    rates = counts[1:-1] / 6000
    # The rows are independent: 5 standard deviations of the rate of one place over 6,000 rows.
    assert (np.abs(rates[10:-10] - 0.15) < 5 * np.sqrt(0.15 / 6000)).all()
    # Only the runs that begin at the first word contain it. Their rate is the average rate of run starts per place.
    assert rates[0] > 0.8 * 0.15 / mean_of(unit) and rates[-1] > 0.8 * 0.15 / mean_of(unit)


@pytest.mark.parametrize("words, mean", [(1, 1.0), (2, 1 + 0.6), (3, 1 + 0.6 * 1.6 + 0.4)])
def test_the_draws_that_a_budget_takes(words, mean):
    assert NGrams(weights=(6, 4)).runs_of(words)[0] == pytest.approx(mean)


def test_variance_of_the_draws_that_a_budget_takes():
    unit, rng = Spans(), np.random.default_rng(0)
    totals = rng.choice(10, (20_000, 40), p=unit.shares).cumsum(axis=1) + np.arange(1, 41)
    found = (totals < 30).sum(axis=1) + 1
    mean, variance = unit.runs_of(30)
    # 5 standard deviations. The standard deviation of a variance is about variance * sqrt(2 / n).
    assert abs(found.mean() - mean) < 5 * np.sqrt(variance / 20_000)
    assert abs(found.var() - variance) < 5 * variance * np.sqrt(2 / 20_000)


def test_albert_n_grams_come_in_the_published_shares():
    objective = MaskedLM(mask_unit=NGrams())
    counts = np.zeros(3)
    for row in examples(objective, windows(20, 50_000)):
        whole = row["tokens"].copy()
        whole[row["masked_positions"]] = row["targets"]
        word = Words(Numbers).starts(whole).cumsum()
        chosen = np.unique(word[row["masked_positions"]])
        runs = np.diff(np.flatnonzero(np.diff(chosen, prepend=-1, append=-1) != 1))
        counts += np.bincount(runs, minlength=4)[1:4]
    shares = counts / counts.sum()
    # 5 standard deviations of about 61,000 draws: sqrt(6 / 11 * 5 / 11 / 61,000) = 0.002.
    np.testing.assert_allclose(shares, [6 / 11, 3 / 11, 2 / 11], atol=0.01)


# --- words ---------------------------------------------------------------------------------------------------------


@of_each_unit
def test_words_are_predicted_whole_or_not_at_all(unit):
    objective = MaskedLM(mask_unit=unit)
    for row in examples(objective, windows(20)):
        whole = row["tokens"].copy()
        whole[row["masked_positions"]] = row["targets"]
        word = Words(Numbers).starts(whole).cumsum()
        chosen = np.isin(np.arange(len(whole)), row["masked_positions"])
        cut = [w for w in np.unique(word[chosen]) if not chosen[word == w].all()]
        assert bool(cut) == isinstance(unit, Tokens)


def test_of_a_word_longer_than_the_budget_the_first_tokens_are_predicted():
    row = example(MaskedLM(rate=0.5, mask_unit=WholeWords()), [10, 12, 12, 12])
    assert row["masked_positions"].tolist() == [1, 2]


def test_a_run_ends_with_its_document():
    objective = MaskedLM(rate=0.5, mask_fraction=1.0, random_fraction=0.0, mask_unit=Spans(stop=1e-9, longest=4))
    tokens = [10, 11, 13, 14, SEP, 16, 17, 19, 20] * 20
    for seed in range(20):
        row = example(objective, tokens, seed)["tokens"][1:-1]
        assert (row[4::9] == SEP).all()


WORDS = {  # "The chef's meal,床前明月光."; two of the tokenizers have a token of two Chinese characters.
    "WordPiece": "the|chef|'|s|meal|,|床|前|明|月|光|.",
    "ByteBPE": "The| chef|'|s| meal|,|床|前|明月|光|.",
    "Unigram": "The| chef|'|s| meal|,|床|前|明月|光|.",
    "Characters": "The| chef|'|s| meal|,|床|前|明|月|光|.",
}


@pytest.mark.parametrize("kind", WORDS)
def test_words_of_every_tokenizer(kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]
    ids = tokenizer.encode("The chef's meal,床前明月光.")
    words = np.split(ids, np.flatnonzero(Words(tokenizer).starts(ids))[1:])
    assert "|".join("".join(tokenizer.decode(word).split("##")) for word in words) == WORDS[kind]


@pytest.mark.parametrize("kind", WORDS)
def test_words_end_where_those_of_berts_tokenizer_do(kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]

    def ends(parts):
        """Returns the end of each part (ids or a string), in characters other than spaces."""
        written = (part if isinstance(part, str) else tokenizer.decode(part).replace("##", "") for part in parts)
        return set(np.cumsum([len(part.replace(" ", "")) for part in written]).tolist())

    for line in ENGLISH.splitlines():
        ids = tokenizer.encode(line)
        words = np.split(ids, np.flatnonzero(Words(tokenizer).starts(ids))[1:])
        expected = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(line)]
        assert ends(words) == ends(expected) & ends(np.split(ids, len(ids)))  # one token may be "3." or ".\""


@pytest.mark.parametrize("kind", WORDS)
def test_a_line_break_ends_a_word(kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]
    ids = tokenizer.encode("meal\nThe")
    starts = Words(tokenizer).starts(ids)
    (place,) = np.flatnonzero([tokenizer.decode(ids[:i]).split() == ["meal"] for i in range(len(ids))])[-1:]
    assert starts[place]


@pytest.mark.parametrize("kind", WORDS)
def test_chinese_words_are_those_of_a_list(kind, tokenizers_of_all_kinds, tmp_path):
    tokenizer = tokenizers_of_all_kinds[kind]
    (tmp_path / "words.txt").write_text("明月 120 n\n明月光\n地上霜\n月光\n疑是\n", encoding="utf-8")
    ids = tokenizer.encode("床前明月光，疑是地上")
    words = np.split(ids, np.flatnonzero(Words(tokenizer, str(tmp_path / "words.txt")).starts(ids))[1:])
    written = [tokenizer.decode(word).replace(" ", "").replace("##", "") for word in words]
    assert written == ["床", "前", "明月光", "，", "疑是", "地", "上"]  # the longest match


def test_a_word_of_the_list_is_none_within_another_word(tokenizers_of_all_kinds, tmp_path):
    tokenizer = tokenizers_of_all_kinds["Characters"]
    (tmp_path / "words.txt").write_text("he\n")
    starts = Words(tokenizer, str(tmp_path / "words.txt")).starts(tokenizer.encode("chef"))
    assert np.flatnonzero(starts).tolist() == [0]


# --- MacBERT -------------------------------------------------------------------------------------------------------


@pytest.fixture
def similar(tmp_path):
    path = tmp_path / "similar.json"
    path.write_text(json.dumps({"meal": ["store", "game", "the meal of the day"], "chef": ["the man of the cat"]}))
    return str(path)


@pytest.mark.slow
def test_similar_words_stand_in_for_the_mask(similar, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds["WordPiece"]
    objective = MaskedLM(rate=0.5, mask_unit=WholeWords(), similar_words=similar).bind(tokenizer)
    meal, store, game, chef = (int(tokenizer.encode(word)[0]) for word in ("meal", "store", "game", "chef"))
    after = {meal: [], chef: []}
    for seed in range(8000):
        row = objective.example(text_of([chef, meal]), np.random.default_rng(seed), tokenizer.vocabulary)
        after[int(row["targets"][0])].append(int(row["tokens"][row["masked_positions"][0]]))
    written = np.array(after[meal])
    # 5 standard deviations of about 4,000 draws. A random token, one of about 355, may equal the expected token.
    assert abs(np.mean(written == meal) - 0.1) < 0.03
    assert abs(np.mean(written == store) - 0.4) < 0.045
    assert abs(np.mean(written == game) - 0.4) < 0.045
    assert tokenizer.vocabulary.mask not in written
    # "chef" has no similar word of one token, so random tokens replace it.
    written = np.array(after[chef])
    assert abs(np.mean(written == chef) - 0.1) < 0.03
    assert len(np.unique(written)) > 300


@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE", "Unigram", "Characters"])
def test_similar_words_keep_the_places_of_all_others(kind, tokenizers_of_all_kinds, tmp_path):
    tokenizer = tokenizers_of_all_kinds[kind]
    vocabulary = dataclasses.replace(tokenizer.vocabulary, cls=0, sep=1, mask=2)
    (tmp_path / "similar.json").write_text(json.dumps({"明": ["白", "青"], "cat": ["dog", "man"]}))
    objective = MaskedLM(rate=0.5, mask_unit=NGrams(), similar_words=str(tmp_path / "similar.json")).bind(tokenizer)
    ids = tokenizer.encode("the cat 举头望明月 the cat")
    found = [objective.example(text_of(ids), np.random.default_rng(s), vocabulary) for s in range(300)]
    for row in found:
        np.testing.assert_array_equal(objective.restore(row, vocabulary), ids)
    assert not [s for s in objective.statistics(found, vocabulary) if s.is_off]


def test_words_with_the_same_tokens_share_their_similar_words(tokenizers_of_all_kinds, tmp_path):
    tokenizer = tokenizers_of_all_kinds["WordPiece"]
    (tmp_path / "similar.json").write_text(json.dumps({"Meal": ["store"], "meal": ["game", "chef"]}))
    objective = MaskedLM(mask_unit=WholeWords(), similar_words=str(tmp_path / "similar.json")).bind(tokenizer)
    meal, *others = (tuple(tokenizer.encode(word).tolist()) for word in ("meal", "store", "game", "chef"))
    assert objective._similar_words.similar_to(meal) == others


class FourWords(Spans):
    """Chooses four words of four tokens, each as a separate span."""

    def bind(self, tokenizer):
        return self

    def starts(self, tokens):
        return np.arange(len(tokens)) % 4 == 0

    def choose(self, tokens, ordinary, budget, rng):
        return Chosen(np.arange(16), np.arange(16) // 4)


def test_spans_of_similar_words_have_independent_fates(similar, tokenizers_of_all_kinds):
    tokenizer, rng, draws = tokenizers_of_all_kinds["WordPiece"], np.random.default_rng(0), 4000
    fractions = {"mask_fraction": 0.5, "random_fraction": 0.0}
    objective = MaskedLM(mask_unit=FourWords(), similar_words=similar, **fractions).bind(tokenizer)
    row = np.resize(tokenizer.encode("dog"), 16)  # It has no similar word, so random tokens replace it.
    replaced = np.array([(objective.mask(row, rng, tokenizer.vocabulary)["tokens"] != row) for _ in range(draws)])
    replaced = replaced.reshape(draws, 4, 4).mean(axis=2) > 0.5  # A random token may equal the original.
    deviation = 0.5 / np.sqrt(draws)
    assert np.abs(replaced.mean(axis=0) - 0.5).max() < 5 * deviation
    for first, second in itertools.combinations(range(4), 2):
        assert abs(np.mean(replaced[:, first] == replaced[:, second]) - 0.5) < 5 * deviation


class OtherFirstTokens:
    """A table in which the similar word of each word differs from it in the first token."""

    def similar_to(self, ids):
        return [(ids[0] + 3 if ids[0] < 900 else ids[0] - 600, *ids[1:])]


@pytest.mark.parametrize("unit", [WholeWords(), NGrams(), Spans()], ids=lambda unit: type(unit).__name__)
def test_a_token_that_a_similar_word_shares_does_not_count_as_kept(unit):
    objective = MaskedLM(mask_unit=unit).bind(Numbers)
    objective.similar_words, objective._similar_words = "similar.json", OtherFirstTokens()
    found = [objective.example(text_of(r), np.random.default_rng(s), VOCABULARY) for s, r in enumerate(windows(100))]
    (kept,) = (s for s in objective.statistics(found, VOCABULARY) if s.name == "kept")
    assert not kept.is_off and kept.tolerance < 0.06  # A third of the tokens do not begin a word.


@pytest.mark.parametrize(
    "content, problem",
    [
        ("{", "is not a JSON"),
        ("[]", "is not a JSON object; it must be a JSON object, word -> similar words"),
        ('{"meal": "party"}', "has 'party' for 'meal', it must be a list of words"),
        ('{"chef": ["the man of the cat"]}', "has a similar word with an equal number of tokens in this tokenizer"),
    ],
)
def test_a_bad_table_of_similar_words(content, problem, tokenizers_of_all_kinds, tmp_path):
    (tmp_path / "similar.json").write_text(content)
    objective = MaskedLM(mask_unit=WholeWords(), similar_words=str(tmp_path / "similar.json"))
    with pytest.raises(UserError, match=f"config.objective.similar_words: .*{problem}"):
        objective.bind(tokenizers_of_all_kinds["WordPiece"])


def test_a_word_list_that_is_no_text(tokenizers_of_all_kinds, tmp_path):
    (tmp_path / "words.txt").write_bytes("明月\n".encode() + b"\xff\n")
    objective = MaskedLM(mask_unit=WholeWords(word_list=str(tmp_path / "words.txt")))
    with pytest.raises(UserError, match=r"config.objective.mask_unit.word_list: .*words.txt:2: not UTF-8"):
        objective.bind(tokenizers_of_all_kinds["WordPiece"])
