"""Runs the stories of examples/ in their short form, and compares each page with the log of its real run.

A story is a folder with config.py, README.md and log.txt. The commands of README.md run in order, in a folder with tiny
data. `config.py` becomes `config.py:short`, and a variant `config.py:NAME` becomes `config.py:short_NAME`. Variants of
full size (`:full…`) stay, because only `plan` reads them. A study file gets the short config and a budget of FLOPs.
Commands that download (DOWNLOADS) do not run.
"""

import gzip
import json
import math
import os
import pathlib
import random
import re
import shlex
import subprocess
import sys

import pytest

from pretrainax.config.config_file import read_config_file
from tests.support.runs import ENV, ROOT, write_text

EXAMPLES = ROOT / "examples"
STORIES = sorted(file.parent.name for file in EXAMPLES.glob("*/config.py"))
DOWNLOADS = ("curl", "git", "pip")  # tests use no network
COMMAND_SECONDS = 300
FLOPS = 1e9  # FLOPs of a run of a study, which allow a few steps
FINE_TUNING = (  # shortens `--config=finetune:…`
    "--config.train.steps=4 --config.schedule.warmup_steps=1 --config.evaluate.every=4 --config.checkpoint.every=4"
)
MACHINE_PATHS = re.compile(r"/(?:tmp|home|root|work|Users)/")
NUMBER = re.compile(r"-?\d[\d,]*\.\d+(?:e[+-]?\d+)?%?")


