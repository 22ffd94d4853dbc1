"""Trains an encoder to embed a sentence close to the sentences that follow it.

    pretrainax train --config=examples/sentence_encoder/config.py:encoder --workdir=runs/encoder
    pretrainax train --config=examples/sentence_encoder/config.py --config.checkpoint.init_from=runs/encoder

Variants: `:encoder` pretrains a small ModernBERT, and the default trains it on pairs. `:short` and `:short_encoder`
take seconds, for tests. `:full` trains a BERT base on pairs, for accelerators.
"""

from typing import Optional

from pretrainax.config import Experiment, RotaryPositions
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon, WarmupLinear
from pretrainax.tasks import Retrieval
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.variants import pick

STEPS = {"": 120, "encoder": 200, "short": 20, "short_encoder": 20, "full": 20_000}
BOOKS = JsonLines(path="books/train-00000-of-00008.jsonl.gz", valid_path="books/valid.jsonl.gz")
PAIRS = JsonLines(path="pairs/train.jsonl", valid_path="pairs/valid.jsonl")


def get_config(variant: str = "", init_from: Optional[str] = None) -> Experiment:
    steps = pick("sentence_encoder", variant, STEPS)
    experiment = encoder() if variant.endswith("encoder") else read_config_file("finetune:retrieval", init_from)
    experiment.data.source = BOOKS if variant.endswith("encoder") else PAIRS
    experiment.train.steps, experiment.schedule.warmup_steps = steps, steps // 10
    experiment.evaluate.every = experiment.checkpoint.every = steps // 2
    if variant == "full":
        experiment.train.global_batch_size = 256  # the passages of a batch are the negatives
        return experiment
    experiment.train.global_batch_size = 8 if variant.startswith("short") else 32
    experiment.train.log_every = 20
    if not variant.endswith("encoder"):
        experiment.data.sequence_length, experiment.objective = 64, Retrieval(query_length=40)
        experiment.optimizer = Muon(learning_rate=0.01, adam_learning_rate=0.005, weight_decay=0.1, clip_norm=1.0)
    return experiment


def encoder() -> Experiment:
    """Returns the pretraining of a ModernBERT with four layers of width 64."""
    experiment = read_config_file("modernbert_base:tiny")
    model = experiment.model
    model.num_layers, model.d_model, model.d_ff, model.num_heads = 4, 64, 128, 2
    model.layer_pattern = ("global",)  # the rows are shorter than the windows of ModernBERT
    model.window, model.position = None, RotaryPositions(max_length=512)  # pairs have longer rows than this run
    experiment.tokenizer = ByteBPE(vocab_size=1024, special_pieces="bert")
    experiment.data.sequence_length = 32
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0)
    experiment.schedule = WarmupLinear()
    return experiment
