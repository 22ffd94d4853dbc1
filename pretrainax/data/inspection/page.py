"""Renders an HTML page of the rows that a model will be trained on.

The page is one file without scripts, has a light and a dark theme, and can be printed.
"""

import html
from collections.abc import Iterator

import numpy as np

from pretrainax.data.inspection import check
from pretrainax.data.inspection.row_view import KINDS, Piece, View
from pretrainax.data.objectives import Statistic
from pretrainax.reporting.units import percent

_STYLE = """
:root { color-scheme: light dark; --page: #f6f5f1; --card: #fffefb; --ink: #22252b; --soft: #6c717c; --line: #e2dfd6;
  --masked: #ffe39a; --masked-ink: #6b4700; --random: #ffcfc7; --random-ink: #8c1d10; --kept: #cdebcf;
  --kept-ink: #1b5a2a; --sentinel: #e2d6fb; --sentinel-ink: #4c2a94; --special: #d5e8f5; --special-ink: #1f5374;
  --bar: #7c9cc4; --good: #2f8f4e; --bad: #c9352b; }
@media screen and (prefers-color-scheme: dark) { :root {
  --page: #15171c; --card: #1d2026; --ink: #e3e5ea; --soft: #949aa8;
  --line: #31353f; --masked: #5b4610; --masked-ink: #ffdf8f; --random: #5f231d; --random-ink: #ffbfb5; --kept: #1e4a2b;
  --kept-ink: #b4ebc0; --sentinel: #40306e; --sentinel-ink: #d9cbff; --special: #1f4459; --special-ink: #b5def5;
  --bar: #6f93c2; --good: #63c683; --bad: #ff7a6e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 0 0 .8rem; }
h3 { font-size: .74rem; letter-spacing: .08em; text-transform: uppercase; color: var(--soft); margin: 1rem 0 .3rem; }
.soft { color: var(--soft); font-size: .92rem; margin: 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.25rem 1.5rem;
  margin-top: 1.25rem; }
.two { display: grid; grid-template-columns: minmax(0, 1fr) 17rem; gap: 2rem; align-items: start; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; } th, td { padding: .32rem .6rem .32rem 0; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .8rem; }
td { border-top: 1px solid var(--line); } .n { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: var(--good); } .off { color: var(--bad); font-weight: 700; }
.legend { display: flex; flex-wrap: wrap; gap: .35rem 1.4rem; margin-top: 1.25rem; font-size: .86rem;
  color: var(--soft); }
.words { font: 1.02rem/2.05 ui-serif, Georgia, "Noto Serif", "DejaVu Serif", serif; overflow-wrap: anywhere;
  white-space: pre-wrap; }
mark { border-radius: 5px; padding: .1em .32em; color: inherit; background: none; -webkit-print-color-adjust: exact;
  print-color-adjust: exact; -webkit-box-decoration-break: clone; box-decoration-break: clone; }
mark s { opacity: .65; text-decoration: none; font-size: .8em; } mark s::after { content: " → "; }
.masked { background: var(--masked); color: var(--masked-ink); }
.random { background: var(--random); color: var(--random-ink); }
.kept { background: var(--kept); color: var(--kept-ink); }
.sentinel { background: var(--sentinel); color: var(--sentinel-ink); font: 600 .78em ui-monospace, monospace; }
.special { background: var(--special); color: var(--special-ink); font: .78em ui-monospace, monospace; }
.unknown { outline: 1.5px dashed var(--random-ink); }
.padding { color: var(--soft); font: .8em system-ui, sans-serif; border: 1px dashed var(--line); }
.words i { color: var(--soft); font: .75em system-ui, sans-serif; opacity: .6; }
.gap { color: var(--soft); padding: 0 .3em; } .dim { opacity: .45; }
.prefix, .B { border-bottom: 2px solid var(--bar); } .A { border-bottom: 2px dotted var(--bar); }
.new { display: block; border-top: 1px dashed var(--soft); margin: .45rem 0 .2rem; height: 0; }
svg { display: block; width: 100%; max-width: 17rem; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
@media (max-width: 48rem) { .two { grid-template-columns: 1fr; } main { padding: 1.25rem .8rem 3rem; } }
@media print { :root { --page: #fff; --card: #fff; } body { font-size: 10.5pt; } main { padding: 0; max-width: none; }
  section { border: 0; border-top: 1px solid var(--line); border-radius: 0; padding: .8rem 0; }
  h2, h3 { break-after: avoid; } }
"""


def render(config: str, summary: str, measured: check.Measurement, views: list[View]) -> str:
    """Renders the HTML page, which shows the statistics of the first rows and views of some rows.

    Args:
      config: the name of the config, for the title.
      summary: one line about the corpus, for the title.
      measured: the statistics of the first rows.
      views: the rows to show.
    """
    sections = [
        f"<h1>What the model will see</h1><p class=soft><b>{_escape(config)}</b> · {_escape(summary)}</p>",
        f"<section class=two><div><h2>Measured over the first {measured.rows} rows</h2>{_table(measured)}</div>"
        f"<div><h2>Fill of the rows</h2>{_histogram(measured.fill)}</div></section>",
        _legend(views),
        *(_row(view) for view in views),
    ]
    return (
        '<!doctype html>\n<html lang=en><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(config)}: what the model will see</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{''.join(section + chr(10) for section in sections)}</main></body></html>\n"
    )


