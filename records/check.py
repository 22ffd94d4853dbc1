"""Checks a record: its text, config, seeds, logs, budget and score, and the test against the standing record.

    python records/check.py records/NAME [--text=DIR] [--runs=DIR] [--against=records/OTHER]

`--text` also hashes the text. `--runs` has the runs of the record, seed-0 and so on: the check compares their configs
and scores their models again. `--replay` with `--text` trains until the first log line and compares its loss and time.
The exit status is 1 if a check fails, or if the record does not improve on the standing record.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np
import reference
import rules
import text
from result import FILE, Result, SeedResult, metrics_path, read_lines, read_result
from run import CoreSeconds, experiment_of

import pretrainax
from pretrainax.checkpoints.workdir import check_workdir
from pretrainax.config import Experiment, load
from pretrainax.files.errors import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.studies.contrasts import compare
from pretrainax.studies.outcomes import MeasureContext

_DRIFT = 2.0  # largest ratio of the 90 % to the 10 % quantile of the reference times of a run
_SPEED = 1.5  # largest FLOPs per core-second of a run, relative to the reference, which consists of large products
_SHORTEST = 0.5  # shortest time between two log lines, relative to the median
_SCORE = 1e-3  # bits per byte; float32 sums in another order change a score by less than 1e-4
_REPLAY = 2e-3  # relative; the loss of the first log line, after at most a 40th of the steps, on another kind of CPU
_REPLAY_TIME = 1.5  # largest ratio of the normalized times of a replay and of the log; CPUs differ in caches and SIMD


class Verdict(NamedTuple):
    """The result of the test against the standing record."""

    improves: bool
    message: str


def problems(
    folder: str, texts: Optional[str] = None, runs: Optional[str] = None, replay: bool = False
) -> Iterator[str]:
    """Yields one line for each rule that a record breaks.

    Args:
      folder: the folder of the record.
      texts: the folder of the text. None: the check compares only the hashes in result.json.
      runs: the folder of the runs, to score their models again; this requires the text. None: no model is scored.
      replay: whether to train seed 0 until its first log line; this requires the text.

    Raises:
      UserError: result.json, config.py or a log cannot be read, or result.json has no seeds or an unknown variant.
    """
    result = read_result(folder)
    if result.variant not in rules.BUDGETS:
        raise UserError(f"the variant is {result.variant!r}, it must be one of {', '.join(rules.BUDGETS)}")
    if not result.seeds:
        raise UserError(f"{os.path.join(folder, FILE)} has no seeds, it must have at least {rules.SEEDS}")
    experiment = experiment_of(folder, result.variant)
    if result.text != rules.TEXT:
        yield f"{FILE} names another text: {result.text}"
    if texts:
        yield from text.problems(texts)
    if text.sha256(os.path.join(folder, "config.py")) != result.config:
        yield "config.py differs from the config of the runs"
    yield from rules.config_problems(experiment, result.track)
    yield from seed_problems(result)
    for seed in result.seeds:
        yield from log_problems(folder, seed, experiment, rules.BUDGETS[result.variant])
        if runs and texts:
            run = os.path.join(runs, f"seed-{seed.seed}")
            yield from run_problems(seed, experiment, run)
            yield from score_problems(seed, experiment, run, texts)
    if replay and texts:
        yield from replay_problems(folder, result.seeds[0], experiment, texts)


def seed_problems(result: Result) -> Iterator[str]:
    """Yields one line for each problem of the seeds."""
    seeds = [seed.seed for seed in result.seeds]
    if len(seeds) < rules.SEEDS or seeds != list(range(len(seeds))):
        yield f"the seeds are {seeds}, they must be 0, 1, 2, … and at least {rules.SEEDS}"
    if len({seed.metrics for seed in result.seeds}) < len(seeds):
        yield "two seeds have the same log"
    if len({len(seed.changes) for seed in result.seeds}) > 1:
        yield "the seeds have different numbers of held-out documents"


def log_problems(folder: str, seed: SeedResult, experiment: Experiment, budget: rules.Budget) -> Iterator[str]:
    """Yields one line for each problem of the log of a seed."""
    path = metrics_path(folder, seed.seed)
    lines = read_lines(path)
    if text.sha256(path) != seed.metrics:
        yield f"{path} differs from the log that {FILE} describes"
    logs = [line for line in lines if line.get("split") == "train"]
    steps, every = experiment.train.steps, rules.log_every(experiment)
    expected = list(range(every, steps + 1, every))
    if [line.get("step") for line in logs] != expected + [steps] * (expected[-1] < steps):
        yield f"{path} must have a log line each {every} steps until step {steps}"
        return
    for line in lines:
        yield from line_problems(path, line)
    yield from time_problems(path, logs, budget)


def line_problems(path: str, line: JsonObject) -> Iterator[str]:
    """Yields one line for each metric of a log line that is missing, not finite or contradicts the loss."""
    place = f"{path}, step {line.get('step')}"
    if not _is_positive(line.get("loss")):
        yield f"{place}: the loss is {line.get('loss')}"
        return
    functions = {"perplexity": math.exp, "bits_per_token": lambda loss: loss / math.log(2)}
    for name, function in functions.items():
        # Both are computed from the same float64.
        if name in line and not math.isclose(line[name], function(line["loss"]), rel_tol=1e-9):
            yield f"{place}: {name} {line[name]} contradicts the loss {line['loss']}"


def time_problems(path: str, logs: Sequence[JsonObject], budget: rules.Budget) -> Iterator[str]:
    """Yields one line for each problem of the times and of the work of a run."""
    for name in ("core_seconds", "flops", "tokens"):
        values = [line.get(name) for line in logs]
        if not all(map(_is_positive, values)) or any(b <= a for a, b in zip(values, values[1:], strict=False)):
            yield f"{path}: {name} must increase from line to line"
            return
    if not all(_is_positive(line.get("reference_seconds")) for line in logs):
        yield f"{path}: each line needs the time of the reference computation, reference_seconds"
        return
    slow, fast = np.quantile([line["reference_seconds"] for line in logs], [0.9, 0.1])
    if slow > _DRIFT * fast:
        yield f"{path}: the reference takes {fast:.3f} to {slow:.3f} core-seconds: the speed of the machine changed"
    seconds = reference_core_seconds(logs)
    speeds = seconds[1:] / np.diff([line["step"] for line in logs])
    if len(speeds) and speeds.min() < _SHORTEST * np.median(speeds):
        yield f"{path}: an update takes {speeds.min():.4f} core-seconds, the median is {np.median(speeds):.4f}"
    work = logs[-1]["flops"] / seconds.sum()
    if work > _SPEED * reference.FLOPS / reference.CORE_SECONDS:
        yield f"{path}: {work:.3g} FLOPs per reference core-second are more than a machine computes"
    if seconds.sum() > budget.core_seconds:
        yield f"{path}: {seconds.sum():,.1f} reference core-seconds exceed the budget of {budget.core_seconds:,.0f}"


def reference_core_seconds(logs: Sequence[JsonObject]) -> np.ndarray:
    """Computes the reference core-seconds until each log line since the line before, [lines]."""
    used, timed = (np.array([line[name] for line in logs]) for name in ("core_seconds", "reference_seconds"))
    return np.diff(used, prepend=0) * reference.CORE_SECONDS / timed


def run_problems(seed: SeedResult, experiment: Experiment, run: str) -> Iterator[str]:
    """Yields a line if the configs of a run and of the record differ; the path of the text may differ."""
    texts = os.path.dirname(getattr(load(os.path.join(run, "config.json")).data.source, "path", ""))
    try:
        if message := check_workdir(run, rules.prepared(experiment, texts, seed.seed)):
            yield f"seed {seed.seed}: {run} has another number of steps: {message}"
    except UserError as e:
        yield f"seed {seed.seed}: {e}"


def score_problems(seed: SeedResult, experiment: Experiment, run: str, texts: str) -> Iterator[str]:
    """Scores the model of a seed again; yields a line if its score, or a document's score, differs from result.json."""
    with tempfile.TemporaryDirectory() as scratch:  # in the run's folder, the measure would read a saved outcome
        link = os.path.join(scratch, "run")
        os.mkdir(link)
        for name in os.listdir(run):
            if name != "measures":
                os.symlink(os.path.abspath(os.path.join(run, name)), os.path.join(link, name))
        outcome = rules.measure(texts).outcomes(link, experiment, MeasureContext())[0]
    if abs(outcome.value - seed.bits_per_byte) > _SCORE:
        yield f"seed {seed.seed}: the model has {outcome.value:.4f} bits per byte, {FILE} has {seed.bits_per_byte:.4f}"
    changes = outcome.changes
    if changes.shape != np.shape(seed.changes) or np.abs(changes - seed.changes).max() > _SCORE / len(changes):
        yield f"seed {seed.seed}: {FILE} has other influences of the held-out documents than the model"


