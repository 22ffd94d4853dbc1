"""Tests which attention specs the collector records while a model is traced."""

import jax
import jax.numpy as jnp
import pytest

from pretrainax import models, zoo
from pretrainax.layers.attention import Mask
from pretrainax.layers.attention_spec import collect_attention_specs, report_attention, spec_of
from pretrainax.layers.compute import Compute
from tests.support.attending import USUAL, arrays, packed_ids
from tests.support.tables import example_shapes


def collected(preset, method="init", **compute):
    config = zoo.preset(preset)
    model, batch = models.build(config, Compute(**compute)), example_shapes(config, batch_size=2)
    batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}
    params = jax.eval_shape(lambda: model.init({"params": jax.random.key(0)}, batch, deterministic=True))
    keys = {"dropout": jax.random.key(0), "sample": jax.random.key(0)}
    with collect_attention_specs() as specs:
        if method == "init":
            jax.eval_shape(lambda: model.init({"params": jax.random.key(0)}, batch, deterministic=True))
        else:
            jax.eval_shape(lambda params: model.apply(params, batch, deterministic=False, rngs=keys), params)
    return specs


def test_a_spec_by_hand():
    q, k, _, bias = arrays(2, 6, 8, 4, 2, 16, has_bias=True, dtype=jnp.bfloat16)
    mask = Mask(False, packed_ids(2, 6), packed_ids(2, 8), window=4)
    spec = spec_of(q, k, mask, bias, bias_by_row=False, logit_cap=50.0)
    assert (spec.head_dim, spec.lengths, spec.dtype) == (16, (6, 8), "bfloat16")
    assert (spec.causal, spec.bias, spec.window, spec.has_prefix) == (False, "shared", 4, False)
    assert (spec.logit_cap, spec.sequence) == (50.0, 1)


@pytest.mark.parametrize("by_row, kind", [(False, "shared"), (True, "by_row")])
def test_the_bias_of_one_row_is_of_the_kind_that_the_layer_says(by_row, kind):
    q, k, _, bias = arrays(1, 6, 6, 4, 2, 16, has_bias=True)
    assert spec_of(q, k, Mask(), bias, bias_by_row=by_row, logit_cap=None).bias == kind


def test_an_encoder_decoder_has_three_attentions():
    specs = collected("t5_base")
    assert [(spec.causal, spec.bias) for spec in specs] == [(False, "shared"), (True, "shared"), (False, "none")]


def test_positions_of_deberta_are_a_bias_of_each_row():
    assert [spec.bias for spec in collected("deberta_v3_base")] == ["by_row"]


@pytest.mark.first(2)
@pytest.mark.parametrize("preset", ["t5_base", "deberta_v3_base", "gemma2_2b"])
@pytest.mark.parametrize("remat", ["none", "block"])
def test_training_traces_the_attentions_that_init_traces(preset, remat):
    assert collected(preset, "apply", remat=remat) == collected(preset) == collected(preset)


def test_each_spec_is_collected_once_and_by_the_inner_collector_alone():
    with collect_attention_specs() as outer:
        report_attention(USUAL)
        with collect_attention_specs() as inner:
            report_attention(USUAL)
            report_attention(USUAL)
    report_attention(USUAL)
    assert outer == inner == [USUAL]
