"""Tests Denoising: figure 2 of BART's paper, its rates and spans, and `restore`."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.objectives import Denoising, Lengths, ObjectiveInput
from pretrainax.data.objectives.denoising import corrupt, draw_spans, permute_sentences
from pretrainax.tokenization.base import Vocabulary
from tests.data.conftest import TEXTS

BOS, PAD, EOS, UNK, MASK = range(5)
VOCABULARY = Vocabulary(size=1000, bos=BOS, pad=PAD, eos=EOS, unk=UNK, mask=MASK)
RATES = ("infilling_rate", "permutation_rate", "masking_rate", "deletion_rate", "rotation_rate")
NOTHING = dict.fromkeys(RATES, 0.0)
FIGURE = np.array([ord(c) for c in "ABC.DE."], np.int32)  # figure 2: two sentences


def only(**rates):
    return Denoising(**NOTHING | rates)


def example(objective, tokens, ends=None, seed=0, vocabulary=VOCABULARY):
    tokens = np.asarray(tokens, np.int32)
    ends = np.array([len(tokens)] if ends is None else ends)
    text = ObjectiveInput(tokens, np.ones(len(tokens), np.int32), parts=ends)
    return objective.example(text, np.random.default_rng(seed), vocabulary)


def spelled(ids):
    pieces = {BOS: "<s>", EOS: "</s>", MASK: "_"}
    return " ".join(pieces.get(i, chr(i)) for i in ids.tolist())


def noised(objective, seeds=100):
    """Returns the encoder inputs that `objective` makes from the text of figure 2, without bos and eos."""
    rows = [example(objective, FIGURE, [4, 7], seed)["encoder_tokens"][1:-1] for seed in range(seeds)]
    return {spelled(row) for row in rows}


@pytest.mark.parametrize(
    "dropped, masks, read",
    [
        ([1, 4], [1, 4], "A _ C . _ E ."),  # token masking
        ([1, 4], [], "A C . E ."),  # token deletion
        ([1, 2], [1, 5], "A _ . D _ E ."),  # Text infilling, a span of 2 and one of 0.
    ],
)
def test_figure_2_of_the_paper(dropped, masks, read):
    lost = np.isin(np.arange(7), dropped)
    assert spelled(corrupt(FIGURE, lost, np.array(masks, np.int64), MASK)) == read


@pytest.mark.parametrize(
    "objective, read",
    [
        (only(masking_rate=0.3), "A _ C . _ E ."),
        (only(deletion_rate=0.3), "A C . E ."),
        (only(infilling_rate=0.3), "A _ . D _ E ."),
        (only(permutation_rate=1.0), "D E . A B C ."),
        (only(rotation_rate=1.0), "C . D E . A B"),
    ],
)
def test_every_noise_makes_what_figure_2_shows(objective, read):
    assert read in noised(objective, seeds=1000)


def test_the_example_of_the_docstring():
    objective = Denoising(infilling_rate=0.3, permutation_rate=1.0)
    rows = [example(objective, [*FIGURE, EOS], [4, 8], seed) for seed in range(3000)]
    (row, *_) = [row for row in rows if spelled(row["encoder_tokens"]) == "<s> D _ E . A _ . </s>"]
    assert spelled(row["targets"]) == "<s> A B C . D E . </s>"
    assert spelled(row["tokens"]) == "</s> <s> A B C . D E ."
    assert row["loss_weights"].tolist() == [1.0] * 9


def test_a_rotated_text_begins_anywhere():
    text = "A B C . D E .".split()
    assert noised(only(rotation_rate=1.0)) == {" ".join(text[i:] + text[:i]) for i in range(7)}


def test_sentences_come_in_every_order_alike():
    tokens, ends = np.arange(6), np.array([1, 3, 6])
    rng = np.random.default_rng(0)
    drawn = [tuple(permute_sentences(tokens, ends, 1.0, rng).tolist()) for _ in range(6000)]
    assert len(set(drawn)) == 6 and (3, 4, 5, 0, 1, 2) in drawn
    assert max(abs(drawn.count(order) - 1000) for order in set(drawn)) < 5 * np.sqrt(6000 * (1 / 6) * (5 / 6))  # 5 dev.


def test_a_share_of_the_sentences_changes_places():
    tokens, ends, rng = np.arange(10), np.arange(1, 11), np.random.default_rng(0)
    moved = [(permute_sentences(tokens, ends, 0.3, rng) != tokens).sum() for _ in range(200)]
    assert max(moved) == 3  # ceil(0.3 * 10); some of them return to their place.


def test_the_end_of_the_document_stays_at_the_end():
    rows = [example(only(permutation_rate=1.0), [*FIGURE, EOS], [4, 7, 8], seed) for seed in range(20)]
    assert {spelled(row["encoder_tokens"]) for row in rows} == {"<s> A B C . D E . </s>", "<s> D E . A B C . </s>"}


@pytest.mark.slow
def test_spans_of_every_place_and_length_alike():
    drawn = [draw_spans(4, 2, 1.0, np.random.default_rng(seed)) for seed in range(20_000)]
    kinds = [(tuple(starts.tolist()), tuple(lengths.tolist())) for starts, lengths in drawn]
    # The first length is 1 or 0 with probability 1 / e each, and otherwise at least 2, which is cut to 2. A second span
    # has the remaining tokens: 1 after a 1, 2 after a 0, in either order. Two spans have 6 places among the 2 tokens
    # that remain, and one span has 3.
    one, other = 1 - 2 / math.e, 1 / math.e
    for lengths, places, share in (((2,), 3, one), ((1, 1), 6, other), ((0, 2), 6, other / 2), ((2, 0), 6, other / 2)):
        counts = [kinds.count(kind) for kind in set(kinds) if kind[1] == lengths]
        expected = 20_000 * share / places
        assert len(counts) == places and max(abs(c - expected) for c in counts) < 5 * np.sqrt(expected)  # 5 deviations


def test_published_statistics_of_a_million_tokens():
    objective, rng = Denoising(), np.random.default_rng(0)
    windows = rng.integers(5, 1000, (1961, 510))  # 1,000,110 tokens
    rows = [example(objective, window, np.arange(30, 511, 30), seed) for seed, window in enumerate(windows)]
    figures = {figure.name: figure for figure in objective.statistics(rows, VOCABULARY)}
    assert figures["lost tokens"].measured == pytest.approx(0.3)  # 153 of 510, exactly
    # The mean of 100,000 spans has a standard deviation of sqrt(3 / 100,000) = 0.0055. The last span of each text is
    # cut by half of the mean.
    assert figures["mean span length"].measured == pytest.approx(3.0 * 153 / 154.5, abs=0.03)
    assert not [figure for figure in figures.values() if figure.is_off]
    assert figures["texts in another order"].measured == 1.0


def test_span_lengths_are_of_a_poisson_distribution():
    _, lengths = draw_spans(1_000_000, 300_000, 3.0, np.random.default_rng(0))  # 100,000 spans, of which one is cut.
    for k in range(8):
        p = math.exp(-3) * 3**k / math.factorial(k)
        assert abs(np.mean(lengths == k) - p) < 5 * math.sqrt(p * (1 - p) / len(lengths))  # 5 standard deviations


@pytest.mark.parametrize("name, masks", [("masking_rate", 51), ("deletion_rate", 0)])
def test_single_tokens_go_at_the_asked_rate(name, masks):
    objective = only(**{name: 0.1})
    row = example(objective, np.arange(5, 515))
    assert (row["encoder_tokens"] == MASK).sum() == masks
    assert len(row["encoder_tokens"]) == 512 - 51 + masks
    assert not [figure for figure in objective.statistics([row], VOCABULARY) if figure.is_off]


def test_all_noises_at_once_share_no_token():
    objective = Denoising(0.3, 3.0, 1.0, 0.2, 0.1, 1.0)
    rows = [example(objective, np.arange(5, 505), np.arange(20, 501, 20), seed) for seed in range(50)]
    read = [row["encoder_tokens"] for row in rows]
    assert {int((tokens[1:-1] != MASK).sum()) for tokens in read} == {500 - 150 - 100 - 50}
    assert not [figure for figure in objective.statistics(rows, VOCABULARY) if figure.is_off]


@pytest.mark.parametrize("other", [Denoising(infilling_rate=0.15), Denoising(mean_span_length=4.0)])
def test_figures_of_other_fields_are_off(other):
    rows = [example(other, np.arange(5, 515), seed=seed) for seed in range(100)]
    assert any(figure.is_off for figure in Denoising().statistics(rows, VOCABULARY))


def test_lengths():
    assert Denoising().lengths(512) == Lengths(raw=510, inputs=512, targets=512)


@given(
    rates=st.tuples(*[st.floats(0, 1)] * 5),
    mean=st.floats(1, 10),
    tokens=st.lists(st.integers(5, 999), max_size=60),
    ends=st.sets(st.integers(1, 60)),
    is_end=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_text_can_be_restored_and_fits(rates, mean, tokens, ends, is_end, seed):
    infilled, masked, deleted, permuted, rotated = rates
    total = max(infilled + masked + deleted, 1)
    objective = Denoising(infilled / total, mean, permuted, masked / total, deleted / total, rotated)
    tokens = tokens + [EOS] if is_end or not tokens else tokens
    ends = sorted({end for end in ends if end < len(tokens)} | {len(tokens)})
    row = example(objective, tokens, ends, seed)
    np.testing.assert_array_equal(objective.restore(row, VOCABULARY), tokens)
    measured = objective.measure(len(tokens))
    assert len(row["encoder_tokens"]) <= measured.inputs and len(row["targets"]) <= measured.targets
    assert row["encoder_tokens"][0] == BOS and row["encoder_tokens"][-1] == EOS


def test_real_texts_can_be_restored(tokenizers_of_all_kinds):
    for tokenizer in tokenizers_of_all_kinds.values():
        known = tokenizer.vocabulary
        vocabulary = dataclasses.replace(known, bos=known.size, mask=known.size + 1, eos=known.separator)
        for text in tokenizer.encode_batch(TEXTS):
            for tokens in (text, np.append(text, known.separator)):
                row = example(Denoising(), tokens, vocabulary=vocabulary)
                np.testing.assert_array_equal(Denoising().restore(row, vocabulary), tokens)


def test_the_end_of_a_cut_document_is_not_predicted():
    assert example(Denoising(), [*FIGURE, EOS])["loss_weights"].min() == 1
    cut = example(Denoising(), FIGURE)
    assert cut["targets"][-1] == EOS and cut["loss_weights"].tolist() == [1.0] * 8 + [0.0]


def test_it_needs_sentences_to_permute_them():
    assert Denoising().unit == "sentences"
    assert Denoising(permutation_rate=0.0).unit == "tokens"


def test_the_same_generator_gives_the_same_example():
    one, other = (example(Denoising(), np.arange(5, 515), np.arange(30, 511, 30), seed=5) for _ in range(2))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_dtypes():
    dtypes = {name: str(array.dtype) for name, array in example(Denoising(), np.arange(5, 515)).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


@pytest.mark.parametrize(
    "objective, problem",
    [
        (Denoising(infilling_rate=1.5), "config.objective.infilling_rate is 1.5, it must be in [0, 1]"),
        (Denoising(mean_span_length=0.5), "config.objective.mean_span_length is 0.5, it must be at least 1"),
        (only(), f"config.objective has no noise: set one of {', '.join(RATES)} above 0"),
        (
            Denoising(masking_rate=0.5, deletion_rate=0.5),
            "config.objective.infilling_rate 0.3 + masking_rate 0.5 + deletion_rate 0.5 is more than 1",
        ),
    ],
)
def test_fields_out_of_range(objective, problem):
    experiment = Experiment(ModelConfig(family="encoder_decoder"), None, DataConfig(None), objective, None, None)
    assert problem in objective.problems(experiment)


def test_a_vocabulary_without_mask_is_refused():
    with pytest.raises(UserError, match="no mask token, Denoising needs bos, eos, mask; set config.tokenizer to Byte"):
        Denoising().check_vocabulary(dataclasses.replace(VOCABULARY, mask=None), 512)
