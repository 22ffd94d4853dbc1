"""Checks the structure of the code: allowed imports, sizes of files and functions, a use for each field."""

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re
import runpy
import subprocess
import sys

from pretrainax import zoo
from pretrainax.config import ModelConfig
from tests.affected import ROOT, module_of

FILES = sorted((ROOT / "pretrainax").rglob("*.py"))
SCRIPT_FOLDERS = ("configs", "examples", "benchmarks", "docs", "launch", "records")
SCRIPTS = sorted(file for folder in SCRIPT_FOLDERS for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALL = FILES + SCRIPTS + TESTS

# Top-level imports of a package may only be from itself and from earlier packages. A top-level module is a command.
PACKAGES = (
    "files config storage reporting trackers sharding checkpoints runtime tokenization data layers models optim "
    "training tasks adapt distill zoo interop inference scoring runs planning profiling scaling evaluation studies"
).split()
COMMANDS = (
    "__main__ api cli main quickstart prepare prepare_beam tokenizer inspect recipe plan profile study ladder report "
    "watch evaluate generate predict verify_resume huggingface doctor completion"
).split()
RANK = {name: rank for rank, name in enumerate(PACKAGES)} | dict.fromkeys(COMMANDS, len(PACKAGES))
# Two chains of packages that users can use separately: data without models, and models without data except for the
# definition of a batch.
CHAINS = {
    "data": {"files", "config", "storage", "reporting", "tokenization"},
    "tasks": {"files", "config", "storage", "data", "tokenization"},
    "layers": {"files", "config", "sharding", "data.batch"},
    "models": {"files", "config", "layers", "sharding", "data.batch"},
    "zoo": {"files", "config", "reporting", "sharding", "models", "layers"},
}


@functools.cache
def tree(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text())


def names_imported(file: pathlib.Path) -> set[str]:
    """Returns the names of the package that a file imports at its top: "data.batch.Batch", and so on."""
    names = set()
    for node in tree(file).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("pretrainax.") for name in names if name.startswith("pretrainax.")}


def imported(file: pathlib.Path) -> set[str]:
    """Returns the parts of the package ("data", "config", …) that the file imports at its top."""
    return {name.split(".")[0] for name in names_imported(file)}


def part_of(file: pathlib.Path) -> str:
    return file.relative_to(ROOT / "pretrainax").parts[0].removesuffix(".py")


MODULES = [file for file in FILES if part_of(file) != "__init__"]


# These modules import the package of an extra at their top, because their classes extend classes of the package.
OF_EXTRAS = {"pretrainax.scoring.tasks.harness": "lm_eval"}


def test_every_module_imports():
    for name in map(module_of, FILES):
        package = OF_EXTRAS.get(name)
        if package is None or importlib.util.find_spec(package):
            importlib.import_module(name)


def test_every_script_imports(monkeypatch):
    for file in SCRIPTS:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(file.parent))  # as Python does for a script
            runpy.run_path(str(file), run_name="imported")


def wrong_imports(file: pathlib.Path) -> set[str]:
    """Returns the imported packages that come after the file's own, and the names that its chain may not import."""
    part = part_of(file)
    after = {name for name in imported(file) if name != part and RANK[name] >= RANK[part] and name != "cli"}
    if part not in CHAINS:
        return after
    allowed = CHAINS[part] | {part}  # whole packages, or one module of a package
    return after | {n for n in names_imported(file) if not {n.split(".")[0], ".".join(n.split(".")[:2])} & allowed}


def test_imports_go_one_way():
    assert {part_of(file) for file in MODULES} - RANK.keys() == set(), "neither a package nor a command"
    assert {module_of(file): wrong for file in MODULES if (wrong := wrong_imports(file))} == {}


ABOVE_TRAINING = PACKAGES[PACKAGES.index("training") + 1 :]


def test_the_training_loop_needs_nothing_that_uses_a_trained_model():
    code = "import sys, pretrainax.training.train; print(*{n.split('.')[1] for n in sys.modules if 'pretrainax.' in n})"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found = set(out.stdout.split())
    assert {"models", "data", "training"} <= found and not found & set(ABOVE_TRAINING)


# A worker imports the main module of the program again.
LIGHT = "config tokenization tokenizer data tasks prepare prepare_beam cli inspect".split()


def test_a_loader_worker_imports_no_jax():
    light = [module_of(f) for f in FILES if part_of(f) in LIGHT]
    code = f"import sys, {', '.join(light)}; print([m for m in ('jax', 'flax', 'optax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --- sizes and words ------------------------------------------------------------------------------------------------

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 8  # self and cls not counted
MOST_ANY = 100  # in the whole package, where it uses libraries without types
NO_VERBS = ("Of", "As", "What", "Whether", "Where", "How", "Which")


