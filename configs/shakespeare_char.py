"""Trains nanoGPT's character-level CPU benchmark: a 0.8M-parameter GPT on the works of Shakespeare, about 3 minutes on
a CPU.

    python -m pretrainax.main --config=configs/shakespeare_char.py --config.data.source.path=input.txt

`input.txt` is the 1.1 MB file of char-rnn's tinyshakespeare; its first 90 % are for training, the rest for validation.
Expected: validation loss about 1.88 nats per character (nanoGPT's README, "I only have a macbook").
"""

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    LearnedPositions,
    ModelConfig,
    TrainConfig,
    UserError,
)
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import TextFiles
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import Characters


def get_config(variant: str = "") -> Experiment:
    if variant:
        raise UserError(f"shakespeare_char has no variant {variant!r}")
    return Experiment(
        model=ModelConfig(
            family="decoder",
            vocab_size=128,
            num_layers=4,
            d_model=128,
            d_ff=512,
            num_heads=4,
            position=LearnedPositions(64),
            use_bias=False,
            scale_residual_init=True,
        ),
        tokenizer=Characters(),
        data=DataConfig(source=TextFiles(path="input.txt", valid_fraction=0.1), sequence_length=64),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=1e-3, b2=0.99, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=100, final_fraction=0.1),
        train=TrainConfig(steps=2000, global_batch_size=12),
        evaluate=EvaluateConfig(every=250, batches=0),  # the whole validation split: 145 batches of 12 x 64
        checkpoint=CheckpointConfig(every=1000),
    )
