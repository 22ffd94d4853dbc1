"""Computes a run's metrics from sums and counts, and reads metrics.jsonl."""

import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config.former_fields import upgrade_metrics
from pretrainax.config.metric import FRACTION, METRICS, Metric, declare, declared
from pretrainax.files.atomic_files import write_atomically
from pretrainax.layers.by_layer import BY_LAYER
from pretrainax.training import expert_balance

# Metrics of all runs. Heads, tasks, experts and distillation declare additional metrics.
declare(
    Metric("labels", "labels of a task, for rows or words", is_count=True),
    Metric("phase", "number of the step's phase in config.phases, from 1", is_count=True),
    Metric("text_tokens", "text tokens in all steps so far, without special tokens and padding", is_count=True),
    Metric("text_bytes", "UTF-8 bytes of text in all steps so far", is_count=True),
    Metric("tokens", "tokens that the devices have read so far, with padding and special tokens", is_count=True),
    Metric("flops", "FLOPs of all steps so far, counted as for `mfu`", is_count=True),
    Metric("learning_rate", "learning rate of the last step"),
    Metric("skipped_updates", "updates skipped so far because they were not finite", is_count=True),
    Metric("skipped_batches", "batches skipped so far after loss spikes", is_count=True),
    Metric("padding_fraction", "fraction of the tokens read that is padding", unit=FRACTION),
    depends_on=(),
)
declare(
    Metric("padded_tokens_per_second", "tokens that the devices read per second, with padding"),
    Metric("step_seconds", "seconds per step, without compilation, evaluations and checkpoints"),
    Metric("compile_seconds", "seconds of the steps that compiled the update, only in lines with such a step"),
    Metric("mfu", "model FLOPs utilization; attention is counted in full, as in the PaLM paper", unit=FRACTION),
    Metric("mfu_executed", "model FLOPs utilization, without masked blocks that attention skips", unit=FRACTION),
    Metric("data_wait_fraction", "fraction of the time that devices waited for a batch", unit=FRACTION),
    depends_on=("hardware",),
)
declare(Metric("tokens_per_second", "text tokens per second"), depends_on=("tokenizer", "hardware"))
declare(
    Metric("gradient_norm", "gradient norm of the last step, before clipping"), depends_on=("objective", "tokenizer")
)
_DERIVED = ("perplexity", "bits_per_token")  # derived from the loss


def parts_in_names(names: Iterable[str]) -> list[str]:
    """Returns the distinct parts in metric names, such as "source=wiki" in "loss/source=wiki", in order."""
    return list(dict.fromkeys(part for name in names if (part := name.partition("/")[2])))


def meaning(name: str, names: Collection[str] = ()) -> str:
    """Returns a metric's description, or "" if it has none; if "labels" is in `names`, the metrics are of a task."""
    return ", of ".join(filter(None, (declared(name, names).meaning, name.partition("/")[2])))


def summarize(sums: Mapping[str, Sequence], without_targets: float = 0.0) -> dict[str, float]:
    """Computes a line of metrics.jsonl from {name: (sum, count)}: the means, and metrics derived from the means.

    A metric with count 0 is omitted, except the loss, which is then `without_targets`: every line has a loss. The loss
    of a task is its "label_loss". A task has no token metrics, such as the perplexity.
    """
    has_tokens = "label_loss" not in sums
    balance = expert_balance.balance_metrics(sums)
    sums = {name.removeprefix("label_"): x for name, x in sums.items() if not name.startswith(BY_LAYER)}
    means = {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count) > 0}
    loss = means.get("loss", without_targets)
    metrics = {"loss": loss, **(metrics_from_loss(loss) if has_tokens else {})}
    if "accuracy" in means:
        metrics["accuracy"] = means["accuracy"]
    metrics["loss_tokens" if has_tokens else "labels"] = float(sums["loss"][1])
    metrics |= {name: mean for name, mean in means.items() if name != "z_loss"}  # of other heads, and of blocks
    if "replaced_loss" in means:
        metrics["replaced_fraction"] = float(sums["replaced_recall"][1]) / float(sums["replaced_loss"][1])
    other_losses = [mean for name, mean in means.items() if name in METRICS and METRICS[name].in_total_loss]
    if other_losses:
        metrics["total_loss"] = loss + sum(other_losses)
    return metrics | balance


def add_up(several: Sequence[Mapping[str, tuple]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Adds up {name: (sum, count)} over several batches, in float64."""
    pairs = {name: [sums[name] for sums in several] for name in several[0]}
    total = lambda parts: np.sum([np.asarray(x, np.float64) for x in parts], axis=0)  # noqa: E731
    return {name: (total([x for x, _ in values]), total([n for _, n in values])) for name, values in pairs.items()}


def summarize_parts(parts: Sequence[tuple[str, ...]], sums: Sequence[Mapping[str, tuple]]) -> dict[str, float]:
    """Computes each validation part's metrics, such as {"loss/source=wiki": …}, except those in `_DERIVED`.

    Args:
      parts: for each batch, the names of the parts that it belongs to, such as "source=wiki".
      sums: for each batch, {name: (sum, count)}.
    """
    names = dict.fromkeys(name for batch_parts in parts for name in batch_parts)
    sums_by_part = {name: [s for labels, s in zip(parts, sums, strict=True) if name in labels] for name in names}
    metrics = {}
    for name, part_sums in sums_by_part.items():
        part_metrics = summarize(add_up(part_sums))
        excluded = _DERIVED if part_metrics.get("loss_tokens", 1) else (*_DERIVED, "loss")
        metrics |= {f"{metric}/{name}": x for metric, x in part_metrics.items() if metric not in excluded}
    return metrics


def metrics_from_loss(loss: float) -> dict[str, float]:
    """Converts a loss in nats per token to perplexity and bits per token; both are finite for a finite loss."""
    largest = 700.0  # float64 holds the exponential of numbers up to 709
    return {"perplexity": math.exp(min(loss, largest)), "bits_per_token": loss / math.log(2)}


def read_metrics(path: str) -> list[dict]:
    """Reads the lines of metrics.jsonl as dicts; omits damaged lines and an incomplete last line."""
    with open(path, "rb") as f:
        return [upgrade_metrics(entry) for line in f if (entry := _parsed_line(line)) is not None]


def remove_lines_after(path: str, step: int) -> int:
    """Removes the lines of steps after `step` from metrics.jsonl, because the run is about to repeat these steps.

    Returns:
      The number of damaged lines, which are also removed. If there are any, the original is copied to `path`.damaged.
    """
    if not os.path.exists(path):
        return 0
    with open(path, "rb") as f:
        lines = [(line, _parsed_line(line)) for line in f]
    remaining = [line for line, entry in lines if entry is not None and entry["step"] <= step]
    damaged = sum(entry is None and line.endswith(b"\n") for line, entry in lines)
    if damaged:
        shutil.copyfile(path, f"{path}.damaged")
    if len(remaining) < len(lines):
        write_atomically(path, b"".join(remaining))
    return damaged


def _parsed_line(line: bytes) -> Optional[dict]:
    """Parses a line of metrics.jsonl as a dict; returns None if the line is damaged or incomplete."""
    try:
        entry = json.loads(line)
        is_valid = type(entry["step"]) is int and isinstance(entry["split"], str)
        loss = entry["loss"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return entry if is_valid and line.endswith(b"\n") and (loss is None or isinstance(loss, int | float)) else None
