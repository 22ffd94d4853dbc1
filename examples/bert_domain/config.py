"""Trains a small ModernBERT for a domain, from scratch or from a general model: `modernbert_base:tiny`, narrower.

    pretrainax train --config=examples/bert_domain/config.py --workdir=runs/scratch

Variants: `:general` trains on books. The default trains on the domain: the documentation of installed packages. The
commands in README.md continue from the general model with a flag. `:short` and `:short_general` take seconds, as a
test. `:full` is ModernBERT base for GPUs.
"""

from pretrainax.config import Experiment
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines, PythonDocs
from pretrainax.optim import Muon, WarmupLinear
from pretrainax.zoo.variants import pick

STEPS = {"": 200, "general": 400, "short": 20, "short_general": 20}
BOOKS = JsonLines(path="books/train-00000-of-00008.jsonl.gz", valid_path="books/valid.jsonl.gz")


def get_config(variant: str = "") -> Experiment:
    sizes = dict.fromkeys(STEPS, "modernbert_base:tiny") | {"full": "modernbert_base:base"}
    experiment = read_config_file(pick("bert_domain", variant, sizes))
    experiment.data.source = BOOKS if variant.endswith("general") else PythonDocs()
    if variant == "full":
        return experiment
    model = experiment.model
    model.d_model, model.d_ff, model.num_heads = 64, 128, 2
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
