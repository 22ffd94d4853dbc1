"""Computes the measure `TaskScore`: fine-tunes a pretrained run on a task, and scores it on the test records."""

import collections
import dataclasses
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Diverged, Experiment, UserError, nearest
from pretrainax.config.config_file import read_config_file
from pretrainax.config.metric import larger_is_better
from pretrainax.config.overrides import set_field
from pretrainax.config.validation import complete, validate
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Record
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.load import load
from pretrainax.inference.predictions import note_of, task_of, task_outputs
from pretrainax.reporting.run_lines import with_seconds
from pretrainax.runs.task_baselines import MAX_RECORDS, Answers, Validated
from pretrainax.runs.train import train
from pretrainax.scoring.corpus_scores import documents_of
from pretrainax.studies.arms import length_flags
from pretrainax.studies.measures import TaskScore
from pretrainax.studies.outcomes import MeasureContext, Outcome
from pretrainax.studies.saved_outcomes import saved, saved_outcomes
from pretrainax.studies.study import Timed
from pretrainax.studies.tuning import without_noise
from pretrainax.tasks import Task, WritingTask
from pretrainax.tasks.baselines import Baseline
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.training.metrics import read_metrics

_TUNING_SEED = 1_000_000  # seed of the fine-tuning runs that choose the rate; final seeds are smaller
_TIMED_STEPS = 30  # updates of a timed fine-tuning run
_NEVER = 10**9  # steps between validations and between checkpoints: both happen only at the end
_FLAG = re.compile(r"--(config\.[^=]+)=(.*)", re.DOTALL)


def metric_of(measure: TaskScore) -> str:
    """Returns the name of the metric that the measure reports."""
    return measure.metric or _config(measure).select_by


def problems(measure: TaskScore, experiment: Experiment) -> Iterator[str]:
    """Yields one line for each reason why a run cannot have the measure."""
    try:
        config = _config(measure)
        source = _source(measure, config)
    except UserError as e:
        yield str(e)
        return
    task, where = config.objective, f"the measure {measure.name}"
    if isinstance(task, WritingTask) or not isinstance(task, Task):
        yield f"{where}: task is {measure.task!r}, which writes texts: use a task with a head, such as classification"
    elif experiment.model.family not in task.families:
        yield f"{where}: task is {measure.task!r}, which the family {experiment.model.family} does not support"
    elif (metric := metric_of(measure)) not in task.metric_names:
        yield f"{where}: metric is {metric!r}, {nearest(metric, task.metric_names)}"
    if len(set(measure.rates)) < 2 or min(measure.rates) <= 0:
        yield f"{where}: rates is {measure.rates}, it must have at least two positive learning rates"
    if not 0 < measure.selection < 1:
        yield f"{where}: selection is {measure.selection}, it must be in (0, 1)"
    if source.holds_out:
        yield f"{where}: source is {source}, which has no test records of its own: set its valid_path or valid_split"
    yield from source.problems(config)


def choose(measure: TaskScore, folder: str, context: MeasureContext) -> JsonObject:
    """Finds the best learning rate for a pretrained run on the selection part of the training records.

    If the best rate is at an edge of the grid, the function tries one more rate there. If all rates have the same
    score, for example because all models always predict one label, the choice is unfinished. The fine-tuning runs have
    one seed, which no final run has. The score is the score of the last step. The function does not read the test
    records, so the choice cannot leak them. If all runs of an arm share this choice, the differences between seeds do
    not include the error of the choice.

    Returns:
      {"learning_rate": …, "score": …, "scores": {rate: score, or None if the run diverged}, "unfinished": "" or why}.
    """
    sign, rates = (1 if larger_is_better(metric_of(measure)) else -1), sorted(set(measure.rates))
    scores = {rate: _selection_score(measure, folder, rate, context) for rate in rates}

    def best() -> float:
        inner = [*rates[1:-1], rates[0], rates[-1]]  # if scores are equal, an inner rate wins over a rate at an edge
        return max(inner, key=lambda rate: -math.inf if (score := scores[rate]) is None else sign * score)

    is_flat = len(set(scores.values())) == 1
    for edge, neighbor, place in ((rates[0], rates[1], 0), (rates[-1], rates[-2], len(rates))):
        if best() == edge and not is_flat:
            further = without_noise(edge * edge / neighbor)
            rates.insert(place, further)
            scores[further] = _selection_score(measure, folder, further, context)
            break
    rate, unfinished = best(), ""
    if scores[rate] is None:
        raise Diverged(f"{measure.name}: all fine-tuning runs of {folder} diverged: lower the rates of the measure")
    if is_flat:
        unfinished = f"{measure.name}: all learning rates have the same score, {scores[rate]:g}"
    elif rate in (rates[0], rates[-1]):
        unfinished = f"{measure.name}: the best learning rate {rate:g} is at the edge of its grid"
    named = {repr(rate): score for rate, score in scores.items()}
    return {"learning_rate": rate, "score": scores[rate], "scores": named, "unfinished": unfinished}


