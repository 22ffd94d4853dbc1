"""Prints a run's header before its first step: data, epochs, comparison with the paper, and warnings."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pretrainax.config import Experiment, UserError
from pretrainax.data.inspection import check
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.data.sources import PythonDocs
from pretrainax.files.errors import counted
from pretrainax.reporting.units import large_number, scientific, three_digits
from pretrainax.runs.description import describe
from pretrainax.training.callbacks import Callback
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.run import Run
from pretrainax.training.start import Row

# Up to 4 epochs are nearly as good as new data; later epochs help less (Muennighoff et al. 2023, arXiv 2305.16264).
FEW_EPOCHS = 4
FEW_RECORDS = 20  # of a validation split: an accuracy has a standard error of 0.11


class Paper(NamedTuple):
    """Information about the paper that the config reproduces."""

    source: str = ""  # dataset of the paper, as a value of --config.data.source; "": unknown
    deviations: str = ""  # summary of the differences between the run and the paper; "": unknown
    recipe: str = ""  # number of values from released code, from the paper, and from memory; "": unknown


UNKNOWN = Paper()


class Header(Callback):
    """Callback that prints a run's header before its first step."""

    part = "starting"

    def __init__(self, paper: Paper = UNKNOWN):
        self._paper = paper

    def on_start(self, loop, state, metrics):
        more = [(name, str(value)) for _, rows in loop.callbacks.call("rows", loop.run) for name, value in rows]
        print_header(loop.run, loop.writer, loop.first_rows, self._paper, more)


def print_header(
    run: Run, writer: MetricsWriter, first: Sequence[Row], paper: Paper = UNKNOWN, more: Sequence[Row] = ()
) -> None:
    """Prints a run's header: the rows in `first`, the rows that `rows` builds, and measurements of batches.

    The function measures the first training batches and, if validation has a separate objective, validation batches.

    Args:
      more: header rows of the run's callbacks.

    Raises:
      UserError: a measurement contradicts the objective's config, or validation cannot compute the metric named by
        config.evaluate.select_by.
    """
    experiment, missing_parts = run.experiment, _parts_without_rows(run)
    if experiment.select_by.partition("/")[2] in missing_parts:
        raise UserError(
            f"config.evaluate.select_by is {experiment.select_by!r}, but validation has no row of it: raise "
            "config.evaluate.batches or its weight"
        )
    if experiment.select_by.startswith("bits_per_byte") and (reason := run.validation.valid_batches.no_target_bytes):
        raise UserError(f"config.evaluate.select_by is {experiment.select_by!r}, which is not available: {reason}")
    measurements = [
        (check.measure(part.train_batches), part.trained.objective, "config.objective") for part in run.parts
    ]
    lines = dict.fromkeys(check.summary_line(measurement) for measurement, _, _ in measurements)
    if (valid_objective := experiment.evaluate.objective) is not None:
        measurement = check.measure(run.validation.valid_batches, sum(run.validation.rows))
        measurements.append((measurement, valid_objective, "config.evaluate.objective"))
        lines[f"in validation {check.summary_line(measurement)}"] = None
    missing = (
        f"NOT VALIDATED: validation has no row of {', '.join(missing_parts)}: raise config.evaluate.batches or weights"
    )
    warnings = [("WARNING", missing)] if missing_parts else []
    writer.header([*first, *rows(run, paper, more), *warnings, *(("measured", line) for line in lines)])
    for measurement, objective, path in measurements:
        check.check(measurement, objective, path)


def rows(run: Run, paper: Paper = UNKNOWN, more: Sequence[Row] = ()) -> list[Row]:
    """Builds a run's (name, value) header rows, warnings last; `more` are the rows of the run's callbacks."""
    experiment, vocabulary = run.experiment, run.prepared.tokenizer.vocabulary
    optimizer, schedule = experiment.optimizer, experiment.schedule
    epochs = _epochs(run)
    tokens = sum(part.work.tokens_per_step * part.steps for part in run.parts)
    times = " and ".join(three_digits(times) for _, times in epochs)
    objective_warnings = experiment.validation_objective.warnings_of(experiment, run.train_batches)
    header_rows = [
        *describe(run),
        ("source", _source(experiment, run.prepared, paper.source)),
        ("tokenizer", f"{experiment.tokenizer}, {vocabulary.size:,} ids"),
        ("objective", str(experiment.objective)),
        *_validation(run),
        ("optimizer", f"{optimizer}, peak learning rate {scientific(optimizer.learning_rate)}"),
        *([("transfer", experiment.transfer.describe(experiment))] if experiment.transfer else []),
        ("schedule", f"{schedule}, warmup over {counted(schedule.warmup_steps, 'step')}"),
        ("run", _length(run, f"{large_number(tokens)} tokens", f"{times} epochs")),
        *([("recipe", paper.recipe)] if paper.recipe else []),
        *([("deviations", paper.deviations)] if paper.deviations else []),
        *(("WARNING", warning) for warning in (*_warnings(experiment, epochs), *_few_records(run))),
        *more,
        *(("WARNING", warning) for warning in objective_warnings),
    ]
    return sorted(header_rows, key=lambda row: row[0] == "WARNING")


