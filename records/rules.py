"""Defines the rules of the records: text, budget, seeds, score, and the fields that a config may set."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pretrainax.config import Experiment
from pretrainax.data.sources import JsonLines
from pretrainax.studies.measures import BitsPerByte

# SHA-256 of the files that `text.py` writes.
TEXT = {
    "train.jsonl": "014a1f5827e6173fbec62fcda3f9c0e2d0502486e7009c36728e6b6ea3cd674a",
    "heldout.jsonl": "db845b8ca7a2c41b0868099e7876efae36e7bd6166eebd6139e2776f48989796",
    "valid.jsonl": "4d4fc0c1afab9aa1b94a375b48d07ec888ad51743063dc32074a965927dbb7fd",
}
TRACKS = {
    "encoder": "encoder",
    "encoder-decoder": "encoder_decoder",
    "decoder": "decoder",
}  # config.model.family of each
SEEDS = 5  # minimum number of seeds, which are 0, 1, 2, …
LEVEL = 0.01  # level of the one-sided test against the standing record
LOGS = 40  # lines of the training log of a run
# The tokenizers that are trained on the training text of the run. Other tokenizers could contain other text.
TOKENIZERS = ("BPE", "ByteBPE", "Characters", "Unigram", "WordPiece", "Words")


class Budget(NamedTuple):
    """The core-seconds that a run may use."""

    core_seconds: float  # reference core-seconds from the end of the first update to the end of the last update
    counts: bool  # whether the result can be a record


# "short" takes seconds and shows that a config runs; its results are not records.
BUDGETS: Mapping[str, Budget] = {"full": Budget(2_400.0, True), "short": Budget(40.0, False)}


def log_every(experiment: Experiment) -> int:
    """Returns the steps between two log lines of a run."""
    return max(experiment.train.steps // LOGS, 1)


def prepared(experiment: Experiment, text: str, seed: int) -> Experiment:
    """Returns the config of one run of a record: the fixed text, the seed, and one log line in each 40th of the steps.

    Args:
      experiment: the config of the record.
      text: the folder of the files of `TEXT`.
      seed: the seed of parameters, data order, dropout and masks.
    """
    source = JsonLines(path=os.path.join(text, "train.jsonl"), valid_path=os.path.join(text, "valid.jsonl"))
    every = log_every(experiment)
    train = dataclasses.replace(
        experiment.train,
        seed=seed,
        log_every=every,
        budget=None,
        **{f"{use}_seed": None for use in ("init", "order", "dropout", "mask")},
    )
    return dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, source=source, workers=0),
        train=train,
        evaluate=dataclasses.replace(experiment.evaluate, every=experiment.train.steps),
        checkpoint=dataclasses.replace(experiment.checkpoint, every=10 * every, keep=1),
        trackers=(),
    )


def measure(text: str) -> BitsPerByte:
    """Returns the score: bits per byte of the spans of the held-out documents."""
    source = JsonLines(path=os.path.join(text, "train.jsonl"), valid_path=os.path.join(text, "heldout.jsonl"))
    return BitsPerByte("bits per byte", source, documents=None)


def config_problems(experiment: Experiment, track: str) -> Iterator[str]:
    """Yields one line for each field that the rules of a track forbid."""
    if track not in TRACKS:
        yield f"the track is {track!r}, it must be one of {', '.join(TRACKS)}"
    elif experiment.model.family != TRACKS[track]:
        yield f"config.model.family is {experiment.model.family}, the track needs {TRACKS[track]}"
    if (name := type(experiment.tokenizer).__name__) not in TOKENIZERS:
        yield f"config.tokenizer is {name}, it must be one of {', '.join(TOKENIZERS)}, which a run trains on its text"
    if experiment.tokenizer.path is not None:
        yield f"config.tokenizer.path is {experiment.tokenizer.path}; a record trains its tokenizer on its text"
    if experiment.train.steps < 1:
        yield "config.train.steps is 0; a record has a fixed number of steps, which all seeds share"
    fields = {
        "checkpoint.init_from": experiment.checkpoint.init_from,
        "tuning": experiment.tuning,
        "distill": experiment.distill,
        "phases": experiment.phases,
        "callbacks": experiment.callbacks,
    }
    for path, value in fields.items():
        if value:
            yield f"config.{path} is set; a record trains fresh parameters on the fixed text, in one phase"
