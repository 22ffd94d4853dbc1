"""Reports a run's results: final metrics compared with a baseline, the average of the last checkpoints, curves.png."""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Optional

from pretrainax.checkpoints.params import Params, load_steps
from pretrainax.checkpoints.steps import last_steps, list_steps
from pretrainax.config.metric import METRICS
from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting import curves
from pretrainax.reporting.tables import text_table
from pretrainax.runs.comparison import Comparison, Comparisons, baseline_of, compare, gains_of, to_json
from pretrainax.runs.learned import warning_of
from pretrainax.runs.task_baselines import compare_task
from pretrainax.scoring.results import Estimate
from pretrainax.storage.places import with_urls
from pretrainax.training.callbacks import Callback
from pretrainax.training.finish import continue_on_error
from pretrainax.training.loop import Loop
from pretrainax.training.metric_labels import (
    METRIC_FORMATS,
    displayed_metrics,
    format_metric,
    label_and_format,
    label_and_format_among,
)
from pretrainax.training.metrics import meaning, metrics_from_loss, parts_in_names, read_metrics

_PLAIN = ("loss", "perplexity", "bits_per_token", "loss_tokens", "labels")  # metrics whose labels need no explanation
_BASELINE = "predicts from token frequencies and the form of targets: which sentinel is next, where a row ends"
_COPYING = (
    "predicts from token frequencies; where the input is not [MASK], it expects the input as often as in training"
)
_UNKNOWN, _NOT_COMPARED = Estimate(math.nan, None), Comparisons({}, "")


class FinalReport(Callback):
    """Prints and plots a run's results when it ends; skips slow computations if a signal ended the run."""

    part = "finishing"

    def on_end(self, loop, state, metrics):
        run, select_by = loop.run, loop.run.experiment.select_by
        compared = _NOT_COMPARED
        if run.experiment.validation_objective.unit != "records":
            with continue_on_error("the baseline", loop):
                compared = _compare(loop, run.validated(state)) or compared
        baseline = {name: c.baseline for name, c in compared.metrics.items() if c.baseline is not None}
        lines = read_metrics(loop.writer.path) if run.is_primary else []
        with continue_on_error("the table", loop):
            loop.note(final_table(lines, metrics, baseline, select_by, compared))
            if warning := warning_of(gains_of(compared.metrics)):
                loop.note(warning)
            if run.is_primary and compared.metrics:
                write_atomically(os.path.join(loop.workdir, "comparison.json"), to_json(compared))
        if run.experiment.validation_objective.unit == "records" and not run.peers.agree(loop.is_stopping):
            with continue_on_error("the baselines of the task", loop):
                loop.note(compare_task(run, run.validated(state), metrics))
        with continue_on_error("the mean of the last checkpoints", loop):
            if not run.peers.agree(loop.is_stopping):
                _validate_average(loop, metrics)
        with continue_on_error("curves.png", loop):
            if run.is_primary:
                draw_curves(loop.workdir, loop.writer.model, baseline, select_by)
                loop.note(f"curves: {with_urls(os.path.join(loop.workdir, 'curves.png'))}")


def draw_curves(workdir: str, model: str, baseline: Optional[Mapping[str, float]], select_by: str) -> None:
    """Draws WORKDIR/curves.png from WORKDIR/metrics.jsonl.

    Args:
      model: description of the model, for the subtitle.
      baseline: losses of models that ignore the context, as in `final_table`, or None if unknown.
      select_by: the metric that selects checkpoints.
    """
    lines = [displayed_metrics(line, select_by) for line in read_metrics(os.path.join(workdir, "metrics.jsonl"))]
    name = os.path.basename(os.path.abspath(workdir))
    curves.draw(os.path.join(workdir, "curves.png"), lines, name, model, baseline, select_by)


