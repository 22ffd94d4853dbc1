"""Tests each adaptation of a start: how it creates arrays, and in which cases it preserves the initial function."""

import dataclasses

import jax
import numpy as np
import pytest

from pretrainax.config import (
    LearnedPositions,
    LinearScaling,
    MixtureOfExperts,
    RotaryPositions,
    SlidingWindows,
    UserError,
)
from pretrainax.interop.adaptations import (
    DecoderToEncoder,
    DecoderToEncoderDecoder,
    DenseToExperts,
    FullToSparse,
    Layers,
    LongerContext,
    WiderVocabulary,
)
from pretrainax.layers.compute import Compute
from pretrainax.layers.stack import Stack
from pretrainax.models.base import Model
from pretrainax.models.encoder import Encoder
from pretrainax.sharding.param_paths import flat
from tests.golden import CASES
from tests.golden.case import Case, batch, weights
from tests.support.adapted import planned, taken
from tests.support.exports import our_logits
from tests.support.huggingface_weights import write_run
from tests.support.tiers import few

pytestmark = pytest.mark.slow

# Both programs compute the same sums in another order. float32 has 7 digits, and logits reach some tens.
ROUNDING = dict(rtol=1e-4, atol=1e-4)


def logits_of(name, arrays=None):
    """Returns the logits of a tiny decoder."""
    config = CASES[name].config
    return our_logits(config, weights(config), arrays or batch(CASES[name]))


class Closed(Encoder):
    """An encoder with a causal mask."""

    def setup(self):
        Model.setup(self)
        self.encoder = Stack(self.config, self.compute, causal=True, num_layers=self.config.num_layers)


# --- families --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(["gpt2", "llama3", "gemma2", "qwen3_moe"], ["gpt2", "gemma2"]))
def test_with_its_mask_kept_closed_an_encoder_says_what_the_decoder_did(name, tmp_path):
    model, arrays = dataclasses.replace(CASES[name].config, family="encoder"), batch(CASES[name])
    params = taken(write_run(tmp_path / "start", CASES[name].config), model, DecoderToEncoder())
    with jax.default_matmul_precision("highest"):
        outputs = Closed(model, Compute()).apply({"params": params}, arrays, deterministic=True)
    closed = np.asarray(outputs.heads["lm"].logits())
    np.testing.assert_allclose(closed, logits_of(name), **ROUNDING)
    # Without the causal mask, the first token attends to the other tokens.
    assert np.abs(our_logits(model, params, arrays) - closed)[:, 0].max() > 0.1


def test_of_one_token_alone_an_encoder_says_what_the_decoder_did(tmp_path):
    model, arrays = dataclasses.replace(CASES["llama3"].config, family="encoder"), batch(CASES["llama3"])
    arrays = {key: x[:, :1] for key, x in arrays.items()}
    params = taken(write_run(tmp_path / "start", CASES["llama3"].config), model, DecoderToEncoder())
    np.testing.assert_allclose(our_logits(model, params, arrays), logits_of("llama3", arrays), **ROUNDING)


@pytest.mark.parametrize("name", few(["gpt2", "llama3", "gemma1"], ["llama3"]))
def test_silent_cross_attention_lets_the_decoder_say_what_it_did(name, tmp_path):
    model = dataclasses.replace(CASES[name].config, family="encoder_decoder")
    adaptation = DecoderToEncoderDecoder(cross_attention="zero")
    params = taken(write_run(tmp_path / "start", CASES[name].config), model, adaptation)
    encoder = {key: x for key, x in batch(Case(model, CASES[name].family)).items() if key.startswith("encoder_")}
    arrays = batch(CASES[name])
    np.testing.assert_allclose(our_logits(model, params, arrays | encoder), logits_of(name, arrays), **ROUNDING)


