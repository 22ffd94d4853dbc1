"""The metrics of a run: from sums and counts to the numbers of a line, and metrics.jsonl, which holds the lines."""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Optional

from pretrainax.config.atomic_files import write_atomically

# What stands beside a number for people; the names are those of metrics.jsonl.
MEANINGS = {
    "loss": "nats a target token",
    "text_loss": "nats a target token that is text: no sentinel, no end, no [SEP]",
    "perplexity": "e to the loss",
    "bits_per_token": "the loss in bits",
    "bits_per_byte": "bits that the targets take, by the bytes of text they have",
    "accuracy": "target tokens guessed right, each from the true ones around it (teacher-forced)",
    "text_accuracy": "the same of target tokens that are text",
    "sequence_accuracy": "targets with every token guessed right: what greedy decoding would get",
    "loss_tokens": "target tokens",
    "text_tokens": "tokens of text that all steps so far were made of: no special token, no padding",
    "text_bytes": "bytes of UTF-8 that these have",
    "tokens": "tokens that the device has read, padding and special tokens too",
    "flops": "FLOPs of all steps so far",
    "learning_rate": "of the last step",
    "gradient_norm": "of the last step, before clipping",
    "skipped_updates": "updates left out so far, as they were not finite",
    "skipped_batches": "batches left out so far, after spikes",
    "tokens_per_second": "tokens of text",
    "padded_tokens_per_second": "tokens that the device has read",
    "step_seconds": "seconds a step, evaluations and checkpoints left out",
    "mfu": "model FLOPs utilisation",
    "data_wait_fraction": "share of the time in which devices waited for a batch",
    "padding_fraction": "share of the tokens read that is padding",
}


def summarize(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Returns the metrics of one line: means, and what follows from them, of {name: (sum, count)}."""
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
    return metrics


def perplexity(loss: float) -> float:
    """Returns e to the loss, and a finite number for any loss."""
    return math.exp(min(loss, 700.0))  # the largest whose exponential a float64 holds is 709


# --- metrics.jsonl -------------------------------------------------------------------------------------------------


def read_metrics(path: str) -> list[dict]:
    """Returns the lines of a metrics.jsonl that are whole: not the last one if a kill cut it short, no damaged one."""
    with open(path, "rb") as f:
        return [found for line in f if (found := _whole(line)) is not None]


def cut_after(path: str, step: int) -> int:
    """Keeps the lines of steps up to `step`, byte for byte; the steps after it are about to be run again.

    Returns how many lines are damaged. They are left out, and the file as it was is kept as `path`.damaged.
    """
    if not os.path.exists(path):
        return 0
    with open(path, "rb") as f:
        lines = [(line, _whole(line)) for line in f]
    kept = [line for line, found in lines if found is not None and found["step"] <= step]
    damaged = sum(found is None and line.endswith(b"\n") for line, found in lines)
    if damaged:
        shutil.copyfile(path, f"{path}.damaged")
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))
    return damaged


def _whole(line: bytes) -> Optional[dict]:
    """Returns what a line of metrics.jsonl holds; None where it is not what `MetricsWriter.log` has written."""
    try:
        found = json.loads(line)
        known = type(found["step"]) is int and isinstance(found["split"], str)
        loss = found["loss"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if known and line.endswith(b"\n") and (loss is None or isinstance(loss, int | float)) else None
