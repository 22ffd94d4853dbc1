"""The first record of the track decoder: a small LLaMA with Muon and scaled logits.

It has the best optimizer, scale, width and length of eight pilot runs of 200 core-seconds each, which were compared by
the bits per byte of the tuning documents: 2.44 with AdamW, 2.29 with AdamW and scaled logits, 2.27 with Muon, 2.20
with Muon and scaled logits.
"""

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    ModelConfig,
    RotaryPositions,
    TrainConfig,
)
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon, WarmupCosine
from pretrainax.tokenization import ByteBPE

STEPS = {"": 3000, "short": 60}  # 92 % of the budget at the speed of the pilot runs


def get_config(variant: str = "") -> Experiment:
    steps = STEPS[variant]
    return Experiment(
        model=ModelConfig(
            family="decoder",
            vocab_size=2048,
            num_layers=4,
            d_model=128,
            d_ff=384,
            num_heads=4,
            position=RotaryPositions(),
            norm="rms",
            activation="silu",
            gated=True,
            use_bias=False,
            logit_scale=4.0,
        ),
        tokenizer=ByteBPE(vocab_size=2048, train_bytes=4_000_000),
        data=DataConfig(source=JsonLines(path="text/train.jsonl", valid_path="text/valid.jsonl"), sequence_length=128),
        objective=CausalLM(),
        optimizer=Muon(learning_rate=0.02, adam_learning_rate=0.01, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=max(steps // 20, 1), final_fraction=0.05),
        train=TrainConfig(steps=steps, global_batch_size=16),
        evaluate=EvaluateConfig(batches=16),
        checkpoint=CheckpointConfig(),
    )
