"""Tests UL2's seven denoisers and UL2R's mixture: the published lengths, modes and shares, and `restore`."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.collate import collate
from pretrainax.data.objectives import (
    UL2R,
    Lengths,
    MixtureOfDenoisers,
    ObjectiveInput,
    SequentialDenoising,
    SpanCorruption,
)
from pretrainax.tokenization.base import Vocabulary
from tests.data.conftest import TEXTS

PAD, EOS, UNK = range(3)
SENTINELS = tuple(range(130, 2, -1))
VOCABULARY = Vocabulary(size=1000, pad=PAD, eos=EOS, unk=UNK, sentinels=SENTINELS)


class Words:
    """A tokenizer that encodes each mode as one token."""

    def encode(self, text):
        return np.array([["[NLU]", "[S2S]", "[NLG]"].index(text) + 131], np.int32)


NLU, S2S, NLG = range(131, 134)
SEVEN = [objective for _, objective in MixtureOfDenoisers().bind(Words()).components()]


def example(objective, tokens, seed=0):
    tokens = np.asarray(tokens, np.int32)
    return objective.example(
        ObjectiveInput(tokens, np.ones(len(tokens), np.int32)), np.random.default_rng(seed), VOCABULARY
    )


def examples(objective, count):
    """Makes examples from windows that fill 512 inputs."""
    raw = objective.lengths(512).raw
    tokens = np.random.default_rng(0).integers(134, 1000, (count, raw))
    return [example(objective, window, seed) for seed, window in enumerate(tokens)]


def test_a_row_of_the_sequential_denoiser():
    words = "Thank you for inviting me to your party last week".split()
    pieces = dict(enumerate(words, 134)) | {S2S: "[S2S]", EOS: "</s>", PAD: "<pad>"}
    objective = SequentialDenoising(mode="[S2S]").bind(Words())
    rows = [example(objective, np.arange(134, 144), seed) for seed in range(20)]
    (row, *_) = [row for row in rows if len(row["targets"]) == 4]
    text = {name: " ".join(pieces[i] for i in row[name].tolist()) for name in ("encoder_tokens", "targets", "tokens")}
    assert text["encoder_tokens"] == "[S2S] Thank you for inviting me to your </s>"
    assert text["targets"] == "party last week </s>"
    assert text["tokens"] == "<pad> party last week"


def test_the_seven_denoisers_of_the_paper():
    table = [(getattr(o, "mean_span_length", None), o.noise_density, o.mode) for o in MixtureOfDenoisers().objectives]
    assert table == [  # table 1
        (3.0, 0.15, "[NLU]"),
        (8.0, 0.15, "[NLU]"),
        (3.0, 0.5, "[NLG]"),
        (8.0, 0.5, "[NLG]"),
        (64.0, 0.15, "[NLG]"),
        (64.0, 0.5, "[NLG]"),
        (None, 0.25, "[S2S]"),
    ]
    assert {weight for weight, _ in MixtureOfDenoisers().components()} == {1.0}


def test_the_shares_of_ul2r():
    shares = {}
    for weight, objective in UL2R().components():
        shares[objective.mode] = shares.get(objective.mode, 0) + weight
    assert shares == {"[S2S]": 0.5, "[NLU]": 0.25, "[NLG]": 0.25}


@pytest.mark.parametrize("objective", SEVEN, ids=str)
def test_the_mode_comes_first(objective):
    mode = {"[NLU]": NLU, "[S2S]": S2S, "[NLG]": NLG}[objective.mode]
    row = example(objective, np.arange(134, 334))
    assert row["encoder_tokens"][0] == mode and mode not in row["targets"]


def test_rows_have_room_for_all_denoisers():
    assert MixtureOfDenoisers().lengths(512) == Lengths(raw=995, inputs=512, targets=507)
    for objective in SEVEN:
        for row in examples(objective, 3):
            assert len(row["encoder_tokens"]) <= 512 and len(row["targets"]) <= 507


def test_how_much_of_the_rows_is_padding():
    rows = [[row] for objective in SEVEN for row in examples(objective, 100)]
    batch = collate(rows, MixtureOfDenoisers().lengths(512), PAD)
    # The seven denoisers use 113, 99, 506, 507, 91, 507 and on average 127.5 (S) of 507 targets. They use 507 of 512
    # inputs, because the mode has room for 6 tokens, but is one token here. S uses 381.5 inputs on average. The number
    # of targets of S has a standard deviation of 73, so its mean over 100 rows has 7.3. Five of these are 0.01 of the
    # 7 * 507 targets.
    assert np.mean(batch["segment_ids"] == 0) == pytest.approx(0.450, abs=0.011)
    assert np.mean(batch["encoder_segment_ids"] == 0) == pytest.approx(0.045, abs=0.011)


@pytest.mark.first(1)
@pytest.mark.parametrize("objective", SEVEN, ids=str)
def test_published_statistics_of_a_million_tokens(objective):
    rows = examples(objective, 1_000_000 // objective.lengths(512).raw + 1)
    figures = list(objective.statistics(rows, VOCABULARY))
    assert figures and not [figure for figure in figures if figure.is_off]
    assert figures[0].expected == objective.noise_density
    # The tolerance covers the rounding of the counts, at most 1 token of 506. For S, whose share is uniform up to 0.5,
    # it also covers 5 standard deviations of the mean of 1,977 windows: 5 * 0.5 / sqrt(12 * 1,977) = 0.016.
    assert figures[0].measured == pytest.approx(objective.noise_density, abs=0.018)


def test_the_rest_of_a_text_is_of_any_length_alike():
    objective = SequentialDenoising()
    assert [len(example(objective, np.arange(134, 154), s)["targets"]) - 1 for s in range(300)].count(10) == 0
    counts = np.bincount([len(example(objective, np.arange(134, 154), s)["targets"]) - 1 for s in range(9000)])
    assert counts[0] == 0 and len(counts) == 10  # lengths from 1 to 2 * 0.25 * 20 - 1
    assert np.abs(counts[1:] - 1000).max() < 5 * np.sqrt(9000 * (1 / 9) * (8 / 9))  # 5 standard deviations


@given(st.integers(1, 300), st.floats(0.01, 0.5), st.integers(0, 2**32))
def test_measured_lengths_bound_those_of_examples_and_grow_with_the_text(raw, density, seed):
    objective = SequentialDenoising(density)
    row, measured, next_measured = (
        example(objective, np.arange(134, 134 + raw), seed),
        *map(objective.measure, (raw, raw + 1)),
    )
    assert len(row["encoder_tokens"]) <= measured.inputs <= next_measured.inputs
    assert len(row["targets"]) <= measured.targets <= next_measured.targets


@pytest.mark.parametrize("length", [9, 10, 64, 512])
def test_the_prefix_fills_the_sequence_length(length):
    assert SequentialDenoising(mode="[S2S]").lengths(length)[:2] == (length - 6, length)


def test_of_a_single_token_the_end_is_written():
    row = example(SequentialDenoising(), [500])
    assert (row["encoder_tokens"].tolist(), row["targets"].tolist()) == ([500, EOS], [EOS])


@given(st.lists(st.integers(134, 999) | st.just(EOS), min_size=1, max_size=200), st.integers(0, 2**32))
def test_the_text_can_be_restored(tokens, seed):
    for objective in SEVEN:
        np.testing.assert_array_equal(objective.restore(example(objective, tokens, seed), VOCABULARY), tokens)


def test_real_texts_can_be_restored(tokenizers_of_all_kinds):
    for tokenizer in tokenizers_of_all_kinds.values():
        known = tokenizer.vocabulary
        more = tuple(range(known.size, known.size + 100))
        vocabulary = dataclasses.replace(known, eos=known.separator, sentinels=known.sentinels or more)
        for _, objective in MixtureOfDenoisers().bind(tokenizer).components():
            for tokens in tokenizer.encode_batch(TEXTS):
                row = objective.example(ObjectiveInput(tokens, None), np.random.default_rng(0), vocabulary)
                np.testing.assert_array_equal(objective.restore(row, vocabulary), tokens)


def test_the_same_generator_gives_the_same_example():
    one, other = (example(SEVEN[-1], np.arange(134, 334), seed=5) for _ in range(2))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_dtypes():
    for objective in SEVEN:
        dtypes = {name: str(array.dtype) for name, array in example(objective, np.arange(134, 334)).items()}
        assert dtypes.pop("loss_weights") == "float32"
        assert set(dtypes.values()) == {"int32"}


def test_a_denoiser_with_a_mode_must_be_bound():
    with pytest.raises(AssertionError, match="bound to a tokenizer"):
        example(SpanCorruption(mode="[NLU]"), np.arange(134, 334))


def test_t5s_100_sentinels_are_too_few():
    with pytest.raises(UserError, match="100 sentinels, .* have 126 spans.*num_sentinels >= 126"):
        MixtureOfDenoisers().check_vocabulary(dataclasses.replace(VOCABULARY, sentinels=SENTINELS[:100]), 512)
    MixtureOfDenoisers().check_vocabulary(VOCABULARY, 512)


def test_figures_of_another_share_are_off():
    rows = examples(SequentialDenoising(0.5), 100)
    assert [figure.is_off for figure in SequentialDenoising(0.25).statistics(rows, VOCABULARY)] == [True]


def test_fields_out_of_range():
    objective = SequentialDenoising(noise_density=0.6)
    experiment = Experiment(ModelConfig(family="encoder_decoder"), None, DataConfig(None), objective, None, None)
    assert list(objective.problems(experiment)) == ["config.objective.noise_density is 0.6, it must be in (0, 0.5]"]
