"""Pretrains ALBERT (Lan et al. 2019, arXiv 1909.11942). Variants: `:base :large :xlarge :xxlarge` (version 2, without
dropout) and `:v1_base` … `:v1_xxlarge`.

    python -m pretrainax.main --config=configs/albert_base.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en')
        ),
        weights=(2500, 800))" --config.train.accumulate=8

The objective is masked language modelling, with masks of one to three consecutive words, together with sentence order
prediction (section 3.1). Source of each value: `pretrainax recipe --config=albert_base`.

The paper uses BERT's datasets, Wikipedia and BooksCorpus (section 4.1). The command uses Project Gutenberg instead of
BooksCorpus.

Hardware of the paper: 64 to 512 TPU v3 chips. Expected after fine-tuning, averaged over SQuAD 1.1 and 2.0, MNLI, SST-2
and RACE: 80.1 (v1_base), 82.4 (v1_large), 85.5 (v1_xlarge), 88.7 (v1_xxlarge) (table 2).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM, NGrams, SentenceOrderPrediction
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Lamb, WarmupLinear
from pretrainax.tokenization import Unigram
from pretrainax.zoo.albert import albert


def get_config(variant: str = "base") -> Experiment:
    return Experiment(
        model=albert(variant or "base"),
        tokenizer=Unigram(vocab_size=30_000, num_sentinels=0, special_pieces="albert"),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=SentenceOrderPrediction(
            masking=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1, mask_unit=NGrams()), short_fraction=0.1
        ),
        optimizer=Lamb(learning_rate=1.76e-3, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=3_125),
        train=TrainConfig(steps=125_000, global_batch_size=4096),
        evaluate=EvaluateConfig(every=5_000, batches=4),
        checkpoint=CheckpointConfig(every=5_000),
    )
