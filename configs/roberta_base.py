"""Pretrains RoBERTa with masked language modelling (Liu et al. 2019, arXiv 1907.11692). Variants: `:base :large`.

    python -m pretrainax.main --config=configs/roberta_base.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation'),
            HuggingFace(path='Skylion007/openwebtext')
        ),
        weights=(12, 4, 76, 38))" --config.train.accumulate=16

Each epoch draws new masks. Rows are concatenated documents. The paper's tokenizer is GPT-2's; this config trains a
tokenizer with RoBERTa's special pieces on the dataset of the run. Source of each value:
`pretrainax recipe --config=roberta_base`.

The paper uses 160 GB of text (section 3.2): Wikipedia, BooksCorpus, CC-News, OpenWebText and Stories. The command uses
Project Gutenberg instead of BooksCorpus and C4's realnewslike instead of CC-News; nothing replaces Stories. The weights
are gigabytes.

Hardware of the paper: 1,024 V100, a day for the first 100,000 steps of large (section 5). Expected after fine-tuning:
MNLI 90.2, SQuAD 1.1 94.6 F1 (large, tables 5 and 6), MNLI 87.6 (base, fairseq's examples/roberta/README.md).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.roberta import roberta
from pretrainax.zoo.variants import pick

# variant -> (peak learning rate, warmup steps)
RECIPES = {"base": (6e-4, 24_000), "large": (4e-4, 30_000)}


def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    learning_rate, warmup_steps = pick("roberta_base", variant, RECIPES)
    return Experiment(
        model=roberta(variant),
        tokenizer=ByteBPE(vocab_size=50_265, special_pieces="roberta"),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1),
        optimizer=AdamW(
            learning_rate=learning_rate,
            b2=0.98,
            epsilon=1e-6,
            weight_decay=0.01,
            clip_norm=None,
            bias_correction="rate",
            decay_norms=True,
            decay_biases=True,
        ),
        schedule=WarmupLinear(warmup_steps=warmup_steps),
        train=TrainConfig(steps=500_000, global_batch_size=8192),
        evaluate=EvaluateConfig(every=5_000, batches=4),
        checkpoint=CheckpointConfig(every=5_000),
    )
