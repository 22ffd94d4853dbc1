"""Tests every objective and every packing in a real run of two steps on a suitable family."""

import dataclasses
import json
import pathlib
import runpy

import numpy as np
import pytest

from pretrainax.config import Generator
from pretrainax.config.metric import STANDARD_ERRORS
from pretrainax.config.validation import validate
from pretrainax.data.objectives import (
    UL2R,
    BidirectionalLM,
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    MaskedLM,
    MixtureOfDenoisers,
    NextSentencePrediction,
    NGrams,
    ObjectiveMixture,
    PrefixLM,
    RateChange,
    ReplacedTokenDetection,
    SentenceOrderPrediction,
    SequenceToSequence,
    SequentialDenoising,
    SpanCorruption,
    Spans,
    TextToText,
    WholeWords,
)
from pretrainax.data.packing import BestFit, FirstFit, OneEach
from pretrainax.data.sources import JsonLines, SourceMixture, TextFiles
from pretrainax.runs.train import train
from pretrainax.tokenization import ByteBPE, Unigram
from pretrainax.training.loop_state import Counts
from tests.support.tiers import few

get_config = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "support" / "tiny.py"))["get_config"]

MASKED = {
    "static": MaskedLM(static=True),
    "whole words": MaskedLM(mask_unit=WholeWords()),
    "n-grams": MaskedLM(mask_unit=NGrams()),
    "spans": MaskedLM(mask_unit=Spans()),
    "a rate that changes": MaskedLM(rate=0.3, rate_change=RateChange(to=0.15)),
}
PAIRS = {"next sentence": NextSentencePrediction(), "sentence order": SentenceOrderPrediction()}
TO_TEXT = {
    "span corruption": SpanCorruption(),
    "a mixture of objectives": ObjectiveMixture((SpanCorruption(), SequentialDenoising()), (3.0, 1.0)),
    "denoisers": MixtureOfDenoisers(),
    "denoising": Denoising(),
}
CAUSAL = {
    "causal": CausalLM(),
    "causal, documents apart": CausalLM(mask_documents=True),
    "prefix": PrefixLM(),
    "fill in the middle": FillInTheMiddle(),
    "decoder only": DecoderOnly(SpanCorruption()),
    "UL2R": DecoderOnly(UL2R()),
}


@pytest.fixture(autouse=True)
def shows_samples(capsys):
    """Checks that no part of the end of a run fails, and that the model writes samples, for every objective."""
    yield
    said = capsys.readouterr().err
    assert "but without" not in said and "  · " in said


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as f:
        for _ in range(400):
            numbers = rng.integers(100, size=rng.integers(1, 8)).tolist()
            f.write(
                json.dumps({"text": " ".join(map(str, numbers)), "sorted": " ".join(map(str, sorted(numbers)))}) + "\n"
            )
    return str(path)


def run(experiment, directory, cache) -> list[dict]:
    experiment.data.cache_dir = str(cache)
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 2, 2, 1
    experiment.schedule.warmup_steps = 1
    validate(experiment)
    assert train(experiment, str(directory)) == 0
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["split"]) for line in lines] == [(1, "train"), (2, "train"), (2, "valid")]
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert STANDARD_ERRORS in lines[-1] and STANDARD_ERRORS not in lines[0]
    counted = ("step", "split", "loss_tokens", "replaced_fraction", STANDARD_ERRORS, *vars(Counts()))
    for name in lines[-1]:
        if name.partition("/")[0] not in counted and not name.endswith("spread"):  # diagnostics
            experiment.evaluate.select_by = name
            validate(experiment)  # All other metrics can select.
    return lines


def config(variant, objective, text):
    experiment = get_config(variant)
    experiment.data.source, experiment.objective = TextFiles(path=str(text)), objective
    return experiment


@pytest.mark.first(1)
@pytest.mark.parametrize("name", few(MASKED, ["spans", "a rate that changes"]))
def test_masked(name, text, cache, tmp_path):
    run(config("bert", MASKED[name], text), tmp_path, cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(PAIRS, ["next sentence"]))
