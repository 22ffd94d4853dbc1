"""Says what a run is about to train, before its first step: on which text, how often, and by which recipe."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pretrainax.config import Experiment, UserError
from pretrainax.data.inspection import check
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.data.sources import PythonDocs
from pretrainax.reporting.units import large_number, scientific, three_digits
from pretrainax.runs.description import describe
from pretrainax.training.callbacks import Callback
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.run import Run
from pretrainax.training.start import Row

# As many are nearly as good as that much new text; then each is worth less (Muennighoff et al. 2023, arXiv 2305.16264).
FEW_EPOCHS = 4


class Paper(NamedTuple):
    """Holds what is known of the paper whose config a run has."""

    source: str = ""  # its text, as --config.data.source takes it
    deviations: str = ""  # in what the run is not the paper's


UNKNOWN = Paper()


class Header(Callback):
    """Prints the header of a run before its first step."""

    part = "starting"

    def __init__(self, paper: Paper = UNKNOWN):
        self._paper = paper

    def on_start(self, loop, state, metrics):
        more = [row for rows in loop.callbacks.call("rows", loop.run) for row in rows]
        show(loop.run, loop.writer, loop.first_rows, self._paper, more)


def show(
    run: Run, writer: MetricsWriter, first: Sequence[Row], paper: Paper = UNKNOWN, more: Sequence[Row] = ()
) -> None:
    """Prints the header: the rows `first`, those of `rows`, and what was measured of the first batches; those of the
    validation too, where it has an objective of its own.

    more: rows of the run's callbacks.

    Raises:
      UserError: what was measured is not what the objective asks for; or a validation would not have the figure that
        the run selects by.
    """
    experiment, unseen = run.experiment, _parts_without_rows(run)
    if experiment.select_by.partition("/")[2] in unseen:
        raise UserError(
            f"config.evaluate.select_by is {experiment.select_by!r}, and a validation has no row of it: raise "
            "config.evaluate.batches, or its weight"
        )
    if experiment.select_by.startswith("bits_per_byte") and (reason := run.validation.valid_batches.no_target_bytes):
        raise UserError(f"config.evaluate.select_by is {experiment.select_by!r}, of which there are none: {reason}")
    measured = [(check.measure(part.train_batches), part.trained.objective, "config.objective") for part in run.parts]
    lines = dict.fromkeys(check.one_line(found) for found, _, _ in measured)
    if (asked := experiment.evaluate.objective) is not None:
        found = check.measure(run.validation.valid_batches, sum(run.validation.rows))
        measured.append((found, asked, "config.evaluate.objective"))
        lines[f"in validation {check.one_line(found)}"] = None
    missing = f"NOT VALIDATED: a validation has no row of {', '.join(unseen)}: raise config.evaluate.batches or weights"
    said = [("WARNING", missing)] if unseen else []
    writer.header([*first, *rows(run, paper, more), *said, *(("measured", line) for line in lines)])
    for found, objective, path in measured:
        check.check(found, objective, path)


def rows(run: Run, paper: Paper = UNKNOWN, more: Sequence[Row] = ()) -> list[Row]:
    """Returns the names and values of a run's header, warnings last; more: rows of its callbacks."""
    experiment, vocabulary = run.experiment, run.prepared.tokenizer.vocabulary
    optimizer, schedule, steps = experiment.optimizer, experiment.schedule, experiment.train.steps
    epochs = _epochs(run)
    tokens = sum(part.work.tokens_per_step * part.steps for part in run.parts)
    times = " and ".join(three_digits(times) for _, times in epochs)
    of_objective = experiment.validation_objective.warnings_of(experiment, run.train_batches)
    described = [
        *describe(run),
        ("source", _source(experiment, run.prepared, paper.source)),
        ("tokenizer", f"{experiment.tokenizer}, {vocabulary.size:,} ids"),
        ("objective", str(experiment.objective)),
        *_validation(experiment),
        ("optimizer", f"{optimizer}, learning rate {scientific(optimizer.learning_rate)} at its peak"),
        ("schedule", f"{schedule}, warm-up over {schedule.warmup_steps:,} steps"),
        ("run", f"{steps:,} steps, {large_number(tokens)} tokens, {times} epochs of the text"),
        *([("deviations", paper.deviations)] if paper.deviations else []),
        *(("WARNING", warning) for warning in _warnings(experiment, epochs)),
        *more,
        *(("WARNING", warning) for warning in of_objective),
    ]
    return sorted(described, key=lambda row: row[0] == "WARNING")


