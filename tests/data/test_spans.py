"""SpanCorruption: the paper's example, the published lengths and statistics, and nothing lost."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.objectives import Lengths, SpanCorruption, Text
from pretrainax.data.objectives.spans import corrupt, noise_mask, noise_of, random_partition
from pretrainax.tokenizer import Vocabulary

PAD, EOS, UNK = range(3)
SENTINELS = tuple(range(102, 2, -1))  # as T5's: <extra_id_0> has the highest id
VOCABULARY = Vocabulary(size=1000, pad=PAD, eos=EOS, unk=UNK, sentinels=SENTINELS)
ORDINARY = st.integers(103, 999) | st.just(EOS)  # a window holds the ends of its documents


def example(objective, tokens, seed=0):
    tokens = np.asarray(tokens, np.int32)
    return objective.example(Text(tokens, np.ones(len(tokens), np.int32)), np.random.default_rng(seed), VOCABULARY)


def test_the_example_of_the_paper():
    words = "Thank you for inviting me to your party last week".split()
    pieces = dict(enumerate(words, 103)) | {SENTINELS[0]: "<X>", SENTINELS[1]: "<Y>", SENTINELS[2]: "<Z>", EOS: "</s>"}
    dropped = np.isin(words, ["for", "inviting", "last"])
    inputs, targets = corrupt(np.arange(103, 113, dtype=np.int32), dropped, VOCABULARY)
    assert " ".join(pieces[i] for i in inputs.tolist()) == "Thank you <X> me to your party <Y> week </s>"
    assert " ".join(pieces[i] for i in targets.tolist()) == "<X> for inviting <Y> last <Z> </s>"


def test_published_lengths():
    assert SpanCorruption().lengths(512) == Lengths(raw=568, inputs=512, targets=114)


@pytest.mark.parametrize("density, mean", [(0.15, 3.0), (0.15, 1.0), (0.5, 3.0), (0.15, 8.0), (0.3, 2.0)])
def test_rows_fill_the_sequence_length(density, mean):
    objective = SpanCorruption(density, mean)
    assert [objective.lengths(n).inputs for n in range(3, 600)] == list(range(3, 600))


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("mean", [1.0, 3.0, 40.0])
@pytest.mark.parametrize("length", [3, 4, 17, 64, 100])
def test_rows_have_the_lengths_that_were_announced(density, mean, length):
    objective = SpanCorruption(density, mean)
    lengths = objective.lengths(length)
    vocabulary = dataclasses.replace(VOCABULARY, size=10_000, sentinels=tuple(range(5000, 9000)))
    tokens = np.arange(103, 103 + lengths.raw, dtype=np.int32)
    row = objective.example(Text(tokens, None), np.random.default_rng(0), vocabulary)
    assert row["encoder_tokens"].shape == row["encoder_segment_ids"].shape == row["encoder_positions"].shape
    assert row["tokens"].shape == row["targets"].shape == row["loss_weights"].shape == row["positions"].shape
    assert len(row["encoder_tokens"]) == lengths.inputs in (length - 1, length)
    assert len(row["targets"]) == lengths.targets


def test_rate_and_number_of_spans_are_exact():
    for seed in range(200):
        mask = noise_mask(568, 0.15, 3.0, np.random.default_rng(seed))
        assert mask.sum() == 85  # round(568 * 0.15)
        assert np.count_nonzero(np.diff(mask.astype(int)) == 1) == 28  # round(85 / 3): mean length 3.04


def test_masks_start_with_text_and_end_with_a_span():
    for seed in range(50):
        mask = noise_mask(100, 0.15, 3.0, np.random.default_rng(seed))
        assert not mask[0] and mask[-1]


def test_places_are_dropped_at_the_published_rate():
    masks = np.stack([noise_mask(568, 0.15, 3.0, np.random.default_rng(seed)) for seed in range(600)])  # 340,800 tokens
    # The first and last places differ by design; the middle must not. Blocks of 100 places x 600 rows hold 60,000
    # draws in spans of about 3, so one standard deviation is about sqrt(0.15 * 0.85 * 3 / 60,000) = 0.0025.
    blocks = masks[:, 34:534].reshape(600, 5, 100).mean((0, 2))
    assert np.abs(blocks - 85 / 568).max() < 0.0125


def test_partitions_are_equally_likely():
    rng = np.random.default_rng(0)
    drawn = [tuple(random_partition(6, 3, rng).tolist()) for _ in range(10_000)]
    ways = [p for p in itertools.product(range(1, 5), repeat=3) if sum(p) == 6]
    assert set(drawn) == set(ways) and len(ways) == 10
    assert max(abs(drawn.count(way) - 1000) for way in ways) < 5 * np.sqrt(10_000 * 0.1 * 0.9)  # 5 deviations


def test_span_lengths_are_distributed_as_published():
    """A part of a uniform partition of n into k is m long with probability C(n-m-1, k-2) / C(n-1, k-1)."""
    rng = np.random.default_rng(0)
    parts = np.concatenate([random_partition(85, 28, rng) for _ in range(1000)])
    for m in (1, 2, 3):
        expected = math.comb(85 - m - 1, 26) / math.comb(84, 27)
        # 28,000 parts; parts of one partition are nearly independent: 5 sqrt(p (1 - p) / 28,000) < 0.015
        assert abs(np.mean(parts == m) - expected) < 0.015


def test_the_decoder_reads_the_targets_shifted_right():
    row = example(SpanCorruption(), np.arange(103, 203))
    assert row["tokens"][0] == PAD
    np.testing.assert_array_equal(row["tokens"][1:], row["targets"][:-1])


def test_both_sides_end_with_eos():
    row = example(SpanCorruption(), np.arange(103, 203))
    assert row["encoder_tokens"][-1] == row["targets"][-1] == EOS


def test_sentinels_come_in_order_on_both_sides():
    row = example(SpanCorruption(), np.arange(103, 203))  # 15 tokens in 5 spans
    for name in ("encoder_tokens", "targets"):
        assert [t for t in row[name].tolist() if t in SENTINELS] == list(SENTINELS[:5])


def test_dtypes():
    dtypes = {name: str(array.dtype) for name, array in example(SpanCorruption(), np.arange(103, 203)).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


@given(
    tokens=st.lists(ORDINARY, min_size=2, max_size=200),
    density=st.floats(0.01, 0.99),
    mean=st.floats(1.0, 20.0),
    seed=st.integers(0, 2**32),
)
def test_the_text_can_be_restored(tokens, density, mean, seed):
    objective = SpanCorruption(density, mean)
    np.testing.assert_array_equal(objective.restore(example(objective, tokens, seed), VOCABULARY), tokens)


@given(st.lists(st.tuples(ORDINARY, st.booleans()), min_size=1, max_size=100))
def test_any_mask_that_starts_with_text_can_be_restored(pairs):
    tokens, mask = (np.array(x) for x in zip((500, False), *pairs, strict=True))
    inputs, targets = corrupt(tokens.astype(np.int32), mask, VOCABULARY)
    row = {"encoder_tokens": inputs, "targets": targets}
    np.testing.assert_array_equal(SpanCorruption().restore(row, VOCABULARY), tokens)


@pytest.mark.parametrize(
    "objective, problem",
    [
        (SpanCorruption(noise_density=1.0), "config.objective.noise_density is 1.0, it must be in (0, 1)"),
        (SpanCorruption(mean_span_length=0.5), "config.objective.mean_span_length is 0.5, it must be at least 1"),
    ],
)
def test_fields_out_of_range(objective, problem):
    experiment = Experiment(ModelConfig(family="encoder_decoder"), None, DataConfig(None), objective, None, None)
    assert list(objective.problems(experiment)) == [problem]


def test_too_few_sentinels_are_refused():
    assert noise_of(568, 0.15, 3.0).spans == 28
    few = dataclasses.replace(VOCABULARY, sentinels=SENTINELS[:27])
    with pytest.raises(UserError, match="27 sentinels, .*sequence_length 512 have 28 spans.*num_sentinels >= 28"):
        SpanCorruption().check_vocabulary(few, 512)


def test_as_many_sentinels_as_spans_are_enough():
    enough = dataclasses.replace(VOCABULARY, sentinels=SENTINELS[:28])
    SpanCorruption().check_vocabulary(enough, 512)
    text = Text(np.arange(103, 671, dtype=np.int32), None)
    row = SpanCorruption().example(text, np.random.default_rng(0), enough)
    assert set(SENTINELS[:28]) < set(row["targets"].tolist())


def test_a_vocabulary_without_eos_and_pad_is_refused():
    with pytest.raises(UserError, match="no eos and no pad token, SpanCorruption needs eos, pad"):
        SpanCorruption().check_vocabulary(dataclasses.replace(VOCABULARY, eos=None, pad=None), 512)
