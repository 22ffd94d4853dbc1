"""Tests PrefixLM and DecoderOnly: the bidirectional prefix, the targets, and `restore`."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, LearnedPositions, ModelConfig, UserError, from_json, to_json
from pretrainax.data.batch import check_batch
from pretrainax.data.collate import collate
from pretrainax.data.objectives import (
    UL2R,
    CausalLM,
    DecoderOnly,
    Denoising,
    Lengths,
    MixtureOfDenoisers,
    ObjectiveInput,
    PrefixLM,
    SequenceToSequence,
    SequentialDenoising,
    SpanCorruption,
    TextToText,
    spans,
)
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from pretrainax.tokenization import ByteBPE
from pretrainax.tokenization.base import Vocabulary
from tests.data.conftest import CHINESE, ENGLISH, TEXTS
from tests.support import tiny

EOS = 1
VOCABULARY = Vocabulary(size=1000, bos=EOS, eos=EOS, mask=0, sentinels=tuple(range(900, 1000)))
WORDS = "</s> <X> <Y> <Z> Thank you for inviting me to your party last week".split()
THANK_YOU = "Thank you for inviting me to your party last week"
INNER = [
    SpanCorruption(),
    SpanCorruption(0.5, 3.0),
    SpanCorruption(0.15, 32.0),
    SequentialDenoising(0.5),
    Denoising(permutation_rate=0.0),
]
of_each_inner = pytest.mark.parametrize("inner", INNER, ids=str)
ORDINARY = st.lists(st.integers(2, 899), min_size=2, max_size=80)


def text_of(tokens, segment_ids=None):
    tokens = np.asarray(tokens, np.int32)
    return ObjectiveInput(
        tokens, np.ones(len(tokens), np.int32) if segment_ids is None else np.array(segment_ids, np.int32)
    )


def example(objective, tokens, seed=0, segment_ids=None, vocabulary=VOCABULARY):
    return objective.example(text_of(tokens, segment_ids), np.random.default_rng(seed), vocabulary)


def in_words(row):
    names = {"tokens", "targets"}
    return {name: " ".join(WORDS[i] if name in names else f"{i:g}" for i in array) for name, array in row.items()}


def ids(words):
    return np.array([WORDS.index(word) for word in words.split()], np.int32)


def windows(count, length):
    return np.random.default_rng(7).integers(2, 900, (count, length), dtype=np.int32)


def off(objective, rows):
    return [s for s in objective.statistics(rows, VOCABULARY) if s.is_off]


def experiment(objective, length=64, family="decoder", source=None):
    return Experiment(ModelConfig(family=family), None, DataConfig(source, length), objective, None, None)


# --- PrefixLM ------------------------------------------------------------------------------------------------------


def test_the_prefix_of_the_papers_table():
    """Reproduces Raffel et al. 2020, table 3: Thank you for inviting -> me to your party last week."""
    rows = (in_words(example(PrefixLM(), ids(THANK_YOU), seed)) for seed in range(200))
    row = next(row for row in rows if row["prefix_mask"].count("1") == 4)
    assert row == {
        "tokens": "Thank you for inviting me to your party last",
        "targets": "you for inviting me to your party last week",
        "prefix_mask": "1 1 1 1 0 0 0 0 0",
        "loss_weights": "0 0 0 1 1 1 1 1 1",
        "segment_ids": "1 1 1 1 1 1 1 1 1",
        "positions": "0 1 2 3 4 5 6 7 8",
    }


def test_every_prefix_is_drawn_alike():
    prefixes = [int(example(PrefixLM(), range(10, 20), seed)["prefix_mask"].sum()) for seed in range(9000)]
    counts = np.bincount(prefixes)
    assert counts[0] == 0 and len(counts) == 10  # Of 10 tokens, 1 to 9 are the prefix.
    assert np.abs(counts[1:] - 1000).max() < 5 * np.sqrt(9000 * 1 / 9 * 8 / 9)  # 5 standard deviations


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 2**32), mask_documents=st.booleans()
)
def test_what_is_seen_from_both_sides_is_not_predicted(sizes, seed, mask_documents):
    objective, segment_ids = PrefixLM(mask_documents), np.repeat(np.arange(1, len(sizes) + 1), sizes)
    tokens = np.arange(10, 10 + sum(sizes))
    assume(len(tokens) > 1)
    row = example(objective, tokens, seed, segment_ids)
    causal = example(CausalLM(mask_documents), tokens, seed, segment_ids)
    np.testing.assert_array_equal(objective.restore(row, VOCABULARY), tokens)
    for segment in set(row["segment_ids"].tolist()):
        inside = row["segment_ids"] == segment
        prefix, weights = int(row["prefix_mask"][inside].sum()), row["loss_weights"][inside]
        assert prefix >= 1 and row["prefix_mask"][inside][:prefix].all()
        assert not weights[: prefix - 1].any()  # Their targets are in the prefix.
        np.testing.assert_array_equal(weights[prefix - 1 :], causal["loss_weights"][inside][prefix - 1 :])
        assert weights.any() == causal["loss_weights"][inside].any()


@pytest.mark.parametrize("mask_documents", [False, True])
def test_half_of_a_million_tokens_is_behind_the_prefixes(mask_documents):
    objective, segment_ids = PrefixLM(mask_documents), np.repeat(np.arange(1, 6), 200)
    rows = [example(objective, row, seed, segment_ids) for seed, row in enumerate(windows(1000, 1000))]
    found = {s.name: s for s in objective.statistics(rows, VOCABULARY)}["text behind the prefix"]
    assert found.expected == pytest.approx(0.5, abs=0.003)  # (n + 1) / 2n for n = 199 or 999 tokens
    # 5 standard deviations; a uniform number has a standard deviation of 0.29.
    assert found.tolerance < 5 * 0.29 / np.sqrt(1000) + 1e-5 and not found.is_off
    assert off(objective, [row | {"loss_weights": np.ones(999, np.float32)} for row in rows])


@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE", "Unigram", "Characters"])
def test_the_texts_of_every_tokenizer_can_be_restored(kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]
    for tokens in tokenizer.encode_batch(TEXTS):
        row = example(PrefixLM(), tokens, vocabulary=tokenizer.vocabulary)
        np.testing.assert_array_equal(PrefixLM().restore(row, tokenizer.vocabulary), tokens)


# --- DecoderOnly ---------------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring(monkeypatch):
    holes = [word in ("for", "inviting", "last") for word in THANK_YOU.split()]
    monkeypatch.setattr(spans, "noise_mask", lambda *_: np.array(holes))
    vocabulary = Vocabulary(size=len(WORDS), eos=0, sentinels=(1, 2, 3))
    row = example(DecoderOnly(), ids(THANK_YOU), vocabulary=vocabulary)
    assert in_words(row) == {
        "tokens": "Thank you <X> me to your party <Y> week </s> <X> for inviting <Y> last <Z>",
        "targets": "you <X> me to your party <Y> week </s> <X> for inviting <Y> last <Z> </s>",
        "prefix_mask": "1 1 1 1 1 1 1 1 1 1 0 0 0 0 0 0",
        "loss_weights": "0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1",
        "segment_ids": " ".join("1" * 16),
        "positions": " ".join(map(str, range(16))),
    }


@of_each_inner
@given(tokens=ORDINARY, seed=st.integers(0, 2**32))
def test_the_text_can_be_restored_and_is_no_longer_than_announced(inner, tokens, seed):
    objective = DecoderOnly(inner)
    row = example(objective, tokens, seed)
    np.testing.assert_array_equal(objective.restore(row, VOCABULARY), tokens)
    announced = objective.measure(len(tokens))
    assert len(row["tokens"]) <= announced.inputs == announced.targets <= objective.measure(len(tokens) + 1).inputs


@of_each_inner
@pytest.mark.parametrize("length", [16, 255, 1024])
def test_inputs_and_targets_fill_the_row_together(inner, length):
    objective = DecoderOnly(inner)
    lengths = objective.lengths(length)
    assert lengths[1:] == (length, length)
    assert length - 4 < objective.measure(lengths.raw).inputs <= length < objective.measure(lengths.raw + 1).inputs


@pytest.mark.parametrize("inner", INNER[:4], ids=str)
def test_statistics_are_those_of_the_inner_objective(inner):
    objective = DecoderOnly(inner)
    rows = [example(objective, row, seed) for seed, row in enumerate(windows(300, 500))]
    found = {s.name: s for s in objective.statistics(rows, VOCABULARY)}
    assert found["noise density"].expected == inner.noise_density and not any(s.is_off for s in found.values())
    wrong = dataclasses.replace(inner, noise_density=0.35)
    assert off(DecoderOnly(wrong), rows)


@pytest.mark.parametrize("mixture", [UL2R(), MixtureOfDenoisers()], ids=lambda m: type(m).__name__)
def test_a_mixture_is_one_of_decoders(mixture):
    texts = [ENGLISH, CHINESE] * 4
    tokenizer = ByteBPE(vocab_size=400, num_sentinels=200).build(iter(texts))
    objective = DecoderOnly(mixture).bind(tokenizer)
    objective.check_vocabulary(tokenizer.vocabulary, 256)
    parts = objective.components()
    assert [weight for weight, _ in parts] == [weight for weight, _ in mixture.components()]
    tokens = np.concatenate(tokenizer.encode_batch(TEXTS))
    for _, part in parts:
        assert isinstance(part, DecoderOnly) and part.families == ("decoder",)
        room = part.lengths(256)
        row = example(part, tokens[: room.raw], vocabulary=tokenizer.vocabulary)
        assert len(row["tokens"]) <= 256
        np.testing.assert_array_equal(part.restore(row, tokenizer.vocabulary), tokens[: room.raw])
        assert tokenizer.decode(row["tokens"]).startswith(("[S2S]", "[NLU]", "[NLG]"))
    assert objective.lengths(256).raw == max(part.lengths(256).raw for _, part in parts)


def pair(source, target):
    tokens = np.array([*source, EOS, *target, EOS], np.int32)
    return ObjectiveInput(tokens, np.ones(len(tokens), np.int32), np.array([len(source) + 1, len(tokens)]))


def test_pairs_share_a_row_and_none_sees_another():
    objective, rng = DecoderOnly(SequenceToSequence()), np.random.default_rng(0)
    texts = [pair([3, 4], [5]), pair([6], [7, 8])]
    assert objective.unit == "pairs" and objective.packs
    np.testing.assert_array_equal(objective.measure_pairs(np.array([[3, 2], [2, 3]])), [[4, 4], [4, 4]])
    rows = [objective.example(text, rng, VOCABULARY) for text in texts]
    filled = collate([rows], Lengths(0, 10, 10), pad=0)
    assert {name: array[0].tolist() for name, array in filled.items()} == {
        "tokens": [3, 4, EOS, 5, 6, EOS, 7, 8, 0, 0],
        "targets": [4, EOS, 5, EOS, EOS, 7, 8, EOS, 0, 0],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 2, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 3, 0, 0],
        "prefix_mask": [1, 1, 1, 0, 1, 1, 0, 0, 0, 0],
        "loss_weights": [0, 0, 1, 1, 0, 1, 1, 1, 0, 0],
    }
    for text, row in zip(texts, rows, strict=True):
        np.testing.assert_array_equal(objective.restore(row, VOCABULARY), text.tokens)


@pytest.mark.parametrize("target_length, room", [(None, (33, 32)), (10, (55, 10))])
def test_a_pair_of_the_longest_parts_fits_a_row(target_length, room):
    objective = DecoderOnly(SequenceToSequence(target_length))
    assert objective.max_pair_lengths(objective.lengths(64)) == room
    assert objective.measure_pairs(np.array([room])).max() == 64


def test_text_to_text_is_of_pairs_or_of_texts():
    objective = DecoderOnly(TextToText())
    ((_, supervised),) = objective.components(pairs=True)
    ((_, unsupervised),) = objective.components(pairs=False)
    assert (supervised.unit, unsupervised.unit) == ("pairs", "tokens")


# --- the batch -----------------------------------------------------------------------------------------------------

DECODER = ModelConfig(family="decoder", vocab_size=1000, position=LearnedPositions(32))


def batch_of(objective, length, **other):
    rows = [[example(objective, range(10, 10 + objective.lengths(length).raw), seed)] for seed in range(2)]
    return collate(rows, Lengths(0, length, length), 0) | other


def test_a_batch_with_a_prefix_is_what_a_decoder_takes():
    for objective in (PrefixLM(), DecoderOnly()):
        check_batch(batch_of(objective, 32), DECODER, Lengths(0, 32, 32), 2)


@pytest.mark.parametrize(
    "other, line",
    [
        ({"prefix_mask": np.ones((2, 32), bool)}, r"batch\['prefix_mask'\] is bool \[2, 32\], not int32 \[2, 32\]"),
        ({"prefix_mask": -np.ones((2, 32), np.int32)}, r"batch\['prefix_mask'\] has -1; it must not be negative"),
        ({"positions": np.full((2, 32), 32, np.int32)}, "has 32; config.model.position.max_length 32 allows 0 to 31"),
    ],
)
def test_what_a_decoder_does_not_take_is_a_line(other, line):
    with pytest.raises(UserError, match=line):
        check_batch(batch_of(PrefixLM(), 32, **other), DECODER, Lengths(0, 32, 32), 2)


def test_token_types_that_the_model_has_not_are_a_line():
    encoder = ModelConfig(family="encoder", vocab_size=1000, position=LearnedPositions(32), num_token_types=2)
    batch = batch_of(PrefixLM(), 32, token_types=np.full((2, 32), 2, np.int32))
    with pytest.raises(UserError, match=r"batch\['token_types'\] has 2; config.model.num_token_types 2 allows 0 to 1"):
        check_batch(batch, encoder, Lengths(0, 32, 32), 2)
    # A model without token types does not look them up.
    check_batch(batch, dataclasses.replace(encoder, num_token_types=0), Lengths(0, 32, 32), 2)


# --- both ----------------------------------------------------------------------------------------------------------

BOTH = [PrefixLM(), PrefixLM(True), DecoderOnly()]
of_both = pytest.mark.parametrize("objective", BOTH, ids=str)


@of_both
def test_dtypes(objective):
    dtypes = {name: str(array.dtype) for name, array in example(objective, range(10, 30)).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


@of_both
def test_the_same_seed_gives_the_same_example_and_another_one_another(objective):
    one, same, other = (example(objective, range(10, 90), seed) for seed in (0, 0, 1))
    assert all((one[name] == same[name]).all() for name in one)
    assert (one["prefix_mask"] != other["prefix_mask"]).any() or (one["tokens"] != other["tokens"]).any()


@of_both
def test_the_config_can_be_saved(objective):
    assert from_json(type(objective), json.loads(json.dumps(to_json(objective)))) == objective


@of_both
def test_another_family_is_refused(objective):
    (problem,) = objective.problems(experiment(objective, family="encoder_decoder"))
    assert f"{type(objective).__name__}, which trains config.model.family decoder" in problem


@pytest.mark.parametrize(
    "objective, length, line",
    [
        (
            DecoderOnly(CausalLM()),
            64,
            "objective.objective is CausalLM, it must support encoder_decoder",
        ),
        (DecoderOnly(SpanCorruption(1.5)), 64, "objective.objective.noise_density is 1.5, it must be in (0, 1)"),
        (DecoderOnly(), 4, "data.sequence_length is 4, DecoderOnly needs at least 5"),
        (DecoderOnly(UL2R()), 10, "data.sequence_length is 10, DecoderOnly needs at least 11"),
        (PrefixLM(), 600, "config.model.position.max_length is 512"),
    ],
)
def test_what_does_not_fit_is_a_line(objective, length, line):
    (problem,) = objective.problems(experiment(objective, length))
    assert line in problem


def test_the_shortest_rows_are_made():
    for objective in (DecoderOnly(), DecoderOnly(SequentialDenoising()), PrefixLM()):
        raw = objective.lengths(objective.shortest).raw
        assert example(objective, range(10, 10 + raw))["loss_weights"].any()


def test_a_source_of_texts_gives_no_pairs():
    objective = DecoderOnly(SequenceToSequence())
    (problem,) = objective.problems(experiment(objective, source=TextFiles(path=".")))
    assert problem.startswith("config.objective.objective is SequenceToSequence, which needs pairs")


def test_too_few_sentinels_are_an_error_that_names_the_length_of_the_config():
    vocabulary = dataclasses.replace(VOCABULARY, sentinels=(999,))
    with pytest.raises(
        UserError,
        match="1 sentinels, rows of config.data.sequence_length 1024 have 46 spans: set config.tokenizer.num_sent",
    ):
        DecoderOnly().check_vocabulary(vocabulary, 1024)
    DecoderOnly().check_vocabulary(VOCABULARY, 1024)
    DecoderOnly(SequenceToSequence()).check_vocabulary(VOCABULARY, 64)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [PrefixLM(), DecoderOnly()], ids=str)
def test_a_decoder_trains_for_two_steps(objective, text, cache, tmp_path):
    experiment = tiny.get_config("gpt")
    experiment.tokenizer = ByteBPE(vocab_size=400, num_sentinels=20)
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.objective, experiment.schedule.warmup_steps = objective, 1
    experiment.mesh.data, experiment.mesh.fsdp, experiment.mesh.tensor = 2, 2, 2
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 2, 2, 1
    assert train(experiment, str(tmp_path)) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 2 and all(abs(loss - np.log(512)) < 0.5 for loss in losses)  # 512 ids, nearly uniform
