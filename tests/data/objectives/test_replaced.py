"""Tests ReplacedTokenDetection: masked LM batches for the generator, and the labels for the discriminator."""

import json
import runpy

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import to_json
from pretrainax.data.collate import collate
from pretrainax.data.objectives import MaskedLM, ObjectiveInput, ReplacedTokenDetection
from pretrainax.models import electra
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.tokenization.base import Vocabulary
from tests.data.conftest import TEXTS

PAD, UNK, CLS, SEP, MASK, THE, CHEF, COOKED, ATE, MEAL = range(10)
VOCABULARY = Vocabulary(size=1000, pad=PAD, unk=UNK, cls=CLS, sep=SEP, mask=MASK)
SENTENCE = np.array([THE, CHEF, COOKED, THE, MEAL], np.int32)


def example(objective, tokens, seed=0, vocabulary=VOCABULARY):
    tokens = np.asarray(tokens, np.int32)
    return objective.example(
        ObjectiveInput(tokens, np.ones(len(tokens), np.int32)), np.random.default_rng(seed), vocabulary
    )


def chef():
    """Returns the example of figure 2, which masks the first and the third word."""
    objective = ReplacedTokenDetection(rate=0.4)
    found = (example(objective, SENTENCE, seed) for seed in range(1000))
    return next(row for row in found if np.flatnonzero(row["tokens"] == MASK).tolist() == [1, 3])


def test_the_chef_cooked_the_meal():
    row = chef()
    assert row["tokens"].tolist() == [CLS, MASK, CHEF, MASK, THE, MEAL, SEP]
    assert row["masked_positions"].tolist() == [1, 3]
    assert row["targets"].tolist() == [THE, COOKED]


def test_the_chef_ate_the_meal():
    """Checks Clark et al. 2020, figure 2: the generator samples "the" and "ate", and only "ate" is a replacement."""
    row = chef()
    lengths = ReplacedTokenDetection(rate=0.4).measure(len(SENTENCE))
    batch = {name: jax.numpy.asarray(x) for name, x in collate([[row]], lengths, PAD).items()}
    logits = np.full((1, lengths.targets, VOCABULARY.size), -1e9, np.float32)
    logits[0, 0, THE] = logits[0, 1, ATE] = 0.0
    generated = LanguageModelOutput(features=jax.numpy.asarray(logits), unembedding=jax.numpy.eye(VOCABULARY.size))
    tokens, replaced = electra.sample_replacements(generated, batch)
    assert tokens[0].tolist() == [CLS, THE, CHEF, ATE, THE, MEAL, SEP]
    assert replaced[0].tolist() == [False, False, False, True, False, False, False]


def test_published_fractions():
    """Checks on 1,000,000 tokens: 85 % masked, 15 % unchanged, none random (the released code)."""
    objective = ReplacedTokenDetection()
    windows = np.random.default_rng(0).integers(5, 1000, (1961, 510), dtype=np.int32)
    found = [example(objective, window, seed) for seed, window in enumerate(windows)]
    figures = {s.name: s for s in objective.statistics(found, VOCABULARY)}
    assert (figures["mask rate"].expected, figures["masked"].expected, figures["random"].expected) == (0.15, 0.85, 0.0)
    assert figures["random"].measured == 0
    assert figures["masked"].tolerance < 0.006  # 5 standard deviations of 150,000 draws, plus 1 in 1,000 by chance.
    assert not [s for s in figures.values() if s.is_off]


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.integers(0, 2**32))
def test_the_text_can_be_restored(tokens, seed):
    objective = ReplacedTokenDetection()
    np.testing.assert_array_equal(objective.restore(example(objective, tokens, seed), VOCABULARY), tokens)


@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE"])
def test_texts_of_real_tokenizers_can_be_restored(kind, tokenizers_of_all_kinds):
    tokenizer, objective = tokenizers_of_all_kinds[kind], ReplacedTokenDetection()
    for line in TEXTS:
        ids = tokenizer.encode(line)
        row = example(objective.bind(tokenizer), ids, vocabulary=tokenizer.vocabulary)
        np.testing.assert_array_equal(objective.restore(row, tokenizer.vocabulary), ids)


def load(name, objective):
    experiment = runpy.run_path(f"configs/{name}.py")["get_config"]()
    experiment.objective = objective
    return experiment


@pytest.mark.parametrize(
    "name, objective, problem",
    [
        (
            "electra_small",
            MaskedLM(),
            "config.objective is MaskedLM, config.model has a replaced_token_head: set config.objective to "
            "ReplacedTokenDetection",
        ),
        (
            "roberta_base",
            ReplacedTokenDetection(),
            "config.objective is ReplacedTokenDetection, config.model has no replaced_token_head: set config.objective "
            "to MaskedLM",
        ),
    ],
)
def test_objective_and_model_go_together(name, objective, problem):
    assert list(objective.problems(load(name, objective))) == [problem]


@pytest.mark.parametrize("name", ["electra_small", "electra_base", "deberta_v3_base"])
def test_the_configs_have_it(name):
    objective = runpy.run_path(f"configs/{name}.py")["get_config"]().objective
    assert json.loads(json.dumps(to_json(objective)))["type"] == "ReplacedTokenDetection"
    assert objective.random_fraction == 0
