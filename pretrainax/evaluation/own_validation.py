"""Repeats a run's own validation for its checkpoints, with the run's validation split and objective."""

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Optional

import jax
import numpy as np

from pretrainax import cli
from pretrainax.checkpoints.params import EMA
from pretrainax.checkpoints.run_json import check_tokenizer
from pretrainax.config import Experiment, UserError
from pretrainax.config.metric import metric_text
from pretrainax.data.sources import NoSource
from pretrainax.data.sources.base import Note
from pretrainax.evaluation.task_comparison import checkpoint_of, reference_of
from pretrainax.files.errors import counted
from pretrainax.interop.origin import AS_TRAINED, Origin
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.runs.comparison import baseline_of, compare
from pretrainax.runs.samples import show_samples
from pretrainax.runs.task_baselines import compare_task, records_of_rows
from pretrainax.runs.train import open_run
from pretrainax.runtime import host
from pretrainax.scoring.record_scores import record_estimates
from pretrainax.scoring.results import Estimate, Result, format_interval, interval_captions, ratio
from pretrainax.sharding.device_memory import check_parameters_fit
from pretrainax.tasks import Task, WritingTask
from pretrainax.tasks.baselines import Predicted
from pretrainax.tasks.chunks import group_numbers, record_indices, records_of
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.training.corpora import checked_corpora
from pretrainax.training.metrics import meaning, parts_in_names
from pretrainax.training.run import Run
from pretrainax.training.train_step import Params

_SOURCE_HINT = "set a data source, such as --source=\"TextFiles(path='my/folder')\""


def validations(
    directory: str, origins: Sequence[Origin], compare_with: Optional[str] = None
) -> Iterator[tuple[Origin, list[Result]]]:
    """Repeats a run's own validation for each checkpoint; yields the checkpoints with their validation metrics.

    If there is only one checkpoint, also prints its metrics and samples.

    Args:
      directory: folder of the run.
      origins: the checkpoints.
      compare_with: another run with the same task, from which the paired differences are added to the metrics.

    Raises:
      UserError: `directory` is a Hugging Face directory or an imported model, so it has no dataset; the tokenizer has
        changed since a checkpoint was saved; or checkpoints with different position encodings are to be averaged.
    """
    if not origins[0].steps:
        raise UserError(f"{directory} is a Hugging Face directory, without a validation split: {_SOURCE_HINT}")
    if isinstance(cli.CONFIG.value.data.source, NoSource):
        raise UserError(f"{directory}: an imported model has no dataset; {_SOURCE_HINT}")
    experiment = cli.experiment()
    experiment.distill = None  # a student is validated without its teacher
    evaluate_fully(experiment, cli.overrides())
    tokenizer = experiment.tokenizer.path
    fingerprint = load_tokenizer(tokenizer).fingerprint
    for step in [step for origin in origins for step in origin.steps]:
        check_tokenizer(step, fingerprint, tokenizer)
    host.start_jax(experiment)
    reference = None if compare_with is None else reference_of(compare_with, experiment)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(open_run(experiment))
        log_note = functools.partial(_log_note, run)
        corpus_check = stack.enter_context(checked_corpora(experiment.data, run.prepared.valid, log_note))
        check_parameters_fit((run.abstract_state.params, run.abstract_frozen), directory)
        run.start.read_frozen(run, directory, is_new=False)
        estimates = _Estimates(run)
        for origin in origins:
            phase, params = checkpoint_of(run, origin)
            task, predicted = phase.experiment.validation_objective, None
            if isinstance(task, Task) and not isinstance(task, WritingTask):
                predicted = phase.validation.predict(params)
                metrics = task.metrics_of(phase, predicted)
            else:
                metrics = phase.validate(params)
            results = _results(run, metrics, estimates.of(phase, params, predicted))
            if len(origins) == 1:
                _print_metrics(phase, origin, params, metrics, results, predicted)
            if reference is not None and predicted is not None:
                results += reference.differences(phase, predicted, results)
            yield origin, results
        corpus_check.wait()


