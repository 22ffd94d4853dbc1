"""Pretrains ELECTRA small with replaced token detection (Clark et al. 2020, arXiv 2003.10555): a BERT for one GPU.
Variants: `:small`; for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/electra_small.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en')
        ),
        weights=(2500, 800))"

The generator has a quarter of the discriminator's width and shares its embeddings. The generator replaces tokens on the
device, and the discriminator detects them; the metrics include its precision and recall. Source of each value:
`pretrainax recipe --config=electra_small`.

The paper uses BERT's datasets, Wikipedia and BooksCorpus. The command uses Project Gutenberg instead of BooksCorpus.

Hardware of the paper: 4 days on one V100. Expected after fine-tuning: GLUE 79.9 (table 1, dev set).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import ReplacedTokenDetection
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import WordPiece
from pretrainax.zoo.electra import electra
from pretrainax.zoo.variants import pick

STEPS = {"small": 1_000_000}


@with_small_sizes
def get_config(variant: str = "small") -> Experiment:
    steps = pick("electra_small", variant or "small", STEPS)
    return Experiment(
        model=electra("small"),
        tokenizer=WordPiece(vocab_size=30_522, lowercase=True),
        data=DataConfig(source=PythonDocs(), sequence_length=128),
        objective=ReplacedTokenDetection(rate=0.15, mask_fraction=0.85),
        optimizer=AdamW(learning_rate=5e-4, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=10_000),
        train=TrainConfig(steps=steps, global_batch_size=128),
        evaluate=EvaluateConfig(every=5_000, batches=40),
        checkpoint=CheckpointConfig(every=5_000),
    )