def replay_problems(folder: str, seed: SeedResult, experiment: Experiment, texts: str) -> Iterator[str]:
    """Trains a seed until its first log line, and yields a line if its loss or time differ from the log."""
    logged = read_lines(metrics_path(folder, seed.seed))[0]
    with tempfile.TemporaryDirectory() as scratch:
        callback = CoreSeconds(scratch, stop_at=logged["step"])
        pretrainax.train(rules.prepared(experiment, texts, seed.seed), scratch, callbacks=[callback])
        replayed = read_lines(os.path.join(scratch, "metrics.jsonl"))[0]
    if not math.isclose(replayed["loss"], logged["loss"], rel_tol=_REPLAY):
        yield f"seed {seed.seed}: a replay has the loss {replayed['loss']:.5f}, the first log line {logged['loss']:.5f}"
    (time,), (again,) = (reference_core_seconds([line]) for line in (logged, replayed))
    if again > _REPLAY_TIME * time:
        yield f"seed {seed.seed}: a replay takes {again / time:.2f} times as long as the log says"


def verdict(one: Result, standing: Result) -> Verdict:
    """Tests if a record improves on the standing record, with the seeds of the standing record.

    The statistic is the mean difference of the seeds divided by its standard error, which covers seeds and held-out
    documents (`pretrainax/studies/contrasts.py`). Without a difference it has a t distribution with Satterthwaite's
    degrees of freedom. The test ignores further seeds of the new record, so nobody can add seeds until it improves.
    """
    seeds = [seed for seed in standing.outcomes if seed in one.outcomes]
    if len(seeds) < len(standing.outcomes):
        return Verdict(False, f"{len(standing.outcomes)} seeds needed, as many as the standing record has")
    chosen = {seed: one.outcomes[seed] for seed in seeds}
    estimate = compare(chosen, standing.outcomes, larger_is_better=False).estimate
    p_value = estimate.p_value / 2 if estimate.value > 0 else 1 - estimate.p_value / 2
    text = f"{estimate.value:+.4f} bits per byte better, one-sided p = {p_value:.2g}, {rules.LEVEL:g} needed"
    return Verdict(estimate.value > 0 and p_value < rules.LEVEL, text)


