"""Pretrains a small ELECTRA on books by detecting replaced tokens: blocks of `modernbert_base:tiny`, and a generator.

    pretrainax train --config=examples/electra/config.py --workdir=runs/electra

Variants: the default takes minutes on two cores; `:short` takes seconds, as a test; `:full` is ELECTRA small for a GPU.
"""

from pretrainax.config import Experiment, Generator, RotaryPositions
from pretrainax.config.config_file import read_config_file
from pretrainax.data.objectives import ReplacedTokenDetection
from pretrainax.data.sources import JsonLines
from pretrainax.optim import Muon, WarmupLinear
from pretrainax.zoo.variants import pick

# The blocks of ELECTRA small have post-norm. With the small width of this run, post-norm blocks learn only token
# frequencies before the run ends.
BASES = {"": "modernbert_base:tiny", "short": "modernbert_base:tiny", "full": "electra_small:small"}


def get_config(variant: str = "") -> Experiment:
    experiment = read_config_file(pick("electra", variant, BASES))
    experiment.data.source = JsonLines(path="books/train-00000-of-00008.jsonl.gz", valid_path="books/valid.jsonl.gz")
    if variant == "full":
        return experiment
    model = experiment.model
    model.d_model, model.d_ff, model.num_heads = 128, 256, 4
    model.layer_pattern, model.window = ("global",), None  # the rows are short
    model.position = RotaryPositions(max_length=256)  # sentences of the task are longer than the rows of this run
    model.masked_lm_head, model.replaced_token_head = False, True
    model.generator = Generator(num_layers=2, d_model=32, d_ff=64, num_heads=1)  # a quarter of the width, as in small
    experiment.objective, experiment.evaluate.objective = ReplacedTokenDetection(rate=0.3), None
    experiment.tokenizer.vocab_size, experiment.data.sequence_length = 384, 64  # small, so context helps more
    experiment.optimizer = Muon(learning_rate=0.02, adam_learning_rate=0.005, weight_decay=0.1, clip_norm=1.0)
    experiment.train.steps, experiment.train.log_every = 800, 50
    experiment.schedule = WarmupLinear(warmup_steps=20)
    experiment.evaluate.every = experiment.checkpoint.every = 200
    experiment.checkpoint.keep_at = (0,)  # the untrained model, as another start for the fine-tuning
    if variant == "short":
        experiment.tokenizer.vocab_size, experiment.data.sequence_length = 300, 32
        experiment.train.steps, experiment.schedule.warmup_steps, experiment.train.global_batch_size = 20, 4, 8
        experiment.evaluate.every = experiment.checkpoint.every = 10
        experiment.evaluate.batches = 2
    return experiment