class _Estimates:
    """Computes the errors of the metrics of checkpoints of one run."""

    def __init__(self, run: Run):
        is_task = run.experiment.validation_objective.unit == "records"
        self._baseline = None if is_task else baseline_of(run)
        self._clusters: Optional[tuple[Run, np.ndarray]] = None  # of the phase of the last checkpoint

    def of(self, run: Run, params: Params, predicted: Optional[Predicted]) -> dict[str, Estimate]:
        """Returns {metric: estimate} over documents or records, without the metrics whose error is unknown."""
        if self._baseline is not None:
            return {name: x.model for name, x in compare(run, params, self._baseline).metrics.items()}
        if predicted is None:
            return {}
        task = run.validation.valid_batches.streams[0].objective
        assert isinstance(task, Task)
        _, outputs, notes = predicted
        records = records_of(notes)
        predictions = [jax.tree.map(operator.itemgetter(documents), outputs) for documents in records]
        if self._clusters is None or self._clusters[0] is not run:
            self._clusters = run, _clusters(run, task, notes)
        clusters = self._clusters[1]
        estimates = record_estimates(task, predictions, [notes[documents] for documents in records], clusters)
        if (losses := task.document_losses(outputs, notes)) is not None:
            estimates["loss"] = ratio(losses, np.ones(len(losses)), clusters[record_indices(notes)], unit="records")
        return estimates


def _clusters(run: Run, task: Task, notes: Sequence[Note]) -> np.ndarray:
    """Returns the number of each validation record's group, such as a passage with several questions, [records]."""
    try:
        return group_numbers(map(task.group, records_of_rows(run, task, range(len(notes)))))
    except UserError:  # the source has changed; `compare_task` prints it
        return np.arange(len(records_of(notes)))


def evaluate_fully(experiment: Experiment, overridden: Collection[str]) -> None:
    """Makes a task objective evaluate all of its metrics, including those that are too slow during training.

    Args:
      experiment: the config to change.
      overridden: config fields that flags override. If these include the objective or its number of answers, the
        objective remains unchanged.
    """
    task = experiment.objective
    if isinstance(task, Task) and not {"objective", "objective.answers"} & {*overridden}:
        experiment.objective = task.evaluated()


def _print_metrics(
    run: Run,
    origin: Origin,
    params: Params,
    metrics: dict[str, float],
    results: Sequence[Result],
    predicted: Optional[Predicted],
) -> None:
    """Prints the metrics of a checkpoint, samples of its predictions, and for a task a comparison with its baselines.

    All processes of the run must call this function. Only the primary process prints.
    """
    log = (lambda line: print(visible(line))) if run.is_primary else lambda line: None
    batches, total = run.validation.sizes
    rows = [
        ("step", " and ".join(os.path.basename(step) for step in origin.steps)),
        *([("parameters", _describe_parameters(origin))] if run.experiment.train.ema_decay is not None else []),
        ("source", f"{run.experiment.data.source}, validation split"),
        ("batches", f"{batches:,} of {total:,}, with {counted(run.experiment.train.global_batch_size, 'row')} each"),
    ]
    named = {"/".join(filter(None, (r.measure, r.part))): r for r in results}
    metric_rows = [
        (name, metric_text(name, r.value), format_interval(r), meaning(name, metrics)) for name, r in named.items()
    ]
    captions = "".join(f"{line}\n" for line in interval_captions(results))
    log(f"{text_table(rows)}\n\n{text_table(metric_rows, '<><<')}\n{captions}")
    show_samples(run, params, log)
    if isinstance(run.experiment.objective, Task):
        log(compare_task(run, params, metrics, predicted))


def _log_note(run: Run, line: str) -> None:
    """Prints a line to stderr in the primary process of the run; does nothing in other processes."""
    if run.is_primary:
        print(visible(line), file=sys.stderr)


def _describe_parameters(origin: Origin) -> str:
    if origin.folder == EMA:
        return f"moving average; for the trained parameters: --from={origin.directory}@{AS_TRAINED}"
    return f"as trained; for their moving average: --from={origin.directory}@{EMA}"


def _results(run: Run, metrics: dict[str, float], estimates: dict[str, Estimate]) -> list[Result]:
    """Converts the validation metrics of a checkpoint to results, with the number of batches, rows and tokens."""
    batches, total = run.validation.sizes
    rows = batches * run.experiment.train.global_batch_size
    units = {"labels": "labels"} if "labels" in metrics else {"tokens": "loss_tokens"}
    counts = {"batches": batches, "batches in all": total, "rows": rows}
    counts |= {unit: int(metrics[name]) for unit, name in units.items()}
    tokens = {part: {"tokens": int(metrics[f"loss_tokens/{part}"])} for part in parts_in_names(metrics)}
    source = f"{run.experiment.data.source}, validation split"
    objective = type(run.experiment.validation_objective).__name__
    method = f"{objective}, teacher-forced, as in the run's own validation"
    results = []
    for name, value in metrics.items():
        measure, _, part = name.partition("/")
        estimate = estimates.get(name, Estimate(value, None))._replace(value=value)
        results.append(
            Result(source, measure, counts=tokens.get(part, counts), how=method, part=part, **estimate._asdict())
        )
    return [r for r in results if r.measure not in units.values()]
