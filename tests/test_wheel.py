"""A user needs only the wheel: it trains and loads without a repository, and contains the configs."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.runs import ENV, ROOT, last_line

pytestmark = pytest.mark.slow

SOURCE = ("pretrainax", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
SMALL = (
    "--config.tokenizer.vocab_size=400 --config.train.steps=2 --config.schedule.warmup_steps=1 "
    "--config.evaluate.batches=1 --config.model.num_layers=1 --config.data.prepare_workers=1"
).split()
VERSION = "9.8.7"
LOADING = """
import pretrainax
model = pretrainax.load("run@best")
print(pretrainax.__file__, model.origin, model(model.encode(["a text"])).logits.shape, sep="\\n")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> pathlib.Path:
    """Returns the files that `pip install` of the wheel would put into an environment."""
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed: pip install 'pretrainax[test]'")
    root = tmp_path_factory.mktemp("wheel")
    (root / "source").mkdir()
    for name in SOURCE:  # a copy, because the build leaves files
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / "source" / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / "source")
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    env = ENV | {"SETUPTOOLS_SCM_PRETEND_VERSION": VERSION}  # replaces the tag, because the copy has no .git
    subprocess.run([sys.executable, "-c", code], cwd=root / "source", check=True, capture_output=True, env=env)
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    shutil.rmtree(root / "source")
    wheel.rename(root / "site" / wheel.name)
    return root / "site"


@pytest.fixture
def python(installed, tmp_path):
    """Runs Python in an empty folder, with the wheel before all installed packages."""
    (tmp_path / "empty").mkdir()

    def run(*words):
        env = ENV | {"PYTHONPATH": str(installed), "HOME": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "empty", env=env, capture_output=True, text=True, timeout=300
        )

    return run


def test_every_file_of_the_package_and_every_config_is_in_it(installed):
    folders = (
        (ROOT / "pretrainax", installed / "pretrainax"),
        (ROOT / "configs", installed / "pretrainax" / "configs"),
    )
    for source, target in folders:
        files = [f.relative_to(source) for f in source.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
        assert [str(file) for file in files if not (target / file).is_file()] == []


def test_its_version_is_the_tag(python):
    done = python("-m", "pretrainax", "--version")
    assert done.stdout == f"pretrainax {VERSION}\n", done.stderr


def test_a_copy_of_the_files_without_git_has_a_version(tmp_path):
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed: pip install 'pretrainax[test]'")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code = "import setuptools_scm; print(setuptools_scm.Configuration.from_file('pyproject.toml').fallback_version)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "0.0+unknown\n", done.stderr


def test_an_empty_environment_trains_the_quickstart(installed, tmp_path):
    """Installs the wheel and its requirements from PyPI; docs/how-to/install.md has the time and the bytes."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed: pip install uv")
    uv, bare = [sys.executable, "-m", "uv"], {name: ENV[name] for name in ("PATH", "JAX_PLATFORMS", "XLA_FLAGS")}
    (wheel,) = installed.glob("*.whl")

    def run(*words, env):
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)

    done = run(*uv, "venv", "--python", sys.executable, "env", env=ENV)
    assert done.returncode == 0, done.stderr
    done = run(*uv, "pip", "install", "--python", "env", wheel, env=ENV | {"UV_LINK_MODE": "copy"})
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr
    bare["HOME"] = str(tmp_path)
    assert run("env/bin/pretrainax", "--version", env=bare).stdout == f"pretrainax {VERSION}\n"
    done = run("env/bin/pretrainax", "quickstart", "--workdir=run", *SMALL, env=bare)
    assert done.returncode == 0 and "unigram baseline" in done.stderr, done.stderr


def test_it_trains_and_loads_where_there_is_nothing_else(python, installed, text):
    source = f"--config.data.source=TextFiles(path='{text}')"
    done = python("-m", "pretrainax.main", "--config=quickstart", "--workdir=run", source, *SMALL)
    assert done.returncode == 0, done.stderr
    done = python("-c", LOADING)
    assert done.returncode == 0, done.stderr
    file, origin, shape = done.stdout.splitlines()
    assert file == f"{installed}/pretrainax/__init__.py"
    assert origin.startswith("run, step 2, the best by validation loss") and shape == "(1, 1, 2176)"


@pytest.mark.parametrize(
    "given, said",
    [
        ("nosuch", "no config file 'nosuch', allowed: albert_base, bart_base"),
        ("bert-base", "no config 'bert-base', did you mean 'bert_base'?"),
        ("configs/quikstart.py", "did you mean 'configs/quickstart.py'"),
        ("gpt2:12m", "gpt2 has no variant '12m', did you mean '124m'?"),
        ("configs/gpt2.py:12m", "gpt2 has no variant '12m', did you mean '124m'?"),
    ],
)
def test_configs_are_found_by_name_and_by_the_path_that_the_documentation_gives(python, given, said):
    done = python("-m", "pretrainax.main", f"--config={given}")
    assert done.returncode == 2 and said in last_line(done)


def test_help_says_where_the_file_of_a_config_is(python, installed):
    done = python("-m", "pretrainax.main", "--config=gpt2:124m", "--help")
    assert done.returncode == 0 and f"\n{installed}/pretrainax/configs/gpt2.py\n" in done.stdout
