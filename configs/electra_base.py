"""Pretrains ELECTRA with replaced token detection (Clark et al. 2020, arXiv 2003.10555). Variants: `:base :large`.

    python -m pretrainax.main --config=configs/electra_base.py:large --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en')
        ),
        weights=(2500, 800))" --config.mesh.fsdp=8 --config.train.accumulate=2

The generator has a third (base) or a quarter (large) of the discriminator's width and shares its embeddings. The
generator replaces tokens on the device, and the discriminator detects them; the metrics include its precision and
recall. Source of each value: `pretrainax recipe --config=electra_base`.

The paper uses BERT's datasets, Wikipedia and BooksCorpus, for base, and XLNet's, 33 B tokens, for large. The command
uses Project Gutenberg instead of BooksCorpus, and the same datasets for both variants.

Hardware of the paper: 4 days on 16 TPU v3 chips (base). Expected after fine-tuning: GLUE 85.1 (base), 89.0 (large)
(tables 1 and 2, dev set).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import ReplacedTokenDetection
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tokenization import WordPiece
from pretrainax.zoo.electra import electra
from pretrainax.zoo.variants import pick

# variant -> (steps, batch size, fraction of masked tokens)
SIZES = {"base": (766_000, 256, 0.15), "large": (400_000, 2048, 0.25)}


def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    steps, batch_size, rate = pick("electra_base", variant, SIZES)
    return Experiment(
        model=electra(variant),
        tokenizer=WordPiece(vocab_size=30_522, lowercase=True),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=ReplacedTokenDetection(rate=rate, mask_fraction=0.85),
        optimizer=AdamW(learning_rate=2e-4, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=10_000),
        train=TrainConfig(steps=steps, global_batch_size=batch_size),
        evaluate=EvaluateConfig(every=5_000, batches=40),
        checkpoint=CheckpointConfig(every=5_000),
    )
