"""Trains a small GPT-2 on a folder of books: `gpt2:tiny` with a smaller vocabulary and Muon.

    pretrainax train --config=examples/gpt_books/config.py --workdir=runs/gpt

Variants: the default takes minutes on two cores; `:short` takes seconds, as a test; `:full` is GPT-2 124M for a GPU.
"""

from pretrainax.config import Experiment
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon
from pretrainax.zoo.variants import pick

BASES = {"": "gpt2:tiny", "short": "gpt2:tiny", "full": "gpt2:124m"}


def get_config(variant: str = "") -> Experiment:
    experiment = read_config_file(pick("gpt_books", variant, BASES))
    experiment.data.source = JsonLines(path="books/train-00000-of-00008.jsonl.gz", valid_path="books/valid.jsonl.gz")
    if variant == "full":
        return experiment
    experiment.tokenizer.vocab_size = 4096  # 12 MB of text have few examples of rarer tokens
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0)
    experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 500, 50, 16
    experiment.evaluate.every = experiment.checkpoint.every = 100
    experiment.evaluate.prompts = ("The door opened, and", "She was not")
    if variant == "short":
        experiment.tokenizer.vocab_size, experiment.data.sequence_length = 300, 32
        experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 20, 4, 8
        experiment.evaluate.every = experiment.checkpoint.every = 10
        experiment.evaluate.batches = 2
    return experiment
