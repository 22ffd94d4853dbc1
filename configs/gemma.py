"""Pretrains Gemma 1, 2 and 3 with causal language modelling. Variants:
`:1_2b :1_7b :2_2b :2_9b :2_27b :3_270m :3_1b :3_4b :3_12b :3_27b`.

    python -m pretrainax.main --config=configs/gemma.py:3_270m --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)"

Gemma team 2024, arXiv 2403.08295 and 2408.00118; 2025, arXiv 2503.19786. The reports give tokens, contexts and chips.
They do not give optimizer, learning rates and batch sizes; this config uses LLaMA 2's. Source of each value:
`pretrainax recipe --config=gemma:3_1b`. Gemma 3 models from 4b on have the scaled positions of the released models,
whose last stage has 128 k tokens of context. The authors pretrained on rows of 32 k tokens before that; to do so from
random weights, set config.model.position to positions without scaling. The dataset is not public; the command uses
FineWeb (Penedo et al. 2024), 15 T tokens of English web text, instead.

| variant | tokens | TPUs of the authors | MMLU, 5-shot, of the released models |
| --- | --- | --- | --- |
| 1_2b, 1_7b | 3, 6 T | 512, 4,096 v5e | 42.3, 64.3 |
| 2_2b, 2_9b, 2_27b | 2, 8, 13 T | 512 v5e, 4,096 v4, 6,144 v5p | 52.2, 71.3, 75.2 |
| 3_270m, 3_1b | 6, 2 T | not published, 512 v5e | HellaSwag, 10-shot: 40.9, 62.3 |
| 3_4b, 3_12b, 3_27b | 4, 12, 14 T | 2,048 v5e, 6,144 v4, 6,144 v5p | 59.6, 74.5, 78.6 |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import BPE
from pretrainax.zoo.gemma import gemma

BATCH_TOKENS = 4 * 2**20
TOKENS = {
    "1_2b": 3e12,
    "1_7b": 6e12,
    "2_2b": 2e12,
    "2_9b": 8e12,
    "2_27b": 13e12,
    "3_270m": 6e12,
    "3_1b": 2e12,
    "3_4b": 4e12,
    "3_12b": 12e12,
    "3_27b": 14e12,
}


def get_config(variant: str = "2_2b") -> Experiment:
    variant = variant or "2_2b"
    model = gemma(variant)  # an unknown variant is a UserError with the nearest names
    context = 32_768 if variant.startswith("3_") else 8192
    return Experiment(
        model=model,
        tokenizer=BPE(vocab_size=262_144 if variant.startswith("3_") else 256_000, special_pieces="gemma"),
        data=DataConfig(source=PythonDocs(), sequence_length=context),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=3e-4, b2=0.95, epsilon=1e-5, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(
            steps=round(TOKENS[variant] / BATCH_TOKENS),
            global_batch_size=BATCH_TOKENS // context,
            log_every=10,
            remat="auto",
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
