"""Draws report.png, which plots several runs: one panel per metric and set of comparable runs, labels at the curves."""

import textwrap
from collections.abc import Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib import figure, ticker

from pretrainax.config.metric import FRACTION, declared
from pretrainax.reporting.curves import FAINT, INK, LEFT, MOST_POINTS, STYLE, line_with_trend, metric_title, trend_of
from pretrainax.reporting.line_styles import MARKERS, LineStyle, label_columns, line_styles, spread
from pretrainax.reporting.run_groups import Panel
from pretrainax.reporting.run_lines import AXES, RunLines
from pretrainax.reporting.runs_table import Report, numbers
from pretrainax.reporting.units import clock, large_number, scientific

SMOOTHING = "bold: training, smoothed by a Gaussian mean of neighbors; faint: as logged; markers: validation"
# Training metrics that have an additional smoothed curve.
NOISY = ("loss", "gradient_norm", "tokens_per_second", "accuracy", "bits_per_byte")
_FONT, _LINE = 9, 0.2  # size of small text in points, and its line height in inches
_WIDTH, _CHARACTER = 12, 0.078  # width of the picture and of a character of small text, in inches
_MOST_CHARACTERS = 155  # of a line of small text


def draw(path: str, report: Report) -> None:
    """Plots each panel of a report. The first panel is large, and the others are below it, two per row.

    Training metrics are drawn as lines, and validation metrics as markers connected by thin lines.

    Args:
      path: the PNG file to write.
    """
    styles = line_styles([run.name for run in report.runs], report.settings)
    header, footer = list(_header(report, styles)), list(_footer(report))
    columns = [panel.metric == report.metrics[0] and panel.groups == "" for panel in report.panels]
    rows = sum(columns) + -(-(len(columns) - sum(columns)) // 2)
    header_height, footer_height = 0.95 + _LINE * len(header), 0.5 + _LINE * len(footer)  # inches
    height = header_height + 2.9 * rows + 1.1 * sum(columns) + footer_height
    label_width = _label_width(styles) / _WIDTH
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(_WIDTH, height), dpi=150)
        ratios = (1.5,) * sum(columns) + (1,) * (rows - sum(columns))
        right = 0.985 - label_width
        gap = 2 * (LEFT + label_width) / (right - LEFT - label_width)  # in mean widths of two panels
        edges = dict(left=LEFT, right=right, top=1 - header_height / height, bottom=(footer_height + 0.35) / height)
        grid = picture.add_gridspec(rows, 2, height_ratios=ratios, hspace=0.42, wspace=gap, **edges)
        places = [grid[0, :]] * sum(columns) + [grid[row, i] for row in range(sum(columns), rows) for i in (0, 1)]
        for place, panel in zip(places, report.panels, strict=False):
            _draw_panel(picture.add_subplot(place), report, panel, styles)
        title = f"{report.title} by {AXES[report.by].title}"
        picture.text(LEFT, 1 - 0.35 / height, title, fontsize=16, fontweight="bold", parse_math=False)
        for i, line in enumerate(header):
            picture.text(LEFT, 1 - (0.62 + _LINE * i) / height, line, color=INK if i else FAINT, fontsize=_FONT)
        for i, line in enumerate(footer):
            picture.text(LEFT, (footer_height - 0.3 - _LINE * i) / height, line, color=FAINT, fontsize=_FONT)
        for text in picture.texts:
            text.set_parse_math(False)
        picture.savefig(path, facecolor="white")


def _header(report: Report, styles: Sequence[LineStyle]) -> Iterator[str]:
    """Yields the lines below the title: the meaning of the curves, the groups, and the names of numbered runs."""
    yield SMOOTHING
    for group in report.groups if len(report.groups) > 1 else ():
        names = ", ".join(styles[i].label for i in group.runs)
        if names.replace(", ", "").isdecimal():
            names = numbers(group.runs)
        yield from _wrapped(f"{group.title}  ({names})")
    names = [f"{style.label}  {run.name}" for style, run in zip(styles, report.runs, strict=True)]
    if any(style.label != run.name for style, run in zip(styles, report.runs, strict=True)):
        per_line = max(1, _MOST_CHARACTERS // (max(map(len, names)) + 4))
        for first in range(0, len(names), per_line):
            yield from _wrapped("    ".join(names[first : first + per_line]))


def _footer(report: Report) -> Iterator[str]:
    """Yields the lines below the panels: the verdict of each group, and the notes."""
    for group, verdict in zip(report.groups, report.verdicts, strict=True):
        if verdict.text:
            yield from _wrapped(f"group {group.name}: {verdict.text}" if len(report.groups) > 1 else verdict.text)
    for note in report.notes:
        yield from _wrapped(note)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _MOST_CHARACTERS, subsequent_indent="      ") or [""]