def test_pairs_of_sentences(name, text, cache, tmp_path):
    experiment = config("bert", PAIRS[name], text)
    experiment.model.pair_head, experiment.data.sequence_length = True, 64
    for line in run(experiment, tmp_path, cache):
        assert 0 < line["pair_loss"] < 5


@pytest.mark.slow
def test_replaced_tokens(text, cache, tmp_path):
    experiment = config("bert", ReplacedTokenDetection(), text)
    model = experiment.model
    model.masked_lm_head, model.replaced_token_head = False, True
    model.generator = Generator(num_layers=2, d_model=16, d_ff=32, num_heads=2)
    # The precision is missing if no token was classified as replaced.
    assert {"replaced_accuracy", "replaced_recall"} <= run(experiment, tmp_path, cache)[-1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", few(TO_TEXT, ["span corruption"]))
def test_encoder_decoders(name, text, cache, tmp_path):
    experiment = config("t5", TO_TEXT[name], text)
    if isinstance(TO_TEXT[name], Denoising):
        experiment.tokenizer = ByteBPE(vocab_size=400, special_pieces="roberta")
    run(experiment, tmp_path, cache)


@pytest.mark.parametrize("name", few(CAUSAL, ["causal"]))
def test_decoders(name, text, cache, tmp_path):
    experiment = config("gpt", CAUSAL[name], text)
    if isinstance(CAUSAL[name], FillInTheMiddle | DecoderOnly):
        experiment.tokenizer = Unigram(vocab_size=400)
    run(experiment, tmp_path, cache)


@pytest.mark.slow
@pytest.mark.parametrize("mask_documents", few([False, True], [True]))
def test_both_directions(mask_documents, text, cache, tmp_path):
    lines = run(config("elmo", BidirectionalLM(mask_documents), text), tmp_path, cache)
    for line in lines:
        assert line["total_loss"] == pytest.approx(line["loss"] + line["backward_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing", few([FirstFit(), BestFit(), OneEach(), OneEach(buckets=(16,))], [FirstFit()]), ids=repr
)
@pytest.mark.parametrize("variant", few(["bert", "t5", "gpt"], ["t5"]))
def test_rows_of_single_documents(variant, packing, translations, cache, tmp_path):
    experiment = get_config(variant)
    experiment.data.source, experiment.data.packing = JsonLines(path=translations, valid_fraction=0.2), packing
    experiment.tokenizer = dataclasses.replace(experiment.tokenizer, vocab_size=260 if variant == "gpt" else 280)
    if variant == "bert":
        experiment.tokenizer.vocab_size = 40
    lines = run(experiment, tmp_path, cache)
    # Pieces that share a row, or whose row has the length of their bucket, leave less than half of the row empty.
    assert (lines[0]["padding_fraction"] > 0.5) == (packing == OneEach())


@pytest.mark.slow
def test_sequence_to_sequence(translations, cache, tmp_path):
    experiment = config("t5", SequenceToSequence(target_length=32), translations)
    experiment.data.source = JsonLines(path=translations, target_field="sorted", valid_fraction=0.2)
    experiment.tokenizer.vocab_size = 280
    train, _, valid = run(experiment, tmp_path, cache)
    assert 0 <= valid["sequence_accuracy"] <= valid["accuracy"] and "sequence_accuracy" not in train


@pytest.mark.slow
def test_supervised_tasks_beside_span_corruption(translations, text, cache, tmp_path):
    experiment = config("t5", TextToText(target_length=32), text)
    experiment.data.source = SourceMixture(
        sources=(
            TextFiles(path=str(text)),
            JsonLines(path=translations, target_field="sorted", prefix="sort: ", valid_fraction=0.2),
        ),
        weights=(0.5, 0.5),
    )
    assert "sequence_accuracy" not in run(experiment, tmp_path, cache)[-1]  # meaningless for spans


@pytest.mark.slow
def test_corpora_whose_weights_change(translations, text, cache, tmp_path):
    experiment = config("gpt", CausalLM(), text)
    sources = TextFiles(path=str(text)), JsonLines(path=translations, valid_fraction=0.2)
    experiment.data.source = SourceMixture(sources=sources, weights=(1.0, 0.0), stages=((0.5, (0.0, 1.0)),))
    run(experiment, tmp_path, cache)
