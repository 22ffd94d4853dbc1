"""Pretrains OLMo 2 with causal language modelling (Walsh et al. 2025, arXiv 2501.00656). Variants: `:2_1b`, `:2_7b`,
`:2_13b`, `:2_32b`.

    python -m pretrainax.main --config=configs/olmo.py:2_7b --config.mesh.fsdp=64 --config.data.source="HuggingFace(
        path='allenai/olmo-mix-1124', streaming=True)"

This is the first of two stages: 4 to 6 T tokens of OLMo-Mix-1124, nearly all web text. The second stage is not
included: about 50 to 300 B tokens of better text while the learning rate decays to zero, in three runs whose weights
are averaged. Source of each value: `pretrainax recipe --config=olmo:2_7b`.

The cosine is planned for 5 T tokens (32b: 6.5 T), so that 1b, 7b and 32b end above a tenth of the peak rate. Weight
decay applies to norms, but not to embeddings.

| variant | peak learning rate | tokens per batch | tokens | MMLU after both stages |
| --- | --- | --- | --- | --- |
| 2_1b | 4e-4 | 2 M | 4.0 T | 44.3 |
| 2_7b | 3e-4 | 4 M | 3.9 T | 63.7 |
| 2_13b | 3e-4 | 8 M | 5.0 T | 67.5 |
| 2_32b | 6e-4 | 8 M | 6.1 T | 74.9 |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.olmo import olmo

CONTEXT = 4096
# variant -> (peak learning rate, rows per batch, steps, warmup steps, tokens of the cosine)
STAGES = {
    "2_1b": (4e-4, 512, 1_907_359, 4_000, 5e12),
    "2_7b": (3e-4, 1024, 928_646, 2_000, 5e12),
    "2_13b": (3e-4, 2048, 596_057, 1_000, 5e12),
    "2_32b": (6e-4, 2048, 721_901, 2_000, 6.5e12),
}


def get_config(variant: str = "2_7b") -> Experiment:
    variant = variant or "2_7b"
    model = olmo(variant)
    learning_rate, rows, steps, warmup_steps, cosine = STAGES[variant]
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
        schedule=WarmupCosine(warmup_steps, final_fraction=0.1, cosine_steps=round(cosine / (rows * CONTEXT))),
        train=TrainConfig(steps=steps, global_batch_size=rows, z_loss=1e-5, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
