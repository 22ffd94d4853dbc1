"""Compares a fine-tuned model with the trivial baselines of its task, on the validation records."""

import collections
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax.config import UserError
from pretrainax.config.metric import larger_is_better
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.reporting.tables import text_table
from pretrainax.runs.learned import Gain, warning_of
from pretrainax.scoring.corpus_scores import documents_of
from pretrainax.scoring.gains import resampled_gain
from pretrainax.scoring.results import Estimate, leave_one_out, ratio_difference
from pretrainax.sharding.arrays import put_batch
from pretrainax.tasks import Task, WritingTask
from pretrainax.tasks.baselines import Baseline, Outputs, Predicted, metrics_or_nan
from pretrainax.tasks.chunks import group_numbers, record_indices
from pretrainax.training.metric_labels import label_and_format_among
from pretrainax.training.run import Run
from pretrainax.training.train_step import Params

MAX_RECORDS = 20_000  # maximum number of training records of the baselines, evenly spaced in the training split
_MAX_SECONDS = 60.0  # maximum time for reading them
_UNIGRAM_BATCHES = 50  # maximum number of training batches from which the unigram baseline counts target tokens
_MAX_GROUPS = 1_000  # maximum number of groups in a jackknife; computing a metric without a group takes milliseconds
_UNIGRAM = "target token frequencies"


class Answers(NamedTuple):
    """Outputs of a model or a baseline for the validation records, and their metrics."""

    name: str
    outputs: Outputs  # None: no outputs, only metrics
    metrics: dict[str, float]
    is_constant: bool = False
    losses: Optional[np.ndarray] = None  # [documents]


class Validated(NamedTuple):
    """The validation records of a task, in order."""

    task: Task  # bound to the tokenizer
    notes: Sequence[Note]  # metadata of the documents
    records: Sequence[Record]

    def answers(self, baseline: Baseline) -> Answers:
        """Computes the metrics of a baseline or of the model's head outputs."""
        metrics, losses = metrics_or_nan(self.task, baseline.outputs, self.notes), None
        if baseline.has_loss and (losses := self.task.document_losses(baseline.outputs, self.notes)) is not None:
            metrics = {"loss": float(losses.mean()), **metrics}
        return Answers(baseline.name, baseline.outputs, metrics, baseline.is_constant, losses)

    @property
    def clusters(self) -> np.ndarray:
        """Returns the number of each record's group (`Task.group`), [records]."""
        return group_numbers(map(self.task.group, self.records))

    def gain(self, metric: str, model: Answers, baseline: Answers) -> Estimate:
        """Computes the gain of the model over a baseline, with the standard error of the paired difference.

        The gain is NaN if a metric is.
        """
        if not (math.isfinite(model.metrics[metric]) and math.isfinite(baseline.metrics[metric])):
            return Estimate(math.nan, None)
        sign, clusters = 1.0 if larger_is_better(metric) else -1.0, self.clusters
        if metric == "loss":
            assert model.losses is not None and baseline.losses is not None
            documents, ones = clusters[record_indices(self.notes)], np.ones(len(self.notes))
            return ratio_difference((model.losses, ones), (baseline.losses, ones), documents).times(sign)
        sums = [self.task.record_sums(x.outputs, self.notes) for x in (model, baseline)]
        if all(metric in x for x in sums):
            return ratio_difference(sums[0][metric], sums[1][metric], clusters).times(sign)
        return resampled_gain(
            lambda answers, documents: _selected(self.task, answers.outputs, self.notes, documents)[metric],
            (model, baseline),
            clusters[record_indices(self.notes)],
        ).times(sign)

    def changes(self, metric: str, model: Answers) -> np.ndarray:
        """Computes a metric minus the metric without each group of records, [groups].

        The groups are `clusters`, or at most _MAX_GROUPS unions of them, which depend on the records alone, if the
        metric is no ratio of sums over records. The change without the only group is 0, as in `leave_one_out`.
        """
        clusters = self.clusters
        if sums := self.task.record_sums(model.outputs, self.notes).get(metric):
            return leave_one_out(*(np.bincount(clusters, x) for x in sums))[1]
        groups = (clusters % _MAX_GROUPS)[record_indices(self.notes)]
        if not groups.any():
            return np.zeros(1)
        rest = (np.flatnonzero(groups != group) for group in range(groups.max() + 1))
        without = [_selected(self.task, model.outputs, self.notes, documents)[metric] for documents in rest]
        return model.metrics[metric] - np.array(without)


