"""Plots statistics of a text dataset, and compares tokenizers by vocabulary size, in the style of curves.png."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib import figure, ticker

from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.curves import FAINT, INK, LEFT, NORM, RATE, RIGHT, STYLE, TRAINING, VALIDATION

_COLORS = (TRAINING, VALIDATION, RATE, NORM, INK)
_PLAIN = ticker.FuncFormatter(lambda x, _: f"{x:,.0f}")


def draw_corpus(path: str, statistics: Mapping[str, JsonObject]) -> None:
    """Plots document lengths (left) and token counts by rank (right), with one color per split.

    Args:
      path: the PNG file to write.
      statistics: results of `data.inspection.corpus.measure`, by split.
    """
    with matplotlib.rc_context(STYLE):
        height = 4.9 + 0.27 * len(statistics)  # inches; each split has a line of text above the panels
        picture = figure.Figure(figsize=(12, height), dpi=150)
        top = 1 - (1.1 + 0.27 * len(statistics)) / height
        grid = picture.add_gridspec(1, 2, left=LEFT, right=RIGHT, top=top, bottom=0.62 / height, wspace=0.2)
        lengths, counts = (picture.add_subplot(grid[0, i]) for i in range(2))
        picture.text(LEFT, 1 - 0.38 / height, "Dataset", fontsize=16, fontweight="bold", va="center")
        for i, (name, split) in enumerate(statistics.items()):
            color = _COLORS[i % len(_COLORS)]
            lower_bounds, documents = np.array(split["length_histogram"]).T
            half_octaves = (2 * np.log2(lower_bounds)).round().astype(int)
            percent = np.bincount(
                half_octaves - half_octaves[0], 100 * documents / split["documents"]
            )  # percent of documents per half octave of length, [half octaves]
            edges = 2.0 ** (np.arange(half_octaves[0], half_octaves[-1] + 2) / 2)
            lengths.stairs(percent, edges, color=color, fill=i == 0, alpha=0.35 if i == 0 else 1.0, linewidth=2)
            ranks, uses = np.array(split["counts_by_rank"]).reshape(-1, 2).T
            counts.plot(ranks, uses, color=color, linewidth=2)
            text = (
                f"{counted(split['documents'], 'document')}, {split['tokens']:,} tokens of "
                f"{split['bytes_per_token']:.2f} bytes; {split['pieces_used']:,} of {split['pieces']:,} pieces used; "
                f"{split['duplicates']:,} duplicates"
            )
            y = 1 - (0.76 + 0.27 * i) / height
            picture.text(LEFT, y, name, color=color, weight="bold", va="center")
            picture.text(LEFT + 0.06, y, text, color=FAINT, va="center")
        lengths.set_title("documents by length, % of the split")
        lengths.set_xscale("log", base=2)
        lengths.set_xlabel("tokens per document")
        lengths.set_ylim(bottom=0)
        counts.set_title("number of uses of each token, from the most frequent token")
        counts.set_xscale("log")
        counts.set_yscale("log")
        counts.set_xlabel("rank of the token by frequency")
        counts.yaxis.set_major_formatter(_PLAIN)
        for panel in (lengths, counts):
            panel.xaxis.set_major_formatter(_PLAIN)
            panel.minorticks_off()
            panel.grid(axis="x", visible=False)
        picture.savefig(path, facecolor="white")


def draw_tokenizers(path: str, results: JsonObject) -> None:
    """Plots bytes per token (left) and training FLOPs per byte (right) over vocabulary sizes, by kind of tokenizer.

    Args:
      path: the PNG file to write.
      results: the results of `tokenization.compare.compare`.
    """
    rows = results["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    sizes = sorted({row["size"] for row in rows})
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, 5.6), dpi=150)
        grid = picture.add_gridspec(1, 2, left=LEFT, right=0.91, top=0.78, bottom=0.12, wspace=0.36)
        picture.text(LEFT, 0.93, "Vocabulary size", fontsize=16, fontweight="bold", va="center")
        lossy = {row["kind"] for row in rows if row["restored_share"] < 1}
        text = (
            f"trained on {results['training_bytes'] / 1e6:.1f} MB, measured on "
            f"{results['held_out_bytes'] / 1e6:.2f} MB of validation text"
            + ("; dashed: decoding does not restore the text exactly" if lossy else "")
        )
        picture.text(LEFT, 0.875, text, color=FAINT, va="center")
        for i, (value_of, title) in enumerate(
            (
                (lambda row: row["bytes_per_token"], "bytes per token: text that fits into a context"),
                (lambda row: row["flops_per_byte"] / 1e6, "training MFLOPs per byte of text: cost of the text"),
            )
        ):
            panel = picture.add_subplot(grid[0, i])
            panel.set_title(title)
            last_points = {}
            for kind, color in zip(kinds, _COLORS, strict=False):
                curve = sorted((row["size"], value_of(row)) for row in rows if row["kind"] == kind)
                style = {"linewidth": 2, "linestyle": (0, (4, 2)) if kind in lossy else "-"}
                points = {"marker": "o", "markersize": 5.5, "markeredgecolor": "white"}
                panel.plot(*zip(*curve, strict=True), color=color, **style, **points)
                last_points[kind] = (*curve[-1], color)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.minorticks_off()
            panel.set_xlabel("config.tokenizer.vocab_size")
            panel.grid(axis="x", visible=False)
            _label_ends(panel, last_points)
        picture.savefig(path, facecolor="white")


def _label_ends(panel, last_points: Mapping[str, tuple[float, float, str]]) -> None:
    """Writes the name of each line at its right end, moved up if it would overlap the name below it.

    Args:
      last_points: for each name, the x and y of the line's last point, and the line's color.
    """
    low, high = panel.get_ylim()
    x_max = panel.get_xlim()[1]
    panel.set_xlim(panel.get_xlim()[0], x_max)
    label_y = -np.inf
    for kind, (x, y, color) in sorted(last_points.items(), key=lambda item: item[1][1]):
        label_y = max(y, label_y + 0.05 * (high - low))
        if x < max(x for x, _, _ in last_points.values()):  # a thin line connects a curve that ends early with its name
            panel.plot([x, x_max], [y, label_y], color=color, linewidth=0.8, linestyle=":")
        text = {"color": color, "weight": "bold", "va": "center", "annotation_clip": False}
        panel.annotate(kind, (x_max, label_y), xytext=(4, 0), textcoords="offset points", **text)
    panel.set_ylim(low, high)
