"""Tests the bytes that products read and write, and the floor of `benchmarks/traffic.py`, which includes them.

The expected values are computed by hand for tiny models: 2 layers, width 32, feed-forward 64, 4 heads of 8.
"""

import dataclasses
import pathlib
import runpy

import pytest

from pretrainax.config import Generator, MixtureOfExperts, MultiTokenPrediction
from pretrainax.data.batch import lengths_of
from pretrainax.planning import memory
from pretrainax.planning.activations import shapes_of
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import AXES
from tests.support import tiny

ONE = dict.fromkeys(AXES, 1)
ROWS, LENGTH, LAYERS, D, F = 8, 32, 2, 32, 64
ATTENTION = (3 * D + D) + (3 * D + D)  # Query, key, value and out read the first sum, and write the second.
MLP = (D + F) + (F + D)
ALL = 2 * ROWS * LAYERS  # 2 bytes of bfloat16 for each row and layer


def model(variant="gpt", **fields):
    experiment = tiny.get_config(variant)
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **fields))


@pytest.mark.parametrize("variant", ["gpt", "bert"])
def test_products_of_a_layer_are_counted_by_hand(variant):
    assert product_bytes(model(variant), ONE, "tpu") == ALL * LENGTH * (ATTENTION + MLP)


def test_a_gated_feed_forward_reads_its_input_twice_and_fewer_heads_of_keys_write_less():
    found = product_bytes(model(gated=True, num_kv_heads=2), ONE, "tpu")
    assert found == ALL * LENGTH * (ATTENTION - D + MLP + D + F)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_each_expert_of_a_token_reads_and_writes_its_own(platform):
    experiment = model(use_bias=False, experts=MixtureOfExperts(num_experts=4, top_k=2, d_ff=16))
    router = 2 * (D + 4) + 2 * 2 * (4 + 1) + 2 * 2  # logits, and the sums of both losses over the logits, in float32
    experts, summed = 2 * 2 * (D + 16), 2 * D + 2 + 2 * D  # The weighted sum of two results is in float32.
    # The last term is the sums per row and expert.
    expected = ALL * (LENGTH * (ATTENTION + router + experts + summed) + 2 * 2 * 4)
    # The GPU kernel also reads the row indices of each tile.
    assert product_bytes(experiment, ONE, platform) == pytest.approx(expected, rel=1e-3 if platform == "gpu" else 0)


def test_a_decoder_that_reads_an_encoder_has_products_of_both():
    experiment = tiny.get_config("t5")
    lengths = lengths_of(shapes_of(experiment))
    # The last term is the keys and values of the encoder's outputs.
    decoder = lengths.targets * (ATTENTION + MLP + 4 * D) + lengths.inputs * 4 * D
    assert product_bytes(experiment, ONE, "tpu") == ALL * (lengths.inputs * (ATTENTION + MLP) + decoder)


def test_a_generator_has_its_own():
    generator = Generator(num_layers=1, d_model=16, d_ff=32, num_heads=2)
    electra = model("bert", masked_lm_head=False, replaced_token_head=True, generator=generator)
    added = product_bytes(electra, ONE, "tpu") - product_bytes(model("bert"), ONE, "tpu")
    assert added == 2 * ROWS * LENGTH * (8 * 16 + 2 * 16 + 2 * 32)


def test_a_device_of_several_has_its_part():
    experiment = tiny.get_config("gpt")
    whole, data, tensor = (product_bytes(experiment, ONE | sizes, "tpu") for sizes in ({}, {"data": 2}, {"tensor": 2}))
    assert 2 * data == whole
    # `tensor` does not split the hidden states that products read, or the results that are added to them.
    assert tensor == ALL * LENGTH * (6 * D + (4 * D + 2 * F) // 2)


def test_float32_takes_twice_as_much_and_micro_batches_take_as_much_in_all():
    experiment = tiny.get_config("gpt")
    once = product_bytes(experiment, ONE, "tpu")
    experiment.train.accumulate = 2
    assert product_bytes(experiment, ONE, "tpu") == once
    assert product_bytes(tiny.get_config("gpt"), ONE, "cpu") == 2 * once


def test_stacks_of_two_sizes_have_their_own():
    experiment = tiny.get_config("t5_narrow")
    lengths = lengths_of(shapes_of(experiment))
    width, queries, keys, inner = 24, 32, 16, 48  # sizes of the decoder: 8 query heads and 4 key heads of width 4
    own = (3 * width + queries) + (queries + 2 * keys + width) + (width + inner) + (inner + width)
    cross = (width + queries) + (queries + width)
    decoder = lengths.targets * (own + cross) + lengths.inputs * 2 * (D + keys)
    expected = lengths.inputs * LAYERS * (ATTENTION + MLP) + 3 * decoder  # The decoder has 3 layers.
    assert product_bytes(experiment, ONE, "tpu") == 2 * ROWS * expected


# --- the floor

ROOT, CHIP, VOCABULARY = pathlib.Path(__file__).parents[2], Topology.parse("v5e:1x1").chip, 512
least_bytes = runpy.run_path(str(ROOT / "benchmarks" / "traffic.py"))["least_bytes"]


def floor(experiment, sizes=ONE):
    return least_bytes(experiment, sizes, "tpu", memory.estimate(experiment, sizes, CHIP))


def test_the_floor_of_a_decoder_is_counted_by_hand():
    block = 4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 2 * 2 * 32
    numbers = LAYERS * block + (VOCABULARY + 64) * 32 + 2 * 32
    assert floor(tiny.get_config("gpt")) == {
        "products": ALL * LENGTH * (ATTENTION + MLP),
        "logits": 2 * 2 * ROWS * LENGTH * VOCABULARY,
        "parameters": 2 * 4 * numbers,
        "gradients": 2 * 4 * numbers,
        "update": 2 * (4 * numbers + 2 * 4 * numbers + 4),  # two moments and Adam's counter
    }


def test_an_encoder_has_logits_of_its_masked_tokens_alone_and_a_generator_has_them_alone():
    experiment = model("bert")
    predicted = lengths_of(shapes_of(experiment)).targets
    assert predicted < LENGTH / 2
    assert floor(experiment)["logits"] == 2 * 2 * ROWS * predicted * VOCABULARY
    generator = Generator(num_layers=1, d_model=16, d_ff=32, num_heads=2)
    electra = model("bert", masked_lm_head=False, replaced_token_head=True, generator=generator)
    assert floor(electra)["logits"] == floor(experiment)["logits"]


def test_each_further_token_has_logits_of_its_own():
    experiment = model(multi_token=MultiTokenPrediction(depth=2))
    assert floor(experiment)["logits"] == 3 * floor(model())["logits"]


def test_a_split_halves_logits_and_micro_batches_read_the_parameters_again():
    experiment = tiny.get_config("gpt")
    once = floor(experiment)
    for axis in ("data", "tensor"):
        assert 2 * floor(experiment, ONE | {axis: 2})["logits"] == once["logits"]
    experiment.train.accumulate = 2
    twice = floor(experiment)
    assert twice["parameters"] == 2 * once["parameters"] and twice["gradients"] == 2 * once["gradients"]
    assert twice["products"] == once["products"] and twice["update"] == once["update"]
