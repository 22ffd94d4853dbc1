"""Compares a run with its baseline on the validation split, with standard errors over documents."""

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax.config.metric import METRICS
from pretrainax.data.baseline import Baseline, target_counts, values_of_targets
from pretrainax.data.batch import HostBatch, is_gathered
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.runs.learned import Gain
from pretrainax.scoring.results import Estimate, ratio
from pretrainax.sharding.arrays import put_batch
from pretrainax.training.run import Run
from pretrainax.training.train_step import Params

# Descriptions of the losses that a model has to improve on its baseline: metric -> (what it is, baseline)
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

MIN_DOCUMENTS = 20  # with fewer documents, standard errors are computed over rows


class Comparison(NamedTuple):
    """A validation metric of a model and of its baseline, on the same predictions."""

    model: Estimate
    baseline: Optional[float]  # None: the metric has no baseline
    gain: Optional[Estimate]  # paired difference, positive if the model is better; None: no baseline, or a perplexity


class Comparisons(NamedTuple):
    """All metrics of a validation, and what its standard errors are computed over."""

    metrics: dict[str, Comparison]
    observations: str  # "1,216 documents"


class _Sums(NamedTuple):
    """The sums of a metric over the predictions in each of D documents or rows, [D] float64 each."""

    model: np.ndarray
    baseline: Optional[np.ndarray]
    weights: np.ndarray


def baseline_of(run: Run, watch: Watch = iter) -> Baseline:
    """Builds the baseline of a run from the token frequencies in all training data, and some training batches.

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


def compare(run: Run, params: Params, baseline: Baseline, watch: Watch = iter) -> Comparisons:
    """Evaluates a model and its baseline on at most _TARGETS targets of the validation split.

    Every document is one observation: all its predictions, in any row, are added up before errors are computed. If
    there are fewer than MIN_DOCUMENTS documents, every row is one observation instead.

    Args:
      baseline: `baseline_of` the run.
      watch: as in `baseline_of`.
    """
    valid, num_batches = _batches(run, "valid"), run.validation.sizes[0]
    num_rows = num_batches * valid.global_batch_size
    by_document, by_row = (
        collections.defaultdict(functools.partial(np.zeros, (3, size))) for size in (valid.num_documents, num_rows)
    )
    has_baseline, seen = set(), np.zeros(valid.num_documents, bool)
    local = run.validation.valid_batches
    local_rows = slice(local.first_row, local.first_row + local.local_batch_size)
    num_compared = min(num_batches, _max_batches(valid))
    for number in watch(range(num_compared)):
        batch, documents = valid.with_documents(number)
        local_batch = put_batch({name: x[local_rows] for name, x in batch.items()}, run.mesh)
        _, values = run.validation.eval_step(params, local_batch, run.frozen)
        model_values, baseline_values = _model_values(jax.device_get(values), batch), baseline.values(batch)
        seen[documents[documents >= 0]] = True
        row_numbers = valid.global_batch_size * number + np.arange(len(documents))
        for name, (value, weights) in model_values.items():
            ids = _documents_of(name, value, batch, documents)
            rows = np.broadcast_to(row_numbers.reshape(-1, *[1] * (value.ndim - 1)), value.shape)
            other, _ = baseline_values.get(name, (np.zeros(1), None))
            has_baseline |= {name} & baseline_values.keys()
            for i, x in enumerate((value * weights, other * weights, weights)):
                np.add.at(by_document[name][i], ids, x)
                np.add.at(by_row[name][i], rows, x)
    num_seen, num_read = int(seen.sum()), int(by_row["loss"][2].astype(bool).sum())
    has_few = num_seen < MIN_DOCUMENTS
    sums = {}
    for name, (model, other, weights) in (by_row if has_few else by_document).items():
        if weights.any():
            sums[name] = _Sums(model, other if name in has_baseline else None, weights)
    observations = f"{num_seen:,} document{'s' * (num_seen != 1)}"
    observations = f"{num_read:,} rows of {observations}" if has_few else observations
    if num_compared < num_batches:
        observations += f" in the first {num_compared:,} of {num_batches:,} batches, as the baseline and the gain"
    comparisons = _comparisons(_with_always_original(sums), "rows" if has_few else "documents")
    return Comparisons(comparisons, observations)


def _model_values(values: Mapping[str, tuple], batch: HostBatch) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns {metric: (value of each prediction, its weight)}, given the values of `Validation.eval_step`."""
    if "loss" not in values:
        return dict(values)
    (loss, _), (is_correct, _) = values["loss"], values["accuracy"]
    of_heads = {name: pair for name, pair in values.items() if name not in ("loss", "accuracy")}
    return values_of_targets(np.asarray(loss, np.float64), is_correct, batch) | of_heads