def standing_record(folder: str, result: Result) -> Optional[str]:
    """Returns the folder of the best other record of the track, next to this record's folder; None if there is none."""
    parent, found = os.path.dirname(os.path.abspath(folder)), {}
    for name in sorted(os.listdir(parent)):
        other = os.path.join(parent, name)
        if os.path.exists(os.path.join(other, FILE)) and not os.path.samefile(other, folder):
            record = read_result(other)
            if record.track == result.track and rules.BUDGETS[record.variant].counts:
                found[other] = statistics.mean(seed.bits_per_byte for seed in record.seeds)
    return min(found, key=found.__getitem__) if found else None


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", help="folder with config.py, result.json and the logs")
    parser.add_argument("--text", help="folder of the text, to hash it")
    parser.add_argument("--runs", help="folder of the runs, to score their models again; needs --text")
    parser.add_argument("--replay", action="store_true", help="train until the first log line; needs --text")
    parser.add_argument("--against", help="the standing record; without it the best other record of the track")
    given = parser.parse_args()
    try:
        if (given.runs or given.replay) and not given.text:
            raise UserError("--runs and --replay need --text=DIR")
        found, result = list(problems(given.record, given.text, given.runs, given.replay)), read_result(given.record)
        standing = given.against or standing_record(given.record, result)
        tested = verdict(result, read_result(standing)) if standing else Verdict(True, "the first record of its track")
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    print("\n".join(found))
    counts = rules.BUDGETS[result.variant].counts
    scores = [seed.bits_per_byte for seed in result.seeds]
    print(f"{statistics.mean(scores):.4f} bits per byte over {len(scores)} seeds; {tested.message}")
    accepted = not found and tested.improves and counts
    print("accepted" if accepted else "not accepted" + ": a short run is no record" * (not counts))
    return 0 if accepted or (not found and not counts) else 1


if __name__ == "__main__":
    sys.exit(main())
