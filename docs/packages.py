"""Draws docs/packages.png from the imports of the package.

Run `python docs/packages.py` after a change of the layout. An arrow leads from a package to one that it imports at the
top of a file. Arrows that follow from other arrows (training to config) are omitted. The commands are one box.
"""

import ast
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent / "pretrainax"
COMMANDS = "commands"
INK, LINE, BOX = "#1f2933", "#7b8794", "#e4ecf5"


def part_of(file: pathlib.Path) -> str:
    """Returns the package of a file; a file at the top is a command."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else COMMANDS


def imports() -> dict[str, set[str]]:
    """Returns the imported packages of each package."""
    imported: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if file == PACKAGE / "__init__.py":
            continue
        wanted = imported.setdefault(part_of(file), set())
        for node in ast.parse(file.read_text()).body:
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            names = [name for name in names if name != "pretrainax.cli"]  # shared code of the commands
            wanted |= {name.split(".")[1] for name in names if name.startswith("pretrainax.")}
    return {part: wanted & imported.keys() - {part} for part, wanted in imported.items()}


def reached(part: str, graph: dict[str, set[str]]) -> set[str]:
    """Returns all direct and indirect imports of a package."""
    return graph[part].union(*(reached(other, graph) for other in graph[part]))


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the transitive reduction of the graph."""
    return {
        part: {
            other
            for other in wanted
            if not any(other in reached(between, graph) for between in wanted if between != other)
        }
        for part, wanted in graph.items()
    }


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Returns the length of the longest import chain below each package."""

    def level(part: str) -> int:
        return 1 + max((level(other) for other in graph[part]), default=-1)

    return {part: level(part) for part in graph}


def routes(arrows: dict[str, set[str]], level: dict[str, int]) -> list[list[tuple[str, int]]]:
    """Returns the points of each arrow, one per level, so that it avoids the boxes in between."""
    return [
        [(part, level[part])]
        + [(f"{part} {other}", n) for n in range(level[part] - 1, level[other], -1)]
        + [(other, level[other])]
        for part, wanted in arrows.items()
        for other in sorted(wanted)
    ]


def heights(points: list[list[tuple[str, int]]]) -> dict[tuple[str, int], float]:
    """Returns the height of each point on its level: near its targets, one unit apart from the others."""
    after: dict[tuple[str, int], list] = {}
    for route in points:
        after.setdefault(route[-1], [])
        for point, other in zip(route, route[1:], strict=False):
            after.setdefault(point, []).append(other)
    height: dict[tuple[str, int], float] = {}
    for n in range(1 + max(level for _, level in after)):
        row = [point for point in after if point[1] == n]
        wanted = {point: sum(height[o] for o in after[point]) / max(len(after[point]), 1) for point in row}
        row.sort(key=lambda point: wanted[point])
        middle = sum(wanted.values()) / len(row)
        for i, point in enumerate(row):
            height[point] = middle + i - (len(row) - 1) / 2
    return height


def draw() -> None:
    """Writes packages.png."""
    arrows = reduced(imports())
    level = levels(arrows)
    points = routes(arrows, level)
    height = heights(points)
    figure, axes = plt.subplots(figsize=(15, 4), dpi=150)
    for route in points:
        *between, last = [(n, height[name, n]) for name, n in route]
        xs, ys = zip(*between, strict=True)
        axes.plot(xs, ys, color=LINE, linewidth=1.2, zorder=1)
        style = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(last[0] + 0.45, last[1]), xytext=between[-1], arrowprops=style, zorder=1)
    for part, n in level.items():
        x, y = n, height[part, n]
        box = FancyBboxPatch((x - 0.45, y - 0.3), 0.9, 0.6, boxstyle="round,pad=0,rounding_size=0.1", fc=BOX, ec=INK)
        axes.add_patch(box)
        axes.text(x, y, part, ha="center", va="center", color=INK, fontsize=7.5)
    axes.set_xlim(-0.5, max(level.values()) + 0.5)
    axes.set_ylim(min(height.values()) - 0.4, max(height.values()) + 0.4)
    axes.axis("off")
    figure.savefig(HERE / "packages.png", bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    draw()
