"""Compares the soft-target loss of each head with the KL divergence of its softened predictions in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import Embed
from pretrainax.distill import soft_targets
from pretrainax.models.heads import HEADS, chain
from pretrainax.models.heads.classify import ClassifierOutput
from pretrainax.models.heads.embed import EmbedOutput
from pretrainax.models.heads.extract import ExtractorOutput
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.tag import TaggerOutput
from tests.distill.by_hand import RNG, drawn, kl, softmax

B, T = 3, 5
LAST_ROW_EMPTY = {"segment_ids": jnp.array([[1] * T, [1, 1, 1, 0, 0], [0] * T])}


@pytest.mark.parametrize("chunk", (1000, 6))
def test_soft_targets_of_tokens_however_many_are_there_at_a_time(chunk):
    def said(width):
        return LanguageModelOutput(jnp.asarray(drawn(B, T, width)), jnp.asarray(drawn(width, 7)), jnp.asarray(drawn(7)))

    ours, theirs, weights = said(4), said(6), RNG.randint(0, 2, (B, T)).astype(np.float32)
    student, teacher = (softmax(np.asarray(x.logits()) / 2) for x in (ours, theirs))
    found = soft_targets.token_loss(ours, theirs, {"loss_weights": jnp.asarray(weights)}, 2.0, chunk)
    np.testing.assert_allclose(found, (4 * kl(teacher, student) * weights).sum(), rtol=1e-4)


def test_soft_targets_of_labels_are_of_rows_with_text():
    ours, theirs = drawn(B, 4), drawn(B, 4)
    batch = {"segment_ids": jnp.array([[1], [1], [0]])}

    def found(kind):
        return soft_targets.label_loss(ClassifierOutput(ours, kind), ClassifierOutput(theirs, kind), batch, 3.0, 1)

    one = 9 * kl(softmax(theirs / 3), softmax(ours / 3))
    for kind in ("single", "choice"):
        np.testing.assert_allclose(found(kind), one[:2].sum(), rtol=1e-4)
    np.testing.assert_allclose(soft_targets.pair_loss(ours, theirs, batch, 3.0, 1), one[:2].sum(), rtol=1e-4)
    p, q = (1 / (1 + np.exp(-x / 3)) for x in (theirs, ours))
    several = 9 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean(-1)
    np.testing.assert_allclose(found("multi"), several[:2].sum(), rtol=1e-3)
    np.testing.assert_allclose(found("regression"), ((ours - theirs) ** 2).mean(-1)[:2].sum(), rtol=1e-5)


def test_soft_targets_of_words_are_of_each_word_by_itself():
    ours, theirs = (TaggerOutput(jnp.asarray(drawn(B, T, 4)), None, None) for _ in range(2))
    words = kl(softmax(np.asarray(theirs.logits) / 2), softmax(np.asarray(ours.logits) / 2)) * 4
    found = soft_targets.tag_loss(ours, theirs, LAST_ROW_EMPTY, 2.0, 1)
    np.testing.assert_allclose(found, words[0].sum() + words[1, :3].sum(), rtol=1e-4)


@pytest.mark.slow
def test_soft_targets_of_a_chain_are_marginals_of_its_softened_tags():
    def said():
        logits, between, start, end = drawn(B, T, 2), drawn(2, 2), drawn(2), drawn(2)
        return TaggerOutput(jnp.asarray(logits), chain.Transitions(*map(jnp.asarray, (between, start, end))), None)

    def marginals(said, row, words):  # by a sum over all tag sequences
        logits, (between, start, end) = np.asarray(said.logits), map(np.asarray, said.transitions)
        chances = np.zeros((words, 2))
        for tags in itertools.product(range(2), repeat=words):
            score = start[tags[0]] + end[tags[-1]] + sum(between[pair] for pair in itertools.pairwise(tags))
            chance = np.exp((score + sum(logits[row, t, tag] for t, tag in enumerate(tags))) / 2)
            chances[np.arange(words), tags] += chance
        return chances / chances.sum(-1, keepdims=True)

    ours, theirs = said(), said()
    wanted = [4 * kl(marginals(theirs, row, n), marginals(ours, row, n)).sum() for row, n in ((0, T), (1, 3))]
    found = soft_targets.tag_loss(ours, theirs, LAST_ROW_EMPTY, 2.0, 1)
    np.testing.assert_allclose(found, sum(wanted), rtol=1e-4)


def test_soft_targets_of_spans_are_the_mean_of_begin_and_end():
    ours, theirs = (ExtractorOutput(jnp.asarray(drawn(B, T, 2))) for _ in range(2))
    ends = [[softmax(np.asarray(said.logits)[..., i] / 2) for said in (theirs, ours)] for i in range(2)]
    wanted = 4 * np.mean([kl(*of_end) for of_end in ends], axis=0)
    found = soft_targets.span_loss(ours, theirs, LAST_ROW_EMPTY, 2.0, 1)
    np.testing.assert_allclose(found, wanted[:2].sum(), rtol=1e-4)


def test_soft_targets_of_passages_between_vectors_of_other_widths():
    batch = {"texts": jnp.array([3, 3, 0])}
    ours, theirs = drawn(B, 3, 4), drawn(B, 3, 6)

    def chances(vectors):  # two queries, each with the passages of both rows
        scores = np.einsum("bd,cpd->bcp", vectors[:2, 0], vectors[:2, 1:]) / 0.5
        return softmax(scores.reshape(2, -1) / 2)

    head = Embed(num_texts=3, normalize=False, temperature=0.5)
    said, told = (EmbedOutput(jnp.asarray(x), head) for x in (ours, theirs))
    found = soft_targets.retrieval_loss(said, told, batch, 2.0, 1)
    np.testing.assert_allclose(found, 4 * kl(chances(theirs), chances(ours)).sum(), rtol=1e-4)


def test_each_head_of_a_task_has_soft_targets():
    assert HEADS.keys() - soft_targets.SOFT_TARGETS.keys() == {
        "replaced",  # These heads are for the pretraining of ELECTRA, ELMo and DeepSeek-V3.
        "backward_lm",
        "multi_token",
    }
