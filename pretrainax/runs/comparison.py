"""Compares a run with its baseline on the validation split, with standard errors over documents."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax.config.metric import METRICS
from pretrainax.data.baseline import Baseline, target_counts
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.files.errors import counted
from pretrainax.runs.cluster_sums import MIN_DOCUMENTS, ClusterSums, Sums, values_of_predictions
from pretrainax.runs.learned import Gain
from pretrainax.scoring.results import Estimate, ratio
from pretrainax.sharding.arrays import put_batch
from pretrainax.training.run import Run
from pretrainax.training.train_step import Params

# The losses in which a model must be better than its baseline: metric -> (description, baseline).
_LEARNED = {
    "masked_loss": ("loss at [MASK], nats per target", "token frequencies"),
    "text_loss": ("loss of text, nats per target", "token frequencies"),
    "loss": ("loss, nats per target", "token frequencies, the form of targets and copying"),
    "replaced_loss": ("replaced-token detection, nats per token", "always 'original'"),
    "pair_loss": ("loss of pairs, nats per pair", "frequencies of the labels"),
}

# Limits of the comparison: training batches from which the baseline learns the form of targets, and targets that it
# reads for learning and for scoring.
_BATCHES, _TARGETS = 50, 1_000_000
Watch = Callable[[Iterable], Iterable]  # yields the same items, or raises an exception


class Comparison(NamedTuple):
    """A validation metric of a model and of its baseline, on the same predictions."""

    model: Estimate
    baseline: Optional[float]  # None: the metric has no baseline
    gain: Optional[Estimate]  # paired difference, positive if the model is better; None: no baseline, or a perplexity


class Comparisons(NamedTuple):
    """All metrics of a validation, and the number and unit of the observations for its standard errors."""

    metrics: dict[str, Comparison]
    observations: str  # "1,216 documents"


def baseline_of(run: Run, watch: Watch = iter) -> Baseline:
    """Builds the baseline of a run from the token frequencies in all training data, and some training batches.

    Args:
      watch: wraps each iterable, for example to stop the computation with an exception.
    """
    prepared, train = run.prepared, _batches(run, "train")
    counts = np.zeros(prepared.tokenizer.vocabulary.size)
    for part, corpora in zip(run.parts, prepared.phases or (prepared.train,), strict=True):
        for epochs, corpus in zip(part.train_batches.epochs, corpora, strict=True):
            for batch_counts in watch(target_counts(corpus)):
                counts += epochs * batch_counts
    num_batches = min(_max_batches(train), _BATCHES, run.experiment.train.steps)
    return Baseline(counts, watch(train[i] for i in range(num_batches)), prepared.tokenizer.vocabulary)


def _batches(run: Run, split: str) -> Batches:
    """Returns the batches of a split with the validation objective and the rows of all processes."""
    config = dataclasses.replace(run.experiment, objective=run.experiment.validation_objective)
    return batches_of(config, run.prepared, split)


def _max_batches(batches: Batches) -> int:
    return max(_TARGETS // (batches.global_batch_size * batches.lengths.targets), 1)


class ValidationSums(NamedTuple):
    """The sums of each validation metric over the predictions in each observation of a validation."""

    metrics: dict[str, Sums]
    unit: str  # "documents", or "rows" if there are fewer than MIN_DOCUMENTS documents
    num_documents: int
    num_batches: int  # batches read


def validation_sums(run: Run, params: Params, baseline: Optional[Baseline], watch: Watch = iter) -> ValidationSums:
    """Evaluates a model and its baseline on at most _TARGETS targets of the validation split.

    Every document is one observation: the function adds up all predictions of a document, in any row, before it
    computes errors. If there are fewer than MIN_DOCUMENTS documents, every row is one observation instead.

    Args:
      baseline: `baseline_of` the run. None: the sums have no baseline.
      watch: as in `baseline_of`.
    """
    valid, num_batches = _batches(run, "valid"), run.validation.sizes[0]
    num_rows = num_batches * valid.global_batch_size
    by_document, by_row = ClusterSums(valid.num_documents), ClusterSums(num_rows)
    seen = np.zeros(valid.num_documents, bool)
    local = run.validation.valid_batches
    local_rows = slice(local.first_row, local.first_row + local.local_batch_size)
    num_compared = min(num_batches, _max_batches(valid))
    for number in watch(range(num_compared)):
        batch, documents = valid.with_documents(number)
        local_batch = put_batch({name: x[local_rows] for name, x in batch.items()}, run.mesh)
        _, values = run.validation.eval_step(params, local_batch, run.frozen)
        model_values = values_of_predictions(jax.device_get(values), batch)
        baseline_values = baseline and baseline.values(batch)
        seen[documents[documents >= 0]] = True
        row_numbers = valid.global_batch_size * number + np.arange(len(documents))
        by_document.add(model_values, batch, documents, baseline_values)
        by_row.add(model_values, batch, np.broadcast_to(row_numbers[:, None], documents.shape), baseline_values)
    has_few = seen.sum() < MIN_DOCUMENTS
    sums = _with_always_original((by_row if has_few else by_document).sums())
    return ValidationSums(sums, "rows" if has_few else "documents", int(seen.sum()), num_compared)


def compare(run: Run, params: Params, baseline: Baseline, watch: Watch = iter) -> Comparisons:
    """Compares a model with its baseline on the predictions and observations of `validation_sums`."""
    sums, unit, num_documents, num_compared = validation_sums(run, params, baseline, watch)
    num_batches, observations = run.validation.sizes[0], counted(num_documents, "document")
    if unit == "rows":
        num_read = np.count_nonzero(sums["loss"].weights) if "loss" in sums else 0
        observations = f"{counted(num_read, 'row')} of {observations}"
    if num_compared < num_batches:
        observations += f" in the first {num_compared:,} of {num_batches:,} batches, as the baseline and the gain"
    return Comparisons(compare_sums(sums, unit), observations)


def _with_always_original(sums: dict[str, Sums]) -> dict[str, Sums]:
    """Adds the baseline of replaced-token detection, which predicts "original" with the fraction of original tokens."""
    if "replaced_loss" not in sums:
        return sums
    total = sums["replaced_loss"].weights
    replaced = sums["replaced_recall"].weights if "replaced_recall" in sums else np.zeros_like(total)
    fraction = replaced.sum() / total.sum()
    nats = sum(-math.log(p) * n for p, n in ((fraction, replaced), (1 - fraction, total - replaced)) if p > 0)
    baselines = {"replaced_loss": nats, "replaced_accuracy": total - replaced, "replaced_recall": 0.0 * total}
    return sums | {name: sums[name]._replace(baseline=x) for name, x in baselines.items() if name in sums}


def compare_sums(sums: Mapping[str, Sums], unit: str) -> dict[str, Comparison]:
    """Compares each metric; `unit` is the plural name of the observations."""
    comparisons = {name: _comparison(x, METRICS[name].larger_is_better, unit) for name, x in sums.items()}
    if "loss" in comparisons:
        model, baseline, gain = comparisons["loss"]
        bits = None if baseline is None else baseline / math.log(2)
        comparisons["bits_per_token"] = Comparison(
            model.times(1 / math.log(2)), bits, gain and gain.times(1 / math.log(2))
        )
        comparisons["perplexity"] = Comparison(model.exp(), baseline and math.exp(min(baseline, 700.0)), None)
    parts = [x for name, x in sums.items() if name == "loss" or METRICS[name].in_total_loss]
    if len(parts) > 1:
        comparisons["total_loss"] = _comparison(_total(parts), False, unit)
    return comparisons


def _comparison(sums: Sums, larger_is_better: bool, unit: str) -> Comparison:
    counted = sums.weights > 0
    model, weights = sums.model[counted], sums.weights[counted]
    if sums.baseline is None:
        return Comparison(ratio(model, weights, unit=unit), None, None)
    baseline = sums.baseline[counted]
    gain = ratio(model - baseline if larger_is_better else baseline - model, weights, unit=unit)
    return Comparison(ratio(model, weights, unit=unit), float(baseline.sum() / weights.sum()), gain)


def _total(parts: list[Sums]) -> Sums:
    """Returns the sums of a sum of mean losses: each document's linear contribution to each mean, with weight 1."""
    counted = np.any([part.weights > 0 for part in parts], axis=0)

    def contributions(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
        mean = sums.sum() / weights.sum()
        return mean + counted.sum() * (sums - mean * weights)[counted] / weights.sum()

    model = np.sum([contributions(part.model, part.weights) for part in parts], axis=0)
    baselines = [contributions(part.baseline, part.weights) for part in parts if part.baseline is not None]
    return Sums(model, np.sum(baselines, axis=0) if len(baselines) == len(parts) else None, np.ones_like(model))


def to_json(comparisons: Comparisons) -> str:
    """Formats comparisons as JSON: {"observations": …, "metrics": {metric: {"value": …, "standard_error": …, …}}}."""
    metrics = {}
    for name, (model, baseline, gain) in comparisons.metrics.items():
        metrics[name] = {**model._asdict(), "baseline": baseline, "gain": gain and gain._asdict()}
    return json.dumps({"observations": comparisons.observations, "metrics": metrics}, indent=1) + "\n"


def gains_of(comparisons: Mapping[str, Comparison]) -> list[Gain]:
    """Returns the gains that show whether a model has learned: in one loss of tokens, and in each other head."""
    names = [next((name for name in ("masked_loss", "text_loss", "loss") if name in comparisons), "loss")]
    gains = []
    for name in (*names, "replaced_loss", "pair_loss"):
        if name in comparisons and (gain := comparisons[name].gain) is not None:
            gains.append(Gain(*_LEARNED[name], gain))
    return gains