def _table(measured: check.Measurement) -> str:
    """Renders a table of all statistics, with measured and expected values."""
    header = "<tr><th>statistic<th class=n>measured<th class=n>expected<th>"
    has_several_groups = len(measured.groups) > 1
    rows = [
        _statistic(f"{group.name}: {statistic.name}" if has_several_groups else statistic.name, statistic)
        for group in measured.groups
        for statistic in group.statistics
    ]
    rows += [_statistic(statistic.name, statistic) for statistic in measured.statistics]
    for name, value in measured.plan.items():
        rows.append(f"<tr><td>{_escape(name)}<td class=n>{check.format_plan_value(value)}<td><td>")
    return f"<table>{header}{''.join(rows)}</table>"


def _statistic(name: str, statistic: Statistic) -> str:
    expected = verdict = ""
    if statistic.expected is not None:
        expected = f"{statistic.expected:.4g} ± {statistic.tolerance:.2g}"
        verdict = "<span class=off>✗ off</span>" if statistic.is_off else "<span class=ok>✓</span>"
    return f"<tr><td>{_escape(name)}<td class=n>{check.format_statistic(statistic)}<td class=n>{expected}<td>{verdict}"


def _histogram(fill: np.ndarray) -> str:
    """Renders an SVG histogram of `fill` [rows] with 20 bars.

    `fill` is the fraction of each row's input positions that are not padding.
    """
    counts, _ = np.histogram(np.clip(fill, 0, 1), bins=20, range=(0, 1))
    bars = "".join(
        f'<rect x="{i * 12 + 1}" y="{96 - 88 * count / counts.max():.1f}" width="10" '
        f'height="{88 * count / counts.max():.1f}" rx="1.5" fill="var(--bar)"><title>{count} rows, '
        f"{i * 5} to {i * 5 + 5} % full</title></rect>"
        for i, count in enumerate(counts.tolist())
        if count
    )
    mean = percent(float(fill.mean()), 1)
    return (
        f'<svg viewBox="0 0 240 116" role="img" aria-label="Histogram of the fill of the rows">{bars}'
        '<line x1="0" x2="240" y1="97" y2="97" stroke="var(--line)"/>'
        '<text x="0" y="112">0 %</text><text x="120" y="112" text-anchor="middle">50 %</text>'
        '<text x="240" y="112" text-anchor="end">100 %</text></svg>'
        f"<p class=soft>{mean} of the inputs are not padding, on average; {len(fill)} rows.</p>"
    )


def _legend(views: list[View]) -> str:
    """Renders a legend that explains the markings of the pieces in `views`."""
    pieces = [piece for view in views for panel in view.panels for piece in panel.pieces]
    kinds = {piece.kind for piece in pieces if piece.tokens} - {"text"}
    items = [(f"<mark class={kind}>{kind}</mark>", KINDS[kind].partition(": ")[2]) for kind in KINDS if kind in kinds]
    if any(piece.part == "prefix" for piece in pieces):
        items.append(("<mark class=prefix>prefix</mark>", "bidirectional attention"))
    if any(piece.part in "AB" and piece.part for piece in pieces):
        items.append(("<mark class=A>A</mark> <mark class=B>B</mark>", "segments of a sentence pair"))
    if any(piece.dim for piece in pieces):
        items.append(("<span class=dim>pale</span>", "no loss"))
    if any(piece.new for piece in pieces):
        items.append(("╌╌", "start of the next document"))
    return "<div class=legend>" + "".join(f"<span>{symbol} {meaning}</span>" for symbol, meaning in items) + "</div>"


def _row(view: View) -> str:
    """Renders the view of one row, with its title, notes and panels."""
    notes = "".join(f"<p class=soft>{_escape(note)}</p>" for note in view.notes)
    panels = "".join(
        f"<h3>{_escape(panel.name)}</h3><div class=words>{''.join(_pieces(panel.pieces))}</div>"
        for panel in view.panels
    )
    return f"<section><h2>{_escape(view.title)}</h2>{notes}{panels}</section>"


def _pieces(pieces: list[Piece]) -> Iterator[str]:
    """Yields the HTML of each piece of a panel."""
    for i, piece in enumerate(pieces):
        if piece.new and i:
            yield "<span class=new></span>"
        space = " " if piece.text.startswith(" ") and piece.kind != "text" else ""
        text, kind = _escape(piece.text.strip(" ") if piece.kind != "text" else piece.text), piece.kind
        if kind == "padding":
            yield (
                f" <mark class=padding>{piece.tokens:,} padding</mark>" if piece.tokens else "<span class=gap>…</span>"
            )
            continue
        if kind == "masked" and piece.target:
            text = _escape(piece.target)
        elif kind == "random":
            text = f"<s>{text}</s>{_escape(piece.target)}"
        marked_text = text if kind == "text" else f"<mark class={kind}>{text}</mark>"
        classes = " ".join(filter(None, (piece.part, "dim" if piece.dim else "")))
        yield space + (f'<span class="{classes}">{marked_text}</span>' if classes else marked_text)


def _escape(text: str) -> str:
    return html.escape(text).replace("⏎", "<i>⏎</i>\n")  # shows ⏎ and breaks the line after it