def test_both_stacks_are_the_decoder_s_and_cross_attention_is_self_attention_of_its_layer(tmp_path):
    source = dataclasses.replace(CASES["gpt2"].config, embedding_norm=True, qk_norm=True)
    model = dataclasses.replace(source, family="encoder_decoder")
    params = flat(taken(write_run(tmp_path / "start", source), model, DecoderToEncoderDecoder()))
    theirs = flat(weights(source))
    for path, x in params.items():
        there = path.replace("cross_attention", "self_attention").removeprefix("decoder_")
        there = there.replace("encoder/", "decoder/", 1) if there.startswith("encoder/") else there
        np.testing.assert_array_equal(x, theirs[there], err_msg=path)
    assert {"decoder_position_embedding/embedding", "decoder_embedding_norm/scale"} <= params.keys()
    # Kernels and biases of four linear maps and three norms.
    assert sum("cross_attention" in path for path in params) == 14


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "top_k"),
    few([("llama3", 1), ("gemma2", 2), ("qwen2", 3), ("t5gemma_9b_2b", 2)], [("t5gemma_9b_2b", 2)]),
)
def test_where_their_weights_add_up_to_one_experts_compute_what_the_feed_forward_did(name, top_k, tmp_path):
    model = dataclasses.replace(CASES[name].config, experts=MixtureOfExperts(num_experts=4, top_k=top_k))
    start = write_run(tmp_path / "start", CASES[name].config)
    params = taken(start, model, DenseToExperts())
    assert np.std(flat(params)["decoder/blocks/mlp/router/kernel"]) > 0.5  # so tokens go to different experts
    np.testing.assert_allclose(our_logits(model, params, batch(CASES[name])), logits_of(name), **ROUNDING)
    assert planned(start, model, DenseToExperts()).effects == (
        "DenseToExperts(): the initial function is unchanged for any router output",
    )


def test_first_layers_stay_as_they_are_where_the_others_have_experts(tmp_path):
    source = dataclasses.replace(CASES["llama3"].config, num_layers=4)
    model = dataclasses.replace(source, experts=MixtureOfExperts(num_experts=4, top_k=2, first_dense=1))
    params = taken(write_run(tmp_path / "start", source), model, DenseToExperts())
    arrays = batch(CASES["llama3"])
    np.testing.assert_allclose(
        our_logits(model, params, arrays), our_logits(source, weights(source), arrays), **ROUNDING
    )


def test_layers_between_stay_as_they_are_where_every_second_has_experts(tmp_path):
    source = dataclasses.replace(CASES["t5_1_0"].config, num_layers=4)
    model = dataclasses.replace(source, experts=MixtureOfExperts(num_experts=3, top_k=1, every=2))
    params = taken(write_run(tmp_path / "start", source), model, DenseToExperts())
    arrays = batch(CASES["t5_1_0"])
    np.testing.assert_allclose(
        our_logits(model, params, arrays), our_logits(source, weights(source), arrays), **ROUNDING
    )


@pytest.mark.parametrize("name", few(["gpt2", "t5_1_1"], ["t5_1_1"]))
def test_a_feed_forward_behind_the_experts_adds_nothing_at_first(name, tmp_path):
    source = dataclasses.replace(CASES[name].config, num_layers=4)
    model = dataclasses.replace(source, experts=MixtureOfExperts(num_experts=3, top_k=2, every=2, dense_after=40))
    start = write_run(tmp_path / "start", source)
    params = taken(start, model, DenseToExperts())
    arrays = batch(CASES[name])
    np.testing.assert_allclose(
        our_logits(model, params, arrays), our_logits(source, weights(source), arrays), **ROUNDING
    )
    made = {path: how for path, how in planned(start, model, DenseToExperts()).created.items() if "/mlp_after" in path}
    of_norm = {"scale", "bias"} if source.use_bias else {"scale"}
    assert {path.partition("/mlp_after")[2] for path, how in made.items() if how == "initialized"} == {
        *(f"_norm/{name}" for name in of_norm),
        *(f"/{name}/kernel" for name in (("up", "gate") if source.gated else ("up",))),
        *(["/up/bias"] * source.use_bias),
    }
    assert all("zero" in how for path, how in made.items() if "/down/" in path)


