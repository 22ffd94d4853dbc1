"""Tests the unigram baseline against values by hand: targets that follow from the form have no loss."""

import collections
import math

import numpy as np
import pytest

from pretrainax.data.baseline import Baseline, target_counts
from pretrainax.data.collate import collate
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import MaskedLM, ObjectiveInput, SpanCorruption
from pretrainax.data.preparation import shards
from pretrainax.data.replacements import with_replacements
from pretrainax.tokenization import Characters
from pretrainax.tokenization.base import Vocabulary

TOKENIZER = Characters().build(iter(["abcd"]))
SPANS = Vocabulary(size=40, pad=0, eos=1, unk=2, sentinels=tuple(range(30, 40)))
FREQUENCIES = np.concatenate([np.zeros(3), np.arange(1, 28), np.zeros(10)])  # Ids 3 to 29 have counts.


def causal(tokens, targets, weights):
    ids = {"tokens": [tokens], "targets": [targets], "segment_ids": [[1] * len(tokens)]}
    return {name: np.array(x, np.int32) for name, x in ids.items()} | {"loss_weights": np.array([weights], np.float32)}


def unigram_baseline(counts, train, valid, vocabulary):
    """Returns the metrics of the baseline over all batches of `valid`: {metric: mean}."""
    baseline, sums = Baseline(counts, train, vocabulary), collections.defaultdict(lambda: np.zeros(2))
    for batch in valid:
        for name, (value, weights) in baseline.values(batch).items():
            sums[name] += (value * weights).sum(), weights.sum()
    return {name: total / max(count, 1e-9) for name, (total, count) in sums.items()}


def test_by_hand():
    vocabulary = Vocabulary(size=4, eos=3)
    counts = np.array([8, 1, 0, 3])  # the text, smoothed by 1/3 each: 8 1/3, 1 1/3, 1/3 of 10
    first = causal([3, 0, 1, 0], [0, 1, 0, 3], [1, 1, 1, 1])
    second = causal([3, 0, 0, 0], [0, 0, 2, 0], [1, 1, 1, 0])
    scores = unigram_baseline(counts, [first], [second], vocabulary)
    of_text = [25 / 30, 25 / 30, 1 / 30]
    form = [1.5 / 2, 2.5 / 3, 2.5 / 3]  # Smoothed: 1 of 1 after an end, 2 of 2 after text.
    # rel=1e-12: the same few float64 operations in another order.
    expected = -sum(math.log(a * b) for a, b in zip(of_text, form, strict=True)) / 3
    assert scores["loss"] == pytest.approx(expected, rel=1e-12)
    assert scores["text_loss"] == pytest.approx(-sum(map(math.log, of_text)) / 3, rel=1e-12)
    assert scores["accuracy"] == scores["text_accuracy"] == pytest.approx(2 / 3, rel=1e-12)
    assert "bits_per_byte" not in scores


def test_without_training_targets_all_tokens_are_alike():
    asked = causal([0, 0], [3, 1], [1, 1])
    scores = unigram_baseline(np.zeros(8), [], [asked], Vocabulary(size=8))
    assert scores["loss"] == pytest.approx(math.log(8), rel=1e-12)  # one rounding of a float64 logarithm


def test_per_byte_it_is_what_all_targets_cost_over_the_bytes_they_have():
    asked = causal([0, 0], [3, 1], [1, 1]) | {"target_bytes": np.array([6.0])}
    scores = unigram_baseline(np.zeros(8), [], [asked], Vocabulary(size=8))
    assert scores["bits_per_byte"] == pytest.approx(2 * 3 / 6, rel=1e-12)


def batches(objective, vocabulary, count, seed):
    rng = np.random.default_rng(seed)
    lengths = objective.lengths(31)
    draw = lambda: rng.choice(40, lengths.raw, p=FREQUENCIES / FREQUENCIES.sum()).astype(np.int32)  # noqa: E731
    rows = [
        [objective.example(ObjectiveInput(draw(), np.ones(lengths.raw, np.int32)), rng, vocabulary)]
        for _ in range(count)
    ]
    return [collate(rows, lengths, 0)]


