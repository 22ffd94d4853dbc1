"""Compares the documentation with the package: names, links, tables, and the site itself."""

import importlib
import os
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys

import pytest

import pretrainax
from tests.support.docs_pages import USE_PAGES, how_to
from tests.test_structure import COMMANDS, PACKAGES

ROOT = pathlib.Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = [
    ROOT / name
    for name in "README.md CONTRIBUTING.md SECURITY.md docs/guide.md docs/design.md docs/how-to/profile.md".split()
]


def paths_named(page: pathlib.Path) -> list[str]:
    """Returns the paths of files and folders in a page: `layers/block.py`, `docs/`, [text](docs/design.md)."""
    # Code blocks contain paths of the user.
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"`([\w./]+/[\w./]*)`", text) + re.findall(r"\]\(([\w./]+)[)#]", text)
    return [path for path in found if "NAME" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page):
    folders = (page.parent, ROOT, ROOT / "pretrainax")
    in_a_run = ("events/", "tokenizer/", "checkpoints/", "profiles/", "plugins/profile/step_10")
    missing = [p for p in paths_named(page) if p not in in_a_run and not any((f / p).exists() for f in folders)]
    assert missing == []


def test_every_page_that_the_package_names_exists():
    files = [*(ROOT / "pretrainax").rglob("*.py"), *(ROOT / "configs").glob("*.py")]
    named = {page for file in files for page in re.findall(r"\bdocs/[\w./-]+\.md", file.read_text())}
    assert named and [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_the_order_of_imports_is_the_one_that_is_tested():
    order = re.search(r"files < .*?commands", DESIGN, re.DOTALL)
    assert order[0].replace("\n", " ").split(" < ") == [*PACKAGES, "commands"]


def test_the_configs_of_the_readme_are_those_of_the_zoo():
    readme = (ROOT / "README.md").read_text()
    written = runpy.run_path(str(ROOT / "docs" / "architectures.py"))["table"](readme)
    assert written == readme, "run python docs/architectures.py"


def test_the_picture_is_drawn_from_imports_without_a_circle():
    packages = runpy.run_path(str(ROOT / "docs" / "packages.py"))
    assert set(packages["imports"]()) == {*PACKAGES, "commands"}
    assert packages["levels"](packages["reduced"](packages["imports"]()))["files"] == 0


def test_the_generated_pages_are_those_of_the_code():
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    assert (ROOT / "docs" / "batch.md").read_text() == reference["batch_page"](), "run python docs/reference.py"
    shown = re.findall(r"^## (.+)", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert shown == list(reference["MODULES"]), "run python docs/reference.py"


@pytest.mark.slow
def test_the_page_of_commands_shows_their_help():
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    assert (ROOT / "docs" / "commands.md").read_text() == reference["commands_page"](), "run python docs/reference.py"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_without_a_network(tmp_path):
    """Builds in strict mode: links, anchors, navigation, docstrings. The proxy in the environment leads nowhere."""
    env = os.environ | {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    hosts = re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(?:https?:)?//([^/"]+)', page)
    assert set(hosts) <= {"colab.research.google.com"}  # the badge of the README


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_every_python_block_of_a_page_is_python(page):
    for block in re.findall(r"```py(?:thon)?\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("name", USE_PAGES)
def test_a_page_about_a_trained_model_says_how_to_load_it(name):
    assert "```python" not in how_to(name) or "pretrainax.load(" in how_to(name)


def test_every_page_is_in_the_navigation():
    nav = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")} == nav


def test_the_python_page_documents_the_public_names():
    page = (ROOT / "docs" / "python.md").read_text()
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)", page, re.MULTILINE)}
    assert set(pretrainax.__all__) <= documented


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


def test_the_citation_is_that_of_the_last_release():
    """The release workflow compares both with the tag."""
    release = re.search(r"^## (\d+\.\d+\.\d+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {release[1]}\ndate-released: {release[2]}\n" in citation


def test_what_the_changelog_says_to_import_is_there():
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    statements = re.findall(r"`(from [\w.]+ import [\w, ]+)`", " ".join(rows))
    assert len(statements) >= 3
    for statement in statements:
        exec(statement, {})
    for first, *others in [re.findall(r"`(\.?[\w.]+)`", row) for row in rows if "`pretrainax." in row]:
        for name in [first, *(first.rsplit(".", 1)[0] + other for other in others if other.startswith("."))]:
            pkgutil.resolve_name(name)


def test_every_new_name_of_the_upgrade_page_exists():
    page = (ROOT / "docs" / "upgrade.md").read_text()
    for module, name in re.findall(r"^\| `([\w.]+)` \| `[\w.]+` \| `([\w.]+)` \|$", page, re.MULTILINE):
        owner = importlib.import_module(f"pretrainax.{module}")
        *classes, last = name.split(".")
        for cls in classes:
            owner = getattr(owner, cls)
        fields = {field for base in getattr(owner, "__mro__", ()) for field in vars(base).get("__annotations__", {})}
        assert hasattr(owner, last) or last in fields, f"{module}: {name}"


def test_the_first_tutorial_generates_with_its_own_command_before_it_installs_torch():
    page = (ROOT / "docs" / "tutorials" / "first-model.md").read_text()
    assert 0 < page.index("pretrainax generate --from=runs/small") < page.index("torch")
