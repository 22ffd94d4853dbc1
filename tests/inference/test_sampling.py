"""Compares each rule for the next token with NumPy and with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.inference import sampling
from pretrainax.inference.sampling import Rules, choose, history_of, processed_logits, row_keys, truncate_logits
from tests.golden.case import needs_transformers

ROWS, SIZE = 5, 40
LOGITS = (3 * np.random.RandomState(0).standard_normal((ROWS, SIZE))).astype(np.float32)
READ = np.random.RandomState(1).randint(0, SIZE, (ROWS, 7))
ALLOWED = jnp.ones(SIZE, bool)


def rules(**options):
    return Rules(allowed=ALLOWED, ends=jnp.array([], jnp.int32), **options)


def kept(logits):
    return np.isfinite(np.asarray(logits))


def chances(logits=LOGITS):
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def fewest(order, p):
    """Returns a mask of the first tokens in `order` [B, V] whose probabilities together reach p."""
    ordered = np.take_along_axis(chances(), order, 1)
    counts = (ordered.cumsum(1) < p).sum(1) + 1
    wanted = np.zeros((ROWS, SIZE), bool)
    for row, count in enumerate(counts):
        wanted[row, order[row, :count]] = True
    return wanted


@pytest.mark.parametrize("k", [1, 3, SIZE, SIZE + 5])
def test_top_k_keeps_the_k_likeliest(k, variant):
    places = np.argsort(np.argsort(-LOGITS, axis=1), axis=1)
    np.testing.assert_array_equal(kept(variant(sampling.keep_top_k)(LOGITS, k)), places < k)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 1.0])
def test_top_p_keeps_the_fewest_that_reach_p(p, variant):
    wanted = fewest(np.argsort(-LOGITS, axis=1), min(p, 0.9999999))
    np.testing.assert_array_equal(kept(variant(sampling.keep_top_p)(LOGITS, p)), wanted)


@pytest.mark.parametrize("p", [1e-3, 0.1, 1.0])
def test_min_p_keeps_those_near_the_likeliest(p, variant):
    wanted = chances() >= p * chances().max(1, keepdims=True)
    np.testing.assert_array_equal(kept(variant(sampling.keep_min_p)(LOGITS, p)), wanted)


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.95])
def test_typical_keeps_those_nearest_to_the_entropy(mass, variant):
    p = chances()
    entropy = -(p * np.log(p)).sum(1, keepdims=True)
    wanted = fewest(np.argsort(np.abs(-np.log(p) - entropy), axis=1), mass)
    np.testing.assert_array_equal(kept(variant(sampling.keep_typical)(LOGITS, mass)), wanted)


def test_penalties_count_what_was_read_and_said():
    asked = rules(repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5)
    history = history_of(jnp.array(READ), jnp.array(READ >= 0).at[:, 5:].set(False), asked)
    said = np.random.RandomState(2).randint(0, SIZE, (3, ROWS))
    for tokens in said:
        history = history.after(jnp.array(tokens), asked)
    expected = LOGITS.copy()
    for row in range(ROWS):
        for token in {*READ[row, :5].tolist(), *said[:, row].tolist()}:
            expected[row, token] *= 1.5 if expected[row, token] < 0 else 1 / 1.5
        for token in said[:, row].tolist():
            expected[row, token] -= 0.25
        for token in set(said[:, row].tolist()):
            expected[row, token] -= 0.5
    np.testing.assert_allclose(processed_logits(LOGITS, asked, history), expected, atol=1e-6)


OPTIONS = [
    dict(temperature=0.7),
    dict(temperature=1.3, top_k=7),
    dict(temperature=0.9, top_p=0.8),
    dict(temperature=1.0, min_p=0.05),
    dict(temperature=1.0, typical_p=0.6),
    dict(temperature=1.0, epsilon_cutoff=0.02),
    dict(temperature=1.0, epsilon_cutoff=0.999),
    dict(temperature=1.0, eta_cutoff=0.03),
    dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, typical_p=0.8, repetition_penalty=1.4),
]


@needs_transformers
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_what_is_drawn_from_is_what_transformers_draws_from(options):
    import torch
    from transformers.generation import logits_process as theirs

    makers = [
        ("repetition_penalty", theirs.RepetitionPenaltyLogitsProcessor),
        ("temperature", theirs.TemperatureLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
        ("typical_p", theirs.TypicalLogitsWarper),
        ("epsilon_cutoff", theirs.EpsilonLogitsWarper),
        ("eta_cutoff", theirs.EtaLogitsWarper),
    ]
    expected = torch.from_numpy(LOGITS.copy())
    for name, make in makers:
        if name in options:
            expected = make(options[name])(torch.from_numpy(READ), expected)
    history = history_of(jnp.array(READ), jnp.ones_like(READ, bool), rules(**options))
    got = jax.jit(lambda asked: truncate_logits(processed_logits(LOGITS, asked, history), asked))(rules(**options))
    np.testing.assert_array_equal(kept(got), kept(expected.numpy()))
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6)


@needs_transformers
@pytest.mark.parametrize(
    "name, value", [("top_p", 0.5), ("top_p", 0.77), ("top_k", 3), ("min_p", 0.4), ("typical_p", 0.7)]
)
def test_of_equal_logits_those_of_transformers_are_kept(name, value, variant):
    import torch
    from transformers.generation import logits_process as theirs

    logits = np.random.RandomState(0).randint(0, 3, (50, 8)).astype(np.float32)
    logits[0] = 0.0
    makers = {"top_p": theirs.TopPLogitsWarper, "top_k": theirs.TopKLogitsWarper, "min_p": theirs.MinPLogitsWarper}
    expected = makers.get(name, theirs.TypicalLogitsWarper)(value)(None, torch.from_numpy(logits.copy())).numpy()
    keep = getattr(sampling, {"typical_p": "keep_typical"}.get(name, f"keep_{name}"))
    np.testing.assert_array_equal(kept(variant(keep)(logits, value)), kept(expected))
    assert name != "top_p" or value != 0.5 or kept(expected)[0].sum() == 4  # half of the 8 equal logits


def test_draws_have_the_chances_of_the_rest():
    asked = rules(temperature=1.0, top_k=3)
    count = 4000
    logits = jnp.broadcast_to(LOGITS[:1], (count, SIZE))
    history = history_of(jnp.zeros((count, 1), int), jnp.ones((count, 1), bool), asked)
    keys = row_keys(0, jnp.arange(count), jnp.zeros(count, int))
    drawn = np.bincount(choose(logits, asked, history, keys, 0), minlength=SIZE) / count
    best = np.where(np.argsort(np.argsort(-LOGITS[0])) < 3, chances()[0], 0.0)
    best /= best.sum()
    assert np.abs(drawn - best).max() < 5 * np.sqrt(0.25 / count)  # five standard deviations


def test_a_draw_follows_from_the_numbers_of_prompt_copy_and_token():
    asked = Rules(allowed=jnp.ones(10_000, bool), ends=jnp.array([], jnp.int32), temperature=1.0)
    history = history_of(jnp.zeros((2, 1), int), jnp.ones((2, 1), bool), asked)
    flat = jnp.zeros((2, 10_000))

    def draw(seed, prompts, copies, number):
        return choose(flat, asked, history, row_keys(seed, jnp.array(prompts), jnp.array(copies)), number).tolist()

    assert draw(0, [3, 5], [0, 1], 2) == draw(0, [5, 3], [1, 0], 2)[::-1]
    others = [(0, [3, 4], [0, 0], 2), (0, [3, 3], [1, 2], 2), (0, [3, 3], [0, 0], 3), (1, [3, 3], [0, 0], 2)]
    # The last two calls have two equal rows each.
    assert len({token for numbers in others for token in draw(*numbers)}) == 6


def after(prompts, said, asked, limits=None):
    """Returns the history of prompts [[id]] of different lengths, which have all generated the tokens said [N, B]."""
    length = max(map(len, prompts))
    tokens = jnp.array([[*row, *[7] * (length - len(row))] for row in prompts])
    is_read = jnp.array([[i < len(row) for i in range(length)] for row in prompts])
    history = history_of(tokens, is_read, asked, None if limits is None else jnp.array(limits), room=len(said))
    for tokens in said:
        history = history.after(jnp.array(tokens), asked)
    return history


@pytest.mark.first(2)
@needs_transformers
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_what_follows_the_previous_tokens_is_banned_as_in_transformers(length):
    """Tests n-grams of 1 to 4 tokens and words of 2 and 3 tokens, for prompts of different lengths, 28 rows each."""
    import torch
    from transformers.generation import logits_process as theirs

    random = np.random.RandomState(length)
    prompts = [random.randint(0, 4, 1 + row % 7).tolist() for row in range(7)]
    said = random.randint(0, 4, (length, 7))
    words = [[0, 1], [3, 3], [1, 2, 3], [2, 0, 0], [9, 1]]
    logits = random.standard_normal((7, SIZE)).astype(np.float32)
    sequences = tuple(jnp.array([word for word in words if len(word) == n]) for n in (2, 3))
    for asked, processor in (
        *((rules(no_repeat_ngram_size=n), theirs.NoRepeatNGramLogitsProcessor(n)) for n in (1, 2, 3, 4)),
        (rules(banned_sequences=sequences), theirs.NoBadWordsLogitsProcessor(words)),
    ):
        got = processed_logits(logits, asked, after(prompts, said, asked))
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([[*prompt, *said[:, row].tolist()]])
            expected = processor(ids, torch.from_numpy(logits[row : row + 1].copy()))
            np.testing.assert_array_equal(got[row], expected[0].numpy())


def test_ends_wait_for_the_minimum_and_tokens_are_forced_at_both_ends():
    asked = rules(
        min_length=3,
        allowed_first=jnp.arange(SIZE) != 5,
        forced_first=jnp.arange(SIZE) == 6,
        forced_last=(jnp.arange(SIZE) == 8) | (jnp.arange(SIZE) == 9),
    )._replace(ends=jnp.array([2]))
    prompts, steps = [[1], [1, 1]], []
    for length in range(4):
        said = np.full((length, 2), 3)
        steps.append(kept(processed_logits(LOGITS[:2], asked, after(prompts, said, asked, limits=[4, 3]))))
    only = lambda *ids: np.isin(np.arange(SIZE), ids)  # noqa: E731
    np.testing.assert_array_equal(steps[0], [only(6), ~only(2, 5)])  # a prompt of one token, and a longer prompt
    np.testing.assert_array_equal(steps[1], [~only(2, 5), ~only()])  # 5 is not the first token after the forced token
    np.testing.assert_array_equal(steps[2], [~only(), only(8, 9)])
    np.testing.assert_array_equal(steps[3][0], only(8, 9))


def test_rows_on_different_devices_do_not_wait_for_each_other():
    """Constraints on the rows of a prompt read only these rows, so that decoding steps need no communication."""
    rows, beams = 16, 2
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    asked = rules(no_repeat_ngram_size=2, banned_sequences=(jnp.array([[1, 2]]),), min_length=9, repetition_penalty=1.2)
    history = history_of(jnp.ones((rows, 3), int), jnp.ones((rows, 3), bool), asked, room=4)

    def step(logits, history, parents, tokens):
        history = history.take_beams(parents).after(tokens, asked)
        return processed_logits(logits, asked, history), history

    inputs = jnp.zeros((rows, SIZE)), history, jnp.zeros((rows // beams, beams), int), jnp.zeros(rows, int)
    text = jax.jit(step).lower(*jax.device_put(inputs, sharding)).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text and "collective-permute" not in text
