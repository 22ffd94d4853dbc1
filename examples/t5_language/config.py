"""Trains a small T5 on Chinese poems: `t5_base:tiny` with bytes of characters, rows for short poems, and Muon.

    pretrainax train --config=examples/t5_language/config.py --workdir=runs/t5

Variants: the default takes minutes on two cores; `:short` takes seconds, as a test; `:full` is T5 1.1 base for a GPU.
"""

from pretrainax.config import Experiment
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.variants import pick

BASES = {"": "t5_base:tiny", "short": "t5_base:tiny", "full": "t5_base:nano"}


def get_config(variant: str = "") -> Experiment:
    experiment = read_config_file(pick("t5_language", variant, BASES))
    experiment.data.source = JsonLines(path="poems/poems.jsonl.gz", valid_fraction=0.1)
    if variant == "full":
        return experiment
    experiment.model.d_model, experiment.model.d_ff, experiment.model.num_heads = 64, 256, 2
    # A unigram vocabulary has a piece for each character, over 6,000 here. RoBERTa's special pieces include </s> and
    # <pad>, which T5 needs.
    experiment.tokenizer = ByteBPE(vocab_size=1024, num_sentinels=100, special_pieces="roberta")
    experiment.data.sequence_length = 64  # about 40 characters: a poem of eight short lines
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0)
    experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 800, 80, 16
    experiment.evaluate.every = experiment.checkpoint.every = 200
    experiment.evaluate.prompts = ("床前明月光，疑是地上<extra_id_0>。", "白日依山盡，<extra_id_0>入海流。")
    if variant == "short":
        experiment.tokenizer.vocab_size, experiment.data.sequence_length = 300, 32
        experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 20, 4, 8
        experiment.evaluate.every = experiment.checkpoint.every = 10
        experiment.evaluate.batches = 2
    return experiment
