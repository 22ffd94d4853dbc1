"""Tests the estimated memory traffic of a step: by hand for tiny models, and against counts of compiled steps."""

import dataclasses
import math
import pathlib
import runpy

import jax
import numpy as np
import pytest

from pretrainax.config import DisentangledPositions, LearnedPositions, MixtureOfExperts, RotaryPositions
from pretrainax.data.batch import lengths_of
from pretrainax.optim import Adafactor, AdamW
from pretrainax.planning.activations import abstract_state, saved_residuals
from pretrainax.planning.estimated_traffic import (
    FUSED,
    PASSES,
    _attention_bytes,
    _layer_bytes,
    bytes_by_kind,
    memory_bytes_between_products,
    product_operands,
)
from pretrainax.planning.memory import estimate
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.planning.shapes import batch_shapes
from pretrainax.runtime.chips import CHIPS
from pretrainax.sharding.mesh import AXES
from pretrainax.sharding.param_paths import parameter_names
from tests.support import tiny
from tests.support.tiers import few

ROOT = pathlib.Path(__file__).parents[2]
ONE = dict.fromkeys(AXES, 1)


def test_attention_is_charged_for_what_is_written_out_and_turned():
    gpt, t5 = tiny.get_config("gpt"), tiny.get_config("t5")
    gpt.train.attention = "xla"
    m, length = gpt.model, lengths_of(batch_shapes(gpt)).inputs
    assert _attention_bytes(gpt, ONE, "gpu", 2) == (
        4 * 2 * m.num_layers * m.num_heads * length**2,
        0,
        0,
        0,
    )
    # the smallest number of rows whose logits exceed the memory of a TPU core
    many = 2**27 // (4 * m.num_heads * length**2)
    fewer, all_rows = (_attention_bytes(gpt, ONE, "tpu", rows).pairs for rows in (many - 1, many))
    assert fewer == 0 < all_rows
    # From half of this number of rows, dropped weights are saved for the backward.
    gpt.model.attention_dropout_rate = 0.1
    kept = [_attention_bytes(gpt, ONE, "tpu", rows) for rows in (many / 2 - 1, many / 2)]
    assert [one.pairs for one in kept] == [0, 0] and kept[0].dropped == 0 < kept[1].dropped
    gpt.model.attention_dropout_rate = 0.0
    assert _attention_bytes(t5, ONE, "tpu", 2).pairs > 0  # The gradient of T5's bias needs an array of logits.
    gpt.model.position = RotaryPositions()
    queries_and_keys = (m.num_heads + m.kv_heads) * m.dim_per_head
    assert _attention_bytes(gpt, ONE, "tpu", 2).rotated == 4 * 2 * m.num_layers * length * queries_and_keys
    narrow = tiny.get_config("t5_narrow")
    narrow.model.position = RotaryPositions()
    lengths = lengths_of(batch_shapes(narrow))
    # Two layers have 4 query and 4 key heads of width 8. Three layers have two attentions each, with 8 query and 4 key
    # heads of width 4.
    numbers = 2 * (4 + 4) * 8 * lengths.inputs + 3 * 2 * (8 + 4) * 4 * lengths.targets
    assert _attention_bytes(narrow, ONE, "tpu", 2).rotated == 4 * 2 * numbers


def _block(experiment):
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat="block"))


@pytest.fixture
def only():
    """Returns a function that computes the bytes of one kind of array on a chip."""

    def count(experiment, kind, chip="h100"):
        platform = CHIPS[chip].platform
        memory = estimate(experiment, ONE, CHIPS[chip])
        return getattr(bytes_by_kind(experiment, ONE, platform, memory), kind)

    return count


def test_what_attention_keeps_is_counted_apart_from_what_its_block_keeps(only):
    experiment = tiny.get_config("gpt")
    experiment.model.head_dim, experiment.model.position = 64, LearnedPositions(2048)  # fused attention supports these
    experiment.data.sequence_length = 2048
    model, tokens = experiment.model, experiment.train.global_batch_size * 2048
    arrays = 2 * model.num_heads * model.dim_per_head + 2 * model.kv_heads * model.dim_per_head
    assert only(experiment, "attention_residuals") == 2 * tokens * model.num_layers * arrays  # q, k, v and the output
    assert only(experiment, "block_residuals") >= 2 * tokens * model.num_layers * (model.d_model + model.d_ff)


def test_logits_that_are_made_again_are_not_kept(only):
    experiment = tiny.get_config("gpt")
    experiment.train.attention = "xla"
    assert only(_block(experiment), "pairs") == only(experiment, "pairs") > 0
    assert only(_block(experiment), "block_residuals") == only(experiment, "block_residuals")