def final_table(
    lines: Sequence[Mapping],
    metrics: Mapping[str, Optional[float]],
    baseline: Mapping[str, float],
    select_by: str,
    compared: Comparisons = _NOT_COMPARED,
) -> str:
    """Formats the last validation's metrics next to a baseline, and tables for the parts of a data mixture.

    Args:
      lines: lines of metrics.jsonl.
      metrics: {name: value}. Examples of names are "loss" (nats per target), "perplexity", "accuracy" (a fraction) and,
        for a part of the mixture, "loss/source=wiki". A value of None was not finite.
      baseline: {name: value} of models that ignore a target's context, or {} if unknown.
      select_by: the metric that selects checkpoints.
      compared: the standard errors of the metrics, and the gains over the baseline.
    """
    copies = "masked_loss" in metrics or "random_loss" in metrics
    title = "baseline" if copies or "replaced_loss" in baseline else "unigram baseline"
    heads = ("", "model", *(["±"] if compared.metrics else ()), *([title] if baseline else ()))
    rows: list[tuple[str, ...]] = [heads + (("gain", "±") if compared.metrics and baseline else ())]
    if "loss" in baseline:
        baseline = {**baseline, **metrics_from_loss(baseline["loss"])}
    train_lines = [line for line in lines if line["split"] == "train"]
    for name in dict.fromkeys(("loss", select_by)) if train_lines else ():
        if name in train_lines[-1]:
            label, spec = label_and_format_among(name, metrics)
            label = f"training {label.removeprefix('validation ')}, last line"
            rows.append((label, format_metric(train_lines[-1][name], spec)))
    metrics = displayed_metrics(metrics, select_by)
    total_metrics = [name for name, value in metrics.items() if value is not None and "/" not in name]
    displayed = sorted(total_metrics, key=lambda name: [*METRIC_FORMATS, *total_metrics].index(name))
    for name in displayed:
        label, spec = label_and_format_among(name, displayed)
        cells = [format(metrics[name], spec), format(baseline[name], spec) if name in baseline else ""]
        if compared.metrics:
            model, _, gain = compared.metrics.get(name, Comparison(_UNKNOWN, None, None))
            cells[1:1] = [_error_cell(model, spec)]
            cells += ["", ""] if gain is None else [format(gain.value, f"+{spec}"), _error_cell(gain, spec)]
        rows.append((label, *_without_empty_end(cells)))
    tables = [text_table(rows, "<>", indent="  ", gap="   "), *_tables_of_parts(metrics)]
    notes = [
        f"{label_and_format_among(name, displayed)[0]}: {meaning(name, displayed)}"
        for name in displayed
        if name in METRICS and name not in _PLAIN
    ]
    if "loss" in baseline:
        notes.append(f"{title}: {_COPYING if copies else _BASELINE}")
    if "replaced_loss" in baseline:
        notes.insert(0, "validation loss, perplexity, token accuracy: of the generator")
        notes.append("baseline of replaced-token detection: always 'original'")
    if compared.metrics:
        notes.append(f"±: standard error over {compared.observations}; gain: positive if the model is better")
    if select_by != "loss":
        notes.append(f"the best checkpoint is the one with the best validation {select_by}")
    return "\n" + "\n\n".join([*tables, "\n".join(f"  {note}" for note in notes)]) + "\n"


def _error_cell(estimate: Estimate, spec: str) -> str:
    return "" if estimate.standard_error is None else format(estimate.standard_error, spec)


def _without_empty_end(cells: list[str]) -> list[str]:
    """Returns the cells of a row up to the last one with text."""
    return cells[: max(i for i, cell in enumerate(cells, start=1) if cell)]


def _tables_of_parts(metrics: Mapping[str, Optional[float]]) -> list[str]:
    """Formats one table per kind of mixture part ("source"), with a row per part and a column per metric."""
    parts, tables = parts_in_names(metrics), []
    for kind in dict.fromkeys(part.partition("=")[0] for part in parts):
        kind_parts = [part for part in parts if part.startswith(f"{kind}=")]
        names = list(dict.fromkeys(name.partition("/")[0] for name in metrics if name.partition("/")[2] in kind_parts))
        suffix = "/task=" if kind == "task" else ""  # accuracies of tasks and of tokens differ
        labels = (label_and_format(f"{name}{suffix}")[0].removesuffix(" of task=") for name in names)
        rows = [(f"by {kind}", *(label.removeprefix("validation ") for label in labels))]
        for part in kind_parts:
            values = [(metrics.get(f"{name}/{part}"), label_and_format(name)[1]) for name in names]
            cells = ("" if value is None else format(value, spec) for value, spec in values)
            rows.append((part.partition("=")[2], *cells))
        tables.append(text_table(rows, "<>", indent="  ", gap="   "))
    return tables


def _validate_average(loop: Loop, final: Mapping[str, float]) -> None:
    """Validates the average of the last `evaluate.average` checkpoints, and logs the result.

    Args:
      final: metrics of the final parameters, without averaging.
    """
    run = loop.run
    count, directory = run.experiment.evaluate.average, os.path.join(loop.workdir, "checkpoints")
    steps = last_steps(list_steps(directory), run.experiment.checkpoint)[-count:] if count else []
    if len(steps) < count:
        loop.note(f"config.evaluate.average is {count}, but only {len(steps)} of the last checkpoints can be averaged")
    if steps:
        folders, metric = [os.path.join(directory, str(step)) for step in steps], run.experiment.select_by
        value = run.validate(load_steps(folders, run.abstract_state.params)).get(metric, math.nan)
        loop.note(
            f"average of the parameters of steps {', '.join(f'{step:,}' for step in steps)}: validation {metric} "
            f"{value:.4f}, without averaging {final.get(metric, math.nan):.4f}; to evaluate or export it: "
            f"{loop.workdir}@average{len(steps)}"
        )


def _compare(loop: Loop, params: Params) -> Optional[Comparisons]:
    """Compares the model with its baseline on the validation split; returns None if a signal ended the run."""

    def until_signal(parts):
        for part in parts:
            loop.run.peers.progress()
            if loop.run.peers.agree(loop.is_stopping):  # all processes evaluate the same batches
                raise _Stopped
            yield part

    with contextlib.suppress(_Stopped):
        return compare(loop.run, params, baseline_of(loop.run, until_signal), until_signal)
    return None


class _Stopped(Exception):
    """Signals that the computation of the baseline must stop because the run is stopping."""