def path_of(file: pathlib.Path) -> str:
    return str(file.relative_to(ROOT))


def functions(file: pathlib.Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree(file)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def parameters(node: ast.FunctionDef) -> list[str]:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_a_file_has_one_subject_and_is_finished():
    lines = {path_of(file): len(file.read_text().splitlines()) for file in ALL}
    assert {path: n for path, n in lines.items() if n > MOST_LINES_OF_A_FILE} == {}, "divide by subject"
    assert [path_of(f) for f in ALL if f.stem in ("utils", "util", "helpers", "misc", "common")] == []
    unfinished = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
    assert [path_of(file) for file in ALL if unfinished.search(file.read_text())] == []


def test_a_function_fits_on_a_screen():
    lines = [(path_of(f), node.name, node.end_lineno - node.lineno + 1) for f in ALL for node in functions(f)]
    assert [entry for entry in lines if entry[-1] > MOST_LINES_OF_A_FUNCTION] == []


def test_a_function_has_few_parameters():
    counts = [(path_of(f), node.name, len(parameters(node))) for f in ALL for node in functions(f)]
    assert [entry for entry in counts if entry[-1] > MOST_PARAMETERS] == []


def test_a_docstring_begins_with_a_sentence():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    without_verb = [
        f"{path_of(file)}: {text.splitlines()[0]}"
        for file in FILES
        for node in ast.walk(tree(file))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if text.split()[0].strip(",.:") in NO_VERBS
    ]
    assert without_verb == []


def test_a_problem_of_a_config_names_its_field_or_flag():
    """Checks the messages of `problems` and its helpers, except in task files and study files without config paths."""
    names = re.compile(r"config\.|config_path|--|\{(path|name|message|where)|WANDB_MODE")
    yields = [
        (path_of(file), ast.unparse(node.value))
        for file in FILES
        if not path_of(file).startswith(("pretrainax/scoring/tasks", "pretrainax/studies"))
        for function in ast.walk(tree(file))
        if isinstance(function, ast.FunctionDef) and "problems" in function.name
        for node in ast.walk(function)
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.JoinedStr | ast.Constant)
    ]
    assert len(yields) > 200
    assert [entry for entry in yields if not names.search(entry[1])] == []


def test_few_things_may_be_of_any_type():
    names = [node.id for file in FILES for node in ast.walk(tree(file)) if isinstance(node, ast.Name)]
    assert names.count("Any") <= MOST_ANY


# JAX has no public name for the key-value store between processes, nor for cuDNN's check of head sizes.
PRIVATE_NAMES = {
    "pretrainax/runtime/cluster.py",
    "pretrainax/planning/topologies.py",
    "tests/planning/test_activations.py",  # makes cuDNN absent
}


def test_jax_is_used_by_its_public_names():
    imports = re.compile(r"^\s*(from|import) jax\._src", re.MULTILINE)
    private = {path_of(file) for file in ALL if imports.search(file.read_text())}
    assert private - PRIVATE_NAMES == set()


def test_what_a_base_class_leaves_open_is_filled_in_by_a_subclass():
    nodes = [node for file in FILES for node in functions(file)]
    is_open = {id(node): "NotImplementedError" in ast.dump(ast.Module(node.body, [])) for node in nodes}
    left_open = {node.name for node in nodes if is_open[id(node)]}
    filled_in = {node.name for node in nodes if not is_open[id(node)]}
    assert left_open <= filled_in


# --- the budget of ModelConfig --------------------------------------------------------------------------------------

FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]


def attributes_read(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def model_fields_read() -> set[str]:
    """Returns the attributes that layers/ and models/ read, directly or through properties of ModelConfig."""
    names = set()
    for file in FILES:
        if part_of(file) in ("layers", "models"):
            names |= attributes_read(tree(file))
    for node in ast.walk(tree(ROOT / "pretrainax" / "config" / "model.py")):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            names |= attributes_read(node)
    return names


def test_an_architecture_field_is_read_by_a_brick():
    assert set(FIELDS) - model_fields_read() == set()


OF_NO_PRESET = ("head", "multi_token", "parts")  # a task, a recipe or another package sets them


def test_two_presets_differ_in_an_architecture_field():
    presets = [zoo.preset(name) for name in zoo.PRESETS]
    values = {field: {repr(getattr(preset, field)) for preset in presets} for field in FIELDS}
    assert [field for field, found in values.items() if len(found) < 2 and field not in OF_NO_PRESET] == []
