"""Tests the checks of each objective: a correct objective passes, and an objective with another rate does not."""

import numpy as np
import pytest
from scipy import stats

from pretrainax.data.objectives import (
    Denoising,
    FillInTheMiddle,
    MaskedLM,
    NextSentencePrediction,
    NGrams,
    ObjectiveInput,
    PrefixLM,
    ReplacedTokenDetection,
    SentenceOrderPrediction,
    SequentialDenoising,
    SpanCorruption,
    Spans,
    Statistic,
    WholeWords,
)
from pretrainax.data.objectives.tolerances import binomial_tolerance, one_sided_tolerance
from pretrainax.tokenization.base import Vocabulary
from tests.support.masking import VOCABULARY as MASKING_VOCABULARY
from tests.support.masking import Numbers

PAD, UNK, CLS, SEP, MASK, BOS, EOS = range(7)
VOCABULARY = Vocabulary(
    size=1000, pad=PAD, unk=UNK, cls=CLS, sep=SEP, mask=MASK, bos=BOS, eos=EOS, sentinels=tuple(range(999, 899, -1))
)
FIRST, END = 60, 900  # ids of text tokens, which are ordinary in both vocabularies
# A correct objective, and the same objective with a rate that is 0.1 to 0.3 too high or too low.
CASES = {
    "masked rate": (MaskedLM(), MaskedLM(rate=0.25)),
    "masked": (MaskedLM(), MaskedLM(mask_fraction=0.6, random_fraction=0.3)),
    "random": (MaskedLM(), MaskedLM(mask_fraction=0.8, random_fraction=0.2)),
    "kept": (MaskedLM(), MaskedLM(mask_fraction=0.6, random_fraction=0.1)),
    "all masked": (MaskedLM(mask_fraction=1.0, random_fraction=0.0), MaskedLM(mask_fraction=0.9, random_fraction=0.0)),
    "whole words": (MaskedLM(mask_unit=WholeWords()), MaskedLM(rate=0.3, mask_unit=WholeWords())),
    "not whole words": (MaskedLM(mask_unit=WholeWords()), MaskedLM()),
    "n-grams": (MaskedLM(mask_unit=NGrams()), MaskedLM(mask_unit=NGrams(weights=(0, 0, 1)))),
    "spans": (MaskedLM(mask_unit=Spans()), MaskedLM(mask_unit=Spans(stop=0.7))),
    "replaced": (ReplacedTokenDetection(), ReplacedTokenDetection(rate=0.3)),
    "sentence order": (SentenceOrderPrediction(), MaskedLM()),
    "span corruption": (SpanCorruption(), SpanCorruption(noise_density=0.3)),
    "span length": (SpanCorruption(), SpanCorruption(mean_span_length=5.0)),
    "sequential": (SequentialDenoising(0.25), SequentialDenoising(0.4)),
    "infilling": (Denoising(), Denoising(infilling_rate=0.4)),
    "infilled spans": (Denoising(), Denoising(mean_span_length=2.0)),
    "deletion": (Denoising(infilling_rate=0.0, deletion_rate=0.2), Denoising(infilling_rate=0.0, deletion_rate=0.4)),
    "prefix": (PrefixLM(), None),
    "fill in the middle": (FillInTheMiddle(fim_rate=0.5), FillInTheMiddle(fim_rate=0.8)),
    "suffix first": (FillInTheMiddle(fim_rate=0.9), FillInTheMiddle(fim_rate=0.9, spm_rate=0.8)),
}
NEXT = NextSentencePrediction()


def text(rng, length, single=0.0):
    """A text of `length` tokens in several sentences, or of one sentence with probability `single`."""
    tokens = rng.integers(FIRST, END, length).astype(np.int32)
    count = 1 if rng.random() < single else int(rng.integers(2, 6))
    ends = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False))
    segments = np.ones(length, np.int32)
    return ObjectiveInput(tokens, segments, np.append(ends, length), 1.0, lambda rng: text(rng, 2 * length, single))


