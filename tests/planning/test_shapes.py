"""Tests that the planned batch has the shapes of the batch that a run reads and `inspect` shows."""

import json

import jax
import numpy as np
import pytest

from pretrainax.config.config_file import read_config_file
from pretrainax.data.batch import check_batch
from pretrainax.data.inspection import terminal
from pretrainax.data.inspection.row_view import TokenTexts, row_views
from pretrainax.data.objectives import MaskedLM, ReplacedTokenDetection, SequenceToSequence, TextToText, WholeWords
from pretrainax.data.packing import OneEach
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines, SourceMixture, TextFiles
from pretrainax.planning.shapes import batch_shapes
from pretrainax.tasks import Instructions
from pretrainax.tokenization import ByteBPE, Unigram
from pretrainax.tokenization import Words as OfWords
from pretrainax.training.train_step import global_shapes
from tests import test_configs
from tests.training import test_pretraining

translations = test_pretraining.translations  # the fixture
OBJECTIVES = (
    {"replaced tokens": ReplacedTokenDetection()}
    | test_pretraining.MASKED
    | test_pretraining.PAIRS
    | test_pretraining.TO_TEXT
    | test_pretraining.CAUSAL
)


def real_shapes(experiment, cache) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the first batch of the corpus, after checking it and rendering one of its rows."""
    experiment.data.cache_dir = str(cache)
    prepared = prepare(experiment)
    batches = batches_of(experiment, prepared, "train")
    batch = batches[0]
    check_batch(batch, experiment.model, batches.lengths, experiment.train.global_batch_size)
    (view,) = row_views(batches, TokenTexts(prepared.tokenizer), 1)
    assert "row 0 ·" in terminal.render(view, False, 100)
    return global_shapes(batch, experiment.train.global_batch_size)


@pytest.mark.first(10)
@pytest.mark.parametrize("name", test_configs.VARIANTS)
def test_the_batch_of_a_config_is_the_real_one(name, text, cache):
    experiment = test_configs.load(name, test_configs.VARIANTS[name][-1])
    test_configs.shrink(experiment, str(text), str(cache))
    experiment.objective.complete(experiment)
    expected = batch_shapes(experiment)
    # The ids do not encode white space, so the real batch has no target_bytes. The planner cannot know this without
    # text.
    if isinstance(experiment.tokenizer, OfWords):
        del expected["target_bytes"]
    assert expected == real_shapes(experiment, cache)


def experiment_of(objective, text):
    """Returns a small experiment with an objective, and a tokenizer with the required special tokens."""
    family = {"encoder": "bert", "encoder_decoder": "t5", "decoder": "gpt"}[objective.families[0]]
    experiment = test_pretraining.config(family, objective, text)
    if family != "bert":  # All these objectives need sentinels, and one needs <s>.
        experiment.tokenizer = Unigram(vocab_size=400)
    if objective is test_pretraining.TO_TEXT["denoising"]:
        experiment.tokenizer = ByteBPE(vocab_size=400, special_pieces="roberta")
    if isinstance(objective, tuple(map(type, test_pretraining.PAIRS.values()))):
        experiment.data.sequence_length = 64
    return experiment


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_batch_of_an_objective_is_the_real_one(objective, text, cache):
    experiment = experiment_of(objective, text)
    assert batch_shapes(experiment) == real_shapes(experiment, cache)


def test_the_batch_of_pairs_is_the_real_one(translations, cache):
    experiment = test_pretraining.config("t5", SequenceToSequence(target_length=24), "absent")
    experiment.data.source = JsonLines(path=translations, target_field="sorted", valid_fraction=0.2)
    experiment.tokenizer.vocab_size = 280
    assert batch_shapes(experiment) == real_shapes(experiment, cache)


def test_a_mixture_of_texts_and_pairs_has_room_for_both(translations, text, cache):
    experiment = test_pretraining.config("t5", TextToText(target_length=32), text)
    pairs = JsonLines(path=translations, target_field="sorted", prefix="sort: ", valid_fraction=0.2)
    experiment.data.source = SourceMixture(sources=(TextFiles(path=str(text)), pairs), weights=(0.5, 0.5))
    assert batch_shapes(experiment) == real_shapes(experiment, cache)


def test_the_batch_of_conversations_needs_no_tokenizer():
    experiment = test_pretraining.config("gpt", Instructions(), "absent")
    assert batch_shapes(experiment)["loss_weights"].shape == batch_shapes(experiment)["tokens"].shape


def test_rows_of_buckets_are_the_longest():
    experiment = test_pretraining.config("gpt", test_pretraining.CAUSAL["causal"], "absent")
    experiment.data.packing = OneEach(buckets=(8, 16))
    assert batch_shapes(experiment)["tokens"].shape == (8, 32)


def test_neither_corpus_nor_tokenizer_is_read(tmp_path):
    experiment = test_pretraining.config("bert", MaskedLM(mask_unit=WholeWords()), tmp_path / "absent")
    experiment.tokenizer.path = str(tmp_path / "absent")
    assert batch_shapes(experiment)["masked_positions"].shape == (8, 5)


def test_words_of_another_script_are_read(tmp_path):
    """Tests a list of words that a tokenizer of another language does not know."""
    path = tmp_path / "similar.json"
    path.write_text(json.dumps({"\u7f8e\u4e3d": ["\u6f02\u4eae"]}))
    objective = MaskedLM(mask_unit=WholeWords(), similar_words=str(path))
    assert batch_shapes(test_pretraining.config("bert", objective, "absent"))["tokens"].dtype == np.int32


def test_conversations_need_no_tokenizer():
    """Tests a plan without tokenizer.json. In a run, the chat template reads this file; byte tokenizers lack it."""
    experiment = read_config_file("finetune:alpaca")
    shapes, rows = batch_shapes(experiment), experiment.train.global_batch_size
    expected = (rows, experiment.data.sequence_length)
    assert {shapes[name].shape for name in ("tokens", "targets", "loss_weights")} == {expected}
