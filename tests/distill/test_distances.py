"""Compares each distance between student and teacher with its paper's formula in NumPy."""

import numpy as np
import pytest

from pretrainax.distill import distances
from pretrainax.layers.attention_mask import FORBIDDEN
from tests.distill.by_hand import drawn, kl, softmax

B, T, D = 3, 5, 12


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
    # The distance excludes keys that one of the two models masks.
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
