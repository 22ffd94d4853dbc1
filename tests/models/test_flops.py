import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.config import DecoderSizes, LearnedPositions
from pretrainax.data.objectives import Lengths
from pretrainax.layers.attention_spec import AttentionSpec, Work
from pretrainax.layers.compute import Compute
from pretrainax.models.electra import discriminator_config, generator_config
from pretrainax.models.flops import attention_flops, executed_flops, flops_per_step, other_flops, work_of
from pretrainax.runtime.chips import peak_flops
from pretrainax.zoo.bert import bert
from pretrainax.zoo.electra import electra
from pretrainax.zoo.gemma import gemma
from pretrainax.zoo.gpt import gpt2
from pretrainax.zoo.llama import llama
from pretrainax.zoo.modernbert import modernbert
from pretrainax.zoo.t5 import t5
from pretrainax.zoo.t5gemma import t5gemma

SMALL = dict(num_layers=2, d_model=256, d_ff=1024, num_heads=4, vocab_size=2048)
CASES = {
    "bert": (bert("base"), Lengths(62, 64, 10), {}),
    "electra": (discriminator_config(electra("small")), Lengths(62, 64, 10), {}),
    "gpt2": (gpt2("124m"), Lengths(65, 64, 64), {}),
    "llama": (llama("3_8b"), Lengths(65, 64, 64), dict(num_kv_heads=2)),
    "t5": (t5("base"), Lengths(70, 64, 24), {}),
    "t5gemma": (
        t5gemma("9b_2b"),
        Lengths(70, 64, 24),
        dict(num_decoder_layers=3, num_kv_heads=2, head_dim=32, window=8, encoder_window=16)
        | dict(decoder=DecoderSizes(d_model=192, d_ff=512, num_heads=6, num_kv_heads=3, head_dim=16)),
    ),
    # XLA's own attention computes all pairs, also outside of the windows.
    "gemma": (gemma("3_1b"), Lengths(65, 64, 64), dict(num_kv_heads=2, layer_pattern=("local", "global"), window=8)),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_xla(name):
    config, lengths, changes = CASES[name]
    config = dataclasses.replace(config, **SMALL, **changes)
    length = lengths.targets if config.family == "encoder_decoder" else lengths.inputs
    names = ("tokens", "positions", "segment_ids")
    batch = {name: jax.ShapeDtypeStruct((4, length), jnp.int32) for name in names}
    batch |= {f"encoder_{name}": jax.ShapeDtypeStruct((4, lengths.inputs), jnp.int32) for name in names}
    if config.family == "encoder":
        batch["masked_positions"] = jax.ShapeDtypeStruct((4, lengths.targets), jnp.int32)
    # XLA counts the body of a loop once, so the layers are unrolled.
    model = models.build(config, Compute(scan_unroll=config.last_stack.num_layers))

    def loss(params, batch):
        # The loss is not a plain sum, because XLA would simplify a product with a gradient of ones.
        outputs = model.apply({"params": params}, batch, deterministic=True)
        logits = outputs.heads["lm"].logits() if "lm" in outputs.heads else outputs.heads["replaced"].logits
        return jnp.sum(jnp.square(logits))

    lowered = jax.jit(jax.grad(loss)).lower(models.abstract_params(config), batch)
    counted = lowered.compile().cost_analysis()["flops"]
    # XLA also counts norms, activations and softmax, which are a few percent at this width.
    assert 1.0 <= counted / flops_per_step(config, 4, lengths.inputs, lengths.targets) < 1.08


def test_a_generator_is_counted_too():
    config, lengths = electra("base"), Lengths(510, 512, 77)
    total = flops_per_step(config, 4, lengths.inputs, lengths.targets)
    kept, generator = (
        flops_per_step(part(config), 4, lengths.inputs, lengths.targets)
        for part in (discriminator_config, generator_config)
    )
    # The generator has a third of the width, and the same depth.
    assert total == kept + generator and 0.1 < generator / kept < 0.2


def test_gpt2_costs_what_is_published():
    # The formula is 6 x the parameters of matmuls + 12 x layers x width x context. GPT-2 124M at 1,024 has 0.86 GFLOP
    # per token.
    config = gpt2("124m")
    assert config.position == LearnedPositions(1024)
    per_token = flops_per_step(config, 8, 1024, 1024) / (8 * 1024)
    multiplying = 12 * 12 * 768**2 + 50_257 * 768
    assert per_token == 6 * multiplying + 12 * 12 * 768 * 1024
    assert math.isclose(per_token, 0.86e9, rel_tol=0.01)


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 990e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v4", 275e12),
        ("TPU7x", 2307e12 / 2),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("cpu", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_by_hand():
    # The encoder, the decoder and the cross-attention differ in lengths, depths, widths and heads.
    config = dataclasses.replace(
        t5("base"),
        **dict(num_layers=3, num_decoder_layers=2, d_model=8, d_ff=24, num_heads=3, num_kv_heads=1, head_dim=4),
        vocab_size=100,
    )
    inputs, targets, width, kv_width = 10, 7, 3 * 4, 4
    maps = 3 if config.gated else 2

    def attention(queries, keys):
        projections = 2 * queries * 8 * width * 2 + 2 * keys * 8 * kv_width * 2
        return projections + 2 * queries * keys * width * 2

    encoder = 3 * (attention(inputs, inputs) + 2 * inputs * 8 * 24 * maps)
    decoder = 2 * (attention(targets, targets) + attention(targets, inputs) + 2 * targets * 8 * 24 * maps)
    head = 2 * targets * 8 * 100
    assert flops_per_step(config, 5, inputs, targets) == 3 * 5 * (encoder + decoder + head)
    # This decoder has its own sizes, and its cross-attention reads vectors of width 8.
    own = dataclasses.replace(config, separate_embeddings=True, decoder=DecoderSizes(6, 20, 2, 1, 5))

    def of_decoder(keys, read):
        projections = 2 * targets * 6 * 10 * 2 + 2 * keys * read * 5 * 2
        return projections + 2 * targets * keys * 10 * 2

    decoder = 2 * (of_decoder(targets, 6) + of_decoder(inputs, 8) + 2 * targets * 6 * 20 * maps)
    assert flops_per_step(own, 5, inputs, targets) == 3 * 5 * (encoder + decoder + 2 * targets * 6 * 100)


# --- executed FLOPs --------------------------------------------------------------------------------------------------


def traced(config, length, **other):
    """Returns the spec of a model's masked attention."""
    fields = dict(dtype="bfloat16", bias="none", has_prefix=False, has_positions=False, sequence=1)
    return AttentionSpec(
        **{**fields, **other},
        head_dim=config.dim_per_head,
        query_length=length,
        key_length=length,
        causal=config.family == "decoder",
        window=config.window,
        logit_cap=config.attention_logit_cap,
    )


def too_dear(config, length, targets, work):
    return flops_per_step(config, 4, length, targets) / executed_flops(config, 4, length, targets, work)


def exactly(causal):
    """Counts the pairs that the mask allows, as a kernel whose tiles have one query and one key."""

    def work(one):
        after = 0 if causal else one.keys
        before, after = (one.keys, after) if one.window is None else (one.window - 1, 0)
        if one.window is not None and not causal:
            before = after = one.window // 2
        places = np.arange(one.queries)
        seen = np.minimum(places + after, one.keys - 1) - np.maximum(places - before, 0) + 1
        return Work(np.array([seen.sum()]))

    return work


def test_modernbert_at_8192_is_nearly_twice_as_dear_by_the_convention():
    config = modernbert("base")
    work = work_of([traced(config, 8192)], "auto", "tpu")
    assert round(too_dear(config, 8192, int(0.15 * 8192), exactly(causal=False)), 1) == 1.8
    # Splash computes tiles of 512 × 512, three of them for a query that attends to 129 keys.
    assert too_dear(config, 8192, int(0.15 * 8192), work) == pytest.approx(1.58, abs=0.005)


def test_gemma_3_at_32768_is_more_than_twice_as_dear_by_the_convention():
    config = gemma("3_1b")
    windows = [one.window for one in _collected(config, 32_768, 32_768)]
    assert sorted(windows, key=str) == [512, None]

    def windows_alone(one):  # Counts all pairs of the global layers, although these layers also skip the causal half.
        return exactly(causal=True)(one) if one.window else Work(np.array([one.queries * one.keys]))

    assert round(too_dear(config, 32_768, 32_768, windows_alone), 1) == 2.1
    assert too_dear(config, 32_768, 32_768, exactly(causal=True)) == pytest.approx(2.37, abs=0.005)
    work = work_of([traced(config, 32_768)], "auto", "tpu")
    assert too_dear(config, 32_768, 32_768, work) == pytest.approx(2.32, abs=0.005)


def _collected(config, inputs, targets):
    """Returns the attentions of a model."""
    found = []
    attention_flops(config, inputs, targets, lambda one: found.append(one) or 0.0)
    return found


@pytest.mark.parametrize(
    "preset, platform",
    [
        ("gemma3_1b", "cpu"),
        ("modernbert_base", "cpu"),
    ],
)
def test_nothing_is_skipped_where_xla_runs(preset, platform):
    config = zoo.preset(preset)
    work = work_of([traced(config, 2048)], "auto", platform)
    assert executed_flops(config, 4, 2048, 2048, work) == flops_per_step(config, 4, 2048, 2048)


def test_a_causal_half_is_skipped_by_cudnn():
    config = gpt2("124m")
    work = work_of([traced(config, 1024)], "auto", "gpu")
    half = 12 * 12 * 768 * 1024 * (1 - 1025 / 2048)  # a part of 12 x layers x width x context
    skipped = flops_per_step(config, 8, 1024, 1024) - executed_flops(config, 8, 1024, 1024, work)
    assert skipped == pytest.approx(8 * 1024 * half, rel=1e-12)


def test_only_a_decoders_own_attention_has_a_half_to_skip():
    config = dataclasses.replace(t5("base"), num_layers=3, num_decoder_layers=2)
    encoder = dict(head_dim=64, dtype="bfloat16", has_prefix=False, has_positions=False, logit_cap=None, sequence=1)
    encoder |= dict(window=None, query_length=512, key_length=512, causal=False, bias="shared")
    specs = [AttentionSpec(**(encoder | changes)) for changes in ({}, dict(causal=True), dict(bias="none"))]
    skipped = flops_per_step(config, 1, 256, 512) - executed_flops(config, 1, 256, 512, work_of(specs, "auto", "gpu"))
    # The lengths differ from the lengths of the traced specs.
    assert skipped == 12 * 2 * 768 * (512**2 - 512 * 513 / 2)


def test_both_encoders_of_electra_have_windows():
    config = dataclasses.replace(electra("base"), layer_pattern=("local",), window=128)
    specs = [traced(part, 2048) for part in (discriminator_config(config), generator_config(config))]
    total = executed_flops(config, 4, 2048, 154, work_of(specs, "auto", "tpu"))
    parts = (
        executed_flops(part(config), 4, 2048, 154, work_of(specs, "auto", "tpu"))
        for part in (discriminator_config, generator_config)
    )
    assert total == sum(parts) < flops_per_step(config, 4, 2048, 154)


def test_a_mask_decoder_runs_the_last_block_twice():
    config = dataclasses.replace(zoo.preset("deberta_v3_base"), generator=None, enhanced_mask_decoder=True)
    once = dataclasses.replace(config, enhanced_mask_decoder=False)
    deeper = dataclasses.replace(once, num_layers=once.num_layers + 1)
    assert flops_per_step(config, 2, 64, 10) == flops_per_step(deeper, 2, 64, 10) > flops_per_step(once, 2, 64, 10)


def test_narrow_embeddings_are_projected_on_their_way_in_and_a_masked_lm_back_to_them():
    config = dataclasses.replace(bert("base"), d_model=12, embedding_dim=5, num_layers=1, vocab_size=70)
    wide = dataclasses.replace(config, embedding_dim=None)
    inputs, targets = 9, 2
    narrow = 2 * inputs * 5 * 12 + 2 * targets * 12 * 5 + 2 * targets * 5 * 70
    usual = 2 * targets * 12 * 12 + 2 * targets * 12 * 70
    difference = flops_per_step(wide, 4, inputs, targets) - flops_per_step(config, 4, inputs, targets)
    assert difference == 3 * 4 * (usual - narrow) and config.masked_lm_head


def test_of_layers_in_turns_each_costs_what_its_kind_does():
    turns = zoo.preset("switch_base_8")
    everywhere = dataclasses.replace(turns, experts=dataclasses.replace(turns.experts, every=None))
    nowhere = dataclasses.replace(turns, experts=None)
    (some, _), (all_of_them, _), (none, _) = (other_flops(model, 64, 16) for model in (turns, everywhere, nowhere))
    assert none < some == (all_of_them + none) / 2


def test_a_feed_forward_behind_experts_costs_what_it_does_elsewhere():
    config = zoo.preset("st_moe_l")
    without = dataclasses.replace(config, experts=dataclasses.replace(config.experts, dense_after=None))
    extra = flops_per_step(config, 4, 64, 16) - flops_per_step(without, 4, 64, 16)
    # Six layers of each stack have it, with three matrices.
    assert extra == 3 * 4 * 6 * (64 + 16) * 2 * 3 * 1024 * 2816


def test_a_convolution_beside_the_first_block_is_counted_once():
    config = dataclasses.replace(bert("base"), input_convolution=3)
    without = dataclasses.replace(config, input_convolution=None)
    extra = flops_per_step(config, 4, 9, 2) - flops_per_step(without, 4, 9, 2)
    assert extra == 3 * 4 * 2 * 9 * 3 * 768**2


def test_the_attentions_of_an_encoder_decoder_say_who_reads_whom():
    config = dataclasses.replace(t5("base"), num_layers=3, num_decoder_layers=2)
    found = {(one.layers, one.queries, one.keys, one.causal) for one in _collected(config, 10, 7)}
    assert found == {(3, 10, 10, False), (2, 7, 7, True), (2, 7, 10, False)}


def test_positions_of_deberta_are_two_products_more_of_each_block():
    config = dataclasses.replace(zoo.preset("deberta_v3_base"), generator=None, num_layers=5)
    without = dataclasses.replace(config, position=LearnedPositions(64))
    extra = flops_per_step(config, 2, 64, 10) - flops_per_step(without, 2, 64, 10)
    assert extra == 3 * 2 * (5 + 1) * 2 * 2 * 64**2 * 768  # The last block runs twice.


def test_parts_of_a_row_are_added_up():
    config = gpt2("124m")
    whole, split = (work_of([traced(config, 2048, sequence=parts)], "auto", "tpu") for parts in (1, 4))
    assert executed_flops(config, 8, 2048, 2048, split) == executed_flops(config, 8, 2048, 2048, whole)


def test_an_attention_is_that_of_its_lengths():
    fields = dict(head_dim=64, dtype="bfloat16", has_prefix=False, has_positions=False, logit_cap=None, sequence=1)
    fields |= dict(window=None, key_length=512, causal=False)
    # `tiled` supports this attention, and cuDNN does not.
    own = AttentionSpec(**fields, query_length=512, bias="by_row")
    cross = AttentionSpec(**fields, query_length=256, bias="none")
    reads = [one for one in _collected(t5("base"), 512, 256) if not one.causal]
    again = {one.queries: work_of([own, cross], "auto", "gpu")(one).recomputed for one in reads}
    assert again == {512: 3, 256: 1}
