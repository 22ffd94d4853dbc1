"""A small T5 on the documentation that is installed beside this program: no download, a few minutes on a laptop's CPU.

    python -m pretrainax.main --config=configs/quickstart.py

Objective: span corruption (Raffel et al. 2020, section 3.1.4) on about 12 MB of English.
"""

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    ModelConfig,
    RelativePositionBuckets,
    TrainConfig,
)
from pretrainax.data.objectives import SpanCorruption
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenizer import Unigram


def get_config(variant: str = "") -> Experiment:
    del variant
    return Experiment(
        model=ModelConfig(
            family="encoder_decoder",
            vocab_size=4224,  # 4,096 pieces + 100 sentinels, rounded up to a multiple of 128
            num_layers=3,
            d_model=192,
            d_ff=512,
            num_heads=4,
            head_dim=48,
            position=RelativePositionBuckets(),
            norm="rms",
            norm_epsilon=1e-6,
            activation="gelu_tanh",
            gated=True,
            use_bias=False,
            tie_embeddings=False,
            scale_attention=False,
            init_stddev=None,
        ),
        tokenizer=Unigram(vocab_size=4096, train_bytes=4_000_000),
        data=DataConfig(source=PythonDocs(), sequence_length=128),
        objective=SpanCorruption(),
        optimizer=AdamW(learning_rate=3e-3, weight_decay=0.01),
        schedule=WarmupCosine(warmup_steps=50),
        train=TrainConfig(steps=400, global_batch_size=32, log_every=10, scan_unroll=3),
        evaluate=EvaluateConfig(every=100, batches=8),
        checkpoint=CheckpointConfig(every=200),
    )
