"""Pretrains BART by denoising (Lewis et al. 2019, arXiv 1910.13461). Variants: `:base :large`.

    python -m pretrainax.main --config=configs/bart_base.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation'),
            HuggingFace(path='Skylion007/openwebtext')
        ),
        weights=(12, 4, 76, 38))" --config.train.accumulate=16

The recipe is the paper's for large (section 5.1). Each masked span of tokens becomes one <mask>, and all sentences are
permuted. The number of steps and the dataset are RoBERTa's. The paper gives neither learning rates nor hardware. Source
of each value: `pretrainax recipe --config=bart_base`.

The paper uses RoBERTa's 160 GB of text: Wikipedia, BooksCorpus, CC-News, OpenWebText and Stories. The command uses
Project Gutenberg instead of BooksCorpus and C4's realnewslike instead of CC-News; nothing replaces Stories. The weights
are gigabytes.

Expected after fine-tuning (large, tables 2 and 3): MNLI 89.9, SQuAD 1.1 94.6 F1, CNN/DailyMail 44.16 ROUGE-1.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, Phase, TrainConfig
from pretrainax.data.objectives import Denoising
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.bart import bart
from pretrainax.zoo.variants import pick

# variant -> (peak learning rate, warmup steps)
RECIPES = {"base": (6e-4, 24_000), "large": (4e-4, 30_000)}


def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    learning_rate, warmup_steps = pick("bart_base", variant, RECIPES)
    return Experiment(
        model=bart(variant),
        tokenizer=ByteBPE(vocab_size=50_265, special_pieces="roberta"),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=Denoising(infilling_rate=0.3, mean_span_length=3.0, permutation_rate=1.0),
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
        train=TrainConfig(steps=500_000, global_batch_size=8000),
        evaluate=EvaluateConfig(every=5_000, batches=4),
        checkpoint=CheckpointConfig(every=5_000),
        phases=(Phase(share=0.9), Phase(dropout_rate=0.0, attention_dropout_rate=0.0)),
    )
