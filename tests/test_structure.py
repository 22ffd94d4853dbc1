"""The shape of the house: what may import what, no file too long, no architecture field without a use."""

import ast
import dataclasses
import importlib
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

from pretrainax import zoo
from pretrainax.config import ModelConfig

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "pretrainax").rglob("*.py"))
SCRIPTS = sorted(f for folder in ("configs", "benchmarks", "launch") for f in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Each may import, at its top, the packages before it and its own. A file at the top of the package is a command.
PACKAGES = (
    "config reporting sharding checkpoints runtime tokenization data layers models zoo optim interop training planning "
    "scaling"
).split()
COMMANDS = "cli main prepare prepare_beam tokenizer inspect plan evaluate verify_resume huggingface".split()
RANK = {name: rank for rank, name in enumerate(PACKAGES)} | dict.fromkeys(COMMANDS, len(PACKAGES))
# The two chains that a user takes apart: text without models, models without text.
CHAINS = {
    "data": {"config", "reporting", "tokenization"},
    "layers": {"config", "sharding"},
    "models": {"config", "layers", "sharding"},
    "zoo": {"config", "reporting", "sharding", "models", "layers"},
}


def module_of(file: pathlib.Path) -> str:
    """pretrainax/data/corpus.py -> pretrainax.data.corpus"""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(file: pathlib.Path) -> set[str]:
    """Parts of the package ("data", "config", …) that the file imports when it is imported itself."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("pretrainax.")}


def part_of(file: pathlib.Path) -> str:
    return file.relative_to(ROOT / "pretrainax").parts[0].removesuffix(".py")


MODULES = [file for file in FILES if part_of(file) != "__init__"]


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_every_module_imports(file):
    importlib.import_module(module_of(file))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda f: f.stem)
def test_every_script_imports(file):
    runpy.run_path(str(file), run_name="imported")


@pytest.mark.parametrize("file", MODULES, ids=module_of)
def test_imports_go_one_way(file):
    part = part_of(file)
    assert part in RANK, f"{part} is neither a package nor a command"
    wrong = {name for name in imported(file) if name != part and RANK[name] >= RANK[part] and name != "cli"}
    assert not wrong, f"{part} stands before {wrong}"
    if part in CHAINS:
        assert imported(file) <= CHAINS[part] | {part}


# A worker imports the program's main module again.
LIGHT = "config tokenization tokenizer data prepare prepare_beam cli inspect".split()


def test_a_loader_worker_imports_no_jax():
    light = [module_of(f) for f in FILES if part_of(f) in LIGHT]
    code = f"import sys, {', '.join(light)}; print([m for m in ('jax', 'flax', 'optax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("file", FILES + SCRIPTS + TESTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_is_short_and_finished(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 400
    assert file.stem not in ("utils", "util", "helpers", "misc", "common")
    unfinished = re.findall(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b", text)
    assert not unfinished


def test_what_a_base_class_leaves_open_is_filled_in_by_a_subclass():
    trees = [ast.parse(file.read_text()) for file in FILES]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    is_open = {id(f): "NotImplementedError" in ast.dump(ast.Module(f.body, [])) for f in functions}
    left_open = {f.name for f in functions if is_open[id(f)]}
    filled_in = {f.name for f in functions if not is_open[id(f)]}
    assert left_open <= filled_in


# --- the budget of ModelConfig --------------------------------------------------------------------------------------

FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]


def attributes_read(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def model_fields_read() -> set[str]:
    """Attributes read in layers/ and models/, and what the properties of ModelConfig among them read."""
    names = set()
    for file in FILES:
        if part_of(file) in ("layers", "models"):
            names |= attributes_read(ast.parse(file.read_text()))
    config = ast.parse((ROOT / "pretrainax" / "config" / "model.py").read_text())
    for node in ast.walk(config):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            names |= attributes_read(node)
    return names


@pytest.mark.parametrize("field", FIELDS)
def test_an_architecture_field_is_read_by_a_brick(field):
    assert field in model_fields_read()


@pytest.mark.parametrize("field", FIELDS)
def test_two_presets_differ_in_an_architecture_field(field):
    assert len({repr(getattr(zoo.preset(name), field)) for name in zoo.PRESETS}) > 1
