"""Holds docs/design.md, CONTRIBUTING.md and CHANGELOG.md against the package that they describe."""

import pathlib
import pkgutil
import re
import runpy

import pytest

import pretrainax
from pretrainax import models  # noqa: F401  which register fields
from pretrainax.data.batch import FIELDS
from tests.test_structure import COMMANDS, PACKAGES

ROOT = pathlib.Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/guide.md", "docs/design.md", "docs/profiling.md")
]


def paths_named(page: pathlib.Path) -> list[str]:
    """Returns what looks like a file or a folder: `layers/block.py`, `docs/`, [text](docs/design.md)."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)  # code: commands of a user, with paths of theirs
    found = re.findall(r"`([\w./]+/[\w./]*)`", text) + re.findall(r"\]\(([\w./]+)[)#]", text)
    return [path for path in found if "NAME" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page):
    folders = (page.parent, ROOT, ROOT / "pretrainax")
    in_a_run = ("events/", "tokenizer/", "checkpoints/", "profiles/", "plugins/profile/step_10")
    missing = [p for p in paths_named(page) if p not in in_a_run and not any((f / p).exists() for f in folders)]
    assert missing == []


def test_the_order_of_imports_is_the_one_that_is_tested():
    order = re.search(r"files < .*?commands", DESIGN, re.DOTALL)
    assert order[0].replace("\n", " ").split(" < ") == [*PACKAGES, "commands"]


def test_the_list_of_files_is_that_of_the_package():
    written = runpy.run_path(str(ROOT / "docs" / "packages.py"))["with_file_list"](DESIGN)
    assert written == DESIGN, "run python docs/packages.py"


def test_the_configs_of_the_readme_are_those_of_the_zoo():
    readme = (ROOT / "README.md").read_text()
    written = runpy.run_path(str(ROOT / "docs" / "architectures.py"))["table"](readme)
    assert written == readme, "run python docs/architectures.py"


def test_the_picture_is_drawn_from_imports_without_a_circle():
    packages = runpy.run_path(str(ROOT / "docs" / "packages.py"))
    assert set(packages["imports"]()) == {*PACKAGES, "commands"}
    assert packages["levels"](packages["reduced"](packages["imports"]()))["files"] == 0


def test_the_table_of_a_batch_has_every_name():
    rows = re.findall(r"^\| `(\w+)` \| ([BTSNLC, ]+) \|", DESIGN, re.MULTILINE)
    assert sorted(rows) == sorted((field.name, ", ".join(field.shape)) for field in FIELDS)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_guide_names_every_package(package):
    assert f"`{package}/`" in GUIDE.split("## Layout")[1]


def test_the_guide_lists_every_command():
    listed = set(re.findall(r"`python -m pretrainax\.(\w+)` \|", GUIDE))
    assert listed == {"zoo", *COMMANDS} - {"__main__", "api", "cli", "prepare_beam"}


def test_every_make_target_that_is_named_exists():
    named = set(re.findall(r"`make (\w+)", "".join(page.read_text() for page in PAGES)))
    named |= set(re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert {target for target in named if f"\n{target}:" not in MAKEFILE} == set()
    assert "check" in named


def test_the_changelog_begins_with_this_version():
    """Behind what is not released yet."""
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in sections if name != "Unreleased") == pretrainax.__version__


def test_what_the_changelog_says_to_import_is_there():
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    statements = re.findall(r"`(from [\w.]+ import [\w, ]+)`", " ".join(rows))
    assert len(statements) >= 3
    for statement in statements:
        exec(statement, {})
    for first, *others in [re.findall(r"`(\.?[\w.]+)`", row) for row in rows if "`pretrainax." in row]:
        for name in [first, *(first.rsplit(".", 1)[0] + other for other in others if other.startswith("."))]:
            pkgutil.resolve_name(name)
