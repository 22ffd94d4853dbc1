"""Draws the plots of a study's report as SVG: forest plots of contrasts, curves of runs, and tuning surfaces."""

import io
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
import numpy as np

from pretrainax.files.errors import counted
from pretrainax.reporting.curves import FAINT, INK, STYLE
from pretrainax.reporting.line_styles import MARKERS, LineStyle, line_styles
from pretrainax.reporting.run_lines import AXES, RunLines
from pretrainax.reporting.units import large_number
from pretrainax.studies.outcomes import FinalRun, Trial
from pretrainax.studies.verdicts import Verdict

matplotlib.use("Agg")  # a backend that needs no display

from matplotlib import figure, ticker  # noqa: E402

_STYLE: dict = STYLE | {"text.parse_math": False}  # names of arms may contain a dollar sign
_MOST_POINTS = 200  # maximum number of points of a curve
_WIDTH = 9.0  # width of a plot in inches
_WORD_COLORS = {"better": "#2b7a4b", "worse": "#b3402a", "equivalent": "#3e7cb1", "": "#9aa5b1"}


def forest(verdicts: Sequence[Verdict], unit: str, margin: float | None) -> str:
    """Draws the differences of one measure with their intervals; exploratory contrasts are thin and grey.

    Args:
      verdicts: contrasts with an estimate, from the first row to the last.
      margin: differences below it count as equal, and have a shaded background; None: no margin.
    """
    rows = len(verdicts)
    with matplotlib.rc_context(_STYLE):
        picture = figure.Figure(figsize=(_WIDTH, 0.8 + 0.36 * rows))
        panel = picture.add_subplot()
        picture.subplots_adjust(left=0.36, right=0.97, top=0.98, bottom=0.62 / (0.8 + 0.36 * rows))
        if margin is not None:
            panel.axvspan(-margin, margin, color="#3e7cb1", alpha=0.1, linewidth=0)
        panel.axvline(0, color=INK, linewidth=1)
        for row, verdict in enumerate(verdicts):
            color = _WORD_COLORS.get(verdict.word, INK)
            is_thin = verdict.role == "exploratory"
            if verdict.interval is not None:
                panel.plot(verdict.interval, [row, row], color=color, linewidth=1.2 if is_thin else 2.4)
            panel.plot(verdict.comparison.estimate.value, row, "os"[not is_thin], color=color, markersize=6)
        labels = [f"{v.contrast.one} − {v.contrast.other}, {v.role}" for v in verdicts]
        panel.set_yticks(range(rows), labels)
        for label, verdict in zip(panel.get_yticklabels(), verdicts, strict=True):
            label.set_color(FAINT if verdict.role == "exploratory" else INK)
        panel.set_ylim(rows - 0.5, -0.5)
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(f"difference{f', {unit}' * bool(unit)}; right of 0: the first arm is better")
        return _svg(picture, "forest " + "; ".join(labels))


def curves(runs: Sequence[FinalRun], metric: str, axis: str) -> str:
    """Draws a validation metric of each arm: the mean over seeds, and a band from the smallest to the largest value.

    Args:
      runs: final runs, each of which has the metric.
      axis: name of the x-axis in `reporting.run_lines.AXES`.
    """
    arms = list(dict.fromkeys(run.arm for run in runs))
    with matplotlib.rc_context(_STYLE):
        picture = figure.Figure(figsize=(_WIDTH, 3.6))
        panel = picture.add_subplot()
        picture.subplots_adjust(left=0.08, right=0.97, top=0.97, bottom=0.15)
        for arm, style in zip(arms, line_styles(arms, arms), strict=True):
            _band(panel, [run for run in runs if run.arm == arm], metric, axis, style)
        is_flops = axis == "flops"  # whose usual form is 1e21
        panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:.3g}" if is_flops else large_number(x)))
        panel.set_xlabel(AXES[axis].title)
        panel.set_ylabel(metric.replace("_", " "))
        panel.legend(frameon=False, labelcolor=INK, fontsize=9)
        return _svg(picture, f"curves {metric} {axis}")


