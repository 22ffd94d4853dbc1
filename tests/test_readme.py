"""Runs every command of the README and of docs/guide.md with small sizes."""

import ast
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tokenize

import pytest

from pretrainax.config import Choice
from tests.support.runs import FAST

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "docs" / "guide.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL) for line in block.splitlines()]
SMALL = (
    "--config.tokenizer.vocab_size=400 --config.train.steps=2 --config.evaluate.batches=1 --config.model.num_layers=1"
)


def run(words: list[str], cwd) -> str:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def commands(start: str) -> list[list[str]]:
    """Returns the commands of both pages with this start, as words; python is the interpreter of the tests."""
    return [shlex.split(c.replace("python -m", f"{sys.executable} -m")) for c in COMMANDS if c.startswith(start)]


def test_every_command_is_run_here():
    starts = ("make quickstart", "make test", "python -m pretrainax.", "launch/tpu_vm.sh")
    assert [c for c in COMMANDS if not c.startswith(starts)] == []


def test_make_quickstart_and_make_test_run_what_the_readme_says():
    said = run(["make", "--dry-run", "quickstart"], ROOT)
    assert "-m pretrainax.main --config=configs/quickstart.py" in said
    assert "-m pytest" in run(["make", "--dry-run", "test"], ROOT)


def test_make_quickstart_says_what_it_installs_and_how_long_it_takes():
    said = run(["make", "--dry-run", "--always-make", "quickstart"], ROOT)
    assert (
        said.index("0.9 GB on disk")
        < said.index("--constraint constraints.txt")
        < said.index("about 3 minutes on 2 cores")
    )


@pytest.mark.slow
def test_own_text_is_trained_on_evaluated_and_prepared(tmp_path, text, cache):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "folder").symlink_to(text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (train, encoder, _, more), (evaluate,), (generate,), (prepare,), (give, take) = (
        commands(f"python -m pretrainax.{x} ") for x in ("main", "evaluate", "generate", "prepare", "huggingface")
    )
    cached = f"--config.data.cache_dir={cache}"
    said = run([*train, *SMALL.split(), cached], tmp_path)
    assert "unigram baseline" in said and (tmp_path / "runs" / "mine" / "curves.png").exists()
    assert "perplexity" in run(evaluate, tmp_path)
    assert "token accuracy" in run([*encoder, *SMALL.split(), cached], tmp_path)
    assert "tokens/s" in run(generate, tmp_path)
    python, loop = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert loop.startswith("run = pretrainax.open(experiment)")  # tests/test_extending.py runs a similar loop
    assert "(2, 128) " in run([sys.executable, "-c", python], tmp_path)
    assert "as T5ForConditionalGeneration" in run(give, tmp_path)
    assert "parameters imported" in run(take, tmp_path)
    source = [word for word in train if word.startswith("--config.data.source")]
    assert "unigram baseline" in run([*more, *source, *SMALL.split(), cached], tmp_path)
    assert "documents" in run([*prepare, "--config.tokenizer.vocab_size=400", cached], tmp_path)


@pytest.mark.slow
def test_a_model_learns_a_task_and_labels_records(tmp_path, text, cache):
    cached, started = f"--config.data.cache_dir={cache}", [sys.executable, "-m", "pretrainax.main"]
    source = f"--config.data.source=TextFiles(path='{text}')"
    run([*started, "--config=bert_base:tiny", "--workdir=runs/bert", source, *SMALL.split(), cached], tmp_path)
    records = [{"sentence": word, "label": i % 2, "idx": i} for i, word in enumerate(["good", "bad"] * 20)]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (_, _, tune, _), (predict,) = (commands(f"python -m pretrainax.{x} ") for x in ("main", "predict"))
    small = ["--config.data.source=JsonLines(path='reviews.jsonl', valid_fraction=0.2)", "--config.train.steps=2"]
    said = run([*tune, *small, "--config.train.global_batch_size=8", "--seeds=2", cached], tmp_path)
    assert "mean ± 95 %" in said and {"seed-0", "seed-1"} <= {x.name for x in (tmp_path / "runs" / "sst2").iterdir()}
    run(predict, tmp_path)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["idx"] for answer in answers] == [*range(40)] and set(answers[0]["probabilities"]) == {
        *("negative", "positive")
    }


