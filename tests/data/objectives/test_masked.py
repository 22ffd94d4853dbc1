"""Tests MaskedLM: its rate and 80/10/10 with every masking unit, a static number of slots, and `restore`."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError, from_json, to_json
from pretrainax.data.collate import collate
from pretrainax.data.objectives import Lengths, MaskedLM, NGrams, ObjectiveInput, RateChange, Spans, Tokens, WholeWords
from pretrainax.data.packing import FirstFit, Windows
from pretrainax.runs.train import train
from tests.data.conftest import TEXTS
from tests.support.masking import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL,
    UNK,
    VOCABULARY,
    example,
    examples,
    first_with,
    of_each_unit,
    statistics,
    text_of,
    windows,
)
from tests.test_configs import load, shrink

# --- lengths -------------------------------------------------------------------------------------------------------


def test_lengths_leave_room_for_cls_and_sep():
    assert MaskedLM().lengths(512) == Lengths(raw=510, inputs=512, targets=77)  # 0.15 * 512 = 76.8


def test_slots_are_not_one_too_many_for_a_rounding_error():
    assert MaskedLM(rate=0.07).lengths(100).targets == 7  # 0.07 * 100 = 7.000000000000001


def test_a_row_is_framed_by_cls_and_sep():
    tokens = example(MaskedLM(), np.arange(10, 20))["tokens"]
    assert (len(tokens), tokens[0], tokens[-1]) == (12, CLS, SEP)


def test_a_rate_that_changes_has_the_slots_of_the_highest():
    assert MaskedLM(rate=0.3, rate_change=RateChange(to=0.15)).lengths(512).targets == 154
    assert MaskedLM(rate=0.1, rate_change=RateChange(to=0.2)).lengths(512).targets == 103


@of_each_unit
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=80),
    rate=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
)
def test_no_more_is_predicted_than_announced_and_always_something(unit, tokens, rate, seed):
    objective = MaskedLM(rate, mask_unit=unit)
    predicted = len(example(objective, tokens, seed)["targets"])
    assert predicted <= objective.measure(len(tokens)).targets
    assert (predicted > 0) == bool(set(tokens) - SPECIAL)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_several_documents_fit_the_slots_of_a_row_and_each_predicts(sizes):
    objective = MaskedLM()
    found = [example(objective, range(10, 10 + size), seed) for seed, size in enumerate(sizes)]
    measured = [objective.measure(size) for size in sizes]
    lengths = Lengths(0, sum(m.inputs for m in measured), sum(m.targets for m in measured))
    row = {name: array[0] for name, array in collate([found], lengths, PAD).items()}
    real = row["loss_weights"] > 0
    places = row["masked_positions"][real]
    assert set(row["segment_ids"][places].tolist()) == set(range(1, len(sizes) + 1))
    restored = row["tokens"].copy()
    restored[places] = row["targets"][real]
    expected = [token for size in sizes for token in (CLS, *range(10, 10 + size), SEP)]
    np.testing.assert_array_equal(restored[: len(expected)], expected)


# --- published examples --------------------------------------------------------------------------------------------


def test_the_three_fates_of_hairy():
    """Reproduces Devlin et al. 2018, appendix A.1: my dog is [MASK], my dog is apple, my dog is hairy."""
    my, dog, is_, hairy = range(10, 14)
    seen = [row for row in first_with(MaskedLM(rate=0.25), [my, dog, is_, hairy], places=[4])]
    assert all(row["tokens"][:4].tolist() == [CLS, my, dog, is_] and row["targets"].tolist() == [hairy] for row in seen)
    written = np.array([row["tokens"][4] for row in seen])
    assert {MASK, hairy} < set(written.tolist())
    # 5 standard deviations of about 5,000 draws.
    assert abs(np.mean(written == MASK) - 0.8) < 0.03
    assert abs(np.mean(written == hairy) - 0.1) < 0.022


# --- published rates, on 1,000,000 tokens --------------------------------------------------------------------------


@pytest.mark.first(3)
@of_each_unit
def test_published_fractions(unit):
    objective = MaskedLM(mask_unit=unit)
    found = statistics(objective, examples(objective, windows(1961)))
    assert found["mask rate"].expected == 0.15 and found["masked"].expected == 0.8 and found["random"].expected == 0.1
    # 5 standard deviations of a rate of 0.8 over 150,000 tokens are 0.0052. For spans of 3.8 words of 1.5 tokens, which
    # share their replacement, they are about 3 times larger.
    assert found["masked"].tolerance < (0.02 if unit.shares_replacement else 0.0075)
    assert found["mask rate"].tolerance < 0.001
    assert not [s for s in found.values() if s.is_off]


def test_the_rate_is_that_of_short_texts_too():
    sizes = np.random.default_rng(0).integers(10, 40, 4000)
    found = examples(MaskedLM(), [range(10, 10 + size) for size in sizes])
    predicted = sum(len(row["targets"]) for row in found)
    # Random rounding has a standard deviation of at most 1/2 per text.
    assert abs(predicted - 0.15 * sizes.sum()) < 5 * np.sqrt(4000) / 2


def test_random_tokens_are_drawn_from_all_ordinary_ones_alike():
    objective = MaskedLM(rate=1.0, mask_fraction=0.0, random_fraction=1.0)
    vocabulary = dataclasses.replace(VOCABULARY, size=15)  # Ids 5..14 are ordinary.
    row = objective.example(text_of(np.full(20_000, 5)), np.random.default_rng(0), vocabulary)
    counts = np.bincount(row["tokens"][1:-1], minlength=15)
    np.testing.assert_array_equal(counts[:5], 0)
    assert np.abs(counts[5:] - 2000).max() < 5 * np.sqrt(20_000 * 0.1 * 0.9)  # 5 standard deviations


def test_every_place_is_chosen_alike():
    chosen = [example(MaskedLM(), np.arange(10, 30), s)["masked_positions"] for s in range(4000)]  # 3 of 20
    counts = np.bincount(np.concatenate(chosen), minlength=22)
    assert counts[0] == counts[21] == 0
    assert np.abs(counts[1:21] - 600).max() < 5 * np.sqrt(4000 * 0.15 * 0.85)  # 5 standard deviations


@pytest.mark.parametrize(
    "wrong, figure",
    [
        (MaskedLM(rate=0.14), "mask rate"),
        (MaskedLM(mask_fraction=0.75), "masked"),
        (MaskedLM(random_fraction=0.2), "random"),
        (MaskedLM(random_fraction=0.0), "kept"),
        (MaskedLM(), "words predicted whole"),
        (MaskedLM(mask_unit=WholeWords()), "words in a row"),
    ],
)
def test_a_wrong_objective_is_found_out_by_its_statistics(wrong, figure):
    asked = MaskedLM(mask_unit=Spans() if "words" in figure else Tokens())
    assert statistics(asked, examples(wrong, windows(300, 2000)))[figure].is_off


def test_a_random_token_that_happens_to_be_the_original_is_no_error():
    objective, row = MaskedLM(rate=1.0, mask_fraction=0.0, random_fraction=1.0), np.arange(10, 110)
    made = example(objective, row)
    made["tokens"][1:-1] = row[::-1]  # 100 draws from 995 ids.
    for equal, is_off in ((1, False), (50, True)):  # One match has a probability of 9 %.
        made["tokens"][1 : 1 + equal] = row[:equal]
        assert [statistics(objective, [made])[name].is_off for name in ("random", "kept")] == [is_off, is_off]


@pytest.mark.parametrize("unit", [WholeWords(), NGrams(), Spans()], ids=lambda unit: type(unit).__name__)
def test_a_row_of_one_long_word_is_no_error(unit):
    """Checks text without spaces: no word fits into the budget, so the targets are only a part of one word."""
    objective = MaskedLM(mask_unit=unit)
    rows = [*windows(20, 126), [10, *[12] * 125]]
    assert [name for name, s in statistics(objective, examples(objective, rows)).items() if s.is_off] == []


@pytest.mark.parametrize("stop, wrong", [(0.2, 0.35), (0.35, 0.2)])
def test_wrong_spans_of_short_rows_are_found_out(stop, wrong):
    made = examples(MaskedLM(mask_unit=Spans(stop=wrong)), windows(256, 126))
    assert statistics(MaskedLM(mask_unit=Spans(stop=stop)), made)["words in a row"].is_off
    assert not statistics(MaskedLM(mask_unit=Spans(stop=wrong)), made)["words in a row"].is_off


# --- the rate over the training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, rates",
    [
        (RateChange(to=0.15), {0.0: 0.3, 0.5: 0.225, 1.0: 0.15}),
        (RateChange(to=0.15, begin=0.9, end=0.9), {0.0: 0.3, 0.89: 0.3, 0.9: 0.15, 1.0: 0.15}),
        (RateChange(to=0.4, begin=0.2, end=0.6), {0.1: 0.3, 0.4: 0.35, 0.7: 0.4}),
    ],
)
def test_the_rate_changes_in_a_line_or_at_once(change, rates):
    objective = MaskedLM(rate=0.3, rate_change=change)
    for progress, rate in rates.items():
        predicted = len(example(objective, range(10, 990), progress=progress)["targets"])
        assert abs(predicted - 980 * rate) <= 1  # The rate is rounded up or down.


def test_the_rate_of_a_part_of_the_training_is_asked_for():
    objective = MaskedLM(rate=0.3, rate_change=RateChange(to=0.15))
    made = examples(MaskedLM(rate=0.15), windows(50, 510))
    assert statistics(objective.with_settings_between(0.0, 0.01), made)["mask rate"].is_off
    assert not statistics(objective.with_settings_between(0.99, 1.0), made)["mask rate"].is_off


def test_what_is_static_has_one_rate():
    assert "static is True, which excludes config.objective.rate_change" in next(
        MaskedLM(rate_change=RateChange(), static=True).field_problems()
    )


def test_an_evaluation_has_the_last_rate():
    assert MaskedLM(rate=0.3, rate_change=RateChange(to=0.15)).rate_at(ObjectiveInput(None, None).progress) == 0.15


# --- an example ----------------------------------------------------------------------------------------------------


@of_each_unit
def test_other_places_keep_their_tokens(unit):
    rows = windows(5)
    for window, row in zip(rows, examples(MaskedLM(mask_unit=unit), rows), strict=True):
        others = np.setdiff1d(np.arange(1, 511), row["masked_positions"])
        np.testing.assert_array_equal(row["tokens"][others], window[others - 1])


def test_special_tokens_do_not_count():
    row = example(MaskedLM(), [10, SEP, 11, SEP] + [UNK] * 26)  # 2 ordinary tokens
    assert row["targets"].shape == row["loss_weights"].shape == (1,)


@of_each_unit
def test_a_row_of_special_tokens_predicts_nothing(unit):
    objective = MaskedLM(mask_unit=unit)
    row = example(objective, [SEP] * 30)
    assert row["loss_weights"].sum() == 0
    np.testing.assert_array_equal(row["tokens"][1:-1], SEP)
    assert not statistics(objective, [row])


@of_each_unit
def test_an_example_follows_from_text_and_generator(unit):
    objective, tokens = MaskedLM(mask_unit=unit), windows(1)[0]
    before = tokens.copy()
    one, same, other = (example(objective, tokens, seed) for seed in (0, 0, 1))
    for name in one:
        np.testing.assert_array_equal(one[name], same[name])
    assert one["masked_positions"].tolist() != other["masked_positions"].tolist()
    np.testing.assert_array_equal(tokens, before)


@of_each_unit
def test_dtypes(unit):
    for tokens in (np.arange(10, 40), [SEP]):
        dtypes = {name: str(array.dtype) for name, array in example(MaskedLM(mask_unit=unit), tokens).items()}
        assert dtypes.pop("loss_weights") == "float32"
        assert set(dtypes.values()) == {"int32"}


@of_each_unit
@given(
    tokens=st.lists(st.integers(0, VOCABULARY.size - 1), min_size=1, max_size=60),
    rate=st.floats(0.01, 1.0),
    random_fraction=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
def test_the_text_can_be_restored(unit, tokens, rate, random_fraction, seed):
    objective = MaskedLM(rate, mask_fraction=1 - random_fraction, random_fraction=random_fraction, mask_unit=unit)
    np.testing.assert_array_equal(objective.restore(example(objective, tokens, seed), VOCABULARY), tokens)


@of_each_unit
@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE", "Unigram", "Characters"])
def test_texts_of_every_tokenizer_can_be_restored(unit, kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]
    vocabulary = dataclasses.replace(tokenizer.vocabulary, cls=0, sep=1, mask=2)
    objective = MaskedLM(mask_unit=unit).bind(tokenizer)
    for seed, line in enumerate(TEXTS):
        ids = np.append(tokenizer.encode(line), np.int32(1))
        row = objective.example(text_of(ids), np.random.default_rng(seed), vocabulary)
        np.testing.assert_array_equal(objective.restore(row, vocabulary), ids)
        assert len(row["targets"]) <= objective.measure(len(ids)).targets


@of_each_unit
@given(tokens=st.lists(st.integers(0, 20), min_size=1, max_size=60), rate=st.floats(0.01, 1.0))
def test_special_tokens_are_never_predicted(unit, tokens, rate):
    row = example(MaskedLM(rate, mask_unit=unit), tokens)
    assert not SPECIAL & set(row["targets"].tolist())


@of_each_unit
def test_a_bound_objective_is_the_same_config_and_goes_to_the_workers(unit, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds["WordPiece"]
    objective = MaskedLM(mask_unit=unit, rate_change=RateChange())
    bound = objective.bind(tokenizer)
    assert bound == objective and to_json(bound) == to_json(objective)
    assert from_json(MaskedLM, json.loads(json.dumps(to_json(objective)))) == objective
    text, rngs = text_of(tokenizer.encode(TEXTS[0])), (np.random.default_rng(0) for _ in range(2))
    for one, other in zip(
        *(
            o.example(text, next(rngs), tokenizer.vocabulary).values()
            for o in (bound, pickle.loads(pickle.dumps(bound)))
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective, problem",
    [
        (MaskedLM(rate=0.0), "config.objective.rate is 0.0, it must be in (0, 1]"),
        (MaskedLM(random_fraction=-0.1), "config.objective.random_fraction is -0.1, it must be in [0, 1]"),
        (MaskedLM(random_fraction=0.3), "config.objective.mask_fraction 0.8 + random_fraction 0.3 is more than 1"),
        (MaskedLM(rate_change=RateChange(to=0.0)), "config.objective.rate_change.to is 0.0, it must be in (0, 1]"),
        (
            MaskedLM(rate_change=RateChange(begin=0.5, end=0.4)),
            "config.objective.rate_change is from begin 0.5 to end 0.4, it must be 0 <= begin <= end <= 1",
        ),
        (
            MaskedLM(mask_unit=RateChange()),
            "config.objective.mask_unit is RateChange, allowed: Tokens, WholeWords, NGrams, Spans",
        ),
        (MaskedLM(rate_change=Tokens()), "config.objective.rate_change is Tokens, it must be a RateChange"),
        (
            MaskedLM(mask_unit=WholeWords("no/such")),
            "config.objective.mask_unit.word_list is 'no/such', which is not a file",
        ),
        (
            MaskedLM(mask_unit=NGrams(weights=(0.0,))),
            "config.objective.mask_unit.weights is (0.0,), it must be a tuple of numbers of at least 0, not all of "
            "them 0",
        ),
        (MaskedLM(mask_unit=Spans(stop=0.0)), "config.objective.mask_unit.stop is 0.0, it must be in (0, 1]"),
        (MaskedLM(mask_unit=Spans(longest=0)), "config.objective.mask_unit.longest is 0, it must be at least 1"),
        (
            MaskedLM(similar_words=__file__),
            "config.objective.similar_words replaces whole words, config.objective.mask_unit is Tokens",
        ),
        (
            MaskedLM(similar_words="no/such", mask_unit=NGrams()),
            "config.objective.similar_words is 'no/such', which is not a file",
        ),
    ],
)
def test_fields_out_of_range(objective, problem):
    experiment = Experiment(ModelConfig(family="encoder"), None, DataConfig(None), objective, None, None)
    assert list(objective.problems(experiment)) == [problem]


def test_a_vocabulary_without_mask_is_refused():
    with pytest.raises(UserError, match="no mask token, MaskedLM needs mask, cls, sep; set config.tokenizer to Word"):
        MaskedLM().check_vocabulary(dataclasses.replace(VOCABULARY, mask=None), 512)


# --- training ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective, packing",
    [
        (MaskedLM(0.3, mask_unit=NGrams(), similar_words="similar.json", rate_change=RateChange()), Windows()),
        (MaskedLM(0.3, mask_unit=Spans(), static=True), FirstFit()),
    ],
    ids=["MacBERT", "SpanBERT"],
)
def test_two_steps(objective, packing, text, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "similar.json").write_text(json.dumps({"a": ["e", "i"], "e": ["a", "o"]}))
    experiment = load("roberta_base", "base")
    shrink(experiment, str(text), str(cache))
    experiment.objective, experiment.data.packing = objective, packing
    assert train(experiment, str(tmp_path / "run")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2] and all(line["loss"] > 0 for line in lines)