def _epochs(run: Run) -> list[tuple[str, float]]:
    """Returns how often the run reads each component of its source, and of those of its phases."""
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
    other = papers_source or "TextFiles(path='FOLDER')"
    whose = "the paper's corpus" if papers_source else "your own text"
    trial = f"{source}: a trial on {size:.0f} MB of Python's documentation"
    return f'{trial}; for {whose}: --config.data.source="{other}"'


def _validation(experiment: Experiment) -> Iterator[Row]:
    """Yields a row about a validation that asks what is not trained, or one that is judged by more than its loss."""
    asked, figure = experiment.evaluate.objective, experiment.select_by
    by = f"the best checkpoint by {figure}" if figure != "loss" else ""
    if asked is not None or by:
        yield "validation", ", ".join(filter(None, ("" if asked is None else str(asked), by)))


def _parts_without_rows(run: Run) -> list[str]:
    """Names the sources and objectives of a mixture that a validation sees nothing of."""
    seen = dict.fromkeys((part for parts in run.validation.parts for part in parts), 0)
    for parts, rows in zip(run.validation.parts, run.validation.rows, strict=True):
        seen |= {part: seen[part] + rows for part in parts}
    return [part for part, rows in seen.items() if not rows]


def _layer_warnings(experiment: Experiment) -> Iterator[str]:
    """Yields where layers stay as they are that were not meant to."""
    layers, steps = experiment.layers, experiment.train.steps
    if (layers.frozen or layers.frozen_embeddings) and not experiment.checkpoint.init_from:
        yield (
            f"FROZEN AT RANDOM: config.layers has {layers.describe()}, and config.checkpoint.init_from gives no "
            "parameters: what is frozen stays as it is drawn"
        )
    if layers.unfreeze_every and (start := layers.last_start(experiment.model)) >= steps:
        yield (
            f"NOT ALL ARE TRAINED: with config.layers.unfreeze_every {layers.unfreeze_every:,} the lowest layer begins "
            f"after {start:,} steps, and the run has {steps:,}: set it lower, or config.train.steps higher"
        )


def _warnings(experiment: Experiment, epochs: list[tuple[str, float]]) -> Iterator[str]:
    """Yields what is likely no one's intention. epochs: each component of the source, and how often it is read."""
    train, warmup = experiment.train, experiment.schedule.warmup_steps
    yield from _layer_warnings(experiment)
    for source, times in epochs:
        if times > FEW_EPOCHS and experiment.objective.unit != "records":
            yield (
                f"THE SAME TEXT {three_digits(times)} TIMES: that is how often the run reads {source}; after about "
                f"{FEW_EPOCHS} times a language model learns ever less from it (Muennighoff et al. 2023, arXiv "
                "2305.16264): set config.data.source to more text, or config.train.steps to fewer steps"
            )
    if warmup > train.steps:
        peak = experiment.optimizer.learning_rate
        yield (
            f"ONLY A WARM-UP: config.schedule.warmup_steps is {warmup:,}, and the run has {train.steps:,} steps; the "
            f"learning rate ends at {scientific(peak * train.steps / warmup)} and never comes to its peak of "
            f"{scientific(peak)}: set config.schedule.warmup_steps to a few percent of config.train.steps"
        )