def _length(run: Run, tokens: str, epochs: str) -> str:
    """Formats the length of a run; for fine-tuning, also the number of records and the intervals."""
    experiment, steps = run.experiment, counted(run.experiment.train.steps, "step")
    if experiment.objective.unit != "records":
        return f"{steps}, {tokens}, {epochs}"
    intervals = f"validation every {experiment.evaluate.every:,} and checkpoint every {experiment.checkpoint.every:,}"
    return f"{epochs} of {run.prepared.train[0].num_records:,} records = {steps}, {tokens}; {intervals}"


def _epochs(run: Run) -> list[tuple[str, float]]:
    """Computes (name, number of epochs) for each component of the data source, adding up the epochs over all phases."""
    if not run.phases:
        components = map(str, run.experiment.data.source.components())
        return list(zip(components, run.train_batches.epochs, strict=True))
    times: dict[str, float] = {}
    for part in run.phases:
        for source, epochs in zip(part.trained.data.source.components(), part.train_batches.epochs, strict=True):
            times[str(source)] = times.get(str(source), 0.0) + epochs
    return list(times.items())


def _source(experiment: Experiment, prepared: Prepared, papers_source: str) -> str:
    source = experiment.data.source
    if not isinstance(source, PythonDocs):
        return str(source)
    size = sum(corpus.num_bytes for corpus in (*prepared.train, *prepared.valid)) / 1e6
    suggested_source = papers_source or "TextFiles(path='FOLDER')"
    source_label = "the dataset of the paper" if papers_source else "your own data"
    description = f"{source}: a smoke test on {size:.0f} MB of Python's documentation"
    return f'{description}; for {source_label}: --config.data.source="{suggested_source}"'


def _validation(run: Run) -> Iterator[Row]:
    """Yields a row if validation has a separate objective, or if a metric other than the loss selects checkpoints."""
    experiment = run.experiment
    valid_objective, metric = experiment.evaluate.objective, experiment.select_by
    default, reason = experiment.objective.selection(run.prepared.training_notes)
    selection = f"best checkpoint by {metric}" if metric != "loss" or reason else ""
    if reason:
        selection += f", because {reason}" if metric == default else f" (configured), although {reason}"
    if valid_objective is not None or selection:
        yield (
            "validation",
            ", ".join(filter(None, ("" if valid_objective is None else str(valid_objective), selection))),
        )


def _few_records(run: Run) -> Iterator[str]:
    """Yields a warning if few records validate a task, as 1 % of a small file does."""
    count = sum(corpus.num_records for corpus in run.prepared.valid)
    if run.experiment.objective.unit == "records" and count < FEW_RECORDS:
        yield (
            f"ONLY {count:,} VALIDATION RECORDS: metrics and the best checkpoint are mostly chance; set "
            "config.data.source.valid_path, or increase config.data.source.valid_fraction"
        )


def _parts_without_rows(run: Run) -> list[str]:
    """Returns the names of the mixture's sources and objectives that contribute no rows to validation."""
    row_counts = dict.fromkeys((part for parts in run.validation.parts for part in parts), 0)
    for parts, rows in zip(run.validation.parts, run.validation.rows, strict=True):
        row_counts |= {part: row_counts[part] + rows for part in parts}
    return [part for part, rows in row_counts.items() if not rows]


def _layer_warnings(experiment: Experiment) -> Iterator[str]:
    """Yields warnings about settings of `config.layers` that probably freeze layers by mistake."""
    layers, steps = experiment.layers, experiment.train.steps
    if (layers.frozen or layers.frozen_embeddings) and not experiment.checkpoint.init_from:
        yield (
            f"FROZEN AT RANDOM: config.layers has {layers.describe()}, but config.checkpoint.init_from is not set: the "
            "frozen layers keep their random initial parameters"
        )
    if layers.unfreeze_every and (start := layers.last_start(experiment.model)) >= steps:
        yield (
            f"NOT ALL ARE TRAINED: with config.layers.unfreeze_every {layers.unfreeze_every:,} the lowest layer begins "
            f"after {counted(start, 'step')}, but the run has {steps:,}: decrease it, or increase config.train.steps"
        )


def _warnings(experiment: Experiment, epochs: list[tuple[str, float]]) -> Iterator[str]:
    """Yields warnings about settings that are probably mistakes, given the number of epochs of each data source."""
    train, warmup = experiment.train, experiment.schedule.warmup_steps
    yield from _layer_warnings(experiment)
    for source, times in epochs:
        if times > FEW_EPOCHS and experiment.objective.unit != "records":
            yield (
                f"THE SAME TEXT {three_digits(times)} TIMES: the run repeats {source}; after about {FEW_EPOCHS} "
                "epochs a language model gains less and less from repeated data (Muennighoff et al. 2023, arXiv "
                "2305.16264): set config.data.source to a larger dataset, or decrease config.train.steps"
            )
    if warmup > train.steps:
        peak = experiment.optimizer.learning_rate
        yield (
            f"ONLY A WARMUP: config.schedule.warmup_steps is {warmup:,}, but the run has {counted(train.steps, 'step')}"
            f". The learning rate ends at {scientific(peak * train.steps / warmup)} and never reaches its peak of "
            f"{scientific(peak)}: set config.schedule.warmup_steps to a few percent of config.train.steps"
        )
