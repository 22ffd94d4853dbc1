"""Fits a law to your own runs, and reports it: `python -m pretrainax.plan --fit=runs/*`.

L is the last validation loss of a finished run. The fit does not use losses from the middle of a run. The learning rate
is still high there, so the loss is higher than at the end of a run with a shorter schedule (Hoffmann et al. 2022,
section 3.1). The loss is the metric `config.evaluate.select_by`, for example the discriminator's loss for ELECTRA. N is
the number of parameters without embeddings. D is the number of text tokens that all steps train on: repeated text
counts each time, and padding counts as text. The law has a term for repeated text if the runs determine this term, and
if the caller provides the epochs of the runs, as in a ladder (`pretrainax.ladder`).
"""

import dataclasses
import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax import config as config_lib
from pretrainax.config import Experiment, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.units import large_number
from pretrainax.scaling.compute_optimal import count_parameters, text_tokens
from pretrainax.scaling.law_checks import form_problems, smaller_windows
from pretrainax.scaling.law_fit import fit, measures_repetition
from pretrainax.scaling.law_intervals import COVERAGE, Intervals, intervals
from pretrainax.scaling.power_laws import CONSTANTS, LAW_JSON, REPETITION, LossLaw, Run
from pretrainax.scaling.prediction import Prediction, loss_differences
from pretrainax.training.metrics import read_metrics

MIN_RUNS = 6  # minimum number of runs for a fit: the number of constants + 1
LAW_PNG = "law.png"
_LOSSES = ("loss", "bits_per_token", "bits_per_byte")  # suffixes of the metrics that a fit supports


# --- runs ----------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """Properties of a run that its folder does not contain."""

    epochs: float = 1.0  # passes over the text
    trunk: str = ""  # as in `Run.trunk`


def read_runs(pattern: str, known: Mapping[str, Known] = {}) -> tuple[list[Run], Experiment, list[str]]:
    """Reads the runs whose workdirs match a glob; returns (finished runs, config of the first run, excluded runs).

    Runs without a final validation loss are excluded. The third item describes each excluded run in one line.

    Args:
      known: {workdir: its epochs and its trunk}; other runs count as independent runs of new text.

    Raises:
      UserError: no workdir matches, the losses of the runs are not comparable, or the selected metric is not a loss.
    """
    runs, left_out, first = [], [], None
    for workdir in sorted(glob.glob(os.path.expanduser(pattern))):
        if not all(os.path.isfile(os.path.join(workdir, name)) for name in ("config.json", "metrics.jsonl")):
            continue
        experiment, loss = _read(workdir)
        if first is None:
            first = workdir, experiment
        differences = loss_differences(first[1], experiment)
        if first[1].select_by != experiment.select_by:
            differences.append(f"evaluate.select_by: {first[1].select_by!r} -> {experiment.select_by!r}")
        if differences:
            raise UserError(f"--fit: {first[0]} and {workdir} are not comparable: {', '.join(differences)}")
        if loss is None:
            left_out.append(
                f"{workdir}: no validation {experiment.select_by} at its last step, {experiment.train.steps:,}"
            )
            continue
        sizes = count_parameters(experiment.model)[1], text_tokens(experiment)
        runs.append(Run(workdir, *sizes, loss, *known.get(workdir, Known())))
    if first is None:
        raise UserError(f"--fit={pattern}: no matching folder has a config.json and a metrics.jsonl")
    if not (metric := first[1].select_by).partition("/")[0].endswith(_LOSSES):
        raise UserError(
            f"--fit={pattern}: these runs have config.evaluate.select_by={metric}; a fit needs a loss "
            f"({', '.join(_LOSSES)})"
        )
    return runs, first[1], left_out


def _read(workdir: str) -> tuple[Experiment, float | None]:
    """Reads a run; returns (config, validation loss at the last step).

    The loss is the metric `config.evaluate.select_by`, or None for an unfinished run.

    Raises:
      UserError: the files in the workdir cannot be read.
    """
    try:
        experiment = config_lib.load(os.path.join(workdir, "config.json"))
        metric_lines = read_metrics(os.path.join(workdir, "metrics.jsonl"))
        last_lines = [x for x in metric_lines if x["split"] == "valid" and x["step"] == experiment.train.steps]
        losses = [x.get(experiment.select_by) for x in last_lines]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--fit: {workdir} cannot be read: {type(e).__name__}: {e}") from e
    return experiment, losses[-1] if losses else None