def test_what_a_layer_keeps_stays_in_the_memory_of_a_tpu_core_where_it_has_room(only):
    experiment = tiny.get_config("gpt")
    assert only(experiment, "block_residuals", "v5e") == only(experiment, "rotated", "v5e") == 0
    assert (
        only(_block(experiment), "block_residuals", "v5e") == only(experiment, "block_residuals") > 0
    )  # Residuals are recomputed from inputs that are read back.
    a_layer = (
        only(experiment, "block_residuals") + only(experiment, "attention_residuals")
    ) / experiment.model.num_layers
    experiment.train.global_batch_size *= int(2**26 // a_layer)
    assert only(experiment, "block_residuals", "v5e") == 0
    experiment.train.global_batch_size *= 2
    assert only(experiment, "block_residuals", "v5e") == only(experiment, "block_residuals") > 2**26


def test_logits_with_a_bias_for_each_row_are_charged_for_once_more(only):
    experiment = tiny.get_config("gpt")
    experiment.train.attention = "xla"
    assert only(experiment, "row_bias") == 0 < only(experiment, "pairs")
    experiment.model.position = DisentangledPositions()
    assert only(experiment, "row_bias") == only(experiment, "pairs") > 0


@pytest.mark.slow
def test_parameters_of_layers_and_of_experts_are_passed_over_more_often_than_others(only):
    experiment = tiny.get_config("gpt")
    experiment.model.experts = MixtureOfExperts()
    names = parameter_names(params := abstract_state(experiment, ONE).params)
    sizes = {name: 4 * math.prod(x.shape) for name, x in zip(names, jax.tree.leaves(params), strict=True)}
    layers = sum(size for name, size in sizes.items() if "/blocks/" in name)
    assert (only(experiment, "layers"), only(experiment, "looped")) == (layers, 0)
    looped = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, scan_unroll=1))
    assert (only(looped, "layers"), only(looped, "looped")) == (0, layers)
    assert only(experiment, "experts") == sum(size for name, size in sizes.items() if "/experts_" in name) > 0


@pytest.mark.slow
def test_an_optimizer_that_keeps_rows_and_columns_reads_gradients_more_often(only):
    experiment = tiny.get_config("gpt")
    experiment.model.d_model = experiment.model.d_ff = 512  # Adafactor does not factor the moments of smaller matrices.
    experiment.optimizer = AdamW()
    assert only(experiment, "factored") == 0
    experiment.optimizer = Adafactor()
    params = abstract_state(experiment, ONE).params
    assert only(experiment, "factored") == sum(4 * math.prod(x.shape) for x in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_a_loop_of_a_gpu_copies_what_layers_keep_into_stacks_and_out_again(family):
    experiment = tiny.get_config(family)
    memory = estimate(experiment, ONE, CHIPS["h100"])
    flat = {on: memory_bytes_between_products(experiment, ONE, on, memory) for on in ("gpu", "tpu")}
    kept = sum(x.bytes for x in saved_residuals(experiment, ONE, "gpu") if "/blocks" in x.module)
    passes, layers = PASSES["gpu"], _layer_bytes(experiment, ONE, "gpu").unrolled
    experiment.train.scan_unroll = 1
    got = memory_bytes_between_products(experiment, ONE, "gpu", memory)
    more = passes.stacked * kept + (passes.looped - passes.layers) * layers
    assert got == pytest.approx(flat["gpu"] + more) and kept > 0
    assert memory_bytes_between_products(experiment, ONE, "tpu", memory) == flat["tpu"]  # A TPU uses loops by default.


def test_products_move_their_activations_in_each_pass_and_logits_and_parameters_once_more():
    experiment = tiny.get_config("gpt")
    memory = estimate(experiment, ONE, CHIPS["h100"])
    sizes = bytes_by_kind(experiment, ONE, "gpu", memory)
    per_pass = product_bytes(experiment, ONE, "gpu") + sizes.attention_residuals
    others = 3 * sizes.logits + 2 * sizes.layers + 4 * sizes.pairs
    assert product_operands(experiment, ONE, "gpu", memory) == pytest.approx(FUSED * 3 * per_pass + others)
    assert product_operands(_block(experiment), ONE, "gpu", memory) == pytest.approx(FUSED * 4 * per_pass + others)


# --- counts of compiled steps ----------------------------------------------------------------------------------------

passes = runpy.run_path(str(ROOT / "benchmarks" / "fit_passes.py"))
STEPS = {step.name: step for step in passes["counted"]() if step.outside}
QUICK = ["bert", "gemma 3 270M", "bert, v5e"]
# Relative errors of the steps that the estimate misses by more than 15 %.
MISSED = {
    "mixtral": -0.179,
    "gpt_oss": 0.203,
    "gemma 3 270M none, v6e": 0.243,
    "gpt2 32, v6e": -0.184,
    "modernbert 8, v5e": -0.299,
    "neobert, v5e": 0.445,
    "gpt2 8, v5p": -0.654,
    "gpt2 64, v5p": -0.244,
}


@pytest.mark.parametrize("name", few(sorted(STEPS), QUICK))
def test_the_estimate_is_near_the_count_of_the_compiled_step(name):
    step, estimate = STEPS[name], passes["estimated"](STEPS[name])
    outside = np.dot(estimate.sizes, PASSES[step.platform])
    error = outside / step.outside - 1
    assert error == pytest.approx(MISSED.get(name, 0.0), abs=0.02 if name in MISSED else 0.15)
    if step.platform == "gpu":  # On a TPU, the bytes of products take no time of their own.
        assert outside + estimate.products == pytest.approx(step.outside + step.products, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_passes_are_those_of_the_fit(platform):
    steps = [step for step in STEPS.values() if step.platform == platform and not step.held_out]
    sizes = np.array([passes["estimated"](step).sizes for step in steps])
    found = passes["fit"](np.array([step.outside for step in steps]), sizes, platform)
    np.testing.assert_allclose(found, PASSES[platform], atol=0.1)
