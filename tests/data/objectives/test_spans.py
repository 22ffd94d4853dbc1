"""Tests SpanCorruption: the paper's example, the published lengths and statistics, and `restore`."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.objectives import Lengths, ObjectiveInput, SpanCorruption
from pretrainax.data.objectives.spans import corrupt, noise_counts, noise_mask, random_partition
from pretrainax.tokenization.base import Vocabulary
from tests.data.conftest import TEXTS

PAD, EOS, UNK = range(3)
SENTINELS = tuple(range(102, 2, -1))  # As in T5, <extra_id_0> has the highest id.
VOCABULARY = Vocabulary(size=1000, pad=PAD, eos=EOS, unk=UNK, sentinels=SENTINELS)
ORDINARY = st.integers(103, 999) | st.just(EOS)  # A window contains the EOS of its documents.


def example(objective, tokens, seed=0, vocabulary=VOCABULARY):
    tokens = np.asarray(tokens, np.int32)
    return objective.example(
        ObjectiveInput(tokens, np.ones(len(tokens), np.int32)), np.random.default_rng(seed), vocabulary
    )


def with_sentinels(tokenizer):
    """Returns the tokenizer's vocabulary, with the separator as EOS, and with 100 sentinels if it has none."""
    known = tokenizer.vocabulary
    more = tuple(range(known.size, known.size + 100))
    return dataclasses.replace(known, size=known.size + 100, eos=known.separator, sentinels=known.sentinels or more)


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
    row = objective.example(ObjectiveInput(tokens, None), np.random.default_rng(0), vocabulary)
    assert row["encoder_tokens"].shape == row["encoder_segment_ids"].shape == row["encoder_positions"].shape
    assert row["tokens"].shape == row["targets"].shape == row["loss_weights"].shape == row["positions"].shape
    assert len(row["encoder_tokens"]) == lengths.inputs in (length - 1, length)
    assert len(row["targets"]) == lengths.targets


def test_rate_and_number_of_spans_are_exact():
    for seed in range(200):
        mask = noise_mask(568, 0.15, 3.0, np.random.default_rng(seed))
        assert mask.sum() == 85  # round(568 * 0.15)
        assert np.count_nonzero(np.diff(mask.astype(int)) == 1) == 28  # round(85 / 3): mean length 3.04.


@pytest.mark.parametrize("density, mean", [(0.15, 3.0), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.95, 1.0)])
@pytest.mark.parametrize("raw", [1, 2, 3, 10, 400])
def test_figures_of_right_examples_are_in_range(density, mean, raw):
    objective = SpanCorruption(density, mean)
    vocabulary = dataclasses.replace(VOCABULARY, sentinels=tuple(range(1000, 1400)))
    examples = [example(objective, np.arange(103, 103 + raw), seed, vocabulary) for seed in range(3)]
    assert not [figure for figure in objective.statistics(examples, vocabulary) if figure.is_off]


def test_published_statistics_of_a_million_tokens():
    examples = [example(SpanCorruption(), np.arange(103, 671), seed) for seed in range(1761)]  # 1,000,248 tokens
    density, mean = SpanCorruption().statistics(examples, VOCABULARY)
    # Each window has the same counts, 85 of 568 tokens in 28 spans, so there is no sampling error.
    assert (density.measured, mean.measured) == (pytest.approx(85 / 568), pytest.approx(85 / 28))
    assert (density.expected, mean.expected) == (0.15, 3.0) and not density.is_off and not mean.is_off


@pytest.mark.parametrize("other", [SpanCorruption(0.2, 3.0), SpanCorruption(0.15, 2.0)])
def test_figures_of_other_fields_are_off(other):
    examples = [example(other, np.arange(103, 671), seed) for seed in range(3)]
    assert any(figure.is_off for figure in SpanCorruption().statistics(examples, VOCABULARY))


def test_masks_start_with_text_and_end_with_a_span():
    for seed in range(50):
        mask = noise_mask(100, 0.15, 3.0, np.random.default_rng(seed))
        assert not mask[0] and mask[-1]


def test_places_are_dropped_at_the_published_rate():
    masks = np.stack([noise_mask(568, 0.15, 3.0, np.random.default_rng(seed)) for seed in range(600)])  # 340,800 tokens
    # The first and last places differ by design; the middle must not. Blocks of 100 places x 600 rows have 60,000
    # draws in spans of about 3, so one standard deviation is about sqrt(0.15 * 0.85 * 3 / 60,000) = 0.0025. The
    # tolerance is 5 of them.
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
        # 28,000 parts; parts of one partition are nearly independent: 5 sqrt(p (1 - p) / 28,000) < 0.015.
        assert abs(np.mean(parts == m) - expected) < 0.015


def test_of_a_single_token_nothing_is_dropped():
    row = example(SpanCorruption(), [500])  # T5's code gives the same.
    assert row["encoder_tokens"].tolist() == [500, EOS]
    assert row["targets"].tolist() == [SENTINELS[0], EOS]


