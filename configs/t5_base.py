"""Pretrains T5 with span corruption (Raffel et al. 2020, arXiv 1910.10683). Variants: `:small :base :large :3b :11b`
(T5 1.1), `:v1_0_small` … `:v1_0_11b` (the models of the paper) and `:nano` (1.1 base as nanoT5 trained it; the
default); for a laptop `:tiny :mini :midi` (of nano).

    python -m pretrainax.main --config=configs/t5_base.py --config.data.source="HuggingFace(
        path='allenai/c4', name='en', valid_split='validation', streaming=True)"

The optimizer is T5's, Adafactor at a learning rate of 1/sqrt(step). The run has the steps of 128 x 512 tokens with
which the authors compared models: 524,288 for `:v1_0_…` (Raffel et al. 2020, section 3.1.2), and 65,536 for T5 1.1
(Shazeer 2020, arXiv 2002.05202, table 1) and for `:nano` (Nawrot 2023, arXiv 2309.02373). The optimizer of `:nano` is
AdamW with each update scaled by the RMS of its parameter, with cosine decay. Source of each value: `pretrainax recipe
--config=t5_base`.

Expected validation loss on C4, in nats per target token: 1.942 for `:base` (Shazeer 2020, table 1), 1.995 in nanoT5's
reproduction; 1.953 for `:nano` after 10.2 hours on one A100 80 GB in bfloat16 (nanoT5's README).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import SpanCorruption
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Adafactor, AdamW, WarmupCosine, WarmupInverseSquareRoot
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import Unigram
from pretrainax.zoo.t5 import SIZES, t5
from pretrainax.zoo.variants import pick


@with_small_sizes
def get_config(variant: str = "nano") -> Experiment:
    variant = variant or "nano"
    is_nano = variant == "nano"
    return Experiment(
        model=t5(pick("t5_base", variant, {"nano": "base"} | {size: size for size in SIZES})),
        tokenizer=Unigram(vocab_size=32_000),  # plus 100 sentinels; the model pads the vocabulary to 32,128 rows
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=SpanCorruption(noise_density=0.15, mean_span_length=3.0),
        optimizer=(
            AdamW(
                learning_rate=2e-2,
                epsilon=1e-6,
                weight_decay=0.0,
                clip_norm=1.0,
                scale_by_parameter_rms=True,
                bias_correction="rate",
            )
            if is_nano
            else Adafactor(learning_rate=1e-2)
        ),
        schedule=(
            WarmupCosine(warmup_steps=10_000, final_fraction=1e-5 / 2e-2, start_fraction=0.5)
            if is_nano
            else WarmupInverseSquareRoot(warmup_steps=10_000, start_fraction=1.0)
        ),
        train=TrainConfig(steps=524_288 if variant.startswith("v1_0") else 65_536, global_batch_size=128),
        evaluate=EvaluateConfig(every=2_000, batches=40),
        checkpoint=CheckpointConfig(every=2_000),
    )
