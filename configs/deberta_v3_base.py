"""Pretrains DeBERTa v3 with replaced token detection (He et al. 2021, arXiv 2111.09543). Variants:
`:xsmall :small :base :large`.

    python -m pretrainax.main --config=configs/deberta_v3_base.py:large --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation'),
            HuggingFace(path='Skylion007/openwebtext')
        ),
        weights=(12, 4, 76, 38))" --config.mesh.fsdp=8 --config.train.accumulate=64

The generator is as wide as the discriminator and half as deep. The discriminator's embeddings are the generator's plus
a trained difference. The generator replaces tokens on the device, and the discriminator detects them; the metrics
include its precision and recall. Source of each value: `pretrainax recipe --config=deberta_v3_base`.

The paper uses RoBERTa's 160 GB of text: Wikipedia, BooksCorpus, CC-News, OpenWebText and Stories. The command uses
Project Gutenberg instead of BooksCorpus and C4's realnewslike instead of CC-News; nothing replaces Stories. The weights
are gigabytes.

The paper does not give its hardware. Expected after fine-tuning: MNLI matched 88.1 (xsmall), 88.3 (small), 90.6 (base),
91.8 (large) (README of the released code).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import ReplacedTokenDetection
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tokenization import Unigram
from pretrainax.zoo.deberta import deberta_v3
from pretrainax.zoo.variants import pick

# variant -> peak learning rate
SIZES = {"xsmall": 6e-4, "small": 6e-4, "base": 6e-4, "large": 3e-4}


def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    learning_rate = pick("deberta_v3_base", variant, SIZES)
    return Experiment(
        model=deberta_v3(variant),
        tokenizer=Unigram(vocab_size=128_000, num_sentinels=0, special_pieces="albert"),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=ReplacedTokenDetection(rate=0.15, mask_fraction=1.0),
        optimizer=AdamW(
            learning_rate=learning_rate, b2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"
        ),
        schedule=WarmupLinear(warmup_steps=10_000),
        train=TrainConfig(steps=500_000, global_batch_size=8192),
        evaluate=EvaluateConfig(every=5_000, batches=40),
        checkpoint=CheckpointConfig(every=5_000),
    )