def test_sentinels_and_ends_that_are_forced_cost_nothing():
    objective = SpanCorruption(0.3, mean_span_length=100.0)  # One span, of the same length in each row.
    train, valid = batches(objective, SPANS, 2000, 0), batches(objective, SPANS, 50, 1)
    scores = unigram_baseline(1e6 * FREQUENCIES, train, valid, SPANS)
    marks, targets = 2, objective.lengths(31).targets
    share = 1 - marks / targets
    assert 0 < share < 1
    # The smoothing adds one count to the 2,000 rows, which costs 1 / 2,000 per target.
    assert scores["loss"] == pytest.approx(share * scores["text_loss"], abs=1e-3)
    frequency = FREQUENCIES[valid[0]["targets"]] / FREQUENCIES.sum()
    assert scores["text_loss"] == pytest.approx(-np.log(frequency[frequency > 0]).mean(), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(1 - share + share * scores["text_accuracy"], rel=1e-6)


def test_which_sentinel_is_next_costs_nothing_and_where_it_stands_does():
    objective = SpanCorruption(0.3)  # 3 spans of 3 tokens on average.
    train, valid = batches(objective, SPANS, 2000, 0), batches(objective, SPANS, 200, 1)
    scores = unigram_baseline(1e6 * FREQUENCIES, train, valid, SPANS)
    targets = valid[0]["targets"][0]
    is_text = (targets >= 3) & (targets < 30)
    form = scores["loss"] * len(targets) - scores["text_loss"] * is_text.sum()  # nats a row
    spans, noise = (targets >= 30).sum(), is_text.sum()
    # The ends of the spans are one of (noise - 1 over spans - 1) choices, which no model knows in advance. The upper
    # bound is one coin flip after each token.
    assert math.log(math.comb(noise - 1, spans - 1)) < form < noise * math.log(2)


def test_of_masks_it_knows_the_frequencies():
    vocabulary = Vocabulary(size=40, pad=0, unk=2, cls=1, sep=30, mask=31)
    train, valid = batches(MaskedLM(), vocabulary, 500, 0), batches(MaskedLM(), vocabulary, 50, 1)
    scores = unigram_baseline(1e6 * FREQUENCIES, train, valid, vocabulary)
    assert scores["loss"] == pytest.approx(scores["text_loss"], abs=1e-3)  # One smoothing count in addition to 2,250.


MASKS = Vocabulary(size=40, pad=0, unk=2, cls=1, sep=30, mask=31)


@pytest.mark.parametrize("fractions", [(0.8, 0.1), (0.0, 0.5), (0.0, 0.0)])
def test_where_the_input_is_visible_it_copies_as_often_as_that_was_right_in_training(fractions):
    objective = MaskedLM(0.3, *fractions)
    (train,), valid = batches(objective, MASKS, 500, 0), batches(objective, MASKS, 200, 1)
    valid = [with_replacements(valid[0], MASKS.mask)]
    scores = unigram_baseline(1e6 * FREQUENCIES, [train], valid, MASKS)
    seen = lambda batch: np.take_along_axis(batch["tokens"], batch["masked_positions"], 1)  # noqa: E731
    visible = (train["loss_weights"] > 0) & (seen(train) != MASKS.mask)
    copied = (seen(train) == train["targets"])[visible].mean()
    frequency, kinds = FREQUENCIES / FREQUENCIES.sum(), valid[0]["replacements"]
    expected = {
        "masked_loss": -np.log(frequency[valid[0]["targets"][kinds == 1]]),
        "random_loss": -np.log((1 - copied) * frequency[valid[0]["targets"][kinds == 2]]),
        "unchanged_loss": -np.log(copied + (1 - copied) * frequency[valid[0]["targets"][kinds == 3]]),
    }
    nats = np.concatenate(list(expected.values()))
    for name, values in expected.items():
        if len(values):
            # The tolerance covers one smoothing count in addition to 450 or more visible targets.
            assert scores[name] == pytest.approx(values.mean(), rel=0.01, abs=1e-3), name
    assert scores["loss"] == pytest.approx(nats.mean(), abs=0.01)
    frequent_at_masks = (valid[0]["targets"][kinds == 1] == FREQUENCIES.argmax()).sum()
    visible_and_copied = (kinds == 3).sum()  # All of them, because each token is rarer than a copy.
    assert scores["accuracy"] == pytest.approx((frequent_at_masks + visible_and_copied) / (kinds > 0).sum(), rel=1e-6)


def test_labels_of_pairs_have_their_frequencies_in_training():
    batch = batches(MaskedLM(), MASKS, 4, 0)[0]
    train, valid = (batch | {"pair_labels": np.array(labels, np.int32)} for labels in ([1, 1, 1, 0], [0, 1, 1, 1]))
    scores = unigram_baseline(1e6 * FREQUENCIES, [train], [valid], MASKS)
    label_1 = 3.5 / 5  # smoothed by 1/2 each
    assert scores["pair_loss"] == pytest.approx(-(3 * math.log(label_1) + math.log(1 - label_1)) / 4, rel=1e-12)
    assert scores["pair_accuracy"] == 0.75


@pytest.mark.parametrize("window", [7, 1 << 22])
def test_of_pairs_the_targets_are_counted(tmp_path, window, monkeypatch):
    monkeypatch.setattr("pretrainax.data.baseline._WINDOW", window)
    pairs = [("aab", "cd"), ("b", "ddd"), ("aaaaaaaaaaaaaaaaaaaa", "c")]
    with shards.ShardWriter(str(tmp_path), 0, TOKENIZER, "pairs") as writer:
        list(writer.write(pairs, collections.Counter()))
    shards.write_index(str(tmp_path), 1, TOKENIZER.vocabulary.size, "fingerprint", "pairs")
    counts = sum(target_counts(Corpus(str(tmp_path))))
    ids = np.concatenate(TOKENIZER.encode_batch([target for _, target in pairs]))
    expected = np.bincount(ids, minlength=TOKENIZER.vocabulary.size)
    expected[TOKENIZER.vocabulary.separator] = len(pairs)
    np.testing.assert_array_equal(counts, expected)


def test_of_text_the_counts_are_those_of_its_preparation(tmp_path):
    with shards.ShardWriter(str(tmp_path), 0, TOKENIZER) as writer:
        list(writer.write(["aab", "cd"], collections.Counter()))
    shards.write_index(str(tmp_path), 1, TOKENIZER.vocabulary.size, "fingerprint")
    (counts,) = target_counts(Corpus(str(tmp_path)))
    assert counts.sum() == 5 + 2  # Including the ends of the documents.
