"""The metrics of a run: from sums and counts to the numbers of a line, and metrics.jsonl, which holds the lines."""

import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config.metric import METRICS, Metric, declare
from pretrainax.files.atomic_files import write_atomically
from pretrainax.layers.by_layer import BY_LAYER
from pretrainax.training import expert_balance

# Of runs in general. Parts declare theirs: heads, tasks, experts, distillation.
declare(
    Metric("labels", "labels of a task: of rows, or of words"),
    Metric("phase", "of the run, from 1: which of config.phases a step is of"),
    Metric("text_tokens", "tokens of text that all steps so far were made of: no special token, no padding"),
    Metric("text_bytes", "bytes of UTF-8 that these have"),
    Metric("tokens", "tokens that the device has read, padding and special tokens too"),
    Metric("flops", "FLOPs of all steps so far, as `mfu` counts them"),
    Metric("learning_rate", "of the last step"),
    Metric("gradient_norm", "of the last step, before clipping"),
    Metric("skipped_updates", "updates left out so far, as they were not finite"),
    Metric("skipped_batches", "batches left out so far, after spikes"),
    Metric("tokens_per_second", "tokens of text"),
    Metric("padded_tokens_per_second", "tokens that the device has read"),
    Metric("step_seconds", "seconds a step, evaluations and checkpoints left out"),
    Metric("mfu", "model FLOPs utilisation, attention counted in full as PaLM's authors do"),
    Metric("mfu_done", "the same of the FLOPs that are done, without what attention skips because a mask hides it"),
    Metric("data_wait_fraction", "share of the time in which devices waited for a batch"),
    Metric("padding_fraction", "share of the tokens read that is padding"),
)
# The same of a task, whose lines have "labels".
OF_LABELS = {"loss": "nats a label, or the squared error of a number", "accuracy": "labels that are right"}
_OF_LOSS = ("perplexity", "bits_per_token")  # follow from the loss


def parts_among(names: Iterable[str]) -> list[str]:
    """Returns the parts that figures of these names are of, "source=wiki" of "loss/source=wiki"."""
    return list(dict.fromkeys(part for name in names if (part := name.partition("/")[2])))


def meaning(name: str, names: Collection[str] = ()) -> str:
    """Returns what a figure is among others, for people; empty for one of the blocks of a model."""
    figure, _, part = name.partition("/")
    said = METRICS[figure].meaning if figure in METRICS else ""
    of_labels = OF_LABELS.get(figure, said) if "labels" in names else said
    return ", of ".join(filter(None, (of_labels, part)))


def summarize(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Returns the metrics of one line: means, and what follows from them, of {name: (sum, count)}.

    Of what was asked nowhere, whose count is 0, there is no mean; but a line always has a loss. That of a task is of
    its labels, "label_loss", and says nothing of tokens.
    """
    of_tokens = "label_loss" not in sums
    balance = expert_balance.figures(sums)
    sums = {name.removeprefix("label_"): x for name, x in sums.items() if not name.startswith(BY_LAYER)}
    means = {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count) > 0}
    loss = means.get("loss", 0.0)
    metrics = {"loss": loss, **(of_loss(loss) if of_tokens else {})}
    if "accuracy" in means:
        metrics["accuracy"] = means["accuracy"]
    metrics["loss_tokens" if of_tokens else "labels"] = float(sums["loss"][1])
    metrics |= {name: mean for name, mean in means.items() if name != "z_loss"}  # of further heads, and of blocks
    if "replaced_loss" in means:
        metrics["replaced_fraction"] = float(sums["replaced_recall"][1]) / float(sums["replaced_loss"][1])
    beside = [mean for name, mean in means.items() if name in METRICS and METRICS[name].in_total_loss]
    if beside:
        metrics["total_loss"] = loss + sum(beside)
    return metrics | balance


def add_up(several: Sequence[Mapping[str, tuple]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the sums and counts of several batches as those of one, in float64."""
    pairs = {name: [sums[name] for sums in several] for name in several[0]}
    added = lambda parts: np.sum([np.asarray(x, np.float64) for x in parts], axis=0)  # noqa: E731
    return {name: (added([x for x, _ in found]), added([n for _, n in found])) for name, found in pairs.items()}


def summarize_parts(parts: Sequence[tuple[str, ...]], sums: Sequence[Mapping[str, tuple]]) -> dict[str, float]:
    """Returns the figures of each part of a validation, {"loss/source=wiki": …}, but for what follows from its loss.

    parts, sums: of each batch.
    """
    names = dict.fromkeys(name for of_batch in parts for name in of_batch)
    of_part = {name: [s for of_batch, s in zip(parts, sums, strict=True) if name in of_batch] for name in names}
    figures = {}
    for name, several in of_part.items():
        found = summarize(add_up(several))
        without = _OF_LOSS if found["loss_tokens"] else (*_OF_LOSS, "loss")
        figures |= {f"{figure}/{name}": x for figure, x in found.items() if figure not in without}
    return figures


def of_loss(loss: float) -> dict[str, float]:
    """Returns what follows from a loss in nats: finite numbers for any finite loss."""
    largest = 700.0  # whose exponential a float64 holds: up to 709
    return {"perplexity": math.exp(min(loss, largest)), "bits_per_token": loss / math.log(2)}


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
