"""Tests the tagging head: the hidden state of each word, the loss and the predictions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import ModelConfig, RotaryPositions, Tag, UserError
from pretrainax.layers.compute import Compute
from pretrainax.models.heads import HEADS
from pretrainax.models.heads.tag import TaggerHead
from pretrainax.training import losses
from tests.support.tiers import few

L = 3
WORDS = np.array([[0, 1, 2, 2, 3, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
BATCH = {
    "tokens": np.arange(18, dtype=np.int32).reshape(3, 6),
    "positions": np.tile(np.arange(6, dtype=np.int32), (3, 1)),
    "segment_ids": np.array([[1] * 6, [1, 1, 1, 0, 0, 0], [0] * 6], np.int32),
    "words": WORDS,
    "word_labels": np.array([[2, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6], np.int32),
}


def config(**head):
    shape = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "position": RotaryPositions(16)}
    return ModelConfig(family="encoder", vocab_size=50, head=Tag(num_labels=L, **head), **shape)


def made(batch=BATCH, **head):
    """Returns a model with random parameters, the parameters, and its outputs for a batch."""
    model = models.build(config(**head), Compute())
    _, variables = jax.jit(lambda key: model.init_with_output(key, batch, deterministic=True))(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), variables["params"])
    return model, params, model.apply({"params": params}, batch, deterministic=True)


@pytest.mark.slow
def test_the_state_of_a_word_is_the_mean_of_its_tokens():
    x = jax.random.normal(jax.random.key(0), (3, 6, 16))
    head = TaggerHead(config())
    variables = head.init(jax.random.key(1), x, WORDS, True)
    logits = head.apply(variables, x, WORDS, True).logits
    kernel, bias = variables["params"]["output"]["kernel"], variables["params"]["output"]["bias"]
    for row, place, tokens in ((0, 0, [1]), (0, 1, [2, 3]), (0, 2, [4]), (1, 0, [1])):
        np.testing.assert_allclose(logits[row, place], x[row, jnp.array(tokens)].mean(0) @ kernel + bias, atol=1e-5)


@pytest.mark.slow
def test_the_loss_of_words_is_theirs_alone():
    _, _, outputs = made()
    value, sums = losses.objective(outputs, BATCH, losses.counts(BATCH))
    logits = outputs.heads["tag"].logits
    said = jax.nn.log_softmax(jnp.stack([logits[0, 0], logits[0, 1], logits[0, 2], logits[1, 0]]))
    labels = [2, 0, 1, 1]
    np.testing.assert_allclose(value, -np.mean([said[i, label] for i, label in enumerate(labels)]), rtol=1e-5)
    assert sums["label_loss"][1] == 4 and sums["label_accuracy"][0] == sum(said.argmax(1) == jnp.array(labels))


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(("softmax", "crf"), ["crf"]))
def test_micro_batches_of_unequal_rows_add_up(kind):
    model, params, outputs = made(kind=kind)

    def loss(params, rows, counts):
        batch = {name: x[list(rows)] for name, x in BATCH.items()}
        return losses.objective(model.apply({"params": params}, batch, deterministic=True), batch, counts)[0]

    counts = losses.counts(BATCH)
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    whole, parts = gradient(params, (0, 1, 2), counts), [gradient(params, rows, counts) for rows in ((0, 2), (1,))]
    np.testing.assert_allclose(whole[0], sum(value for value, _ in parts), rtol=1e-5)
    added = jax.tree.map(lambda *x: sum(x), *[gradients for _, gradients in parts])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole[1], added)
    if kind == "crf":
        assert all(np.abs(whole[1]["tagger"][name]).sum() > 0 for name in ("transitions", "start", "end"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("softmax", "crf"))
def test_answers_are_tags_and_their_probabilities(kind):
    _, _, outputs = made(kind=kind)
    found = HEADS["tag"].predictions(outputs.heads["tag"], BATCH)
    assert (found["tags"] >= 0).tolist() == [[True] * 3 + [False] * 3, [True] + [False] * 5, [False] * 6]
    assert ((found["probabilities"] > 0) == (found["tags"] >= 0)).all() and found["probabilities"].max() < 1
    if kind == "softmax":
        first = jax.nn.softmax(outputs.heads["tag"].logits[0, 0])
        np.testing.assert_allclose(found["probabilities"][0, 0], first.max(), rtol=1e-6)


@pytest.mark.slow
def test_a_crf_says_no_tag_that_may_not_follow():
    follows = ((), (2,), ())  # Tag 1 may only follow tag 2.
    _, params, _ = made(kind="crf", follows=follows)
    params["tagger"]["output"]["bias"] = params["tagger"]["output"]["bias"].at[1].set(100.0)
    said = {}
    for forbids in ((), follows):
        model = models.build(config(kind="crf", follows=forbids), Compute())
        outputs = model.apply({"params": params}, BATCH, deterministic=True)
        said[forbids] = HEADS["tag"].predictions(outputs.heads["tag"], BATCH)["tags"]
    assert said[()][0, :3].tolist() == [1, 1, 1]
    assert said[follows][0, 0] != 1 and said[follows][1, 0] != 1
    assert said[follows][0, :3].tolist() in ([2, 1, 0], [2, 1, 2], [0, 2, 1], [2, 2, 1])


@pytest.mark.slow
def test_each_token_is_a_word_where_the_batch_has_no_words():
    batch = {name: x for name, x in BATCH.items() if not name.startswith("word")}
    _, params, outputs = made(batch)
    of_tokens = BATCH | {"words": np.where(BATCH["segment_ids"] > 0, np.arange(1, 7), 0)}
    again = models.build(config(), Compute()).apply({"params": params}, of_tokens, deterministic=True)
    np.testing.assert_array_equal(outputs.heads["tag"].logits, again.heads["tag"].logits)


@pytest.mark.slow
def test_labels_of_words_need_the_head_and_the_head_needs_labels():
    _, _, outputs = made()
    unlabelled = {name: x for name, x in BATCH.items() if name != "word_labels"}
    with pytest.raises(UserError, match="the head has no words to learn from"):
        losses.check_labels(outputs, unlabelled)
    with pytest.raises(UserError, match="labels of words have no head"):
        losses.check_labels(models.Outputs({}), BATCH)
