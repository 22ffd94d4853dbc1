"""ST-MoE by span corruption (Zoph et al. 2022, arXiv 2202.08906): `:l` (4.1 B parameters), `:32b` (269 B, of which a
token uses as many as of a dense model of 32 B).

    python -m pretrainax.main --config=configs/st_moe.py:l --config.mesh.expert=8
        --config.data.source="HuggingFace(path='allenai/c4', name='en', valid_split='validation', streaming=True)"

T5's objective and optimizer: `:l` for 500,000 steps of a million tokens, `:32b` for 1.5 T tokens, of C4 and of GLaM's
text, which is not published, on 1,024 TPU cores (64 for the rows, 16 for the model). An expert has room for 1.25 times
an even share of the tokens of a device, and what is more passes by: `metrics.jsonl` counts it. Each number, and what is
left out: `pretrainax recipe --config=st_moe`.

Expected of `:32b`, fine-tuned: 91.2 on SuperGLUE, 27.1 of ROUGE-2 on XSum.
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
        tokenizer=Unigram(vocab_size=32_000),  # and 100 sentinels; the model pads them to 32,128 rows
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
