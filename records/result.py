"""Reads and writes result.json of a record: the inputs of its runs, and their scores."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.studies.outcomes import Outcome, Outcomes

FILE = "result.json"
# The fields of metrics.jsonl that are part of a record.
FIELDS = ("step", "split", "loss", "perplexity", "bits_per_token", "text_loss", "tokens", "flops", "step_seconds")
FIELDS += ("core_seconds", "reference_seconds", "learning_rate", "gradient_norm")


class SeedResult(NamedTuple):
    """The result of the run of one seed."""

    seed: int
    bits_per_byte: float
    changes: Sequence[float]  # influence of each held-out document, as in `Outcome.changes`
    metrics: str  # SHA-256 of metrics-SEED.jsonl


class Result(NamedTuple):
    """The content of result.json."""

    track: str
    variant: str  # name of the budget, and argument of `get_config`
    config: str  # SHA-256 of config.py
    text: dict[str, str]  # SHA-256 of each file of the text
    seeds: Sequence[SeedResult]
    versions: dict[str, str]
    machine: str

    @property
    def outcomes(self) -> Outcomes:
        """Returns the score of each seed in the format of `pretrainax/studies/contrasts.py`."""
        return {s.seed: [Outcome(s.bits_per_byte, np.array(s.changes, np.float64))] for s in self.seeds}


def read_result(folder: str) -> Result:
    """Reads result.json of a record; raises UserError if it is missing or has the wrong fields."""
    path = os.path.join(folder, FILE)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return Result(**content | {"seeds": [SeedResult(**seed) for seed in content["seeds"]]})
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{path} is no result of a record ({type(e).__name__}: {e})") from e


def write_result(folder: str, result: Result) -> None:
    """Writes result.json of a record."""
    content = result._asdict() | {"seeds": [seed._asdict() for seed in result.seeds]}
    write_atomically(os.path.join(folder, FILE), json.dumps(content, indent=1) + "\n")


def metrics_path(folder: str, seed: int) -> str:
    """Returns the path of the log of a seed."""
    return os.path.join(folder, f"metrics-{seed}.jsonl")


def read_lines(path: str) -> list[JsonObject]:
    """Reads a JSON Lines file; raises UserError if a line is not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e})") from e
    if not all(isinstance(line, dict) for line in lines):
        raise UserError(f"{path} has a line that is no JSON object")
    return lines