def test_of_weights_that_do_not_add_up_to_one_a_router_without_an_opinion_gives_their_share(tmp_path):
    """A zero router gives all experts the weight 1 / E, and the layer adds the outputs of k experts.

    This equals the dense model with its down projection scaled by k / E, which the report states.
    """
    source, experts = CASES["llama3"].config, MixtureOfExperts(num_experts=8, top_k=2, normalized=False)
    model, start = dataclasses.replace(source, experts=experts), write_run(tmp_path / "start", CASES["llama3"].config)
    params = taken(start, model, DenseToExperts())
    params["decoder"]["blocks"]["mlp"]["router"]["kernel"] *= 0
    less = weights(source)
    less["decoder"]["blocks"]["mlp"]["down"]["kernel"] *= 2 / 8
    arrays = batch(CASES["llama3"])
    np.testing.assert_allclose(our_logits(model, params, arrays), our_logits(source, less, arrays), **ROUNDING)
    (effect,) = planned(start, model, DenseToExperts()).effects
    assert "do not sum to 1 (normalized, scale) but to about 0.25 with a fresh router, which scales" in effect
    scaled = MixtureOfExperts(num_experts=8, top_k=2, normalized=False, scores="sigmoid", scale=2.5)
    (effect,) = planned(start, dataclasses.replace(source, experts=scaled), DenseToExperts()).effects
    assert "but to about 2.5 with a fresh router, which scales the output of each feed-forward layer" in effect


