import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from pretrainax import models
from pretrainax.config import LearnedPositions
from pretrainax.data.objectives import Lengths
from pretrainax.layers.compute import Compute
from pretrainax.models.electra import discriminator_config, generator_config
from pretrainax.models.flops import flops_per_step
from pretrainax.runtime.chips import peak_flops
from pretrainax.zoo.bert import bert
from pretrainax.zoo.electra import electra
from pretrainax.zoo.gpt import gpt2
from pretrainax.zoo.llama import llama
from pretrainax.zoo.t5 import t5

SMALL = dict(num_layers=2, d_model=256, d_ff=1024, num_heads=4, vocab_size=2048)
CASES = {
    "bert": (bert("base"), Lengths(62, 64, 10), {}),
    "electra": (discriminator_config(electra("small")), Lengths(62, 64, 10), {}),
    "gpt2": (gpt2("124m"), Lengths(65, 64, 64), {}),
    "llama": (llama("3_8b"), Lengths(65, 64, 64), dict(num_kv_heads=2)),
    "t5": (t5("base"), Lengths(70, 64, 24), {}),
}


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
    model = models.build(config, Compute(scan_unroll=2))  # XLA counts the body of a loop once: no loop

    def loss(params, batch):
        # not a plain sum: XLA would see through the product with a gradient of ones
        outputs = model.apply({"params": params}, batch, deterministic=True)
        logits = outputs.heads["lm"].logits() if "lm" in outputs.heads else outputs.heads["replaced"].logits
        return jnp.sum(jnp.square(logits))

    lowered = jax.jit(jax.grad(loss)).lower(models.abstract_params(config), batch)
    counted = lowered.compile().cost_analysis()["flops"]
    # XLA counts norms, activations and softmax too, which at this width are a few percent
    assert 1.0 <= counted / flops_per_step(config, 4, lengths.inputs, lengths.targets) < 1.08


def test_a_generator_is_counted_too():
    config, lengths = electra("base"), Lengths(510, 512, 77)
    total = flops_per_step(config, 4, lengths.inputs, lengths.targets)
    kept, generator = (
        flops_per_step(part(config), 4, lengths.inputs, lengths.targets)
        for part in (discriminator_config, generator_config)
    )
    assert total == kept + generator and 0.1 < generator / kept < 0.2  # a third as wide, and as deep


def test_gpt2_costs_what_is_published():
    # 6 x the parameters that multiply + 12 x layers x width x context: 0.86 GFLOP a token for GPT-2 124M at 1,024
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
        ("cpu", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak
