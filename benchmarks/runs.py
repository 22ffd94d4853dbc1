"""Runs the training commands of a comparison, each in a separate process, and reads their metrics."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np
from scipy import stats

# With learned positions and the published learning rate, a small encoder has learned only word frequencies after 25 M
# tokens (loss 5.78) and does not use neighbors. With rotary positions it starts to use neighbors after 1 M tokens.
ENCODER = [
    *("--config.model.position=RotaryPositions()", "--config.train.global_batch_size=32"),
    "--config.optimizer=AdamW(learning_rate=2e-2, epsilon=1e-6, clip_norm=1.0, scale_by_parameter_rms=True)",
]
BERT = [
    *("--config=configs/bert_base.py:tiny", "--config.model.pair_head=False", *ENCODER),
    "--config.objective=MaskedLM(rate=0.3)",
]
PRETRAINING = [  # for less than one epoch
    *("--config.model.dropout_rate=0.0", "--config.model.attention_dropout_rate=0.0", "--config.train.attention=xla"),
    *("--config.tokenizer.vocab_size=4096", "--config.model.vocab_size=auto"),
]


TEXT = {
    "books": "folder with train*.jsonl.gz and valid*.jsonl.gz",
    "source": "data source, as in --config.data.source",
}


def parser(description: Optional[str], text: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of a comparison: --workdir and a data flag, which is a key of TEXT."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workdir", required=True, help="folder for the runs")
    made.add_argument(f"--{text}", required=True, help=TEXT[text])
    return made


def command(words: Sequence[str]) -> None:
    """Runs `python -m pretrainax.main`; on failure exits with the last line of its stderr."""
    done = subprocess.run([sys.executable, "-m", "pretrainax.main", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit((done.stderr.strip().splitlines() or ["no message"])[-1])


def train(workdir: str, flags: Sequence[str], fields: Mapping[str, object]) -> list[dict]:
    """Starts or continues a run unless its last validation is finished; returns the lines of metrics.jsonl.

    Args:
      workdir: folder of the run.
      flags: flags of the command.
      fields: config values by field path; must contain "train.steps".
    """
    if not _is_done(workdir, fields["train.steps"]):
        command([*flags, *(f"--config.{field}={value}" for field, value in fields.items()), f"--workdir={workdir}"])
    return lines(workdir)


def lines(workdir: str) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl; an empty list if there is no file."""
    if not os.path.exists(path := os.path.join(workdir, "metrics.jsonl")):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def last_loss(lines: Sequence[Mapping]) -> float:
    """Returns the last validation loss in nats per target; infinity if the loss is not finite."""
    loss = next(line["loss"] for line in reversed(lines) if line["split"] == "valid")
    return float("inf") if loss is None else loss


def books(folder: str) -> str:
    """Returns the value of --config.data.source for a folder with train*.jsonl.gz and valid*.jsonl.gz."""
    train, valid = (os.path.join(folder, f"{split}*.jsonl.gz") for split in ("train", "valid"))
    return f"JsonLines(path={train!r}, valid_path={valid!r})"


def gain(one: np.ndarray, other: np.ndarray) -> str:
    """Returns the mean paired difference per seed with its 95 % interval by Student's t."""
    differences = one - other
    half = stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / np.sqrt(len(differences))
    mean = differences.mean()
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def _is_done(workdir: str, steps: object) -> bool:
    return any(line["step"] == steps and line["split"] == "valid" for line in lines(workdir))