def _band(panel, runs: Sequence[FinalRun], metric: str, axis: str, style: LineStyle) -> None:
    """Draws the curve of one arm, as far as all of its seeds have values."""
    points = [RunLines(run.folder, run.lines).curve("valid", metric, axis, _MOST_POINTS) for run in runs]
    length = min(len(x) for x, _ in points)
    x = np.mean([x[:length] for x, _ in points], axis=0)  # [points]
    values = np.array([y[:length] for _, y in points])  # [seeds, points]
    look = {"color": style.color, "marker": MARKERS[style.marker], "markersize": 4 if length <= 20 else 0}
    dashes = {"dashes": style.dashes} if style.dashes else {}
    panel.plot(
        x, values.mean(axis=0), label=f"{runs[0].arm}, {counted(len(runs), 'seed')}", linewidth=1.6, **look, **dashes
    )
    panel.fill_between(x, values.min(axis=0), values.max(axis=0), color=style.color, alpha=0.18, linewidth=0)


def surface(trials: Sequence[Trial], field: str, chosen: Mapping[str, float], measure: str) -> str:
    """Draws the values of the tuning measure against one field, for one arm.

    Small dots are trials, and larger dots with a line are the means over seeds. The fields that are not on the axis
    have their chosen values. The dashed line marks the chosen value. Crosses at the bottom mark trials that stopped
    early: their values belong to shorter runs, and perhaps to another metric.
    """
    with matplotlib.rc_context(_STYLE):
        picture = figure.Figure(figsize=(_WIDTH / 2, 2.6))
        panel = picture.add_subplot()
        picture.subplots_adjust(left=0.18, right=0.96, top=0.95, bottom=0.2)
        whole = [(x.values, x.value) for x in trials if x.value is not None and not x.stopped_early]
        panel.plot([values[field] for values, _ in whole], [value for _, value in whole], "o", color=FAINT, ms=4)
        stopped = sorted({trial.values[field] for trial in trials if trial.stopped_early})
        bottom = panel.get_xaxis_transform()
        panel.plot(stopped, [0.04] * len(stopped), "x", color=FAINT, markersize=4, transform=bottom)
        others = {name: value for name, value in chosen.items() if name != field}
        means: dict[float, list[float]] = {}
        for values, value in whole:
            if all(values.get(name) == other for name, other in others.items()):
                means.setdefault(values[field], []).append(value)
        xs = sorted(means)
        panel.plot(xs, [float(np.mean(means[x])) for x in xs], "o-", color="#3e7cb1", linewidth=1.6, markersize=6)
        if field in chosen:
            panel.axvline(chosen[field], color="#d1603d", linewidth=1.2, linestyle=(0, (4, 3)))
        if xs and xs[0] > 0:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:.3g}"))
        panel.set_xticks(_few(xs), minor=False)
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.set_xlabel(field.removeprefix("config."))
        panel.set_ylabel(measure.replace("_", " "))
        return _svg(picture, f"surface {trials[0].arm} {field}")


def _few(values: Sequence[float]) -> Sequence[float]:
    """Returns at most five values, so that the labels do not overlap."""
    return values[:: -(-len(values) // 5) or 1]


def axes_of(runs: Iterable[FinalRun], metric: str, names: Sequence[str]) -> list[str]:
    """Returns the x-axes in `names` on which all runs have the metric."""
    lines = [[line for line in run.lines if line["split"] == "valid" and metric in line] for run in runs]
    return [n for n in names if all(x and all(line.get(AXES[n].field) is not None for line in x) for x in lines)]


def _svg(picture: figure.Figure, name: str) -> str:
    """Returns the SVG element of a picture, equal in each call; its ids depend on `name`, to be unique in a page."""
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}), io.StringIO() as file:
        picture.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = file.getvalue()
    return text[text.index("<svg") :]  # without the document type, which contains a URL