def compare_task(run: Run, params: Params, metrics: Mapping[str, float], predicted: Optional[Predicted] = None) -> str:
    """Formats a table of the model's metrics next to the baselines of its task, the gains, and a warning if necessary.

    If there are no baselines, returns a line with the reason instead. All processes of the run must call this function.

    Args:
      metrics: the metrics of the last validation.
      predicted: the predictions of this validation, if the task has a head. None: computes them.
    """
    task = run.validation.valid_batches.streams[0].objective
    assert isinstance(task, Task)
    if (count := jax.process_count()) > 1 and isinstance(task, WritingTask):
        reason = f"the run has {count} processes, but the baselines of generated text need one"
        return f"no baselines: {reason}; python -m pretrainax.evaluate in one process computes them"
    try:
        return _compare_task(run, params, task, metrics, predicted)
    except UserError as error:
        return f"no baselines: {error}"


def _compare_task(
    run: Run, params: Params, task: Task, metrics: Mapping[str, float], predicted: Optional[Predicted]
) -> str:
    """Formats the tables of `compare_task`. Raises UserError if the source lacks the records of the corpus."""
    outputs, notes, rows = _outputs(run, params, task, predicted)
    started = time.perf_counter()
    train, total = training_records(run, task)
    validated = Validated(task, notes, records_of_rows(run, task, rows) if notes else [])
    columns, gains = [], {}
    if notes:
        model = validated.answers(Baseline("model", outputs))
        columns = [validated.answers(x) for x in task.baselines(train, validated.records, notes)]
        gains = _gains(validated, run.experiment.select_by, model, columns)
    if isinstance(task, WritingTask):
        unigram, estimate = _unigram_loss(run, params)
        columns.insert(0, Answers(_UNIGRAM, None, {"loss": unigram}, is_constant=True))
        gains["loss", _UNIGRAM] = estimate, True
    cost = f"{len(train):,} of {total:,} training records" if len(train) < total else f"{total:,} training records"
    title = f"baselines, from {cost} in {time.perf_counter() - started:.1f} s:"
    return "\n".join(["", title, "", _table(metrics, columns), "", *_gain_lines(gains, run.experiment.select_by)])


def _gains(
    validated: Validated, select_by: str, model: Answers, columns: Sequence[Answers]
) -> dict[tuple[str, str], tuple[Estimate, bool]]:
    """Computes the gains in `select_by` over the best baseline and over the best constant baseline, and in the loss.

    The gain in the loss is over the constant baseline with the best loss.

    Returns:
      {(metric, baseline): (gain, whether the baseline is constant)}.
    """
    gains = {}
    for metric, pool in (
        (select_by, columns),
        (select_by, [x for x in columns if x.is_constant]),
        ("loss", [x for x in columns if x.is_constant]),
    ):
        pool = [x for x in pool if metric in x.metrics]
        if pool and (metric in model.metrics):
            best = (max if larger_is_better(metric) else min)(pool, key=lambda x: x.metrics[metric])
            if (metric, best.name) not in gains:
                gains[metric, best.name] = validated.gain(metric, model, best), best.is_constant
    return gains


def _gain_lines(gains: Mapping[tuple[str, str], tuple[Estimate, bool]], select_by: str) -> Iterator[str]:
    """Yields a line per gain, and a warning if the model does not beat the constant baselines in `select_by`.

    The gain in the loss has no influence on the warning, unless the loss selects checkpoints. The reason: if the label
    frequencies of the training and the validation records differ, a constant model may have a lower loss than the label
    frequencies.

    A model that is worse than a baseline that reads the text (a bag of words) has still learned something. The line of
    the gain states that the model is worse, but there is no warning.
    """
    constant = []
    for (metric, baseline), (estimate, is_constant) in gains.items():
        gain = Gain(metric, baseline, estimate)
        constant += [gain] if is_constant and metric == select_by else []
        is_worse = gain._replace(estimate=estimate.times(-1)).is_learned
        verdict = (
            "the model is better" if gain.is_learned else "the model is worse" if is_worse else "not distinguishable"
        )
        yield f"  {gain}: {verdict}"
    if (warning := warning_of(constant)) is not None:
        yield warning


def _table(metrics: Mapping[str, float], columns: Sequence[Answers]) -> str:
    """Formats a table with a row per metric that a baseline has, and a column for the model and for each baseline."""
    names = [name for name in metrics if any(name in x.metrics for x in columns)]
    rows: list[tuple[str, ...]] = [("", "model", *(x.name for x in columns))]
    for name in names:
        label, spec = label_and_format_among(name, metrics)
        values = [x.get(name) for x in (metrics, *(c.metrics for c in columns))]
        rows.append((label, *("" if value is None else format(value, spec) for value in values)))
    return text_table(rows, "<" + ">" * (1 + len(columns)), indent="  ", gap="   ")


