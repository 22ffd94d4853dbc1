"""Compares beam search with an enumeration of all sequences, for a model that is a table of bigrams."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.inference import beam_search
from pretrainax.inference.sampling import Rules
from tests.support.bigrams import Bigrams, Trigrams, prompts_of

SIZE, END, LIMIT = 5, 4, 4
TABLE = jnp.array(2 * np.random.RandomState(0).standard_normal((SIZE, SIZE)).astype(np.float32))
BEGIN = jax.jit(functools.partial(beam_search.begin, Bigrams()), static_argnames=("beams", "room"))
GO_ON = jax.jit(functools.partial(beam_search.generate_chunk, Bigrams()))
RULES = Rules(allowed=jnp.ones(SIZE, bool), ends=jnp.array([END]))


def search(batch, beams, penalty=1.0, limits=None, piece=1, rules=RULES, table=TABLE):
    limits = jnp.full(len(batch["tokens"]), LIMIT) if limits is None else jnp.array(limits)
    found = BEGIN(table, batch, rules, penalty, limits, beams=beams, room=LIMIT)
    while not found.ended.all():
        found = GO_ON(table, found, rules, penalty, piece)
    return jax.device_get(found.finished)


def all_texts(last, penalty, limit):
    """Returns all sequences that end or have the maximum length, best first: (score, tokens, log-probabilities)."""
    table, found = np.asarray(jax.nn.log_softmax(TABLE)), []
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(SIZE), repeat=length):
            if END in tokens[:-1] or (length < limit and tokens[-1] != END):
                continue
            each = [float(table[a, b]) for a, b in itertools.pairwise([last, *tokens])]
            found.append((sum(each) / length**penalty, tokens, each))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_with_room_for_all_texts_the_best_are_found_in_order(penalty):
    """341 sequences end or have four tokens, so 400 beams keep all of them."""
    batch = prompts_of([0, 1, 2], [3], [2, 0])
    found = search(batch, beams=400, penalty=penalty, limits=[4, 4, 3])
    for row, (last, limit) in enumerate([(2, 4), (3, 4), (0, 3)]):
        expected = all_texts(last, penalty, limit)
        assert (found.lengths[row] > 0).sum() == len(expected)
        np.testing.assert_allclose(found.scores[row, : len(expected)], [score for score, *_ in expected], rtol=1e-5)
        texts = {}  # some sequences have equal scores
        for place in range(len(expected)):
            length = found.lengths[row, place]
            tokens, log_probs = found.tokens[row, place, :length], found.log_probs[row, place, :length]
            texts[tuple(tokens.tolist())] = (found.scores[row, place], *log_probs)
        assert set(texts) == {tokens for _, tokens, _ in expected}
        for score, tokens, log_probs in expected:
            np.testing.assert_allclose(texts[tokens], (score, *log_probs), rtol=1e-5)


def test_one_beam_is_greedy():
    found = search(prompts_of([0, 1]), beams=1)
    last, tokens = 1, []
    while len(tokens) < LIMIT and END not in tokens:
        last = int(TABLE[last].argmax())
        tokens.append(last)
    assert found.tokens[0, 0, : found.lengths[0, 0]].tolist() == tokens


def test_a_prompt_finds_the_same_in_any_batch_and_in_pieces_of_any_length():
    alone = [search(prompts_of(row), beams=3) for row in ([0, 1, 2], [3])]
    together = search(prompts_of([3], [0, 1, 2], [3]), beams=3, piece=64)
    for row, expected in ((0, alone[1]), (1, alone[0]), (2, alone[1])):
        for name in ("tokens", "scores", "lengths"):
            np.testing.assert_array_equal(getattr(together, name)[row], getattr(expected, name)[0], err_msg=name)


def test_what_rules_forbid_is_in_no_text():
    rules = RULES._replace(allowed=jnp.array([True, False, True, True, True]))
    found = search(prompts_of([0]), beams=6, rules=rules)
    texts = [found.tokens[0, n, : found.lengths[0, n]].tolist() for n in range(6)]
    assert texts[0] and not any(1 in tokens for tokens in texts)
    table = np.where(np.arange(SIZE) == 1, -np.inf, np.asarray(TABLE))
    assert np.isfinite(found.scores).all() and texts[0][0] == table[0].argmax() or len(texts[0]) > 1


@pytest.mark.parametrize(
    "rule, after",
    [
        (
            {"repetition_penalty": 2.0},
            lambda x, said: 2.0 * x if said else x,
        ),  # log-probabilities are negative
        ({"frequency_penalty": 0.7}, lambda x, said: x - 0.7 * said),
    ],
)
def test_each_beam_remembers_what_it_has_said_itself_when_beams_change_places(rule, after):
    """Each score must follow from the sequence's own tokens, even if beams changed places.

    The beams have room for all sequences.
    """
    found = search(prompts_of([0]), beams=400, rules=RULES._replace(**rule))
    table = np.asarray(jax.nn.log_softmax(TABLE), np.float64)
    in_prompt = "repetition_penalty" in rule  # this penalty also counts the tokens of the prompt
    count = int((found.lengths[0] > 0).sum())
    assert count == 341
    for place in range(count):
        tokens = found.tokens[0, place, : found.lengths[0, place]].tolist()
        so_far, total = [0] * in_prompt, 0.0
        for last, token in itertools.pairwise([0, *tokens]):
            total += after(table[last, token], so_far.count(token))
            so_far.append(token)
        assert found.scores[0, place] == pytest.approx(total / len(tokens), rel=1e-5)


def written_down(last, table, beams, penalty, limit, early_stopping=False):
    """Implements beam search with lists, as its module describes it; table [V, V, V]."""
    table = np.asarray(jax.nn.log_softmax(table), np.float64)
    running, finished = [(0.0, ())], []
    for length in range(1, limit + 1):
        longer = []
        for score, tokens in running:
            one, two = ([last, last, *tokens])[-2:]
            longer += [(score + table[one, two, new], (*tokens, new)) for new in range(SIZE)]
        longer = sorted(longer, reverse=True)[: 2 * beams]
        ended = [length == limit or tokens[-1] == END for _, tokens in longer]
        finished += [(s / length**penalty, t) for (s, t), over in zip(longer[:beams], ended, strict=False) if over]
        finished = sorted(finished, reverse=True)[:beams]
        running = [text for text, over in zip(longer, ended, strict=True) if not over][:beams]
        hypothetical = limit if early_stopping == "never" and penalty > 0 else length
        if len(finished) < beams:
            continue
        if early_stopping is True or not running or running[0][0] / hypothetical**penalty <= finished[-1][0]:
            break
    return finished


@pytest.mark.first(4)
@pytest.mark.parametrize(
    "beams, penalty, early_stopping",
    [
        *[(2, 1.0, False), (2, 2.0, "never"), (3, 2.0, True), (2, 0.0, False), (1, 1.0, False), (3, 2.0, False)],
        *[(4, -1.0, False), (4, 0.5, False), (4, 0.5, "never"), (4, -1.0, "never"), (2, 0.0, "never"), (2, 1.0, True)],
    ],
)
def test_what_a_table_of_trigrams_writes_is_what_lists_write(beams, penalty, early_stopping):
    """Each beam continues from its own state, and a prompt ends neither too early nor too late."""
    begin = jax.jit(functools.partial(beam_search.begin, Trigrams(), beams=beams, room=6))
    go_on = jax.jit(functools.partial(beam_search.generate_chunk, Trigrams()))
    flags = {True: {"stops_when_full": True}, False: {}, "never": {"stops_at_best": True}}
    rules = RULES._replace(**flags[early_stopping])
    for seed in range(12):
        table = jnp.array(1.5 * np.random.RandomState(seed).standard_normal((SIZE, SIZE, SIZE)).astype(np.float32))
        batch, limits = prompts_of([0, 1], [3], [2]), [6, 5, 1]
        found = begin(table, batch, rules, penalty, jnp.array(limits))
        while not found.ended.all():
            found = go_on(table, found, rules, penalty, 2)
        found = jax.device_get(found)
        for row, (last, limit) in enumerate(zip([1, 3, 2], limits, strict=True)):
            expected = written_down(last, table, beams, penalty, limit, early_stopping)
            lengths = found.finished.lengths[row][: len(expected)].tolist()
            texts = [tuple(found.finished.tokens[row, n, :size].tolist()) for n, size in enumerate(lengths)]
            assert texts == [tokens for _, tokens in expected], (seed, row)
            np.testing.assert_allclose(
                found.finished.scores[row, : len(expected)], [score for score, _ in expected], rtol=1e-5
            )


def test_a_row_with_no_room_gets_no_text():
    found = search(prompts_of([0], [1]), beams=2, limits=[0, 2])
    assert found.lengths[0].tolist() == [0, 0] and (found.lengths[1] > 0).all()


@pytest.mark.slow
def test_what_stands_behind_a_short_prompt_was_not_said():
    """Rows are padded with token 0. A penalty on the tokens of the prompt must not apply to it."""
    rules, table = RULES._replace(repetition_penalty=3.0), TABLE.at[:, 0].add(3.0)
    alone, beside = (search(prompts_of([1], *more), beams=3, rules=rules, table=table) for more in ([], [[2, 3, 1]]))
    np.testing.assert_array_equal(beside.tokens[0], alone.tokens[0])
    np.testing.assert_array_equal(beside.scores[0], alone.scores[0])
    assert 0 in alone.tokens[0, :, 0]
