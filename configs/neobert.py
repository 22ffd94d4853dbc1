"""Pretrains NeoBERT with masked language modelling (Le Breton et al. 2025, arXiv 2502.19587). Variants: `:base`; for a
laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/neobert.py --config.train.accumulate=8 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)"

The run has 1,000,000 steps on rows of 1,024 tokens and 50,000 steps on rows of 4,096, with 2 M tokens per step. 20 % of
the tokens are targets, all of them masked. Source of each value: `pretrainax recipe --config=neobert`. The authors'
dataset, RefinedWeb, is 600 B tokens of web text; the command uses FineWeb (Penedo et al. 2024) instead.

Hardware of the paper: 8 H100, 6,000 hours. Expected after fine-tuning: GLUE 89.0 (table 3, dev set).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, Phase, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import WordPiece
from pretrainax.zoo.neobert import neobert

SHORT, LONG = 1_000_000, 50_000  # steps


@with_small_sizes
def get_config(variant: str = "base") -> Experiment:
    return Experiment(
        model=neobert(variant or "base"),
        tokenizer=WordPiece(vocab_size=30_522, lowercase=True),
        data=DataConfig(source=PythonDocs(), sequence_length=1024),
        objective=MaskedLM(rate=0.2, mask_fraction=1.0, random_fraction=0.0),
        optimizer=AdamW(
            learning_rate=1e-4,
            b2=0.95,
            epsilon=1e-8,
            weight_decay=0.01,
            clip_norm=1.0,
            decay_norms=True,
            decay_biases=True,
        ),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1, cosine_steps=900_000),
        train=TrainConfig(steps=SHORT + LONG, global_batch_size=2048, log_every=10),
        evaluate=EvaluateConfig(every=5_000, batches=4, objective=MaskedLM(rate=0.15)),
        checkpoint=CheckpointConfig(every=5_000),
        phases=(
            Phase(share=SHORT / (SHORT + LONG)),
            Phase(share=LONG / (SHORT + LONG), sequence_length=4096, global_batch_size=512),
        ),
    )