def texts(seed, count, length, single=0.0):
    rng = np.random.default_rng(seed)
    return rng, [text(rng, int(rng.integers(length // 2, 2 * length)), single) for _ in range(count)]


def found(asked, made, seed, count=100, length=100):
    """The statistics of `asked`, measured on examples of `made`."""
    vocabulary = VOCABULARY
    if isinstance(asked, MaskedLM):
        asked, made, vocabulary = asked.bind(Numbers), made.bind(Numbers), MASKING_VOCABULARY
    rng, inputs = texts(seed, count, length)
    if isinstance(asked, FillInTheMiddle):
        inputs = [x._replace(tokens=np.append(x.tokens[:-1], vocabulary.separator).astype(np.int32)) for x in inputs]
    return list(asked.statistics([made.example(x, rng, vocabulary) for x in inputs], vocabulary))


@pytest.mark.first(6)
@pytest.mark.parametrize("size", [(5, 12), (20, 100), (100, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", CASES)
def test_a_correct_objective_raises_no_alarm_in_67_draws_of_each_size(name, size):
    asked, _ = CASES[name]  # 201 draws per objective; chance gives one alarm in 8,000 such tests.
    off = [s for seed in range(67) for s in found(asked, asked, seed, *size) if s.is_off]
    assert not off


@pytest.mark.first(6)
@pytest.mark.parametrize("name", [name for name, (_, wrong) in CASES.items() if wrong is not None])
def test_a_rate_that_is_off_is_found(name):
    asked, wrong = CASES[name]
    if name == "sentence order":  # Each label is 1 with probability 0.8.
        rng, inputs = texts(0, 100, 100)
        made = [asked.example(x, rng, VOCABULARY) for x in inputs]
        made = [e | {"pair_labels": np.array(rng.random() < 0.8, np.int32)} for e in made]
        assert [s.name for s in asked.statistics(made, VOCABULARY) if s.is_off] == ["swapped segments"]
        return
    count = 400 if isinstance(asked, FillInTheMiddle) else 100  # One draw per document: 0.3 is 12 standard deviations.
    missed = [seed for seed in range(10) if not any(s.is_off for s in found(asked, wrong, seed, count))]
    assert not missed


def next_sentences(seed, count, single, probability=None):
    """Returns the statistic of random next sentences, with probability `probability`, or the objective's if None."""
    rng, inputs = texts(seed, count, 60, single)
    if probability is None:
        made = [NEXT.example(x, rng, VOCABULARY) for x in inputs]
    else:
        labels = [len(x.parts) == 1 or rng.random() < probability for x in inputs]
        made = [{"pair_labels": np.array(label, np.int32)} for label in labels]
    statistic, _ = NEXT.input_statistics(made, inputs, VOCABULARY)
    return statistic


@pytest.mark.parametrize("single", [0.0, 0.3, 0.8])
def test_next_sentences_raise_no_alarm_whatever_number_of_sequences_is_one_sentence(single):
    draws = [next_sentences(seed, count, single) for seed in range(67) for count in (3, 10, 40)]
    assert not [s for s in draws if s.is_off]


@pytest.mark.parametrize("probability", [0.2, 0.8])
@pytest.mark.parametrize("single", [0.0, 0.3])
def test_a_fraction_of_random_next_sentences_of_80_or_20_percent_is_found(single, probability):
    # Of 400 examples, 280 have several sentences: 0.3 is 10 standard deviations of a fair coin.
    assert not [seed for seed in range(20) if not next_sentences(seed, 400, single, probability).is_off]


def test_sequences_that_are_nearly_all_one_sentence_are_an_error():
    rng, inputs = texts(0, 50, 60, single=1.0)
    made = [NEXT.example(x, rng, VOCABULARY) for x in inputs]
    off = [s.name for s in NEXT.input_statistics(made, inputs, VOCABULARY) if s.is_off]
    assert off == ["sequences of one sentence"]


@pytest.mark.parametrize("draws, probability", [(1, 0.5), (20, 0.1), (400, 0.5), (5000, 0.01)])
def test_the_tolerance_is_exceeded_in_at_most_1_of_1_7_million_checks(draws, probability):
    tolerance, counts = binomial_tolerance(draws, probability), np.arange(draws + 1)
    is_off = np.abs(counts / draws - probability) > tolerance
    mass = np.exp(stats.binom.logpmf(counts, draws, probability))
    assert mass[is_off].sum() <= 2 * 2.87e-7


def test_a_rate_of_0_or_1_has_no_tolerance():
    assert binomial_tolerance(10, 0.0) == binomial_tolerance(10, 1.0) == 1e-6


def test_a_tolerance_holds_on_its_side_only():
    assert one_sided_tolerance(0.1, 0.2, 0.05, 0.3) == pytest.approx(0.05, abs=2e-6)
    assert one_sided_tolerance(0.3, 0.2, 0.05, 0.3) == pytest.approx(0.3, abs=2e-6)


def test_too_few_examples_to_check_a_rate_are_reported():
    few, many = (Statistic("swapped segments", 0.5, 0.5, binomial_tolerance(n, 0.5)) for n in (20, 200))
    assert few.is_weak and not many.is_weak
