"""BigBird by masked language modelling (Zaheer et al. 2020, arXiv 2007.14062): `:base :large`, and for a laptop
`:tiny :mini :midi`, whose rows are so short that each block meets all others.

    python -m pretrainax.main --config=configs/bigbird.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation'),
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en')
        ),
        weights=(10, 74, 31))"

Rows of 4,096 tokens. The paper goes on from RoBERTa, whose function these weights then compute in part; here they are
fresh. Its tokenizer is SentencePiece's of GPT-2's pieces; this one is learnt from the run's text. Each number:
`pretrainax recipe --config=bigbird`.

The paper's text is 19 B tokens (appendix E.1): BooksCorpus, CC-News, Stories and Wikipedia. Books of Project Gutenberg
stand in here for BooksCorpus, the news in C4 for CC-News, and nothing for Stories.

Hardware of the paper: 64 TPU v3. Expected: 1.678 bits a token of its text (base, appendix E.1).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM
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
        objective=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1),
        optimizer=AdamW(learning_rate=1e-4, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=10_000),
        train=TrainConfig(steps=100_000, global_batch_size=256, remat="auto"),
        evaluate=EvaluateConfig(every=2_000, batches=4),
        checkpoint=CheckpointConfig(every=2_000),
    )
