"""Pretrains PaLM with causal language modelling (Chowdhery et al. 2022, arXiv 2204.02311). Variants: `:8b`, `:62b`,
`:540b`.

    python -m pretrainax.main --config=configs/palm.py:8b --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=64

The dataset (web text, books, code, conversations and news, in many languages) is not public; the command uses FineWeb
(Penedo et al. 2024) instead. All three sizes have 780 B training tokens. `:540b` took 1,200 hours on 6,144 TPU v4 chips
and most of another 336 hours on 3,072 chips. Source of each value: `pretrainax recipe --config=palm`. Zero-shot LAMBADA
scores of the authors' models (table 6): 69.5, 75.4, 77.9.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupInverseSquareRoot
from pretrainax.tokenization import BPE
from pretrainax.zoo.palm import palm

TOKENS, ROWS, CONTEXT = 780e9, 1024, 2048


def get_config(variant: str = "8b") -> Experiment:
    model = palm(variant or "8b")
    return Experiment(
        model=model,
        tokenizer=BPE(vocab_size=256_000),
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(
            learning_rate=1e-2, b2=0.99, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0, scale_by_parameter_rms=True
        ),
        schedule=WarmupInverseSquareRoot(warmup_steps=10_000),
        train=TrainConfig(
            steps=round(TOKENS / (ROWS * CONTEXT)), global_batch_size=ROWS, z_loss=1e-4, log_every=10, remat="auto"
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
