"""Prints the sizes of the package and their limits: `python -m tests.targets`. Exit status 1 means an exceeded limit.

`tests/test_structure.py` checks the imports. This script adds the numbers of lines, files and cases.
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "pretrainax"
ABOVE = {"zoo", "tasks", "adapt", "distill", "interop", "inference", "scoring"}  # packages that use a trained model


def lines(files) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def cone_of(module: str) -> list[pathlib.Path]:
    """Returns the files of this package that an import of a module executes."""
    code = f"import sys, {module}; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('pretrainax')))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [pathlib.Path(file) for file in out.stdout.split()]


def cases(*arguments: str) -> int:
    """Counts the cases that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.count("::")


def rows() -> list[tuple[str, int, int | None]]:
    """Returns names, numbers and limits; None means that a number has no limit."""
    cone = cone_of("pretrainax.training.loop")
    used = {file.relative_to(PACKAGE).parts[0] for file in cone} & ABOVE
    return [
        ("lines of pretrainax/training", lines((PACKAGE / "training").rglob("*.py")), 3000),
        ("lines that training/loop.py imports", lines(cone), 31_000),
        ("  files", len(cone), None),
        (f"  packages that use a trained model {sorted(used) or ''}", len(used), 0),
        ("lines of pretrainax/evaluate.py", lines([PACKAGE / "evaluate.py"]), 120),
        ("lines of the package", lines(PACKAGE.rglob("*.py")), None),
        ("cases of make test", cases("-m", "not slow"), None),
        ("cases of make test-all", cases(), None),
    ]


if __name__ == "__main__":
    found = rows()
    for name, number, most in found:
        print(f"{name:60} {number:>7,}" + ("" if most is None else f"  at most {most:,}"))
    sys.exit(any(most is not None and number > most for _, number, most in found))
