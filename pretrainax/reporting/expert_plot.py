"""Draws experts.png, which plots the load of a run's experts (mixture of experts), from its metrics.jsonl."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib import figure, ticker

from pretrainax.reporting.curves import FAINT, LEFT, RIGHT, STYLE, TRAINING, VALIDATION

_MAX_LOAD = 3.0  # load with the darkest color; 1 is an equal fraction of the tokens


def draw(path: str, lines: Sequence[dict], title: str) -> None:
    """Plots the last load of each expert (left) and the highest load in each layer over the steps (right).

    A load of 1 means that the expert gets an equal share of the tokens.

    Args:
      path: the PNG file to write.
      lines: lines of metrics.jsonl. Only lines with "experts", {layer: loads of the E experts}, are drawn.
    """
    expert_lines = [line for line in lines if "experts" in line]
    names = [layer.replace(".", " ") for layer in expert_lines[-1]["experts"]]
    loads = [np.array(list(line["experts"].values()), float) for line in expert_lines]
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, 2.8 + min(0.22 * len(names), 8.0)), dpi=150)
        height = picture.get_figheight()
        grid = picture.add_gridspec(1, 2, left=LEFT + 0.03, right=RIGHT, top=1 - 1.0 / height, bottom=0.62 / height)
        last, over_steps = picture.add_subplot(grid[0, 0]), picture.add_subplot(grid[0, 1])
        picture.text(LEFT, 1 - 0.38 / height, f"{title}: experts", fontsize=16, fontweight="bold", va="center")
        image = last.imshow(loads[-1], aspect="auto", cmap="Blues", vmin=0, vmax=_MAX_LOAD, interpolation="nearest")
        picture.colorbar(image, ax=last, fraction=0.05, extend="max").outline.set_visible(False)
        last.set_title(f"load of each expert (1: an even share of the tokens), step {expert_lines[-1]['step']:,}")
        last.set_xlabel("expert number")
        last.set_yticks(range(len(names)), names, fontsize=max(4, min(9, 160 // len(names))))
        last.grid(visible=False)
        steps, largest = [line["step"] for line in expert_lines], np.array([load.max(axis=1) for load in loads])
        over_steps.plot(steps, largest, color=TRAINING, alpha=0.25, linewidth=1)
        over_steps.plot(steps, largest.mean(axis=1), color=VALIDATION, linewidth=2)
        over_steps.axhline(1.0, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        over_steps.set_title("highest load of an expert: blue: each layer; orange: mean")
        over_steps.set_xlabel("step")
        over_steps.set_ylim(bottom=0)
        over_steps.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        picture.savefig(path, facecolor="white")
