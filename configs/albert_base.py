"""ALBERT by masked language modelling (Lan et al. 2019, arXiv 1909.11942): `:base :large :xlarge :xxlarge` (version 2,
without dropout), `:v1_base` … `:v1_xxlarge`.

    python -m pretrainax.main --config=configs/albert_base.py --config.train.accumulate=8 --config.data.source="…"

The paper's hyperparameters (section 4.1; warmup: the released code's README): 125,000 steps of 4,096 x 512 tokens,
LAMB at 0.00176. Still to come are sentence order prediction, and so the pair head that learns from it, and masks over
up to three tokens in a row (both: section 3.1 and 4.1). Its vocabulary is SentencePiece's; here it is BERT's
word pieces, as many.

Hardware of the paper: 64 to 512 TPU v3 chips. Expected after fine-tuning, the mean of SQuAD 1.1 and 2.0, MNLI, SST-2
and RACE: 80.1 (v1_base), 82.4 (v1_large), 85.5 (v1_xlarge), 88.7 (v1_xxlarge) (table 2).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Lamb, WarmupLinear
from pretrainax.tokenizer import WordPiece
from pretrainax.zoo.albert import albert


def get_config(variant: str = "base") -> Experiment:
    model = albert(variant or "base")
    model.pair_head = False
    return Experiment(
        model=model,
        tokenizer=WordPiece(vocab_size=30_000, lowercase=True),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1),
        optimizer=Lamb(learning_rate=1.76e-3, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0),
        schedule=WarmupLinear(warmup_steps=3_125),
        train=TrainConfig(steps=125_000, global_batch_size=4096, log_every=100),
        evaluate=EvaluateConfig(every=5_000, batches=4),
        checkpoint=CheckpointConfig(every=5_000),
    )
