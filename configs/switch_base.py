"""Pretrains Switch Transformer with span corruption (Fedus et al. 2021, arXiv 2101.03961). Variants, with their numbers
of experts: `:base_8 :base_16 :base_32 :base_64 :base_128 :base_256 :large_128 :xxl_128 :c_2048`.

    python -m pretrainax.main --config=configs/switch_base.py:base_8 --config.mesh.expert=8
        --config.data.source="HuggingFace(path='allenai/c4', name='en', valid_split='validation', streaming=True)"

The objective and the optimizer are T5's. The run has 550,000 steps of a million tokens (576 B in all). The capacity of
an expert is 1.25 times an even share of a device's tokens. Tokens beyond it skip the experts; `metrics.jsonl` counts
them. Source of each value, and omissions: `pretrainax recipe --config=switch_base`.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import SpanCorruption
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Adafactor, WarmupInverseSquareRoot
from pretrainax.tokenization import Unigram
from pretrainax.zoo.switch import switch

TOKENS, LENGTH = 2**20, 512  # tokens per batch, tokens per row


def get_config(variant: str = "base_8") -> Experiment:
    variant = variant or "base_8"
    model = switch(variant)
    assert model.experts is not None
    model.experts.capacity = 1.0 if variant == "c_2048" else 1.25
    return Experiment(
        model=model,
        tokenizer=Unigram(vocab_size=32_000),  # plus 100 sentinels; the model pads the vocabulary to 32,128 rows
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=SpanCorruption(noise_density=0.15, mean_span_length=3.0),
        optimizer=Adafactor(learning_rate=1e-2),
        schedule=WarmupInverseSquareRoot(warmup_steps=10_000, start_fraction=1.0),
        train=TrainConfig(steps=550_000, global_batch_size=TOKENS // LENGTH, z_loss=1e-4, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=5_000, batches=8),
        checkpoint=CheckpointConfig(every=5_000),
    )
