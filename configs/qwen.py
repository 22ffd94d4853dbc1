"""Pretrains Qwen 2, 2.5 and 3 with causal language modelling. Variants: `:2_0_5b` … `:2_72b`, `:2_5_0_5b` … `:2_5_72b`,
`:3_0_6b` … `:3_32b`, and with experts `:3_30b_a3b` and `:3_235b_a22b`.

    python -m pretrainax.main --config=configs/qwen.py:3_0_6b --config.mesh.fsdp=8 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)"

Yang et al. 2024, arXiv 2407.10671 and 2412.15115; 2025, arXiv 2505.09388. The reports give tokens and contexts: rows of
4,096 tokens for nearly all of the run. They do not give the hardware, or learning rates and batch sizes, which come
from the authors' own scaling laws; this config uses LLaMA 2's. Source of each value:
`pretrainax recipe --config=qwen:3_8b`. The dataset, many languages and code, is not public; the command uses FineWeb
(Penedo et al. 2024), English web text, instead.

| variant | tokens | MMLU, 5-shot, of the released models |
| --- | --- | --- |
| 2_0_5b, 2_1_5b, 2_7b, 2_72b | 12, 7, 7, 7 T | 45.4, 56.5, 70.3, 84.2 |
| 2_5_0_5b, 2_5_1_5b, 2_5_3b, 2_5_7b, 2_5_14b, 2_5_32b, 2_5_72b | 18 T | 47.5, 60.9, 65.6, 74.2, 79.7, 83.3, 86.1 |
| 3_0_6b, 3_1_7b, 3_4b, 3_8b, 3_14b, 3_32b | 36 T | 52.8, 62.6, 73.0, 76.9, 81.1, 83.6 |
| 3_30b_a3b, 3_235b_a22b | 36 T | 81.4, 87.8 |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.qwen import qwen

BATCH_TOKENS, CONTEXT = 4 * 2**20, 4096


def get_config(variant: str = "2_5_0_5b") -> Experiment:
    variant = variant or "2_5_0_5b"
    model = qwen(variant)
    if variant == "2_0_5b":
        tokens = 12e12
    else:
        tokens = 36e12 if variant.startswith("3_") else 18e12 if variant.startswith("2_5_") else 7e12
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=151_646),  # 151,643 and three special ones; the model has a few more rows
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(
            learning_rate=1.5e-4 if model.num_layers >= 64 else 3e-4,
            b2=0.95,
            epsilon=1e-5,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(
            steps=round(tokens / BATCH_TOKENS),
            global_batch_size=BATCH_TOKENS // CONTEXT,
            log_every=10,
            remat="auto",
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
