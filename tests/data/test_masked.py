"""MaskedLM: BERT's rate and 80/10/10, a static number of slots, and nothing lost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.objectives import Lengths, MaskedLM, Text
from pretrainax.tokenizer import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = {PAD, UNK, CLS, SEP, MASK}
VOCABULARY = Vocabulary(size=1000, pad=PAD, unk=UNK, cls=CLS, sep=SEP, mask=MASK)


def example(objective, tokens, seed=0):
    tokens = np.asarray(tokens, np.int32)
    return objective.example(Text(tokens, np.ones(len(tokens), np.int32)), np.random.default_rng(seed), VOCABULARY)


def rows(count, length=510):
    """Windows of ordinary tokens and the examples made of them."""
    windows = np.random.default_rng(7).integers(len(SPECIAL), VOCABULARY.size, (count, length), dtype=np.int32)
    return windows, [example(MaskedLM(), window, seed) for seed, window in enumerate(windows)]


def test_lengths_leave_room_for_cls_and_sep():
    assert MaskedLM().lengths(512) == Lengths(raw=510, inputs=512, targets=77)  # 0.15 * 512 = 76.8


def test_slots_are_not_one_too_many_for_a_rounding_error():
    assert MaskedLM(rate=0.07).lengths(100).targets == 7  # 0.07 * 100 = 7.000000000000001


def test_a_row_is_framed_by_cls_and_sep():
    tokens = example(MaskedLM(), np.arange(10, 20))["tokens"]
    assert (len(tokens), tokens[0], tokens[-1]) == (12, CLS, SEP)


def test_exactly_the_rounded_rate_is_predicted():
    _, examples = rows(20)
    assert {row["loss_weights"].sum() for row in examples} == {round(0.15 * 510)}


def test_published_fractions():
    windows, examples = rows(600)  # 306,000 tokens, 45,600 of them predicted
    before, after = [], []
    for window, row in zip(windows, examples, strict=True):
        used = row["loss_weights"] > 0
        chosen = row["masked_positions"][used]
        before.append(window[chosen - 1])
        after.append(row["tokens"][chosen])
    before, after = np.concatenate(before), np.concatenate(after)
    masked, kept = np.mean(after == MASK), np.mean(after == before)
    # 5 standard deviations: sqrt(0.8 * 0.2 / 45,600) = 0.0019, sqrt(0.1 * 0.9 / 45,600) = 0.0014
    assert abs(masked - 0.8) < 0.0095
    assert abs(kept - 0.1) < 0.007
    assert abs(1 - masked - kept - 0.1) < 0.007


def test_random_tokens_are_drawn_from_all_ordinary_ones_alike():
    objective = MaskedLM(rate=1.0, mask_fraction=0.0, random_fraction=1.0)
    vocabulary = dataclasses.replace(VOCABULARY, size=15)  # ids 5..14 are ordinary
    text = Text(np.full(20_000, 5, np.int32), np.ones(20_000, np.int32))
    row = objective.example(text, np.random.default_rng(0), vocabulary)
    counts = np.bincount(row["tokens"][1:-1], minlength=15)
    np.testing.assert_array_equal(counts[:5], 0)
    assert np.abs(counts[5:] - 2000).max() < 5 * np.sqrt(20_000 * 0.1 * 0.9)  # 5 standard deviations


def test_every_place_is_chosen_alike():
    chosen = [example(MaskedLM(), np.arange(10, 30), s)["masked_positions"][:3] for s in range(4000)]  # 3 of 20
    counts = np.bincount(np.concatenate(chosen), minlength=22)
    assert counts[0] == counts[21] == 0
    assert np.abs(counts[1:21] - 600).max() < 5 * np.sqrt(4000 * 0.15 * 0.85)  # 5 standard deviations


def test_other_places_keep_their_tokens():
    windows, examples = rows(5)
    for window, row in zip(windows, examples, strict=True):
        others = np.setdiff1d(np.arange(1, 511), row["masked_positions"])
        np.testing.assert_array_equal(row["tokens"][others], window[others - 1])


def test_special_tokens_do_not_count():
    row = example(MaskedLM(), [10, SEP, 11, SEP] + [UNK] * 26)  # 2 ordinary tokens
    assert row["targets"].shape == row["loss_weights"].shape == (1,)


def test_a_row_of_special_tokens_predicts_nothing():
    row = example(MaskedLM(), [SEP] * 30)
    assert row["loss_weights"].sum() == 0
    np.testing.assert_array_equal(row["tokens"][1:-1], SEP)


def test_masks_differ_between_seeds():
    one, other = (example(MaskedLM(), np.arange(10, 200), seed)["masked_positions"] for seed in (0, 1))
    assert (one != other).any()


def test_dtypes():
    dtypes = {name: str(array.dtype) for name, array in example(MaskedLM(), np.arange(10, 40)).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


@given(
    tokens=st.lists(st.integers(0, VOCABULARY.size - 1), min_size=1, max_size=60),
    rate=st.floats(0.01, 1.0),
    random_fraction=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
def test_the_text_can_be_restored(tokens, rate, random_fraction, seed):
    objective = MaskedLM(rate, mask_fraction=1 - random_fraction, random_fraction=random_fraction)
    np.testing.assert_array_equal(objective.restore(example(objective, tokens, seed), VOCABULARY), tokens)


@given(tokens=st.lists(st.integers(0, 20), min_size=1, max_size=60), rate=st.floats(0.01, 1.0))
def test_special_tokens_are_never_predicted(tokens, rate):
    row = example(MaskedLM(rate), tokens)
    assert not SPECIAL & set(row["targets"][row["loss_weights"] > 0].tolist())


@pytest.mark.parametrize(
    "objective, problem",
    [
        (MaskedLM(rate=0.0), "config.objective.rate is 0.0, it must be in (0, 1]"),
        (MaskedLM(random_fraction=-0.1), "config.objective.random_fraction is -0.1, it must be in [0, 1]"),
        (MaskedLM(random_fraction=0.3), "config.objective.mask_fraction 0.8 + random_fraction 0.3 is more than 1"),
    ],
)
def test_fields_out_of_range(objective, problem):
    experiment = Experiment(ModelConfig(family="encoder"), None, DataConfig(None), objective, None, None)
    assert list(objective.problems(experiment)) == [problem]


def test_a_vocabulary_without_mask_is_refused():
    with pytest.raises(UserError, match="no mask token, MaskedLM needs mask, cls, sep; set config.tokenizer to Word"):
        MaskedLM().check_vocabulary(dataclasses.replace(VOCABULARY, mask=None), 512)
