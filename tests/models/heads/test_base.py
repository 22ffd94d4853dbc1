import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import Classify, DecoderSizes, ModelConfig, RotaryPositions
from pretrainax.layers.compute import Compute
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.models.heads import HEADS, Head, heads_of
from pretrainax.models.heads.base import mean_sums
from pretrainax.training import losses

CONFIG = ModelConfig(vocab_size=50, num_layers=1, d_model=16, d_ff=32, num_heads=2, position=RotaryPositions(16))
BATCH = {
    "tokens": jnp.arange(16, dtype=jnp.int32).reshape(2, 8),
    "targets": jnp.arange(1, 17, dtype=jnp.int32).reshape(2, 8),
    "loss_weights": jnp.ones((2, 8)),
    "segment_ids": jnp.ones((2, 8), jnp.int32),
    "positions": jnp.tile(jnp.arange(8, dtype=jnp.int32), (2, 1)),
}


class Sentiment(Head):
    """A head that rates a text as good or bad from its last token; [B] float32."""

    name, loss_name = "sentiment", "sentiment_loss"

    def is_in(self, config):
        return True

    def modules(self, config):
        return {"sentiment_head": Linear((1,), ("d_model", "labels"), normal_init(config, config.d_model))}

    def output(self, model, x, batch, *, deterministic):
        return model.sentiment_head(x[:, -1])[:, 0]

    def count(self, batch):
        return jnp.asarray(batch["good"].size) if "good" in batch else None

    def sums(self, output, batch, **options):
        loss = jax.nn.softplus(output) - jnp.where(batch["good"] > 0, output, 0.0)
        return loss.sum(), mean_sums("sentiment", loss, (output > 0) == (batch["good"] > 0), jnp.ones_like(loss))


@pytest.mark.slow
@pytest.mark.parametrize("labelled", (False, True))
def test_a_head_of_its_own_is_one_class(monkeypatch, labelled):
    monkeypatch.setitem(HEADS, "sentiment", Sentiment())
    model = models.build(CONFIG, Compute())
    batch = BATCH | ({"good": jnp.array([0, 1])} if labelled else {})
    outputs, variables = model.init_with_output(jax.random.key(0), batch, deterministic=True)
    assert "sentiment_head" in variables["params"]
    chex.assert_shape(outputs.heads["sentiment"], (2,))
    value, sums = losses.objective(outputs, batch, losses.counts(batch))
    without = losses.objective(models.Outputs({"lm": outputs.heads["lm"]}), batch, losses.counts(batch))[0]
    if not labelled:
        assert "sentiment_loss" not in sums and value == without
        return
    np.testing.assert_allclose(value, without + sums["sentiment_loss"][0] / 2, rtol=1e-6)
    assert "sentiment_accuracy" in sums


def test_a_head_is_as_wide_as_the_stack_that_it_reads():
    sizes = DecoderSizes(d_model=12, d_ff=24, num_heads=2)
    config = dataclasses.replace(CONFIG, family="encoder_decoder", separate_embeddings=True, decoder=sizes)
    params = models.abstract_params(dataclasses.replace(config, tie_embeddings=False))
    assert params["unembedding"]["kernel"].shape == (12, 50)
    params = models.abstract_params(dataclasses.replace(config, head=Classify(num_labels=3, pooling="last")))
    assert {name: map_["kernel"].shape for name, map_ in params["classifier"].items()} == {
        "dense": (12, 12),
        "output": (12, 3),
    }


def test_a_model_has_the_heads_that_its_config_asks_for():
    assert [head.name for head in heads_of(CONFIG)] == ["lm"]
    assert [head.name for head in heads_of(ModelConfig(family="encoder", pair_head=True))] == ["lm", "pair"]
    discriminator = ModelConfig(family="encoder", replaced_token_head=True)
    assert [head.name for head in heads_of(discriminator)] == ["replaced"]
