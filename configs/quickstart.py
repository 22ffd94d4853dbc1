"""Trains a small T5 on documentation that is installed with PretrainAX: no download, a few minutes on a laptop CPU.

    python -m pretrainax.main --config=configs/quickstart.py

The objective is span corruption (Raffel et al. 2020, section 3.1.4) on about 12 MB of English. The model is T5 1.1 at a
hundredth of the size of `small`. The optimizer is nanoT5's (arXiv 2309.02373), whose updates are scaled by the RMS of
each matrix. Source of each value: `pretrainax recipe --config=quickstart`.

Expected after 2 to 3 minutes of training on 2 cores: a validation loss of about 3.65 nats per target token. The unigram
baseline, which uses token frequencies and the form of the targets, has 4.68. Sentinels and end tokens are 28 % of the
targets and quickly learned. On text tokens alone, which the table reports too, token frequencies give 5.91.
"""

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    ModelConfig,
    RelativePositionBuckets,
    TrainConfig,
    UserError,
)
from pretrainax.data.objectives import SpanCorruption
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import Unigram


def get_config(variant: str = "") -> Experiment:
    if variant:
        raise UserError(f"quickstart has no variant {variant!r}")
    return Experiment(
        model=ModelConfig(
            family="encoder_decoder",
            vocab_size=2176,  # 2,048 pieces + 100 sentinels, rounded up to a multiple of 128
            num_layers=2,
            d_model=128,
            d_ff=384,
            num_heads=4,
            position=RelativePositionBuckets(),
            norm="rms",
            norm_epsilon=1e-6,
            activation="gelu_tanh",
            gated=True,
            use_bias=False,
            tie_embeddings=False,
            attention_scale=1.0,
            init_stddev=None,
        ),
        tokenizer=Unigram(vocab_size=2048, train_bytes=4_000_000),
        data=DataConfig(source=PythonDocs(), sequence_length=128),
        objective=SpanCorruption(),
        optimizer=AdamW(learning_rate=2e-2, b2=0.98, weight_decay=0.0, scale_by_parameter_rms=True),
        schedule=WarmupCosine(warmup_steps=50, final_fraction=0.05),
        train=TrainConfig(steps=1300, global_batch_size=16),
        evaluate=EvaluateConfig(every=100, batches=16),
        checkpoint=CheckpointConfig(every=500),
    )