def _documents_of(name: str, value: np.ndarray, batch: HostBatch, documents: np.ndarray) -> np.ndarray:
    """Returns the document of each prediction, as an array with the shape of `value`.

    documents: [B, T], the document of each token; -1 for padding, whose predictions have weight 0.
    """
    documents = np.maximum(documents, 0)
    if value.ndim == 1:  # one prediction per row
        return documents[:, 0]
    # The tokens of a discriminator are not the targets of the generator.
    if is_gathered(batch) and not name.startswith("replaced_"):
        return np.take_along_axis(documents, batch["masked_positions"], axis=1)
    return documents


def _with_always_original(sums: dict[str, _Sums]) -> dict[str, _Sums]:
    """Adds the baseline of replaced-token detection, which predicts "original" with the fraction of original tokens."""
    if "replaced_loss" not in sums:
        return sums
    total = sums["replaced_loss"].weights
    replaced = sums["replaced_recall"].weights if "replaced_recall" in sums else np.zeros_like(total)
    fraction = replaced.sum() / total.sum()
    nats = sum(-math.log(p) * n for p, n in ((fraction, replaced), (1 - fraction, total - replaced)) if p > 0)
    baselines = {"replaced_loss": nats, "replaced_accuracy": total - replaced, "replaced_recall": 0.0 * total}
    return sums | {name: sums[name]._replace(baseline=x) for name, x in baselines.items() if name in sums}


def _comparisons(sums: Mapping[str, _Sums], unit: str) -> dict[str, Comparison]:
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


def _comparison(sums: _Sums, larger_is_better: bool, unit: str) -> Comparison:
    counted = sums.weights > 0
    model, weights = sums.model[counted], sums.weights[counted]
    if sums.baseline is None:
        return Comparison(ratio(model, weights, unit=unit), None, None)
    baseline = sums.baseline[counted]
    gain = ratio(model - baseline if larger_is_better else baseline - model, weights, unit=unit)
    return Comparison(ratio(model, weights, unit=unit), float(baseline.sum() / weights.sum()), gain)


def _total(parts: list[_Sums]) -> _Sums:
    """Returns the sums of a sum of mean losses: each document's linear contribution to each mean, with weight 1."""
    counted = np.any([part.weights > 0 for part in parts], axis=0)

    def contributions(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
        mean = sums.sum() / weights.sum()
        return mean + counted.sum() * (sums - mean * weights)[counted] / weights.sum()

    model = np.sum([contributions(part.model, part.weights) for part in parts], axis=0)
    baselines = [contributions(part.baseline, part.weights) for part in parts if part.baseline is not None]
    return _Sums(model, np.sum(baselines, axis=0) if len(baselines) == len(parts) else None, np.ones_like(model))


def to_json(comparisons: Comparisons) -> str:
    """Formats comparisons as JSON: {"observations": …, "metrics": {metric: {"value": …, "standard_error": …, …}}}."""
    metrics = {}
    for name, (model, baseline, gain) in comparisons.metrics.items():
        metrics[name] = {**model._asdict(), "baseline": baseline, "gain": gain and gain._asdict()}
    return json.dumps({"observations": comparisons.observations, "metrics": metrics}, indent=1) + "\n"


def gains_of(comparisons: Mapping[str, Comparison]) -> list[Gain]:
    """Returns the gains that show whether a model has learned: of one loss of tokens, and of each other head."""
    names = [next((name for name in ("masked_loss", "text_loss", "loss") if name in comparisons), "loss")]
    gains = []
    for name in (*names, "replaced_loss", "pair_loss"):
        if name in comparisons and (gain := comparisons[name].gain) is not None:
            gains.append(Gain(*_LEARNED[name], gain))
    return gains