def panel_title(report: Report, panel: Panel) -> str:
    """Returns the title of a panel: the metric, its unit, and the groups that are comparable in it."""
    runs = [report.runs[i] for i in panel.runs]
    title = metric_title(panel.metric, ("labels",) if any(run.has("labels") for run in runs) else ())
    mark = "; not comparable between groups" if panel.is_mixed else ""
    return f"{title}; group {panel.groups}" if panel.groups else title + mark


def _draw_panel(axes, report: Report, panel: Panel, styles: Sequence[LineStyle]) -> None:
    """Draws the training and validation curves of one panel, formats the axes, and labels the curves."""
    axes.set_title(panel_title(report, panel), parse_math=False)
    axes.grid(axis="x", visible=False)
    ends = []
    for i in panel.runs:
        run, style = report.runs[i], styles[i]
        positions, values = run.curve("train", panel.metric, report.by, MOST_POINTS)
        trend = trend_of(values) if panel.metric in NOISY else values
        first = len(axes.lines)
        line_with_trend(axes, positions, values, style.color, trend)
        if style.dashes:
            axes.lines[first + 1].set(linestyle=(0, style.dashes), dash_capstyle="butt")
        trained = np.column_stack([positions, trend])
        positions, values = run.curve("valid", panel.metric, report.by, MOST_POINTS)
        marker = dict(marker=MARKERS[style.marker], markersize=5.5, markeredgecolor="white", markeredgewidth=0.7)
        axes.plot(positions, values, color=style.color, linewidth=0.8, alpha=0.9, **marker)
        points = np.concatenate([trained, np.column_stack([positions, values])])
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            ends.append((points[points[:, 0].argmax()], style))
    axes.set_xlabel(AXES[report.by].title)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=report.by == "step"))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: place_text(x, report.by)))
    axes.set_xlim(0, 1.01 * max((point[0] for point, _ in ends), default=1) or 1)
    if declared(panel.metric).unit == FRACTION:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, symbol=" %"))
    if panel.metric in ("learning_rate", "gradient_norm"):
        axes.set_ylim(bottom=0)
    if panel.metric == "gradient_norm":
        _limit_spikes(axes, [report.runs[i] for i in panel.runs], report.by)
    _label(axes, ends)


def _label(axes, ends: Sequence[tuple[np.ndarray, LineStyle]]) -> None:
    """Writes the label of each curve to the right of its end, with its marker, and connects them by a thin line.

    ends: the last point and the style of each curve.
    """
    if not ends:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    axes.get_ylim()  # computes the limits, on which the transformation depends
    points = np.clip([to_axes.transform(point) for point, _ in ends], 0, 1)  # [N, 2]
    box, (width, height) = axes.get_position(), axes.figure.get_size_inches()
    label_width = _label_width([style for _, style in ends]) / (box.width * width)
    for column in label_columns(points[:, 0], label_width):
        x = points[column, 0].max() + 0.02
        heights = spread(points[column, 1], 1.35 * _FONT / 72 / (box.height * height), 0, 1)
        for i, y in zip(column, heights, strict=True):
            end, style = ends[i]
            _label_curve(axes, end, style, (x, y))


def _label_curve(axes, end: np.ndarray, style: LineStyle, place: tuple[float, float]) -> None:
    """Writes the label of one curve at `place`, in fractions of the panel, with a marker and a line from its end."""
    line = dict(arrowstyle="-", color=style.color, linewidth=0.6, alpha=0.6, shrinkA=0, shrinkB=0, relpos=(0, 0.5))
    axes.annotate("", end, place, textcoords="axes fraction", annotation_clip=False, arrowprops=line)
    marker = dict(marker=MARKERS[style.marker], color=style.color, markersize=5)
    axes.plot(*place, transform=axes.transAxes, clip_on=False, zorder=4, **marker)
    axes.annotate(
        style.label, place, (7, 0), xycoords="axes fraction", textcoords="offset points", va="center", fontsize=_FONT,
        color=INK, annotation_clip=False, parse_math=False, zorder=4,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
    )  # fmt: skip


def _label_width(styles: Sequence[LineStyle]) -> float:
    """Returns the width of the longest label with its marker, in inches."""
    return 0.35 + _CHARACTER * max(len(style.label) for style in styles)


def _limit_spikes(panel, runs: Sequence[RunLines], by: str) -> None:
    """Switches to a logarithmic y-axis if a spike would flatten the rest of the curves."""
    values = np.concatenate([run.curve("train", "gradient_norm", by, MOST_POINTS)[1] for run in runs])
    positive = values[values > 0]
    if len(positive) and positive.max() > 20 * np.median(positive):
        panel.set_yscale("log")
        panel.set_ylim(bottom=positive.min() / 1.5)


def place_text(place: float, by: str) -> str:
    """Formats a position on the x-axis `by`: "12,000" steps, "1.2 M" tokens, "3.1e18" FLOPs, "1:23:00" hours."""
    if by == "time":
        return clock(place)
    return f"{place:,.0f}" if by == "step" else scientific(place) if by == "flops" else large_number(place)