def test_biases_are_copied_too_and_what_is_dropped_is_said(tmp_path):
    model = dataclasses.replace(CASES["gpt2"].config, experts=MixtureOfExperts(capacity=1.25))
    start = planned(write_run(tmp_path / "start", CASES["gpt2"].config), model, DenseToExperts())
    assert not start.unused_paths and "drop tokens above their capacity" in start.effects[0]
    assert {start.created[f"decoder/blocks/mlp/router/{name}"] for name in ("kernel", "bias")} == {"initialized"}
    assert start.created["decoder/blocks/mlp/experts_up/bias"] == "8 copies (decoder/blocks/mlp/up/bias)"
    assert start.created["decoder/blocks/mlp/experts_up/kernel"] == "8 copies (decoder/blocks/mlp/up/kernel)"


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there, ours, layers, expected",
    [
        (4, 2, Layers(), [0, 2]),
        (2, 4, Layers(), [0, 0, 1, 1]),
        (2, 4, Layers("stacked"), [0, 1, 0, 1]),
        (2, 3, Layers("stacked"), [0, 1, 0]),
        (4, 3, Layers((3, 3, 1)), [3, 3, 1]),
        (4, 4, Layers(), [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_layers_begin_as_those_that_are_taken(there, ours, layers, expected, tmp_path):
    source = dataclasses.replace(CASES["gpt2"].config, num_layers=there)
    model = dataclasses.replace(source, num_layers=ours)
    params = flat(taken(write_run(tmp_path / "start", source), model, layers))
    for path, x in flat(weights(source)).items():
        np.testing.assert_array_equal(params[path], x[expected] if "/blocks/" in path else x, err_msg=path)


@pytest.mark.parametrize(
    ("name", "which"),
    few([("gpt2", "evenly"), ("llama3", "stacked"), ("mixtral", "evenly")], [("llama3", "stacked")]),
)
def test_more_layers_that_are_silent_compute_what_fewer_did(name, which, tmp_path):
    model = dataclasses.replace(CASES[name].config, num_layers=4)
    start = write_run(tmp_path / "start", CASES[name].config)
    params = taken(start, model, Layers(which, zero_init=True))
    np.testing.assert_allclose(our_logits(model, params, batch(CASES[name])), logits_of(name), **ROUNDING)
    assert planned(start, model, Layers(which, zero_init=True)).effects[0].endswith("the initial function is unchanged")
    louder = taken(start, model, Layers(which))
    assert np.abs(our_logits(model, louder, batch(CASES[name])) - logits_of(name)).max() > 0.1


def test_layers_without_experts_are_taken_for_those_without_and_others_for_others(tmp_path):
    experts = MixtureOfExperts(num_experts=4, top_k=2, first_dense=1)
    source = dataclasses.replace(CASES["llama3"].config, num_layers=4, experts=experts)
    start, model = write_run(tmp_path / "start", source), dataclasses.replace(source, num_layers=3)
    params = flat(taken(start, model, Layers((0, 3, 1))))
    for path, x in flat(weights(source)).items():
        layers = [0] if "/dense/" in path else [2, 0] if "/blocks/" in path else slice(None)
        np.testing.assert_array_equal(params[path], x[layers], err_msg=path)
    with pytest.raises(UserError, match="layers 1 would be of the other kind: set layers to layers of the same kind"):
        planned(start, model, Layers((0, 0, 1)))


def test_of_layers_in_turns_too(tmp_path):
    experts = MixtureOfExperts(num_experts=4, top_k=1, every=2)
    source = dataclasses.replace(CASES["llama3"].config, num_layers=4, experts=experts)
    start, model = write_run(tmp_path / "start", source), dataclasses.replace(source, num_layers=2)
    params = flat(taken(start, model, Layers((2, 1))))
    for path, x in flat(weights(source)).items():
        layers = [1] if "/between/" in path else [0] if "/blocks/" in path else slice(None)
        np.testing.assert_array_equal(params[path], x[layers], err_msg=path)
    with pytest.raises(UserError, match="layers 1 would be of the other kind: set layers to layers of the same kind"):
        planned(start, model, Layers((0, 2)))


@pytest.mark.parametrize("taken", [(0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 1, 0), (0, 0, 0, 0)])
def test_silent_layers_are_said_to_change_nothing_where_the_others_are_all_there_and_in_their_order(taken, tmp_path):
    source, model = CASES["gpt2"].config, dataclasses.replace(CASES["gpt2"].config, num_layers=4)
    start = planned(write_run(tmp_path / "start", source), model, Layers(taken, zero_init=True))
    assert start.effects[0].endswith("the initial function is unchanged") == (taken in [(0, 0, 1, 1), (0, 1, 1, 0)])


def test_layers_that_were_local_and_are_global_are_said(tmp_path):
    source = dataclasses.replace(CASES["gpt_neo"].config, num_layers=2)  # one global and one local layer
    start = write_run(tmp_path / "start", source)
    for layers, other, same in ((Layers(zero_init=True), "1, 2", False), (Layers("stacked", zero_init=True), "", True)):
        (effect,) = planned(start, dataclasses.replace(source, num_layers=4), layers).effects
        said = f"with another attention than in the start (local, global, without rotation): {other} of these 4"
        assert (said in effect) != same
        assert effect.endswith("the initial function is unchanged") == same


def test_layers_that_positions_turned_and_do_not_here_are_said(tmp_path):
    position = RotaryPositions(20, theta=40.0, no_rotation_every=4)
    source = dataclasses.replace(CASES["llama3"].config, num_layers=8, position=position)
    start = write_run(tmp_path / "start", source)
    (effect,) = planned(start, dataclasses.replace(source, num_layers=4), Layers()).effects
    assert "with another attention than in the start (local, global, without rotation): 3 of these 4" in effect


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama3", "bert_masked_lm"])  # tied table, untied table, output bias
def test_logits_of_old_tokens_stay_and_those_of_new_ones_are_their_mean(name, tmp_path):
    source = CASES[name].config
    model = dataclasses.replace(source, vocab_size=128)
    params = taken(write_run(tmp_path / "start", source), model, WiderVocabulary())
    old, new = logits_of(name), our_logits(model, params, batch(CASES[name]))
    np.testing.assert_allclose(new[..., : source.vocab_size], old, **ROUNDING)
    mean = np.repeat(old.mean(axis=-1, keepdims=True), 128 - source.vocab_size, axis=-1)
    np.testing.assert_allclose(new[..., source.vocab_size :], mean, **ROUNDING)


def test_rows_that_no_token_had_are_made_like_new_ones(tmp_path):
    source = CASES["gpt2"].config
    start, model = write_run(tmp_path / "start", source), dataclasses.replace(source, vocab_size=128)
    table = flat(taken(start, model, WiderVocabulary(tokens=40)))["token_embedding/embedding"]
    old = flat(weights(source))["token_embedding/embedding"]
    np.testing.assert_array_equal(table[:40], old[:40])
    # The means of 40 numbers sum in another order.
    np.testing.assert_allclose(table[40:], np.broadcast_to(old[:40].mean(axis=0), (88, 16)), atol=1e-6)
    assert (
        "the 40 old tokens keep their logits, the 88 new tokens get"
        in planned(start, model, WiderVocabulary(40)).effects[0]
    )


@pytest.mark.parametrize("name", ["gpt2", "roberta", "bart"])  # the last two have rows that no position uses
def test_a_longer_context_leaves_learned_positions_as_they_were_and_repeats_them(name, tmp_path):
    source = CASES[name].config
    unused = source.position.offset
    model = dataclasses.replace(source, position=LearnedPositions(50, offset=unused))
    params = taken(write_run(tmp_path / "start", source, pad_id=CASES[name].pad_id), model, LongerContext())
    np.testing.assert_allclose(our_logits(model, params, batch(CASES[name])), logits_of(name), **ROUNDING)
    for path, x in flat(weights(source)).items():
        if "position" in path:
            rows = [*range(unused), *(unused + i % 20 for i in range(50))]
            np.testing.assert_array_equal(flat(params)[path], x[rows], err_msg=path)


def test_positions_that_are_stretched_keep_the_first_and_the_last(tmp_path):
    source = CASES["gpt2"].config
    model = dataclasses.replace(source, position=LearnedPositions(39))
    start = write_run(tmp_path / "start", source)
    table = np.asarray(flat(taken(start, model, LongerContext("interpolate")))["position_embedding/embedding"])
    old = flat(weights(source))["position_embedding/embedding"]
    # Every second row equals an old row. The rows between them are means of two old rows, exact except for the last
    # digit.
    np.testing.assert_allclose(table[::2], old, atol=1e-6)
    np.testing.assert_allclose(table[1::2], (old[1:] + old[:-1]) / 2, atol=1e-6)


def test_rotary_positions_become_slower_and_no_array_changes(tmp_path):
    source = CASES["llama3"].config
    position = RotaryPositions(80, theta=160.0, scaling=LinearScaling(4.0))
    model, start = dataclasses.replace(source, position=position), write_run(tmp_path / "start", source)
    adapted = planned(start, model, LongerContext())
    assert not adapted.created and not adapted.unused_paths and not adapted.fit.changed
    assert adapted.effects == (
        "LongerContext(): max_length 20 -> 80; theta 40.0 -> 160.0; scaling None -> LinearScaling(factor=4.0)",
    )
    for path, x in flat(taken(start, model, LongerContext())).items():
        np.testing.assert_array_equal(x, flat(weights(source))[path])


# --- sparse attention ------------------------------------------------------------------------------------------------


def windowed(window):
    return dataclasses.replace(
        CASES["roberta"].config, layer_pattern=("local",), window=window, sparse_attention=SlidingWindows()
    )


def test_windows_say_the_same_of_rows_that_they_hold(tmp_path):
    case = CASES["roberta"]
    start, arrays = write_run(tmp_path / "start", case.config, pad_id=case.pad_id), batch(case)
    wide = our_logits(windowed(30), taken(start, windowed(30), FullToSparse()), arrays)
    real = arrays["segment_ids"] > 0
    np.testing.assert_allclose(wide[real], logits_of("roberta", arrays)[real], **ROUNDING)
    narrow = our_logits(windowed(4), taken(start, windowed(4), FullToSparse()), arrays)
    assert np.abs(narrow - wide)[real].max() > 0.1


def test_maps_of_global_tokens_begin_as_copies(tmp_path):
    params = flat(taken(write_run(tmp_path / "start", CASES["roberta"].config, pad_id=1), windowed(4), FullToSparse()))
    for name in ("query", "key", "value"):
        own, copied = (params[f"encoder/blocks/self_attention/{x}{name}/kernel"] for x in ("", "global_"))
        np.testing.assert_array_equal(own, copied)


def test_what_is_sparse_already_is_not_narrowed(tmp_path):
    start = write_run(tmp_path / "start", windowed(4), pad_id=1)
    with pytest.raises(UserError, match=r"FullToSparse\(\), .* must be None: leave the adaptation out"):
        planned(start, windowed(8), FullToSparse())
