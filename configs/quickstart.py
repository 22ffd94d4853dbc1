"""A small T5 on the documentation that is installed beside this program: no download, a few minutes on a laptop's CPU.

    python -m pretrainax.main --config=configs/quickstart.py

Objective: span corruption (Raffel et al. 2020, section 3.1.4) on about 12 MB of English. The model is T5 1.1 at a
hundredth of the size of `small`, the optimizer nanoT5's (arXiv 2309.02373): steps relative to the size of each matrix.
Each number: `pretrainax recipe --config=quickstart`.
Expected: validation loss about 3.65 nats a target token, where token frequencies and the form of the targets give 4.68;
2 to 3 minutes of training on 2 cores. Sentinels and ends are 28 % of the targets and soon learnt: of text alone, which
the table shows beside it, token frequencies give 5.91.
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