def outcomes(measure: TaskScore, folder: str, context: MeasureContext) -> list[Outcome]:
    """Fine-tunes a pretrained run with each downstream seed, and scores each result on the test records once.

    In a trial of the tuning, returns the best score on the selection part of the training records instead.
    """
    choice = context.choice or choose(measure, folder, context)
    if context.is_tuning:
        return [Outcome(choice["score"])]
    rate = choice["learning_rate"]

    def of_seed(seed: int) -> Outcome:
        def compute(scratch: str) -> Mapping[str, Outcome]:
            _fine_tune(measure, folder, scratch, rate, seed, context)
            outcome = _test_outcome(measure, scratch)
            shutil.rmtree(os.path.join(scratch, "checkpoints"))
            return {"model": outcome}

        return saved_outcomes(folder, measure, f"seed-{seed}", {"rate": rate, "seed": seed}, compute)["model"]

    return [of_seed(seed) for seed in context.downstream_seeds]


def timed(measure: TaskScore, folder: str, context: MeasureContext) -> Timed:
    """Times a fine-tuning run of `_TIMED_STEPS` updates and its test, and adds the time of the other updates.

    A first run compiles the programs, which the runs of an arm share. If the data determines the length of a run, the
    run is not shortened.
    """
    rate, full = min(measure.rates), _config(measure, folder)
    others = max(full.train.steps - _TIMED_STEPS, 0)
    flags = length_flags(full, _TIMED_STEPS) if others else ()
    short = dataclasses.replace(measure, flags=(*measure.flags, *flags))

    def run_once() -> tuple[float, float]:
        with tempfile.TemporaryDirectory(prefix="study-task-") as scratch:
            started = time.perf_counter()
            _fine_tune(short, folder, scratch, rate, _TUNING_SEED, context)
            trained = time.perf_counter()
            _test_outcome(short, scratch)
            tested = time.perf_counter()
            lines = with_seconds(read_metrics(os.path.join(scratch, "metrics.jsonl")))
        step_seconds = (lines[-1]["seconds"] or 0.0) / lines[-1]["step"]
        return trained - started + others * step_seconds, tested - trained

    run_once()
    tune, test = run_once()
    choice = (len(measure.rates) + 1) * tune  # the best rate is often at an edge
    of_arm, of_run = (choice, 0.0) if measure.rate_of == "arm" else (0.0, choice)
    return Timed(of_arm, of_run + len(context.downstream_seeds) * (tune + test), choice)


