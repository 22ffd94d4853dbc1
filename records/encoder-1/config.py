"""The first record of the track encoder: a small ModernBERT with masking at 30 %, Muon and scaled logits.

Pilot runs of about 200 core-seconds had 2.96 bits per byte of the tuning documents with AdamW, and 2.87 with Muon and
scaled logits; masked spans were worse.
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
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon, WarmupCosine
from pretrainax.tokenization import ByteBPE

STEPS = {"": 3000, "short": 60}  # an estimate from pilot runs


def get_config(variant: str = "") -> Experiment:
    steps = STEPS[variant]
    return Experiment(
        model=ModelConfig(
            family="encoder",
            vocab_size=2048,
            num_layers=4,
            d_model=128,
            d_ff=384,
            num_heads=4,
            position=RotaryPositions(),
            norm="rms",
            activation="gelu",
            gated=True,
            use_bias=False,
            masked_lm_head=True,
            logit_scale=4.0,
        ),
        tokenizer=ByteBPE(vocab_size=2048, train_bytes=4_000_000, special_pieces="bert"),
        data=DataConfig(source=JsonLines(path="text/train.jsonl", valid_path="text/valid.jsonl"), sequence_length=128),
        objective=MaskedLM(rate=0.3),
        optimizer=Muon(learning_rate=0.02, adam_learning_rate=0.01, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=max(steps // 20, 1), final_fraction=0.05),
        train=TrainConfig(steps=steps, global_batch_size=16),
        evaluate=EvaluateConfig(batches=16),
        checkpoint=CheckpointConfig(),
    )
