"""Prints the test files that a change in a part can break: `python -m tests.affected layers data/packing`.

These are the test files that import a module of the part, directly or indirectly, or that run a command which does so.
Imports inside functions count too. A part is a package, or a file of a package.
"""

import ast
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable

import pretrainax

ROOT = pathlib.Path(__file__).parents[1]
# Tests that start processes name the modules in strings: "pretrainax.main", "tests.chaos.kill".
NAMED = re.compile(r"\b(?:pretrainax|tests)(?:\.\w+)+")


def module_of(file: pathlib.Path) -> str:
    """Returns the name of a module: pretrainax/data/corpus.py -> pretrainax.data.corpus."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# Names that the package itself imports on first use: {"pretrainax.load": "pretrainax.inference.load"}.
PUBLIC = {f"pretrainax.{name}": module for name, module in pretrainax._MODULES.items()}
FILES = {module_of(f): f for folder in ("pretrainax", "tests") for f in sorted((ROOT / folder).rglob("*.py"))}


def executed(tree: ast.Module) -> list[ast.stmt]:
    """Returns the statements of a file, without imports that only a type checker reads."""
    return [x for x in tree.body if not (isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")]


def mentioned(module: str) -> set[str]:
    """Returns the modules that a file imports anywhere, and the modules in the strings of a test."""
    names, in_tests = set(), module.startswith("tests.")
    for node in itertools.chain.from_iterable(map(ast.walk, executed(ast.parse(FILES[module].read_text())))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pretrainax":
            names.add(f"pretrainax.{node.attr}")
        elif in_tests and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(NAMED.findall(node.value))
    # pretrainax.data.corpus.Corpus -> pretrainax.data.corpus. Importing a module also runs its package. The top-level
    # package imports a module only on the use of a name, so only these names count.
    above = {".".join(name.split(".")[:n]) for name in names for n in range(2, name.count(".") + 2)}
    above |= {found for name in names if (found := PUBLIC.get(name))}
    return above & FILES.keys() - {module}


def reached() -> dict[str, set[str]]:
    """Returns, for each module, all modules that it needs, including itself."""
    needs = {module: mentioned(module) for module in FILES}
    found = {}
    for module in FILES:
        seen, left = {module}, [module]
        while left:
            new = needs[left.pop()] - seen
            seen |= new
            left += new
        found[module] = seen
    return found


def affected(parts: Iterable[str]) -> list[str]:
    """Returns the paths of the test files that need a module of these parts."""
    wanted = tuple(f"pretrainax.{part.strip('/').removesuffix('.py').replace('/', '.')}" for part in parts)
    changed = {module for module in FILES if f"{module}.".startswith(tuple(f"{name}." for name in wanted))}
    if not changed:
        sys.exit(f"{' '.join(parts)}: no part of the package, as layers or data/packing")
    return [
        str(FILES[module].relative_to(ROOT))
        for module, needed in reached().items()
        if FILES[module].name.startswith("test_") and needed & changed
    ]


if __name__ == "__main__":
    print(*affected(sys.argv[1:]))