@given(st.integers(1, 300), st.floats(0.01, 0.99), st.floats(1.0, 20.0), st.sampled_from(["", "[NLU]"]))
def test_measured_lengths_are_those_of_examples_and_grow_with_the_text(raw, density, mean, mode):
    objective = SpanCorruption(density, mean, mode)
    objective._mode_token_ids = np.full(objective.mode_tokens, 500, np.int32)
    vocabulary = dataclasses.replace(VOCABULARY, sentinels=tuple(range(1000, 1400)))
    row = example(objective, np.arange(103, 103 + raw), vocabulary=vocabulary)
    measured = objective.measure(raw)
    assert measured == (raw, len(row["encoder_tokens"]), len(row["targets"]))
    assert measured <= objective.measure(raw + 1) and measured.targets <= objective.measure(raw + 1).targets


def test_the_same_generator_gives_the_same_example():
    one, other = (example(SpanCorruption(), np.arange(103, 671), seed=5) for _ in range(2))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_the_decoder_reads_the_targets_shifted_right():
    row = example(SpanCorruption(), np.arange(103, 203))
    assert row["tokens"][0] == PAD
    np.testing.assert_array_equal(row["tokens"][1:], row["targets"][:-1])


def test_both_sides_end_with_eos():
    row = example(SpanCorruption(), np.arange(103, 203))
    assert row["encoder_tokens"][-1] == row["targets"][-1] == EOS


def test_sentinels_come_in_order_on_both_sides():
    row = example(SpanCorruption(), np.arange(103, 203))  # 15 tokens in 5 spans.
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


def test_real_texts_can_be_restored(tokenizers_of_all_kinds):
    objective = SpanCorruption(mode="[NLU]")
    for tokenizer in tokenizers_of_all_kinds.values():
        vocabulary, bound = with_sentinels(tokenizer), objective.bind(tokenizer)
        for tokens in tokenizer.encode_batch(TEXTS):
            row = example(bound, tokens, vocabulary=vocabulary)
            np.testing.assert_array_equal(bound.restore(row, vocabulary), tokens)


def test_the_mode_comes_first(tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds["Unigram"]
    bound = SpanCorruption(mode="[NLU]").bind(tokenizer)
    text = tokenizer.encode(TEXTS[0])
    row, plain = (example(o, text, vocabulary=tokenizer.vocabulary) for o in (bound, SpanCorruption()))
    assert tokenizer.decode(row["encoder_tokens"]) == "[NLU]" + tokenizer.decode(plain["encoder_tokens"])
    np.testing.assert_array_equal(row["targets"], plain["targets"])


@pytest.mark.parametrize("mode", ["[NLU]", "[S2S]", "去噪", "\U0001f642"])
def test_lengths_have_room_for_the_mode_of_any_tokenizer(mode, tokenizers_of_all_kinds):
    objective = SpanCorruption(mode=mode)
    for tokenizer in tokenizers_of_all_kinds.values():
        bound = objective.bind(tokenizer)
        assert bound.lengths(512) == objective.lengths(512) and bound == objective
        row = example(bound, np.arange(103, 103 + bound.lengths(512).raw), vocabulary=with_sentinels(tokenizer))
        assert len(row["encoder_tokens"]) <= 512


def test_a_mode_of_more_tokens_than_bytes_is_refused():
    class Splits:
        def encode(self, text):
            return np.zeros(7, np.int32)

    with pytest.raises(UserError, match="mode '.NLU.' has 7 tokens, it must have at most 6"):
        SpanCorruption(mode="[NLU]").bind(Splits())


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


def test_a_sequence_that_is_too_short_for_the_mode_is_refused():
    objective = SpanCorruption(mode="[NLU]")
    data = DataConfig(None, sequence_length=8)
    experiment = Experiment(ModelConfig(family="encoder_decoder"), None, data, objective, None, None)
    assert list(objective.problems(experiment)) == ["config.data.sequence_length is 8, SpanCorruption needs at least 9"]


def test_too_few_sentinels_are_refused():
    assert noise_counts(568, 0.15, 3.0).spans == 28
    few = dataclasses.replace(VOCABULARY, sentinels=SENTINELS[:27])
    with pytest.raises(UserError, match="27 sentinels, .*sequence_length 512 have 28 spans.*num_sentinels >= 28"):
        SpanCorruption().check_vocabulary(few, 512)


def test_as_many_sentinels_as_spans_are_enough():
    enough = dataclasses.replace(VOCABULARY, sentinels=SENTINELS[:28])
    SpanCorruption().check_vocabulary(enough, 512)
    text = ObjectiveInput(np.arange(103, 671, dtype=np.int32), None)
    row = SpanCorruption().example(text, np.random.default_rng(0), enough)
    assert set(SENTINELS[:28]) < set(row["targets"].tolist())


def test_a_vocabulary_without_eos_and_pad_is_refused():
    with pytest.raises(UserError, match="no eos and no pad token, SpanCorruption needs eos, pad"):
        SpanCorruption().check_vocabulary(dataclasses.replace(VOCABULARY, eos=None, pad=None), 512)