def baselines(measure: TaskScore, folder: str, context: MeasureContext) -> dict[str, Outcome]:
    """Computes the scores of the task's trivial baselines: label frequencies, a bag of words."""

    def compute(_: str) -> dict[str, Outcome]:
        experiment = _experiment(measure, folder, measure.rates[0], 0)
        tokenizer, metric = load_tokenizer(os.path.join(folder, "tokenizer")), metric_of(measure)
        task = experiment.objective
        assert isinstance(task, Task)
        task, source = task.adapted(experiment).bind(tokenizer), _source(measure, experiment)
        train_records, records = (list(_records(task, source, split)) for split in ("train", "valid"))
        train_records = train_records[:: -(-len(train_records) // MAX_RECORDS)]
        notes = [note_of(encoded) for record in records for encoded in task.encode(record, tokenizer)]
        validated = Validated(task, notes, records)
        found = [validated.answers(baseline) for baseline in task.baselines(train_records, records, notes)]
        return {x.name: _outcome(validated, metric, x) for x in found if metric in x.metrics}

    return saved_outcomes(folder, measure, "baselines", {}, compute)


def _config(measure: TaskScore, init_from: Optional[str] = None) -> Experiment:
    """Builds the config of the fine-tuning from the measure's task and flags."""
    experiment = read_config_file(f"finetune:{measure.task}", init_from)
    if measure.source is not None:
        experiment.data.source = measure.source
    for flag in measure.flags:
        match = _FLAG.fullmatch(flag)
        if match is None:
            raise UserError(f"flags has {flag!r}, it must have the form --config.FIELD=VALUE")
        set_field(experiment, *match.groups())
    return experiment


def _source(measure: TaskScore, experiment: Experiment) -> Source:
    """Returns the data source, whose validation split holds the test records."""
    source = measure.source or experiment.data.source
    if not isinstance(source, Source):
        raise UserError(f"source is {source}, it must be a data source of records")
    return source


def _experiment(measure: TaskScore, folder: str, rate: float, seed: int) -> Experiment:
    """Builds the config of one fine-tuning run; its source has only the training records."""
    experiment = _config(measure, folder)
    source, fields = experiment.data.source, {"valid_path", "valid_split", "valid_data_files"}
    without = {field.name: field.default for field in dataclasses.fields(source) if field.name in fields}
    without |= {"valid_split": None} if "valid_split" in without else {}  # the default for TFDS names a split
    experiment.data.source = dataclasses.replace(source, **without, valid_fraction=measure.selection)
    experiment.optimizer = dataclasses.replace(experiment.optimizer, learning_rate=rate)
    experiment.train.seed, experiment.trackers = seed, ()
    experiment.evaluate.every = experiment.checkpoint.every = _NEVER
    experiment.evaluate.batches = 0
    complete(experiment)
    validate(experiment)
    return experiment


def _fine_tune(measure: TaskScore, folder: str, workdir: str, rate: float, seed: int, context: MeasureContext) -> None:
    """Trains a fine-tuning run, or resumes it; a signal ends the process as it ends a training command."""
    code = (context.train or train)(_experiment(measure, folder, rate, seed), workdir)
    if code:
        sys.exit(code)


def _selection_score(measure: TaskScore, folder: str, rate: float, context: MeasureContext) -> Optional[float]:
    """Fine-tunes with a learning rate; returns the score on the selection part of the training records.

    Returns None if the run diverges.
    """

    def compute(scratch: str) -> JsonObject:
        try:
            _fine_tune(measure, folder, scratch, rate, _TUNING_SEED, context)
        except Diverged:
            return {"score": None}
        *_, last = (x for x in read_metrics(os.path.join(scratch, "metrics.jsonl")) if x["split"] == "valid")
        shutil.rmtree(os.path.join(scratch, "checkpoints"))
        return {"score": last[metric_of(measure)]}

    return saved(folder, measure, f"rate-{rate:.3g}", {"rate": rate}, compute)["score"]


def _records(task: Task, source: Source, split: str) -> Iterator[Record]:
    for record in documents_of(source.reading(task), split, collections.Counter()):
        if isinstance(record, Record) and not task.is_skipped(record):
            yield record


def _test_outcome(measure: TaskScore, workdir: str) -> Outcome:
    """Scores a fine-tuned run on the test records."""
    loaded = load(workdir)
    task, source = task_of(loaded), _source(measure, _config(measure))
    records = list(_records(task, source, "valid"))
    found = list(task_outputs(loaded, task, records, even=True))
    outputs = jax.tree.map(lambda *arrays: np.concatenate(arrays), *(x.predictions for x in found))
    notes = list(itertools.chain.from_iterable(x.notes for x in found))
    validated = Validated(task, notes, records)
    return _outcome(validated, metric_of(measure), validated.answers(Baseline("model", outputs)))


def _outcome(validated: Validated, metric: str, answers: Answers) -> Outcome:
    return Outcome(answers.metrics[metric], validated.changes(metric, answers))
