"""The metrics of a run: from sums and counts to the numbers of a line, and metrics.jsonl, which holds the lines."""

import json
import math
import os
from collections.abc import Mapping
from typing import Optional

from pretrainax.config.atomic_files import write_atomically

# What stands beside a number for people; the names are those of metrics.jsonl.
MEANINGS = {
    "loss": "nats a target token",
    "perplexity": "e to the loss",
    "bits_per_token": "the loss in bits",
    "bits_per_byte": "bits of text that a byte of it takes",
    "accuracy": "target tokens guessed right, each from the true ones around it (teacher-forced)",
    "sequence_accuracy": "targets with every token guessed right: what greedy decoding would get",
    "loss_tokens": "target tokens",
}


def summarize(sums: Mapping[str, tuple], bytes_per_token: Optional[float] = None) -> dict[str, float]:
    """Returns the metrics of one line: means, and what follows from them, of {name: (sum, count)}.

    Bits per byte compare models across tokenizers. They need `bytes_per_token`, the mean length in UTF-8 of a target
    token, and a loss that is a likelihood of the text: a causal one. None for the others.
    """
    loss = float(sums["loss"][0]) / max(float(sums["loss"][1]), 1e-9)
    metrics = {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_token": loss / math.log(2),
        "accuracy": float(sums["accuracy"][0]) / max(float(sums["accuracy"][1]), 1e-9),
        "loss_tokens": float(sums["loss"][1]),
    }
    for name in sums:
        if name not in ("loss", "accuracy", "z_loss"):  # of further heads, and of blocks
            metrics[name] = float(sums[name][0]) / max(float(sums[name][1]), 1e-9)
    if bytes_per_token:
        metrics["bits_per_byte"] = metrics["bits_per_token"] / bytes_per_token
    return metrics


def perplexity(loss: float) -> float:
    """Returns e to the loss, and a finite number for any loss."""
    return math.exp(min(loss, 700.0))  # the largest whose exponential a float64 holds is 709


# --- metrics.jsonl -------------------------------------------------------------------------------------------------


def read_metrics(path: str) -> list[dict]:
    """Returns the lines of a metrics.jsonl, without the last one if a kill cut it short."""
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def cut_after(path: str, step: int) -> None:
    """Keeps the lines of steps up to `step`, byte for byte; the steps after it are about to be run again."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as f:
        lines = f.readlines()
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept))
