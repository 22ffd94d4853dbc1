"""Trains a small LLaMA on the bases of a genome, one token per base.

    pretrainax train --config=examples/dna/config.py --workdir=runs/dna

Variants: the default takes minutes on a CPU; `:short` takes seconds, as a test; `:full` is a 7B model for accelerators.
"""

from pretrainax.config import Experiment
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon
from pretrainax.tokenization import Characters
from pretrainax.zoo.variants import pick

BASES = {"": "llama:tiny", "short": "llama:tiny", "full": "llama:2_7b"}


def get_config(variant: str = "") -> Experiment:
    experiment = read_config_file(pick("dna", variant, BASES))
    experiment.data.source = JsonLines(path="dna/train.jsonl", valid_path="dna/valid.jsonl")
    experiment.tokenizer = Characters()  # A, C, G, T, ambiguous letters of the genome, and three special tokens
    experiment.model.vocab_size = 128
    if variant == "full":
        return experiment
    model = experiment.model
    model.d_model, model.d_ff, model.num_heads = 64, 128, 2
    experiment.data.sequence_length = 256
    experiment.optimizer = Muon(learning_rate=0.02, adam_learning_rate=0.01, weight_decay=0.1, clip_norm=1.0)
    experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 400, 40, 8
    experiment.evaluate.every = experiment.checkpoint.every = 100
    experiment.train.log_every = 25
    if variant == "short":
        experiment.data.sequence_length = 32
        experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 20, 4, 8
        experiment.evaluate.every = experiment.checkpoint.every = 10
        experiment.evaluate.batches = 2
    return experiment
