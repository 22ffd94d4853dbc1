"""Pretrains T5Gemma with a mixture of denoisers (Zhang et al. 2025, arXiv 2504.06225). Variants: `:s_s`, `:b_b`,
`:l_l`, `:ml_ml`, `:xl_xl`, `:2b_2b`, `:9b_9b`, `:9b_2b`.

    python -m pretrainax.main --config=configs/t5gemma.py:b_b --config.mesh.fsdp=8 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)"

The run has 2 T tokens. The sizes of T5 start from random weights. The authors initialize both stacks of 2b-2b, 9b-9b
and 9b-2b with the weights of Gemma 2; this config does not. The objective is UL2's, as in one group of the released
models; the other group uses prefix language modelling with Gemma 2 as the teacher. Learning rates and batch sizes were
not available; this config uses LLaMA 2's. The dataset, web pages, code and science, is not public; the command uses
FineWeb (Penedo et al. 2024) instead. Source of each value: `pretrainax recipe --config=t5gemma`.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MixtureOfDenoisers
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import BPE
from pretrainax.zoo.t5gemma import t5gemma

TOKENS, ROWS, LENGTH = 2e12, 2048, 512


def get_config(variant: str = "b_b") -> Experiment:
    return Experiment(
        model=t5gemma(variant or "b_b"),
        tokenizer=BPE(vocab_size=255_872, num_sentinels=128, special_pieces="gemma"),
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=MixtureOfDenoisers(),
        optimizer=AdamW(learning_rate=3e-4, b2=0.95, epsilon=1e-5, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(steps=round(TOKENS / (ROWS * LENGTH)), global_batch_size=ROWS, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
