"""The bytes that a step moves at least, by hand, of tiny models: 2 layers, width 32, feed-forward 64, 4 heads of 8."""

import dataclasses

from pretrainax.config import Generator
from pretrainax.data.batch import lengths_of
from pretrainax.planning import memory
from pretrainax.planning.activations import shapes_of
from pretrainax.planning.floor import least_bytes
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import AXES
from tests.support import tiny

ONE = dict.fromkeys(AXES, 1)
CHIP = Topology.parse("v5e:1x1").chip
ROWS, LENGTH, VOCABULARY, LAYERS = 8, 32, 512, 2
LAYER = 32 + 3 * 32 + 32 + 64  # its input, queries, keys and values, attention's result, before the activation
KEPT = 2 * 2 * ROWS * LAYERS  # written and read in bfloat16, of each row and layer


def floor(experiment, sizes=ONE, platform="tpu"):
    return least_bytes(experiment, sizes, platform, memory.estimate(experiment, sizes, CHIP))


def model(variant="gpt", **fields):
    experiment = tiny.get_config(variant)
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **fields))


def test_of_a_decoder_each_part_is_counted_by_hand():
    block = 4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 2 * 2 * 32
    numbers = LAYERS * block + (VOCABULARY + 64) * 32 + 2 * 32
    assert floor(tiny.get_config("gpt")) == {
        "kept": KEPT * LENGTH * LAYER,
        "logits": 2 * 2 * ROWS * LENGTH * VOCABULARY,
        "parameters": 2 * 4 * numbers,
        "gradients": 2 * 4 * numbers,
        "update": 2 * (4 * numbers + 2 * 4 * numbers + 4),  # two moments, and Adam's counter
    }


def test_a_gated_feed_forward_keeps_two_arrays_and_fewer_heads_of_keys_less():
    found = floor(model(gated=True, num_kv_heads=2))
    assert found["kept"] == KEPT * LENGTH * (LAYER + 64 - 32)


def test_an_encoder_has_logits_of_its_masked_tokens_alone():
    experiment = tiny.get_config("bert")
    predicted = lengths_of(shapes_of(experiment)).targets
    assert predicted < LENGTH / 2
    found = floor(experiment)
    assert found["logits"] == 2 * 2 * ROWS * predicted * VOCABULARY
    assert found["kept"] == KEPT * LENGTH * LAYER


def test_a_decoder_that_reads_an_encoder_keeps_queries_results_and_the_encoders_keys_and_values():
    experiment = tiny.get_config("t5")
    lengths = lengths_of(shapes_of(experiment))
    decoder = lengths.targets * (LAYER + 2 * 32) + lengths.inputs * 2 * 32
    assert floor(experiment)["kept"] == KEPT * (lengths.inputs * LAYER + decoder)


def test_of_stacks_of_two_sizes_each_keeps_its_own():
    experiment = tiny.get_config("t5_narrow")
    lengths = lengths_of(shapes_of(experiment))
    own = 24 + (32 + 2 * 16 + 32) + 48  # 8 heads of 4, of which keys and values have 4
    decoder = lengths.targets * (own + 2 * 32) + lengths.inputs * 2 * 16
    kept = lengths.inputs * LAYERS * LAYER + 3 * decoder  # layers
    assert floor(experiment)["kept"] == 2 * 2 * ROWS * kept


def test_a_generator_keeps_its_own_and_it_alone_has_logits():
    generator = Generator(num_layers=1, d_model=16, d_ff=32, num_heads=2)
    electra = {"masked_lm_head": False, "replaced_token_head": True, "generator": generator}
    plain, found = floor(model("bert")), floor(model("bert", **electra))
    own = 2 * 2 * ROWS * LENGTH * (16 + 3 * 16 + 16 + 32)
    assert found["kept"] == plain["kept"] + own and found["logits"] == plain["logits"]


def test_a_device_of_several_moves_its_part():
    whole = floor(tiny.get_config("gpt"))
    data, tensor = (floor(tiny.get_config("gpt"), ONE | {axis: 2}) for axis in ("data", "tensor"))
    assert (2 * data["kept"], 2 * data["logits"]) == (whole["kept"], whole["logits"])
    # along tensor the layer's input stays whole, 32 of 224 numbers
    assert (tensor["kept"], 2 * tensor["logits"]) == (whole["kept"] * (32 + 192 // 2) // 224, whole["logits"])


def test_micro_batches_read_the_parameters_again_and_float32_takes_twice_as_much():
    experiment = tiny.get_config("gpt")
    once = floor(experiment)
    experiment.train.accumulate = 2
    twice = floor(experiment)
    assert twice["parameters"] == 2 * once["parameters"] and twice["gradients"] == 2 * once["gradients"]
    assert twice["kept"] == once["kept"] and twice["update"] == once["update"]
    assert floor(tiny.get_config("gpt"), platform="cpu")["kept"] == 2 * once["kept"]
