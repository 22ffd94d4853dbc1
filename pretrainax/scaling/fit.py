"""Fits a law to your own runs, and reports it: `python -m pretrainax.plan --fit=runs/*`.

L is the last validation loss of a finished run. Losses from the middle of a run are not used: the learning rate is
still high there, so the loss is higher than at the end of a run with a shorter schedule (Hoffmann et al. 2022, section
3.1). The loss is the metric `config.evaluate.select_by`, for example the discriminator's loss for ELECTRA. N is the
number of parameters without embeddings. D is the number of text tokens that all steps train on: repeated text counts
each time, and padding counts as text.
"""

import glob
import json
import os
from collections.abc import Sequence

from pretrainax import config as config_lib
from pretrainax.config import Experiment, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.units import large_number
from pretrainax.scaling.compute_optimal import count_parameters, text_tokens
from pretrainax.scaling.law_fit import COVERAGE, Fit, Run, fit, interval, unidentified
from pretrainax.scaling.power_laws import CONSTANTS
from pretrainax.training.metrics import read_metrics

MIN_RUNS = 6  # minimum number of runs for a fit: the number of constants + 1
# Fields of the config that must be equal in all runs, so that the losses are comparable.
_SAME = ("data.", "tokenizer", "objective", "model.family", "evaluate.objective", "evaluate.parameters")
_LOSSES = ("loss", "bits_per_token", "bits_per_byte")  # suffixes of the metrics that a fit supports


# --- runs ----------------------------------------------------------------------------------------------------------


def read_runs(pattern: str) -> tuple[list[Run], Experiment, list[str]]:
    """Reads the runs whose workdirs match a glob; returns (finished runs, config of the first run, excluded runs).

    Excluded runs are those without a final validation loss. The third item describes each of them in one line.

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
        differences = [line for line in config_lib.differences(first[1], experiment) if line.startswith(_SAME)]
        if first[1].select_by != experiment.select_by:
            differences.append(f"evaluate.select_by: {first[1].select_by!r} -> {experiment.select_by!r}")
        if differences:
            raise UserError(f"--fit: {first[0]} and {workdir} are not comparable: {', '.join(differences)}")
        if loss is None:
            left_out.append(
                f"{workdir}: no validation {experiment.select_by} at its last step, {experiment.train.steps:,}"
            )
            continue
        runs.append(Run(workdir, count_parameters(experiment.model)[1], text_tokens(experiment), loss))
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
    """Raises UserError if the runs are too few to fit the law's five constants; the message says what is missing."""
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


def fit_report(pattern: str, directory: str) -> str:
    """Fits the law to runs, writes law.json and law.png to `directory`, and returns tables that describe the fit.

    Args:
      pattern: glob that matches the runs' workdirs.

    Raises:
      UserError: there are too few runs, the runs are not comparable, or `directory` cannot be written.
    """
    runs, experiment, left_out = read_runs(pattern)
    check_enough(pattern, runs)
    parameters, tokens = (large_number(max(getattr(run, name) for run in runs)) for name in ("parameters", "tokens"))
    largest = f"{parameters} parameters and {tokens} tokens"
    source = f"fit of {len(runs)} runs of up to {largest}, {pattern}"
    law, resampled = fit(runs, experiment.model.family, source)
    law_fit = Fit(law, resampled, runs, left_out, experiment.select_by, unidentified(resampled, runs))
    try:
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "law.json")
        write_atomically(path, json.dumps(_law_json(law_fit), indent=1) + "\n")
        from pretrainax.scaling.picture import draw_law  # a late import, because matplotlib imports slowly

        draw_law(os.path.join(directory, "law.png"), law, resampled, runs)
    except OSError as e:
        raise UserError(f"--to={directory} cannot be written: {e.strerror}") from e
    use = f"To use this law for a budget: --flops=… --law={path}"
    if law_fit.unidentified:
        use = f"THE LAW IS NOT IDENTIFIED, so that --flops=… --law={path} does not use it:\n  "
        use += "\n  ".join(law_fit.unidentified)
    return f"{_tables(law_fit)}\n\nWrote {path} and law.png. {use}\n"


def _law_json(law_fit: Fit) -> dict[str, object]:
    """Builds the contents of law.json (see `power_laws.law_of`): the law's constants and intervals, and the runs."""
    law = law_fit.law
    return {
        "source": law.source,
        "family": law.family,
        "with_embeddings": law.with_embeddings,
        "metric": law_fit.metric,
        "constants": {name: getattr(law, name) for name in CONSTANTS},
        "intervals": {
            name: interval([getattr(x, name) for x in law_fit.resampled]) for name in (*CONSTANTS, "exponent")
        },
        "interval": COVERAGE,
        "unidentified": law_fit.unidentified,
        "runs": [run._asdict() for run in law_fit.runs],
        "left_out": law_fit.left_out,
        "resamples": [[float(f"{getattr(x, name):.6g}") for name in CONSTANTS] for x in law_fit.resampled],
    }


def _tables(law_fit: Fit) -> str:
    """Formats one table of the runs with their predicted losses and one of the law's constants with their intervals."""
    law, width = law_fit.law, max(len(run.workdir) for run in law_fit.runs)
    loss_width = max(len(law_fit.metric), 8)
    lines = [f"{'run':<{width}}  {'N':>8} {'D':>8} {law_fit.metric:>{loss_width}} {'law':>8}   error"]
    for run in law_fit.runs:
        predicted = law.loss(run.parameters, run.tokens)
        lines.append(
            f"{run.workdir:<{width}}  {large_number(run.parameters):>8} {large_number(run.tokens):>8} "
            f"{run.loss:{loss_width}.4f} {predicted:8.4f} {100 * (run.loss / predicted - 1):+5.2f} %"
        )
    lines += [f"left out: {line}" for line in law_fit.left_out]
    lines += ["", "L(N, D) = E + A / N^alpha + B / D^beta; N: parameters without embeddings, D: tokens of text"]
    for name in (*CONSTANTS, "exponent"):
        low, high = interval([getattr(x, name) for x in law_fit.resampled])
        label = "N_opt ∝ C^a, a" if name == "exponent" else name
        lines.append(f"  {label:<14} {getattr(law, name):10.4g}   {COVERAGE:.0%} of resamples: {low:.4g} to {high:.4g}")
    return "\n".join(lines)
