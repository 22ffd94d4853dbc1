"""Pretrains UL2 with a mixture of denoisers (Tay et al. 2022, arXiv 2205.05131). Variants: `:base :20b`.

    python -m pretrainax.main --config=configs/ul2_base.py --config.data.source="HuggingFace(
        path='allenai/c4', name='en', valid_split='validation', streaming=True)"

`:base` has UL2's architecture at the size of T5 1.1 base and the recipe of the paper's ablations (section 4), whose
size the paper does not give. `:20b` (section 5.1) had 1 trillion training tokens. Source of each value, and omissions:
`pretrainax recipe --config=ul2_base`.

The objective mixes seven denoisers (table 1). A mode token, [NLU], [NLG] or [S2S], precedes the inputs of each. The
denoisers need 128 sentinels; the model keeps its 32,128 rows.

Hardware of the paper: 64 to 128 TPU v4 chips for the ablations, 512 for `:20b`. The paper publishes no loss.
"""

import dataclasses

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MixtureOfDenoisers
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Adafactor, WarmupInverseSquareRoot
from pretrainax.tokenization import Unigram
from pretrainax.zoo.t5 import ul2
from pretrainax.zoo.variants import pick

# variant -> (steps, batch size)
RECIPES = {"base": (500_000, 128), "20b": (2_000_000, 1024)}
BASE = dict(num_layers=12, d_model=768, d_ff=2048, num_heads=12, head_dim=64)


def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    steps, batch_size = pick("ul2_base", variant, RECIPES)
    return Experiment(
        model=dataclasses.replace(ul2("20b"), **BASE) if variant == "base" else ul2(variant),
        tokenizer=Unigram(vocab_size=32_000, num_sentinels=128),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=MixtureOfDenoisers(),
        optimizer=Adafactor(learning_rate=1e-2),
        schedule=WarmupInverseSquareRoot(warmup_steps=10_000, start_fraction=1.0),
        train=TrainConfig(steps=steps, global_batch_size=batch_size),
        evaluate=EvaluateConfig(every=5_000, batches=40),
        checkpoint=CheckpointConfig(every=5_000),
    )
