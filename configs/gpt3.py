"""Pretrains GPT-3 with causal language modelling (Brown et al. 2020, arXiv 2005.14165). Variants:
`:125m :350m :760m :1_3b :2_7b :6_7b :13b :175b`.

    python -m pretrainax.main --config=configs/gpt3.py:1_3b --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', name='sample-350BT', streaming=True)" --config.mesh.fsdp=8

Rows are concatenated documents, and attention crosses document boundaries. Source of each value:
`pretrainax recipe --config=gpt3:1_3b`.

The authors' dataset is not public; the command uses a sample of FineWeb (Penedo et al. 2024), 350 B tokens of web text,
instead.

The authors trained on V100 GPUs. The table has their petaflop/s-days (table D.1) and zero-shot scores (table H.1):

| variant | PF-days | LAMBADA | HellaSwag |
| --- | --- | --- | --- |
| 125m, 350m, 760m, 1_3b | 2.6, 7.4, 15.8, 27.5 | 42.7, 54.3, 60.4, 63.6 | 33.7, 43.6, 51.0, 54.7 |
| 2_7b, 6_7b, 13b, 175b | 55.2, 139, 268, 3640 | 67.1, 70.3, 72.5, 76.2 | 62.8, 67.4, 70.9, 78.9 |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.gpt import gpt3

TOKENS = 300e9
# variant -> (peak learning rate, rows of 2,048 tokens per batch: 0.5, 1, 2 and 3.2 M tokens)
RECIPES = {
    "125m": (6.0e-4, 256),
    "350m": (3.0e-4, 256),
    "760m": (2.5e-4, 256),
    "1_3b": (2.0e-4, 512),
    "2_7b": (1.6e-4, 512),
    "6_7b": (1.2e-4, 1024),
    "13b": (1.0e-4, 1024),
    "175b": (0.6e-4, 1536),
}


def get_config(variant: str = "125m") -> Experiment:
    variant = variant or "125m"
    model = gpt3(variant)  # an unknown variant is a UserError with the nearest names
    learning_rate, rows = RECIPES[variant]
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=50_257),
        data=DataConfig(source=PythonDocs(), sequence_length=2048),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=learning_rate, b2=0.95, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(
            warmup_steps=round(375e6 / (rows * 2048)), final_fraction=0.1, cosine_steps=round(260e9 / (rows * 2048))
        ),
        train=TrainConfig(steps=round(TOKENS / (rows * 2048)), global_batch_size=rows, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
