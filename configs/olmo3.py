"""Pretrains OLMo 3 with causal language modelling (Olmo team 2025, arXiv 2512.13961). Variants: `:3_7b` and `:3_32b`.

    python -m pretrainax.main --config=configs/olmo3.py:3_7b --config.mesh.fsdp=64 --config.data.source="HuggingFace(
        path='allenai/dolma3', streaming=True)"

This is the first of three stages: 5.9 T (7b) or 5.5 T (32b) tokens of Dolma 3, with 8,192 tokens of context. The second
stage (100 B tokens) and the third (longer documents, YaRN, 65,536 tokens) are not included. Hardware: 512 H100s (7b).
Source of each value: `pretrainax recipe --config=olmo3:3_7b`.

| variant | peak learning rate | tokens per batch | tokens |
| --- | --- | --- | --- |
| 3_7b | 3e-4 | 4 M | 5.93 T |
| 3_32b | 6e-4 | 8 M | 5.50 T |
"""

import dataclasses

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.olmo import olmo3

CONTEXT = 8192
# variant -> (peak learning rate, rows per batch, tokens)
STAGES = {"3_7b": (3e-4, 512, 5.93e12), "3_32b": (6e-4, 1024, 5.5e12)}


def get_config(variant: str = "3_7b") -> Experiment:
    variant = variant or "3_7b"
    model = olmo3(variant)
    model.position = dataclasses.replace(model.position, max_length=CONTEXT, scaling=None, local_theta=None)
    learning_rate, rows, tokens = STAGES[variant]
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=100_278),
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(
            learning_rate=learning_rate,
            b2=0.95,
            epsilon=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
            decay_embeddings=False,
            decay_norms=True,
            decay_biases=True,
        ),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(
            steps=round(tokens / (rows * CONTEXT)), global_batch_size=rows, z_loss=1e-5, log_every=10, remat="auto"
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
