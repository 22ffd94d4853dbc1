"""Trains a small mixture of experts on books: 8 experts per layer, of which each token uses 2.

    pretrainax train --config=examples/experts/config.py --workdir=runs/experts
    pretrainax train --config=examples/experts/config.py --config.model.experts=none --workdir=runs/dense

The second command trains the dense model with equal active parameters: its feed-forward is as wide as two experts.
Variants: the default takes minutes on a CPU; `:short` takes seconds, as a test; `:full` is OLMoE 1B-7B for
accelerators.
"""

from pretrainax.config import Experiment, MixtureOfExperts
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.variants import pick

BASES = {"": "llama:tiny", "short": "llama:tiny", "full": "olmoe:1b_7b"}
EXPERTS, ACTIVE = 8, 2


def get_config(variant: str = "") -> Experiment:
    experiment = read_config_file(pick("experts", variant, BASES))
    experiment.data.source = JsonLines(path="books/train-00000-of-00008.jsonl.gz", valid_path="books/valid.jsonl.gz")
    if variant == "full":
        return experiment
    model = experiment.model
    model.d_model, model.d_ff, model.num_heads = 64, 256, 2
    model.experts = MixtureOfExperts(EXPERTS, ACTIVE, d_ff=model.d_ff // ACTIVE)
    experiment.tokenizer, experiment.data.sequence_length = ByteBPE(vocab_size=1024), 64
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0)
    experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 250, 25, 16
    experiment.evaluate.every = experiment.checkpoint.every = 125
    experiment.train.log_every = 25
    if variant == "short":
        experiment.tokenizer, experiment.data.sequence_length = ByteBPE(vocab_size=300), 32
        experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 20, 4, 8
        experiment.evaluate.every = experiment.checkpoint.every = 10
        experiment.evaluate.batches = 2
    return experiment
