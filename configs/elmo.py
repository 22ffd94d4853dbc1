"""Pretrains ELMo with language modelling in both directions (Peters et al. 2018, arXiv 1802.05365). Variants:
`:original`, `:medium`, `:small`; for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/elmo.py --config.data.source="HuggingFace(
        path='dvruette/lm1b', valid_split='test', streaming=True)"

The dataset is the 1B Word Benchmark (Chelba et al. 2013, arXiv 1312.3005), for ten epochs. Spaces separate its words
and punctuation, as config.tokenizer requires. Source of each value: `pretrainax recipe --config=elmo`.

To import the released model, put its options.json, weights (*.hdf5) and vocabulary (vocab-2016-09-10.txt) in a folder.
Then run `pretrainax huggingface import --from=FOLDER --workdir=runs/elmo` (`pip install 'pretrainax[elmo]'`). To
fine-tune it, set --config.checkpoint.init_from=runs/elmo --config.checkpoint.fresh_heads=True. The released files do
not include the softmax over words.

Hardware of the release: 3 GTX 1080 Ti, two weeks. Expected: 39.7, the mean of the forward and backward perplexity
(section 3.4).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import BidirectionalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import Adagrad, WarmupConstant
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import Words
from pretrainax.zoo.elmo import elmo

TOKENS, EPOCHS, ROWS, LENGTH = 768_648_884, 10, 64, 120


@with_small_sizes
def get_config(variant: str = "original") -> Experiment:
    return Experiment(
        model=elmo(variant or "original"),
        tokenizer=Words(vocab_size=793_471),
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=BidirectionalLM(),
        optimizer=Adagrad(learning_rate=0.2, initial_square=0.01, clip_norm=1.0),
        schedule=WarmupConstant(warmup_steps=0),
        train=TrainConfig(steps=round(EPOCHS * TOKENS / (ROWS * LENGTH)), global_batch_size=ROWS, log_every=100),
        evaluate=EvaluateConfig(every=5_000, batches=8),
        checkpoint=CheckpointConfig(every=5_000),
    )