def page(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()


def commands(name: str) -> list[list[str]]:
    """Returns the commands of the shell blocks of a page, as words."""
    blocks = re.findall(r"```sh\n(.*?)```", page(name), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def shortened(word: str) -> str:
    """Returns a word of a command with the short variant of a story's config."""
    if re.fullmatch(r"examples/\w+/\w+\.toml", word):
        return pathlib.Path(word).name
    config = re.fullmatch(r"(--config=examples/\w+/config\.py)(?::(\w+))?", word)
    if config is None or (config[2] or "").startswith("full"):
        return word
    return f"{config[1]}:short" + (f"_{config[2]}" if config[2] else "")


def shortened_study(text: str) -> str:
    """Returns a study file with the short variants of its configs and a tiny budget."""
    text = re.sub(r'(config = "examples/\w+/config\.py)"', r'\1:short"', text)
    text = re.sub(r'(config = "examples/\w+/config\.py):(?!short)(\w+)"', r'\1:short_\2"', text)
    return re.sub(r"(flops = )\S+", rf"\g<1>{FLOPS:.0e}", text)


def write_records(file: pathlib.Path, records: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    """Writes a folder with the files that the stories read, with made-up text."""
    root, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    texts = [file.read_text() for file in sorted(write_text(root / "text").iterdir())]
    for name in ("train-00000-of-00008", "valid", "test"):
        write_records(root / "books" / f"{name}.jsonl.gz", [{"text": text} for text in texts])
    characters = [chr(0x4E00 + i) for i in range(300)]
    poems = ["，".join("".join(rng.choices(characters, k=7)) for _ in range(8)) + "。" for _ in range(300)]
    write_records(root / "poems" / "poems.jsonl.gz", [{"text": poem} for poem in poems])
    (root / "ecoli.fna").write_text(">made up\n" + "\n".join("".join(rng.choices("ACGT", k=70)) for _ in range(1500)))
    lines = [line for text in texts for line in text.splitlines()][:160]
    for split in ("train", "test"):
        labelled = [{"text": line, "label": i % 2} for i, line in enumerate(lines)]
        tagged = [{"tokens": line.split(), "tags": [f"{'BI'[i > 0]}-NP" for i in range(12)]} for line in lines]
        write_records(root / "tasks" / "sst2" / f"{split}.jsonl", labelled)
        write_records(root / "tasks" / "conll2000" / f"{split}.jsonl", tagged)
    return root


def run_story(name: str, root: pathlib.Path) -> list[tuple[list[str], str]]:
    """Runs the commands of a story in `root`; returns each with its output."""
    env, outputs = ENV | {"PYTHONPATH": str(ROOT), "HOME": str(root)}, []
    for study in (EXAMPLES / name).glob("*.toml"):
        (root / study.name).write_text(shortened_study(study.read_text()))
    for words in commands(name):
        if words[0] in DOWNLOADS:
            continue
        assert words[0] == "pretrainax" or words[1].startswith("examples/"), f"{words}: not run by this test"
        tuning = FINE_TUNING.split() if any(word.startswith("--config=finetune:") for word in words) else []
        program = ["-m", "pretrainax"] if words[0] == "pretrainax" else []
        command = [sys.executable, *program, *map(shortened, words[1:]), *tuning]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        outputs.append((words, done.stdout + done.stderr))
    return outputs


@pytest.mark.slow  # a story takes about 80 s of processor time, mostly for starting its commands
@pytest.mark.parametrize("name", STORIES)
def test_the_commands_of_a_story_run_in_order(name, data, tmp_path):
    for part in data.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    outputs = run_story(name, tmp_path)
    for words, output in outputs:
        assert not re.search(r"\b(?:loss|score|bits per byte)\s+(?:nan|inf)\b", output), output
        if words[1] in ("train", "evaluate", "plan", "study"):
            values = [float(number.strip("%").replace(",", "")) for number in NUMBER.findall(output)]
            assert values and all(map(math.isfinite, values)), words
        if words[1:3] == ["huggingface", "export"]:
            (folder,) = [tmp_path / word.removeprefix("--to=") for word in words if word.startswith("--to=")]
            assert json.loads((folder / "config.json").read_text())["model_type"]
            assert (folder / "model.safetensors").stat().st_size > 1000
    assert {words[1] for words, _ in outputs} >= {"train", "plan"}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_has_a_default_a_short_and_a_full_config(name):
    default, short, full = (read_config_file(str(EXAMPLES / name / "config.py") + v) for v in ("", ":short", ":full"))
    assert short.train.steps <= 30 < default.train.steps < full.train.steps
    named = set(re.findall(r"config\.py:(\w+)", page(name)))
    for variant in named:
        read_config_file(f"{EXAMPLES / name / 'config.py'}:{variant}")


@pytest.mark.parametrize("name", STORIES)
def test_the_results_of_a_page_are_those_of_its_log(name):
    log = (EXAMPLES / name / "log.txt").read_text()
    (results,) = re.findall(r"^## Results\n(.*?)(?=^## |\Z)", page(name), re.DOTALL | re.MULTILINE)
    numbers = set(NUMBER.findall(re.sub(r"\]\(\S+\)", "", results)))
    assert len(numbers) >= 3
    assert {number for number in numbers if number not in log} == set()
    assert MACHINE_PATHS.findall(log + page(name)) == []


@pytest.mark.parametrize("name", STORIES)
def test_the_log_has_each_command_of_its_page(name):
    log = (EXAMPLES / name / "log.txt").read_text().splitlines()
    ran = [shlex.split(line.removeprefix("$ ")) for line in log if line.startswith("$ ")]
    assert [words for words in commands(name) if words[0] not in DOWNLOADS and words not in ran] == []


@pytest.mark.parametrize("name", STORIES)
def test_a_page_is_short_and_its_links_and_pictures_exist(name):
    text = page(name)
    assert len(text.splitlines()) <= 90
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in link]
    assert [link for link in links if not (EXAMPLES / name / link).exists()] == []
    pictures = sorted(file.name for file in (EXAMPLES / name).glob("*.png"))
    assert pictures and set(pictures) <= set(links)
    assert [file for file in pictures if os.path.getsize(EXAMPLES / name / file) >= 100_000] == []
    assert len((EXAMPLES / name / "log.txt").read_text().splitlines()) <= 250


def test_the_table_of_stories_has_each_folder():
    rows = re.findall(r"^\| .*\]\((\w+)/README\.md\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == STORIES


def test_pairs_of_sentences_are_made_of_a_folder_of_markdown_books(tmp_path):
    """As a reader has it who clones the collection that the page names."""
    command = [sys.executable, str(EXAMPLES / "sentence_encoder" / "prepare.py"), "books", "pairs"]
    (tmp_path / "books" / "author").mkdir(parents=True)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "no pairs for train in books: it must contain train*.jsonl.gz, or books */*.md\n"
    for book in range(200):
        sentences = [f"This is sentence {i} of book {book} by an author of long sentences." for i in range(20)]
        (tmp_path / "books" / "author" / f"{book}.md").write_text(" ".join(sentences))
    subprocess.run(command, cwd=tmp_path, check=True)
    books = {}
    for split in ("train", "valid", "test"):
        lines = (tmp_path / "pairs" / f"{split}.jsonl").read_text().splitlines()
        books[split] = {json.loads(line)["query"].split(" of book ")[1] for line in lines}
    assert sum(map(len, books.values())) == len(set.union(*books.values())) == 200
