"""Tests the decoding loop on the device, with a model that is a table of bigrams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.inference import token_loop
from pretrainax.inference.sampling import Rules, row_keys
from tests.support.bigrams import Bigrams, prompts_of

SIZE, END, ROOM = 12, 11, 16
TABLE = jnp.array(2 * np.random.RandomState(3).standard_normal((SIZE, SIZE)).astype(np.float32))
BEGIN = jax.jit(functools.partial(token_loop.begin, Bigrams()), static_argnames=("copies", "room"))
GO_ON = jax.jit(functools.partial(token_loop.generate_chunk, Bigrams()))
GREEDY = Rules(allowed=jnp.ones(SIZE, bool), ends=jnp.array([END]))
DRAWN = GREEDY._replace(temperature=1.0)
PROMPTS = [0, 1, 2], [3], [4, 0], [5]


def write(rows, limits, rules=GREEDY, piece=5, copies=1, numbers=None):
    numbers = np.repeat(np.arange(len(rows)) if numbers is None else numbers, copies)
    keys = row_keys(7, jnp.array(numbers), jnp.arange(len(numbers)) % copies)
    limits = jnp.repeat(jnp.array(limits), copies)
    written = BEGIN(TABLE, prompts_of(*rows), rules, keys, limits, copies=copies, room=ROOM)
    while not written.ended.all():
        written = GO_ON(TABLE, written, rules, piece)
    return jax.device_get((written.tokens, written.log_probs, written.lengths))


def greedy(last, limit):
    tokens = []
    while len(tokens) < limit and END not in tokens:
        last = int(TABLE[last].argmax())
        tokens.append(last)
    return tokens


def test_rows_end_by_themselves_at_the_end_or_their_limit():
    limits = [16, 3, 16, 0]
    tokens, log_probs, lengths = write(PROMPTS, limits)
    table = jax.nn.log_softmax(TABLE)
    for row, limit in enumerate(limits):
        expected = greedy(PROMPTS[row][-1], limit)
        assert tokens[row].tolist() == expected + [0] * (ROOM - len(expected))  # the loop writes nothing after the end
        pairs = zip([PROMPTS[row][-1], *expected], expected, strict=False)
        np.testing.assert_allclose(log_probs[row, : lengths[row]], [table[a, b] for a, b in pairs], rtol=1e-6)
    assert len({*lengths.tolist()}) > 2


@pytest.mark.parametrize("piece", [1, 64])
def test_the_length_of_pieces_changes_nothing(piece):
    for a, b in zip(write(PROMPTS, [9] * 4, DRAWN, piece), write(PROMPTS, [9] * 4, DRAWN), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_draw_does_not_depend_on_the_batch():
    tokens, _, lengths = write(PROMPTS, [9] * 4, DRAWN)
    again, _, same = write([PROMPTS[2], PROMPTS[0]], [9, 9], DRAWN, numbers=[2, 0])
    np.testing.assert_array_equal(again, tokens[[2, 0]])
    np.testing.assert_array_equal(same, lengths[[2, 0]])


@pytest.mark.slow
def test_copies_of_a_prompt_are_other_draws_and_the_first_is_that_of_one_alone():
    tokens, *_ = write(PROMPTS[:2], [9] * 2, DRAWN, copies=3)
    alone, *_ = write(PROMPTS[:2], [9] * 2, DRAWN)
    np.testing.assert_array_equal(tokens[::3], alone)
    assert len({tuple(row) for row in tokens[:3].tolist()}) == 3