def _outputs(
    run: Run, params: Params, task: Task, predicted: Optional[Predicted]
) -> tuple[Outputs, Sequence[Note], Sequence[int]]:
    """Computes the model's outputs for one validation; also returns the notes of its documents and their row numbers.

    There are no outputs and notes if the task generates text and validation computes only the loss.
    """
    if not isinstance(task, WritingTask):
        _, outputs, notes = predicted or run.validation.predict(params)
        return outputs, notes, range(len(notes))
    configured = run.experiment.validation_objective
    assert isinstance(configured, WritingTask)
    if configured.answers == 0:
        return None, [], []
    answers, notes = run.write(run, params, configured)
    total = run.validation.valid_batches.rows_per_epoch
    return [answer.text for answer in answers], notes, [i * total // len(notes) for i in range(len(notes))]


def training_records(run: Run, task: Task) -> tuple[list[Record], int]:
    """Reads at most MAX_RECORDS training records from the data source; also returns the number of training records.

    Raises:
      UserError: the source has no training record, because validation is a single record that was held out.
    """
    total, skipped, started = run.prepared.train[0].num_records, collections.Counter(), time.perf_counter()
    documents = documents_of(run.experiment.data.source.reading(task), "train", skipped)
    step = -(-total // MAX_RECORDS)
    records = []
    for record in itertools.islice(documents, 0, None, step):
        assert isinstance(record, Record)
        records += [] if task.is_skipped(record) else [record]
        if time.perf_counter() - started > _MAX_SECONDS:
            break
    if not records:
        raise UserError("config.data.source has no training record apart from the validation split")
    return records, total


def records_of_rows(run: Run, task: Task, rows: Sequence[int]) -> list[Record]:
    """Finds the records of the validation documents with these row numbers (in order) in the data source.

    The corpus stores token ids; a baseline reads text. The corpus may lack records of the source (duplicates).

    Raises:
      UserError: the source lacks a record, because the splits of the source and of the corpus differ.
    """
    (stream,) = run.validation.valid_batches.streams
    tokenizer, found, position = run.prepared.tokenizer, [], 0
    documents = documents_of(run.experiment.data.source.reading(task), "valid", collections.Counter())
    for record in documents:
        assert isinstance(record, Record)
        if position == len(rows):
            break
        if task.is_skipped(record):
            continue
        encoded, wanted = list(task.encode(record, tokenizer)), stream.record(rows[position]).tokens
        if encoded and np.array_equal(_tokens(encoded[0]), wanted):
            found.append(record)
            position = min(position + len(encoded), len(rows))
    if position < len(rows):
        raise UserError(
            "config.data.source lacks the validation records: its files have changed, or the split left no record for "
            "validation, so that one record was held out; set config.data.source.valid_path or valid_fraction"
        )
    return found


def _tokens(encoded: Encoded) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *encoded.parts])


def _unigram_loss(run: Run, params: Params) -> tuple[float, Estimate]:
    """Computes the loss of a unigram model of the target tokens, and the model's gain over it.

    The unigram model counts the targets of some training batches, and splits one extra count evenly among all token
    ids. The gain has the standard error of the difference over records; a row is a record.
    """
    counts = np.zeros(run.prepared.tokenizer.vocabulary.size)
    for i in range(min(_UNIGRAM_BATCHES, run.experiment.train.steps)):
        batch = run.train_batches[i]
        counts += np.bincount(batch["targets"].ravel(), batch["loss_weights"].ravel(), len(counts))
    log_shares = np.log((counts + 1 / len(counts)) / (counts.sum() + 1))
    sums, validation = [], run.validation
    for batch in validation.batches():
        _, values = validation.eval_step(params, put_batch(batch, validation.mesh), validation.frozen)
        loss, weights = (np.asarray(x, np.float64) for x in jax.device_get(values["loss"]))  # [B, N] each
        unigram_nats = -log_shares[batch["targets"]]
        sums.append([(weights * x).sum(1) for x in (loss, unigram_nats, np.ones_like(loss))])
    model, unigram, targets = np.concatenate(sums, axis=1)
    model, unigram, targets = (x[targets > 0] for x in (model, unigram, targets))  # the last batch has empty rows
    gain = ratio_difference((model, targets), (unigram, targets), np.arange(len(targets))).times(-1.0)
    return float(unigram.sum() / targets.sum()), gain


def _selected(task: Task, outputs: Outputs, notes: Sequence[Note], documents: np.ndarray) -> dict[str, float]:
    """Computes the metrics of some documents, possibly repeated; `documents` are their indices."""
    selected: Outputs = (
        [outputs[i] for i in documents]
        if isinstance(outputs, list)  # generated strings
        else jax.tree.map(lambda array: array[documents], outputs)
    )
    return metrics_or_nan(task, selected, [notes[i] for i in documents])
