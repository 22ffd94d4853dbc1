"""Pretrains BigBird with masked language modelling (Zaheer et al. 2020, arXiv 2007.14062). Variants: `:base :large`;
for a laptop `:tiny :mini :midi`, with rows so short that each block attends to all others.

    python -m pretrainax.main --config=configs/bigbird.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation'),
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en')
        ),
        weights=(10, 74, 31))"

Rows have 4,096 tokens. The paper starts from RoBERTa's weights and so computes a part of RoBERTa's function; this
config starts from random weights. The paper's tokenizer has GPT-2's pieces in SentencePiece; this config trains a
tokenizer on the dataset of the run. Source of each value: `pretrainax recipe --config=bigbird`.

The paper's dataset has 19 B tokens (appendix E.1): BooksCorpus, CC-News, Stories and Wikipedia. The command uses
Project Gutenberg instead of BooksCorpus and C4's realnewslike instead of CC-News; nothing replaces Stories.

Hardware of the paper: 64 TPU v3. Expected: 1.678 bits per token on the paper's dataset (base, appendix E.1).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM, WholeWords
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.bigbird import bigbird


@with_small_sizes
def get_config(variant: str = "base") -> Experiment:
    return Experiment(
        model=bigbird(variant or "base"),
        tokenizer=ByteBPE(vocab_size=50_358, special_pieces="bert"),
        data=DataConfig(source=PythonDocs(), sequence_length=4096),
        objective=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1, mask_unit=WholeWords()),
        optimizer=AdamW(learning_rate=1e-4, epsilon=1e-6, weight_decay=0.01, clip_norm=None, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=10_000),
        train=TrainConfig(steps=100_000, global_batch_size=256, remat="auto"),
        evaluate=EvaluateConfig(every=2_000, batches=4),
        checkpoint=CheckpointConfig(every=2_000),
    )
