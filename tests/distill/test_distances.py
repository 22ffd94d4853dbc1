"""Each distance of a student from its teacher is that of its paper, in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.distill import distances, soft_targets
from pretrainax.layers.attention_mask import FORBIDDEN
from pretrainax.models.heads.classify import ClassifierOutput
from pretrainax.models.heads.language_model import LanguageModelOutput

RNG = np.random.RandomState(0)
B, T, D = 3, 5, 12


def drawn(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def kl(teacher, student):
    """Of probabilities, over the last axis."""
    return (teacher * np.log(teacher / student)).sum(-1)


def test_hidden_states_by_mean_squares_and_by_cosine(variant):
    a, b = drawn(B, T, D), drawn(B, T, D)
    np.testing.assert_allclose(variant(distances.squares)(a, b), ((a - b) ** 2).mean(-1), rtol=1e-5)
    cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(variant(distances.cosine)(a, b), 1 - cosines, rtol=1e-4)


def test_logits_of_attention_where_a_query_sees_a_key():
    a, b, seen = drawn(B, 2, 2, T, T), drawn(B, 2, 2, T, T), np.tril(np.ones((T, T), bool))
    masked = [np.where(seen, x, np.float32(FORBIDDEN)) for x in (a, b)]
    wanted = [((a - b)[..., t, : t + 1] ** 2).mean(-1).mean((1, 2)) for t in range(T)]
    np.testing.assert_allclose(distances.attention_squares(*masked), np.stack(wanted, -1), rtol=1e-5)
    # Keys that one of the two does not see are left out.
    assert np.isfinite(distances.attention_squares(masked[0], b)).all()


def test_of_more_layers_each_of_the_students_has_the_teachers_of_the_same_share():
    found = distances.over_layers(distances.squares, np.zeros((3, 1, 1, 1)), np.arange(6.0).reshape(6, 1, 1, 1))
    np.testing.assert_allclose(found, [[1**2 + 3**2 + 5**2]])  # layers 2, 4 and 6 of 6


@pytest.mark.parametrize("heads", (1, 4))
def test_relations_of_any_number_of_heads_between_other_widths_and_heads(heads):
    ours, theirs, seen = drawn(B, T, 3, 8), drawn(B, T, 2, 6), np.tril(np.ones((B, T, T), bool))

    def relation(x):
        x = x.reshape(B, T, heads, -1).transpose(0, 2, 1, 3)  # [B, A, T, K]
        logits = x @ x.swapaxes(-1, -2) / np.sqrt(x.shape[-1])
        return softmax(np.where(seen[:, None], logits, -1e9))

    a, b = relation(ours), relation(theirs)
    wanted = [kl(b[..., t, : t + 1], a[..., t, : t + 1]).mean(1) for t in range(T)]
    np.testing.assert_allclose(distances.relations(ours, theirs, heads, seen), np.stack(wanted, -1), atol=1e-5)


@pytest.mark.parametrize("chunk", (1000, 6))
def test_soft_targets_of_tokens_however_many_are_there_at_a_time(chunk):
    def said(width):
        return LanguageModelOutput(jnp.asarray(drawn(B, T, width)), jnp.asarray(drawn(width, 7)), jnp.asarray(drawn(7)))

    ours, theirs, weights = said(4), said(6), RNG.randint(0, 2, (B, T)).astype(np.float32)
    student, teacher = (softmax(np.asarray(x.logits()) / 2) for x in (ours, theirs))
    found = soft_targets.of_tokens(ours, theirs, {"loss_weights": jnp.asarray(weights)}, 2.0, chunk)
    np.testing.assert_allclose(found, (4 * kl(teacher, student) * weights).sum(), rtol=1e-4)


def test_soft_targets_of_labels_are_of_rows_with_text():
    ours, theirs = drawn(B, 4), drawn(B, 4)
    batch = {"segment_ids": jnp.array([[1], [1], [0]])}

    def found(kind):
        return soft_targets.of_labels(ClassifierOutput(ours, kind), ClassifierOutput(theirs, kind), batch, 3.0, 1)

    one = 9 * kl(softmax(theirs / 3), softmax(ours / 3))
    np.testing.assert_allclose(found("single"), one[:2].sum(), rtol=1e-4)
    np.testing.assert_allclose(soft_targets.of_pairs(ours, theirs, batch, 3.0, 1), one[:2].sum(), rtol=1e-4)
    p, q = (1 / (1 + np.exp(-x / 3)) for x in (theirs, ours))
    several = 9 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean(-1)
    np.testing.assert_allclose(found("multi"), several[:2].sum(), rtol=1e-3)
    np.testing.assert_allclose(found("regression"), ((ours - theirs) ** 2).mean(-1)[:2].sum(), rtol=1e-5)
