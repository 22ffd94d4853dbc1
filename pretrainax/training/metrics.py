"""The metrics of a run: from sums and counts to the numbers of a line, and metrics.jsonl, which holds the lines."""

import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.files.atomic_files import write_atomically
from pretrainax.layers.by_layer import BY_LAYER
from pretrainax.training import expert_balance

# What stands beside a number for people; the names are those of metrics.jsonl.
MEANINGS = {
    "loss": "nats a target token",
    "text_loss": "nats a target token that is text: no sentinel, no end, no [SEP]",
    "perplexity": "e to the loss",
    "bits_per_token": "the loss in bits",
    "bits_per_byte": "bits that the targets take, by the bytes of text they have",
    "accuracy": "target tokens guessed right, each from the true ones around it (teacher-forced)",
    "f1": "harmonic mean of precision and recall: of spans, of the second of two classes, or the mean of all",
    "precision": "spans said that are there, of all said",
    "recall": "spans said that are there, of all there",
    "strict_f1": "F1 of spans, of which none counts that begins otherwise than its scheme says",
    "unread": "words that are cut off at the end of their row: no tag is right of them, and they are of no span",
    "exact_match": "answers that are right: of those found, but for case, punctuation, articles and spaces; "
    "of those written, but for white space around them",
    "answer_f1": "F1 of the words of an answer and of the best of the right ones: the mean",
    "question_accuracy": "questions of whose answers each is judged rightly: MultiRC's exact match",
    "has_answer_exact_match": "exact_match of questions that have an answer",
    "has_answer_f1": "answer_f1 of questions that have an answer",
    "no_answer_accuracy": "questions without an answer to which none is said",
    "f1_micro": "the same of all labels together",
    "matthews": "Matthews' correlation of classes said and true: 0 by chance, 1 at best",
    "accuracy_f1": "mean of accuracy and F1, as GLUE ranks MRPC and QQP, and SuperGLUE CB",
    "pearson": "correlation of numbers said and true",
    "spearman": "correlation of their ranks",
    "pearson_spearman": "mean of both, as GLUE ranks STS-B",
    "squared_error": "mean square of the difference of numbers said and true",
    "text_accuracy": "the same of target tokens that are text",
    "sequence_accuracy": "targets with every token guessed right: what greedy decoding would get",
    "rouge1": "mean F1 of the words of answers written and true, of their stems",
    "rouge2": "the same of pairs of words",
    "rougeL": "the same of their longest common subsequence",
    "bleu": "BLEU of all answers written, from 0 to 100, as sacreBLEU counts it",
    "chrf": "chrF of all answers written, from 0 to 100, as sacreBLEU counts it",
    "recall@1": "queries whose passage has the best score of all passages of the split",
    "recall@10": "queries whose passage is among the ten best",
    "recall@100": "queries whose passage is among the hundred best",
    "mrr": "mean reciprocal rank: of one over the place of a query's passage among all",
    "label_accuracy": "answers written that are the word of the true label",
    "no_label": "answers written that are the word of no label",
    "loss_tokens": "target tokens",
    "labels": "labels of a task: of rows, or of words",
    "phase": "of the run, from 1: which of config.phases a step is of",
    "replaced_loss": "nats a token, of the discriminator: was it replaced?",
    "replaced_accuracy": "tokens of which the discriminator says rightly whether they were replaced",
    "replaced_precision": "tokens that were replaced, of those that the discriminator says were",
    "replaced_recall": "tokens that the discriminator says were replaced, of those that were",
    "replaced_fraction": "tokens that were replaced, of all",
    "multi_token_loss": "nats a token, of those after the next one",
    "multi_token_accuracy": "tokens after the next one that are guessed right",
    "pair_loss": "nats a pair of segments: how do they belong together?",
    "pair_accuracy": "pairs of segments of which the right label is said",
    "backward_loss": "nats a token, each told from those behind it: what reads from right to left",
    "backward_accuracy": "target tokens of that which are guessed right",
    "total_loss": "loss and pair_loss, or backward_loss, together, as they are trained",
    "distillation_loss": "how far the student is from its teacher: the parts below, by their weights in config.distill",
    "soft_loss": "T² times the KL divergence from the teacher's answers, a target or a label",
    "soft_pair_loss": "the same of pairs of segments",
    "hidden_loss": "distance of hidden states from the teacher's, a token, summed over layers",
    "embedding_loss": "the same of what the first layer reads",
    "attention_loss": "mean square of the difference of attention's logits from the teacher's, summed over layers",
    "relation_loss": "KL divergence of relations among queries, keys and values from the teacher's, a token",
    "balance_loss": "what the routers are asked for evenness by, times its weight: the mean over layers",
    "router_z_loss": "mean square of the routers' log-normalisers, times its weight",
    "expert_imbalance": "tokens of the busiest expert over the mean: the mean over layers; 1 is even",
    "dead_experts": "experts of all layers that no token was given to",
    "router_entropy": "nats of a router's distribution over experts, a token: the mean over layers",
    "dropped_fraction": "assignments to experts that had no room left",
    "text_tokens": "tokens of text that all steps so far were made of: no special token, no padding",
    "text_bytes": "bytes of UTF-8 that these have",
    "tokens": "tokens that the device has read, padding and special tokens too",
    "flops": "FLOPs of all steps so far, as `mfu` counts them",
    "learning_rate": "of the last step",
    "gradient_norm": "of the last step, before clipping",
    "skipped_updates": "updates left out so far, as they were not finite",
    "skipped_batches": "batches left out so far, after spikes",
    "tokens_per_second": "tokens of text",
    "padded_tokens_per_second": "tokens that the device has read",
    "step_seconds": "seconds a step, evaluations and checkpoints left out",
    "mfu": "model FLOPs utilisation, attention counted in full as PaLM's authors do",
    "mfu_done": "the same of the FLOPs that are done, without what attention skips because a mask hides it",
    "data_wait_fraction": "share of the time in which devices waited for a batch",
    "padding_fraction": "share of the tokens read that is padding",
}
# The same of a task, whose lines have "labels".
OF_LABELS = {"loss": "nats a label, or the squared error of a number", "accuracy": "labels that are right"}
_BESIDE = {"pair_loss", "backward_loss"}  # of which a model may have one, trained along with the loss
_OF_LOSS = ("perplexity", "bits_per_token")  # follow from the loss


def parts_among(names: Iterable[str]) -> list[str]:
    """Returns the parts that figures of these names are of, "source=wiki" of "loss/source=wiki"."""
    return list(dict.fromkeys(part for name in names if (part := name.partition("/")[2])))


def meaning(name: str, names: Collection[str] = ()) -> str:
    """Returns what a figure is among others, for people; empty for one of the blocks of a model."""
    figure, _, part = name.partition("/")
    meanings = MEANINGS | OF_LABELS if "labels" in names else MEANINGS
    return ", of ".join(filter(None, (meanings.get(figure, ""), part)))


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
    for other in _BESIDE & means.keys():
        metrics["total_loss"] = loss + means[other]
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