@pytest.mark.slow
def test_rows_are_shown_and_tokenizers_compared(tmp_path, text, cache):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (compare,), (inspect,) = (commands(f"python -m pretrainax.{x} ") for x in ("tokenizer", "inspect"))
    small = [f"--config.data.cache_dir={cache}", f"--config.data.source=TextFiles(path='{text}')"]
    assert "bytes per token" in run([*compare, "--sizes=300,400", *small], tmp_path)
    assert (tmp_path / "runs" / "sizes" / "report.png").exists()
    assert "noise density" in run([*inspect, "--config.tokenizer.vocab_size=400", *small], tmp_path)
    assert "<html" in (tmp_path / "runs" / "rows.html").read_text()


def test_the_readme_is_short():
    assert len(README.split()) <= 1200 and len(README.splitlines()) <= 150


def test_each_measurement_is_that_of_the_linked_section_of_the_lab_book():
    book = (ROOT / "benchmarks" / "lab_book.md").read_text()
    sections = {
        re.sub(r"[^\w -]", "", s.splitlines()[0]).lower().replace(" ", "-"): s
        for s in re.split(r"^#+ ", book, flags=re.M)[1:]
    }
    rows = re.findall(r"^\| \[[^\]]+\]\(benchmarks/lab_book\.md#(\S+)\) (\|.*)$", README, re.MULTILINE)
    stated = re.search(r"\*\*Next to other programs\*\*, (\S+) to (\S+)\.", README).groups()
    dates = sorted(anchor[-10:] for anchor, _ in rows)
    assert len(rows) == 8 and stated == (dates[0], dates[-1])
    for anchor, cells in rows:
        tables = "".join(line for line in sections[anchor].splitlines() if line.startswith("|"))
        # 500 W comes from published.toml.
        measured = [number for number in re.findall(r"[\d,.]*\d", cells) if number != "500"]
        assert measured and set(measured) <= set(re.findall(r"[\d,.]*\d", tables)), anchor


def test_how_to_use_a_model_fits_on_a_screen():
    (section,) = re.findall(r"## Use it\n.*?(?=\n## )", README, re.DOTALL)
    assert len(section.splitlines()) <= 25


def test_every_object_a_flag_is_given_is_one():
    objects = [word.partition("=")[2] for word in shlex.split(" ".join(re.findall(r'--config\.\S+="[^"]+"', PAGES)))]
    assert len(objects) >= 5 and all(isinstance(Choice.parse(text), Choice) for text in objects)


@pytest.mark.slow
def test_the_zoo_is_printed():
    (zoo,) = commands("python -m pretrainax.zoo ")
    assert "Gemma 2" in run(zoo, ROOT)


@pytest.mark.slow
def test_a_recipe_is_shown_with_its_sources():
    (recipe,) = commands("python -m pretrainax.recipe ")
    assert "create_pretraining_data.py" in run(recipe, ROOT)


@pytest.mark.slow
def test_a_run_is_planned_and_a_budget_spent(tmp_path):
    run_of_a_config, budget = commands("python -m pretrainax.plan ")
    said = run([*run_of_a_config, "--nocompile"], ROOT)
    assert "DOES NOT FIT by the estimate" in said and "USD" in said and "--config.mesh.fsdp" in said
    assert "tokens" in run(budget, tmp_path)


def test_the_launcher_prints_its_commands():
    (launch,) = commands("launch/tpu_vm.sh")
    said = run([*launch[: launch.index("--")], "--dry-run", *launch[launch.index("--") :]], ROOT)
    assert "pretrainax.main" in said and "--worker=all" in said and "--config.mesh.fsdp=16" in said


def code_lines(text: str) -> int:
    """Counts the lines without docstrings, comments and empty lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings, code = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_the_stated_size_is_the_size_of_the_package():
    stated = re.search(r"about ([\d,]+) lines of Python, ([\d,]+) without docstrings and comments", README).groups()
    texts = [file.read_text() for file in (ROOT / "pretrainax").rglob("*.py") if "configs" not in file.parts]
    sizes = sum(text.count("\n") for text in texts), sum(map(code_lines, texts))
    assert sizes == pytest.approx([int(x.replace(",", "")) for x in stated], rel=0.03)  # "about"
