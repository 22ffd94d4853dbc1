"""Formats the result of a coordinate check as a table, and draws it."""

from collections.abc import Sequence

import matplotlib

from pretrainax.files.errors import counted
from pretrainax.reporting.curves import GRID, STYLE, TRAINING, VALIDATION, two_panels
from pretrainax.reporting.tables import text_table
from pretrainax.scaling.coordinates import LIMIT, STEPS, Sizes

_TICKS = (0.1, 0.25, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 2, 4, 10)  # ticks of the axis with the relative sizes


def table(widths: Sequence[int], sizes: Sequence[Sizes]) -> str:
    """Formats a table of the sizes of all modules, followed by the sizes that depend on the width."""
    rows = [("module", "RMS of", *(f"{width:,}" for width in widths), "difference", "error", "")]
    for x in sizes:
        numbers = (f"{size:.3g}" for size in x.sizes)
        rows.append((x.module, x.what, *numbers, f"{x.difference:.0%}", f"{x.error:.0%}", x.verdict))
    failed, unknown = (
        sorted({x.module for x in sizes if x.verdict == verdict}) for verdict in ("NOT FLAT", "not known")
    )
    lines = [f"all sizes are within {LIMIT:.0%} of their mean over widths"] if not failed + unknown else []
    if failed:
        lines.append(f"the output depends on the width after {STEPS} steps: {', '.join(failed)}")
    if unknown:
        lines.append(f"not known, because the seeds differ too much: {', '.join(unknown)}")
    seeds = len(sizes[0].by_seed[0])
    lines.append(f"{counted(seeds, 'seed')} of each width; error: what their differences can explain (95 %)")
    return "\n\n".join([text_table(rows, "<<>"), "\n".join(lines)])


def draw(path: str, widths: Sequence[int], sizes: Sequence[Sizes]) -> None:
    """Draws two panels in a PNG file, activations and changes, with one line per module."""
    legend = f"RMS relative to the smallest width, after {STEPS} steps; orange: depends on the width"
    titles = ("activations", "changes of outputs, and of tables, norms and biases")
    with matplotlib.rc_context(STYLE):
        picture, panels = two_panels("Sizes of outputs by width", legend)
        for panel, title, shown in zip(panels, titles, (("activation",), ("change", "update")), strict=True):
            panel.set_title(title)
            for x in (x for x in sizes if x.what in shown):
                relative = [size / x.sizes[0] if x.sizes[0] else 1.0 for size in x.sizes]
                color = VALIDATION if x.verdict == "NOT FLAT" else TRAINING
                panel.plot(widths, relative, color=color, linewidth=1.2, alpha=0.7)
            panel.axhspan(1 - LIMIT, 1 + LIMIT, color=GRID, alpha=0.6)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.minorticks_off()
            limits = panel.get_ylim()
            panel.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
            panel.set_ylim(limits)
            panel.set_xticks(list(widths), [f"{width:,}" for width in widths])
            panel.set_xlabel("width")
        picture.savefig(path, facecolor="white")
