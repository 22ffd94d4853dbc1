"""Makes the training runs of a comparison, each by the command in a process of its own, and reads what they noted."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np
from scipy import stats

# A small encoder with learned positions and the published rate has not learnt to look at its neighbours after 25 M
# tokens: it tells how often words come, no more (a loss of 5.78). With rotary positions it begins to after one.
ENCODER = [
    *("--config.model.position=RotaryPositions()", "--config.train.global_batch_size=32"),
    "--config.optimizer=AdamW(learning_rate=2e-2, epsilon=1e-6, clip_norm=1.0, scale_by_parameter_rms=True)",
]
BERT = [
    *("--config=configs/bert_base.py:tiny", "--config.model.pair_head=False", *ENCODER),
    "--config.objective=MaskedLM(rate=0.3)",
]
PRETRAINING = [  # of less than an epoch
    *("--config.model.dropout_rate=0.0", "--config.model.attention_dropout_rate=0.0", "--config.train.attention=xla"),
    *("--config.tokenizer.vocab_size=4096", "--config.model.vocab_size=auto"),
]


TEXT = {
    "books": "a folder with train*.jsonl.gz and valid*.jsonl.gz",
    "source": "the text, as --config.data.source takes it",
}


def parser(description: Optional[str], text: str) -> argparse.ArgumentParser:
    """Returns a parser of a comparison's flags: where its runs go, and the text, of those of TEXT."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workdir", required=True, help="a folder for the runs")
    made.add_argument(f"--{text}", required=True, help=TEXT[text])
    return made


def command(words: Sequence[str]) -> None:
    """Runs `python -m pretrainax.main`; ends this process, with the last line of that one, where it fails."""
    done = subprocess.run([sys.executable, "-m", "pretrainax.main", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit((done.stderr.strip().splitlines() or ["no message"])[-1])


def train(workdir: str, flags: Sequence[str], fields: Mapping[str, object]) -> list[dict]:
    """Makes a run, or the rest of it, unless it has its last validation already; returns the lines of its metrics.

    Args:
      fields: values of the config by their path below it; "train.steps" is among them.
    """
    if not _is_done(workdir, fields["train.steps"]):
        command([*flags, *(f"--config.{field}={value}" for field, value in fields.items()), f"--workdir={workdir}"])
    return lines(workdir)


def lines(workdir: str) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl; none where there is none."""
    if not os.path.exists(path := os.path.join(workdir, "metrics.jsonl")):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def last_loss(lines: Sequence[Mapping]) -> float:
    """Returns the last validation loss, nats a target; infinity where it is not finite."""
    loss = next(line["loss"] for line in reversed(lines) if line["split"] == "valid")
    return float("inf") if loss is None else loss


def books(folder: str) -> str:
    """Returns the text of a folder with train*.jsonl.gz and valid*.jsonl.gz, as --config.data.source takes it."""
    train, valid = (os.path.join(folder, f"{split}*.jsonl.gz") for split in ("train", "valid"))
    return f"JsonLines(path={train!r}, valid_path={valid!r})"


def gain(one: np.ndarray, other: np.ndarray) -> str:
    """Returns the mean of the differences of one seed each, with its interval of 95 % by Student's t."""
    differences = one - other
    half = stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / np.sqrt(len(differences))
    mean = differences.mean()
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def _is_done(workdir: str, steps: object) -> bool:
    return any(line["step"] == steps and line["split"] == "valid" for line in lines(workdir))
