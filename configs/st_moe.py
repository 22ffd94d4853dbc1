"""Pretrains ST-MoE with span corruption (Zoph et al. 2022, arXiv 2202.08906). Variants: `:l` (4.1 B parameters), `:32b`
(269 B; a token uses as many as in a dense model of 32 B).

    python -m pretrainax.main --config=configs/st_moe.py:l --config.mesh.expert=8
        --config.data.source="HuggingFace(path='allenai/c4', name='en', valid_split='validation', streaming=True)"

The objective and the optimizer are T5's. `:l` has 500,000 steps of a million tokens. `:32b` has 1.5 T tokens, of C4 and
of GLaM's dataset, which is not published, on 1,024 TPU cores (64-way data parallel, 16-way model parallel). The
capacity of an expert is 1.25 times an even share of a device's tokens. Tokens beyond it skip the experts;
`metrics.jsonl` counts them. Source of each value, and omissions: `pretrainax recipe --config=st_moe`.

Expected after fine-tuning `:32b`: SuperGLUE 91.2, XSum 27.1 ROUGE-2.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import SpanCorruption
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Adafactor, WarmupInverseSquareRoot
from pretrainax.tokenization import Unigram
from pretrainax.zoo.st_moe import st_moe

BATCH_TOKENS, LENGTH = 2**20, 512
STEPS = {"l": 500_000, "32b": round(1.5e12 / BATCH_TOKENS)}


def get_config(variant: str = "l") -> Experiment:
    variant = variant or "l"
    model = st_moe(variant)
    assert model.experts is not None
    model.experts.capacity = 1.25
    return Experiment(
        model=model,
        tokenizer=Unigram(vocab_size=32_000),  # plus 100 sentinels; the model pads the vocabulary to 32,128 rows
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=SpanCorruption(noise_density=0.15, mean_span_length=3.0),
        optimizer=Adafactor(learning_rate=1e-2),
        schedule=WarmupInverseSquareRoot(warmup_steps=10_000, start_fraction=1.0),
        train=TrainConfig(
            steps=STEPS[variant],
            global_batch_size=BATCH_TOKENS // LENGTH,
            z_loss=1e-4,
            log_every=10,
            remat="auto",
        ),
        evaluate=EvaluateConfig(every=5_000, batches=8),
        checkpoint=CheckpointConfig(every=5_000),
    )
