"""`python -m pretrainax.predict` writes a model's predictions for records, and evaluate prints metrics on them.

The test forks all commands from one process that has imported their packages.
"""

import csv
import json
import pathlib
import sys

import numpy as np
import pytest

from pretrainax.config.validation import get
from pretrainax.predict import COUNT
from tests.support import tiny
from tests.support.classifiers import named_labels, with_head
from tests.support.huggingface_weights import write_directory
from tests.support.runs import run

pytestmark = pytest.mark.slow

FORKING = """
import json, pathlib, sys
from pretrainax import evaluate, predict
from tests.fuzz.forked import run_forked

def start():
    sys.argv = [name, *words]
    {"evaluate": evaluate, "predict": predict}[name].main()

said = pathlib.Path(sys.argv[1], "said.txt")
for name, *words in json.loads(sys.stdin.read()):
    code, text = run_forked(start, said, 120)
    print(json.dumps([code, text]), flush=True)
"""
TEXTS = ["a cat", "the dog sat, the cat ran.", "no"]
LABELS = ("bad", "fair", "good")
LABELLED = (2, 2, 0)  # labels of TEXTS, in a file with labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Writes an imported model with a head, a language model, and records of every kind."""
    root = tmp_path_factory.mktemp("predict")
    named_labels(write_directory(root / "hf", with_head("bert")), *LABELS)
    write_directory(root / "lm", "bert")
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    (root / "a.jsonl").write_text("\n".join(lines) + "\n")
    (root / "bad.jsonl").write_text("\n".join([lines[0], '{"txt": 1}', *lines[1:]]))
    (root / "all_bad.jsonl").write_text("no\n")
    (root / "b.tsv").write_text("id\treview\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS)))
    return root


def commands(folder, list_of_words):
    done = run([sys.executable, "-c", FORKING, str(folder)], timeout=600, input=json.dumps(list_of_words))
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def mistakes(folder) -> list[tuple[list[str], str]]:
    """Returns invalid command lines with their error messages."""
    hf, a, out = f"--from={folder}/hf", f"--input={folder}/a.jsonl", f"--output={folder}/x.jsonl"
    source = f"--source=JsonLines(path='{folder}/a.jsonl')"
    return [
        (["predict", a, out], "--from is missing"),
        (["predict", hf, out], "--input is missing"),
        (["predict", hf, a], "--output is missing"),
        (["predict", hf, a, a.replace("input", "output")], "is the file of --input: set another file"),
        (["predict", hf, a, out, "--config.train.steps=1"], "--config.train.steps changes nothing in a prediction"),
        (["predict", hf, a, out, "--config.objective.labels=a,b"], "Classification of 2 labels needs Classify"),
        (["predict", hf, a, out, "--config.data.sequence_length=99"], "config.model.position.max_length is 20"),
        (["predict", hf, f"--input={folder}/bad.jsonl", out], "bad.jsonl:2: no field 'text'"),
        (
            ["predict", hf, f"--input={folder}/all_bad.jsonl", out, "--skip_bad"],
            "holds no record: 1 bad record",
        ),
        (["predict", f"--from={folder}/lm", a, out], "has no head of a task"),
        (["predict", hf, f"--workdir={folder}", a, out], "--workdir is not for this command"),
        (["predict", hf, a, out, "--format=xml"], "--format"),
        (["predict", hf, a, f"--output={folder}/bad.jsonl"], "exists: choose another file, or add --overwrite"),
        (["predict", hf, a, f"--output={folder}/x.csv", "--format=jsonl"], "x.csv ends in .csv, but --format is jsonl"),
        (["predict", hf, a, f"--output={folder}/x.tsv"], "predict writes JSON lines (.jsonl) or CSV (.csv), not .tsv"),
        (["evaluate", hf, source], "a.jsonl:1: no field 'label'"),
        (["evaluate", hf, source, "--stride=3"], "--stride is for language models, and"),
        (["evaluate", hf, "--tasks=grammar"], "--tasks is for language models, and"),
        (["evaluate", hf, f"--source=TextFiles(path='{folder}/a.jsonl')"], "which is for JsonLines"),
    ]


@pytest.fixture(scope="module")
def said(folder):
    given, a = ["predict", f"--from={folder}/hf"], f"--input={folder}/a.jsonl"
    table = [f"--input={folder}/b.tsv", f"--output={folder}/out.csv"]
    (folder / "short.jsonl").write_text("replaced")
    rows = [("text", "label"), *zip(TEXTS, LABELLED, strict=True)]
    (folder / "labelled.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    figures = ["evaluate", *given[1:], f"--source=Tsv(path='{folder}/labelled.tsv')", "--split=all"]
    named = {
        "plain": [*given, a, f"--output={folder}/out.jsonl"],
        "table": [*given, *table, "--batch=1", "--config.objective.text_field=review"],
        "short": [*given, a, f"--output={folder}/short.jsonl", "--overwrite", "--config.data.sequence_length=12"],
        "windows": [*given, a, "--output=-", "--config.objective.chunks=Chunks(max_windows=1)"],
        "skipped": [*given, f"--input={folder}/bad.jsonl", "--output=-", "--skip_bad"],
        "figures": [*figures, "--config.objective.numbered=good,bad,fair"],
    }
    wrong = [words for words, _ in mistakes(folder)]
    found = commands(folder, [*named.values(), *wrong])
    return dict(zip([*named, *range(len(wrong))], found, strict=True))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_comes_back_with_its_label_and_probabilities(said, folder):
    code, text = said["plain"]
    assert code == 0 and f"wrote 3 records of {folder}/a.jsonl to {folder}/out.jsonl; " in text, text
    for i, line in enumerate(lines(folder / "out.jsonl")):
        assert list(line) == ["id", "text", "prediction", "probabilities"]
        assert (line["id"], line["text"]) == (i, TEXTS[i]) and tuple(line["probabilities"]) == LABELS
        assert line["prediction"] == max(LABELS, key=line["probabilities"].get)
        assert sum(line["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)


def test_a_table_has_the_same_of_another_kind_of_file_with_another_field(said, folder):
    assert said["table"][0] == 0, said["table"][1]
    with open(folder / "out.csv", newline="") as f:
        for row, line in zip(csv.DictReader(f), lines(folder / "out.jsonl"), strict=True):
            assert (row["id"], row["review"], row["prediction"]) == (str(line["id"]), line["text"], line["prediction"])
            for name in LABELS:
                assert float(row[f"probabilities.{name}"]) == pytest.approx(line["probabilities"][name], abs=1e-5)


def test_texts_that_lose_their_end_are_counted(said, folder):
    assert "; 1 record is longer than 20 tokens (config.data.sequence_length) and loses its end" in said["plain"][1]
    assert said["short"][0] == 0
    assert "; 1 record is longer than 12 tokens (config.data.sequence_length) and loses its end" in said["short"][1]
    assert "1 record is longer than all windows of config.objective.chunks and loses its end" in said["windows"][1]
    whole, short = (lines(folder / f"{name}.jsonl") for name in ("out", "short"))
    assert short[0]["probabilities"] == pytest.approx(whole[0]["probabilities"], abs=1e-5)
    assert short[1]["probabilities"] != pytest.approx(whole[1]["probabilities"], abs=1e-5)


def test_bad_records_are_left_out_named_and_counted(said, folder):
    code, text = said["skipped"]
    assert code == 0 and f"left out: {folder}/bad.jsonl:2: no field 'text', did you mean 'txt'?" in text, text
    found = [json.loads(line)["text"] for line in text.splitlines() if line.startswith("{")]
    assert found == TEXTS and "3 records of" in text and "; left out 1 bad records; " in text


def test_an_imported_classifier_is_evaluated_on_a_file_that_counts_labels_in_another_order(said, folder):
    code, text = said["figures"]
    assert code == 0, text
    meant = [("good", "bad", "fair")[label] for label in LABELLED]
    right = [name == line["prediction"] for name, line in zip(meant, lines(folder / "out.jsonl"), strict=True)]
    (row,) = (line.split() for line in text.splitlines() if line.startswith("accuracy "))
    assert row[1] == f"{np.mean(right):.4f}" and row[2:4] == ["3", "records,"]  # one of the records is cut
    assert "both splits" in text and "Classification, as in a run's own validation" in text


def test_what_counts_are_fields():
    for path in COUNT:
        get(tiny.get_config("bert"), path)


def test_mistakes_are_one_line_each(said, folder):
    for number, (words, expected) in enumerate(mistakes(folder)):
        code, text = said[number]
        last = text.splitlines()[-1] if text else ""
        assert code == 2 and expected in last, (words, text)
    assert not (folder / "x.jsonl").exists()