def check_enough(pattern: str, runs: Sequence[Run]) -> None:
    """Raises UserError if the runs are too few to fit the law's five constants; the message states what is missing."""
    sizes, amounts = ({getattr(run, name) for run in runs} for name in ("parameters", "tokens"))
    max_amounts = max((len({r.tokens for r in runs if r.parameters == size}) for size in sizes), default=0)
    missing = [
        *([f"{MIN_RUNS - len(runs)} more runs"] if len(runs) < MIN_RUNS else []),
        *([f"{3 - len(sizes)} more sizes"] if len(sizes) < 3 else []),
        *([f"{3 - len(amounts)} more amounts of text"] if len(amounts) < 3 else []),
        *(["one size with two amounts of text"] if max_amounts < 2 else []),
    ]
    if missing:
        raise UserError(
            f"--fit={pattern}: {len(runs)} finished runs with {len(sizes)} sizes and {len(amounts)} amounts of text "
            f"are too few for {len(CONSTANTS)} constants; missing: {', '.join(missing)}"
        )


# --- the report ----------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """A law fitted to runs, and the intervals of its constants."""

    law: LossLaw
    intervals: Intervals
    left_out: Sequence[str] = ()  # one line per excluded run, with the reason
    too_small: Sequence[Run] = ()  # finished runs that the fit ignores, because they are too small for the law's form
    repetition: str = ""  # the reason why the law has no term for repeated text; "": it has this term


def fit_runs(pattern: str, known: Mapping[str, Known] = {}) -> Fit:
    """Fits the law to the runs whose workdirs match a glob; arguments as in `read_runs`.

    Raises:
      UserError: there are too few runs, or the runs are not comparable.
    """
    runs, experiment, left_out = read_runs(pattern, known)
    check_enough(pattern, runs)
    found = fit_law(runs, experiment.model.family, pattern, experiment.select_by)
    law = dataclasses.replace(found.law, config=config_lib.to_json(experiment))
    return found._replace(law=law, left_out=(*left_out, *found.left_out))


def fit_law(runs: Sequence[Run], family: str, source: str, metric: str = LossLaw.metric) -> Fit:
    """Fits the law to runs, with a term for repeated text if the runs determine it.

    If the law of all runs has the wrong form, the function fits the law to the first of `law_checks.smaller_windows` in
    which the form is right, and ignores the other runs. If the form is right in no window, the function returns the law
    of all runs as unidentified.

    Args:
      source: description of the runs; other arguments as in `law_fit.fit`.
    """
    whole = _fit_without_checks(runs, family, source, metric)
    if not (reasons := list(form_problems(whole.law))):
        return whole
    for window in smaller_windows(runs):
        found = _fit_without_checks(window, family, source, metric)
        if not list(form_problems(found.law)):
            kept = set(window)
            too_small = tuple(run for run in runs if run not in kept)
            return found._replace(left_out=[*_left_out(too_small, len(runs), reasons, metric)], too_small=too_small)
    unidentified = (*whole.law.unidentified, *(f"form: {line}; add larger models and longer runs" for line in reasons))
    return whole._replace(law=dataclasses.replace(whole.law, unidentified=unidentified))


def _left_out(too_small: Sequence[Run], count: int, reasons: Sequence[str], metric: str) -> Iterator[str]:
    """Yields a line for each run that a fit ignores; `reasons` are the failed checks of a law of all `count` runs."""
    yield from (f"with all {count} runs, {line}" for line in reasons)
    for run in too_small:
        size = f"{large_number(run.parameters)} parameters and {large_number(run.tokens)} tokens"
        yield f"{run.workdir}: {metric} {run.loss:.4f} with {size}; too small for the law's form"


def _fit_without_checks(runs: Sequence[Run], family: str, source: str, metric: str) -> Fit:
    parameters, tokens = (large_number(max(getattr(run, name) for run in runs)) for name in ("parameters", "tokens"))
    source = f"fit of {len(runs)} runs of up to {parameters} parameters and {tokens} tokens, {source}"

    def fitted(repeats: bool, reason: str = "") -> Fit:
        law = fit(runs, family, source, metric, repeats)
        found = intervals(law)
        return Fit(dataclasses.replace(law, unidentified=found.unidentified), found, repetition=reason)

    if not measures_repetition(runs):
        return fitted(False, "the runs do not repeat their text, or their epochs are unknown")
    repeating = fitted(True)
    if (interval := repeating.intervals.of[REPETITION]).is_bounded:
        return repeating
    most = max(run.epochs for run in runs)
    return fitted(False, f"up to {most:.1f} epochs do not determine R*, whose interval is {interval}")


