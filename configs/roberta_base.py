"""RoBERTa by masked language modelling (Liu et al. 2019, arXiv 1907.11692): `:base :large`.

    python -m pretrainax.main --config=configs/roberta_base.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation'),
            HuggingFace(path='Skylion007/openwebtext')
        ),
        weights=(12, 4, 76, 38))" --config.train.accumulate=16

Masks are drawn anew each time, rows filled with documents one after the other. Its tokenizer is GPT-2's; this one is
learnt from the run's text, with RoBERTa's special pieces. Each number: `pretrainax recipe --config=roberta_base`.

The paper's text is 160 GB (section 3.2): Wikipedia, BooksCorpus, CC-News, OpenWebText and Stories. Books of Project
Gutenberg stand in here for BooksCorpus, the news in C4 for CC-News, and nothing for Stories; weights are gigabytes.

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

# variant -> (peak learning rate, steps of warmup)
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
        ),
        schedule=WarmupLinear(warmup_steps=warmup_steps),
        train=TrainConfig(steps=500_000, global_batch_size=8192),
        evaluate=EvaluateConfig(every=5_000, batches=4),
        checkpoint=CheckpointConfig(every=5_000),
    )
