"""Trains a small ModernBERT on books, and a student with half of its layers: `modernbert_base:tiny`, narrower.

    pretrainax train --config=examples/distill/config.py:teacher --workdir=runs/teacher

Variants: `:teacher` has four layers. The default is a student with two of these layers; the commands in README.md
select its teacher with a flag. `:short` and `:short_teacher` take seconds, as a test. `:full_teacher` is ModernBERT
base, and `:full` is a student with 11 of its 22 layers, for GPUs.
"""

from pretrainax.config import Experiment
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon, WarmupLinear
from pretrainax.zoo.variants import pick

LAYERS = {"": 2, "teacher": 4, "short": 2, "short_teacher": 4, "full": 11, "full_teacher": 22}
STEPS = {"": 200, "teacher": 800, "short": 20, "short_teacher": 20}


def get_config(variant: str = "") -> Experiment:
    layers, full = pick("distill", variant, LAYERS), variant.startswith("full")
    experiment = read_config_file(f"modernbert_base:{'base' if full else 'tiny'}")
    model = experiment.model
    model.num_layers = layers
    experiment.data.source = JsonLines(path="books/train-00000-of-00008.jsonl.gz", valid_path="books/valid.jsonl.gz")
    if full:
        return experiment
    model.d_model, model.d_ff, model.num_heads = 64, 128, 2
    # The rows are short. Equal layers let a student start from any of the teacher's layers.
    model.layer_pattern, model.window, model.position.local_theta = ("global",), None, None
    experiment.tokenizer.vocab_size, experiment.data.sequence_length = 384, 64  # small, so context helps more
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0)
    experiment.train.steps = STEPS[variant]
    experiment.schedule = WarmupLinear(warmup_steps=20)
    experiment.evaluate.every = experiment.checkpoint.every = experiment.train.steps // 2
    experiment.train.log_every = 50
    if variant.startswith("short"):
        experiment.tokenizer.vocab_size, experiment.data.sequence_length = 300, 32
        experiment.train.global_batch_size, experiment.schedule.warmup_steps = 8, 4
        experiment.evaluate.batches = 2
    return experiment