def fit_report(pattern: str, directory: str) -> str:
    """Fits the law to runs, writes law.json and law.png to `directory`, and returns tables that describe the fit.

    Args:
      pattern: glob that matches the runs' workdirs.

    Raises:
      UserError: there are too few runs, the runs are not comparable, or `directory` cannot be written.
    """
    law_fit = fit_runs(pattern)
    try:
        write_law(law_fit, directory)
    except OSError as e:
        raise UserError(f"--to={directory} cannot be written: {e.strerror}") from e
    path = os.path.join(directory, LAW_JSON)
    use = f"To use this law for a budget: --flops=… --law={path}"
    if law_fit.law.unidentified:
        use = f"THE LAW IS NOT IDENTIFIED, so that --flops=… --law={path} does not use it:\n  "
        use += "\n  ".join(law_fit.law.unidentified)
    return f"{tables(law_fit)}\n\nWrote {path} and {LAW_PNG}. {use}\n"


def write_law(
    law_fit: Fit, directory: str, prediction: Optional[Prediction] = None, measured: Optional[float] = None
) -> None:
    """Writes law.json and law.png to a folder; `prediction` and `measured` as in `picture.draw_law`."""
    os.makedirs(directory, exist_ok=True)
    write_atomically(os.path.join(directory, LAW_JSON), json.dumps(law_json(law_fit), indent=1) + "\n")
    from pretrainax.scaling.picture import draw_law  # a late import, because matplotlib imports slowly

    draw_law(os.path.join(directory, LAW_PNG), law_fit.law, law_fit.intervals.extremes, prediction, measured)


def law_json(law_fit: Fit) -> JsonObject:
    """Builds the contents of law.json (see `power_laws.law_of`): the law's constants and intervals, and the runs."""
    law, found = law_fit.law, law_fit.intervals
    return {
        "source": law.source,
        "family": law.family,
        "with_embeddings": law.with_embeddings,
        "metric": law.metric,
        "constants": {name: getattr(law, name) for name in found.of if name != "exponent"},
        "repetition": law_fit.repetition or "a constant of the law",
        "intervals": {name: interval._asdict() for name, interval in found.of.items()},
        "interval": COVERAGE,
        "noise": found.noise,
        "correlation": law.correlation,
        "unidentified": law.unidentified,
        "runs": [run._asdict() for run in law.runs],
        "left_out": law_fit.left_out,
        "too_small": [run._asdict() for run in law_fit.too_small],
        "config": law.config,
    }


def tables(law_fit: Fit) -> str:
    """Formats one table of the runs with their predicted losses and one of the law's constants with their intervals."""
    law, width = law_fit.law, max(len(run.workdir) for run in law_fit.law.runs)
    loss_width = max(len(law.metric), 8)
    lines = [f"{'run':<{width}}  {'N':>8} {'D':>8} {'epochs':>6} {law.metric:>{loss_width}} {'law':>8}   error"]
    for run in law.runs:
        predicted = law.loss(run.parameters, run.tokens, run.epochs)
        lines.append(
            f"{run.workdir:<{width}}  {large_number(run.parameters):>8} {large_number(run.tokens):>8} "
            f"{run.epochs:6.2f} {run.loss:{loss_width}.4f} {predicted:8.4f} {100 * (run.loss / predicted - 1):+5.2f} %"
        )
    lines += [f"left out: {line}" for line in law_fit.left_out]
    lines += ["", "L(N, D) = E + A / N^alpha + B / D^beta; N: parameters without embeddings, D: tokens of text"]
    if law.repetition is not None:
        lines[-1] += f"; epochs after the first count as in Muennighoff et al. 2023, R* = {REPETITION}"
    else:
        lines.append(f"no term for repeated text: {law_fit.repetition}")
    for name, interval in law_fit.intervals.of.items():
        label = "N_opt ∝ C^a, a" if name == "exponent" else name
        lines.append(f"  {label:<14} {getattr(law, name):10.4g}   {COVERAGE:.0%} interval: {interval}")
    noise, correlation = law_fit.intervals.noise, law.correlation
    shared = f"; errors of one trunk have the correlation {correlation:g}" if correlation else ""
    lines.append(f"  standard deviation of a run: {100 * noise:.2g} % of its loss{shared}")
    return "\n".join(lines)
