"""Draws docs/packages.png from the imports of the package, and lists its files in docs/design.md by their docstrings.

`python docs/packages.py` belongs to each change of the layout. An arrow goes from a package to one that it imports at
the top of a file. Arrows that a longer way says already, as from training to config, are left out; the commands, a file
each, are one box.
"""

import ast
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

from pretrainax.config.reference import docstring_of, first_sentence  # noqa: E402

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent / "pretrainax"
COMMANDS = "commands"
INK, LINE, BOX = "#1f2933", "#7b8794", "#e4ecf5"


def part_of(file: pathlib.Path) -> str:
    """Returns the package that a file is in; a file at the top is a command."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else COMMANDS


def imports() -> dict[str, set[str]]:
    """Returns for each package the others that it imports."""
    found: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if file == PACKAGE / "__init__.py":
            continue
        wanted = found.setdefault(part_of(file), set())
        for node in ast.parse(file.read_text()).body:
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            names = [name for name in names if name != "pretrainax.cli"]  # which has what the commands share
            wanted |= {name.split(".")[1] for name in names if name.startswith("pretrainax.")}
    return {part: wanted & found.keys() - {part} for part, wanted in found.items()}


def reached(part: str, graph: dict[str, set[str]]) -> set[str]:
    """Returns all that a package imports, at any distance."""
    return graph[part].union(*(reached(other, graph) for other in graph[part]))


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the graph without the arrows that a longer way says already."""
    return {
        part: {
            other
            for other in wanted
            if not any(other in reached(between, graph) for between in wanted if between != other)
        }
        for part, wanted in graph.items()
    }


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Returns how many packages the longest way down from each has."""

    def level(part: str) -> int:
        return 1 + max((level(other) for other in graph[part]), default=-1)

    return {part: level(part) for part in graph}


def ways(arrows: dict[str, set[str]], level: dict[str, int]) -> list[list[tuple[str, int]]]:
    """Returns each arrow as the points it goes through, one a level, so that it goes around the boxes between."""
    return [
        [(part, level[part])]
        + [(f"{part} {other}", n) for n in range(level[part] - 1, level[other], -1)]
        + [(other, level[other])]
        for part, wanted in arrows.items()
        for other in sorted(wanted)
    ]


def heights(points: list[list[tuple[str, int]]]) -> dict[tuple[str, int], float]:
    """Returns how high each point stands on its level: near those it leads to, and apart from the others."""
    after: dict[tuple[str, int], list] = {}
    for way in points:
        after.setdefault(way[-1], [])
        for point, other in zip(way, way[1:], strict=False):
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


def first_sentence_of(file: pathlib.Path) -> str:
    """Returns that of the docstring of a file."""
    return first_sentence(docstring_of(file))


def file_list() -> str:
    """Returns all files of the package as Markdown, one a line, those at the top first."""
    lines = []
    for folder in (PACKAGE, *sorted(path.parent for path in PACKAGE.rglob("*/__init__.py"))):
        lines.append(f"\n**`{folder.relative_to(PACKAGE.parent)}/`** {first_sentence_of(folder / '__init__.py')}\n")
        files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
        lines += [f"- `{file.name}` {first_sentence_of(file)}" for file in files]
    return "\n".join(lines).strip()


def with_file_list(page: str) -> str:
    """Returns docs/design.md with the list of files as it is now."""
    before, start, rest = page.partition("<!-- files: written by docs/packages.py -->\n")
    _, end, after = rest.partition("<!-- end of files -->")
    return f"{before}{start}\n{file_list()}\n\n{end}{after}"


def draw() -> None:
    """Writes packages.png."""
    arrows = reduced(imports())
    level = levels(arrows)
    points = ways(arrows, level)
    height = heights(points)
    figure, axes = plt.subplots(figsize=(12, 3.6), dpi=150)
    for way in points:
        *between, last = [(n, height[name, n]) for name, n in way]
        xs, ys = zip(*between, strict=True)
        axes.plot(xs, ys, color=LINE, linewidth=1.2, zorder=1)
        style = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(last[0] + 0.43, last[1]), xytext=between[-1], arrowprops=style, zorder=1)
    for part, n in level.items():
        x, y = n, height[part, n]
        box = FancyBboxPatch((x - 0.43, y - 0.3), 0.86, 0.6, boxstyle="round,pad=0,rounding_size=0.1", fc=BOX, ec=INK)
        axes.add_patch(box)
        axes.text(x, y, part, ha="center", va="center", color=INK, fontsize=8)
    axes.set_xlim(-0.5, max(level.values()) + 0.5)
    axes.set_ylim(min(height.values()) - 0.4, max(height.values()) + 0.4)
    axes.axis("off")
    figure.savefig(HERE / "packages.png", bbox_inches="tight", metadata={"Software": None})


def main() -> None:
    draw()
    design = HERE / "design.md"
    design.write_text(with_file_list(design.read_text()))


if __name__ == "__main__":
    main()
