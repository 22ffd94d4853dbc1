"""`python -m pretrainax.evaluate` reproduces a run's last validation, and scores any data with any model.

The test forks all commands from one process that has imported their packages.
"""

import dataclasses
import json
import math
import pathlib
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
from matplotlib import image

from pretrainax.config.validation import get
from pretrainax.data.sources import TextFiles
from pretrainax.evaluation import command as evaluate_module
from pretrainax.inference.load import load
from pretrainax.interop.directories import import_directory
from pretrainax.scoring.corpus_scores import score_source
from pretrainax.scoring.tasks.run import load_tasks, run_tasks
from tests.support import tiny
from tests.support.docs_pages import how_to
from tests.support.huggingface_weights import write_directory
from tests.support.runs import command, lines, run, write_text

pytestmark = pytest.mark.slow

FORKING = """
import json, pathlib, sys
from pretrainax import evaluate
from tests.fuzz.forked import run_forked

def start():
    sys.argv = ["evaluate", *words]
    evaluate.main()

said = pathlib.Path(sys.argv[1], "said.txt")
for words in json.loads(sys.stdin.read()):
    code, text = run_forked(start, said, 120)
    print(json.dumps([code, text]), flush=True)
"""
STEPS = (2, 4)
AVERAGED = ", moving average of the parameters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text, cache) -> pathlib.Path:
    """Creates the inputs of the commands.

    They are a run with two checkpoints that validates the moving average of its parameters, similar folders that are
    not a run, an imported model, and another text.
    """
    root = tmp_path_factory.mktemp("evaluate")
    flags = "--config.train.steps=4", "--config.evaluate.every=2", "--config.evaluate.batches=1"
    flags += "--config.train.ema_decay=0.5", "--config.evaluate.parameters=ema"
    done = run(command("tests/support/tiny.py:gpt", root / "run", text, cache, *flags, "--config.checkpoint.every=2"))
    assert done.returncode == 0, done.stderr
    shutil.copytree(root / "run", root / "moved")
    shutil.copytree(root / "run", root / "other")
    shutil.copytree(root / "run", root / "asked")
    config = json.loads((root / "asked" / "config.json").read_text())
    config["evaluate"]["objective"] = config["objective"]
    (root / "asked" / "config.json").write_text(json.dumps(config))
    vocabulary = root / "other" / "tokenizer" / "vocabulary.json"
    vocabulary.write_text(vocabulary.read_text().replace("<|endoftext|>", "<|end|>"))
    shutil.copytree(root / "run", root / "damaged")
    (root / "damaged" / "checkpoints" / "2" / "run.json").write_text("{}")
    import_directory(str(write_directory(root / "gpt2", "gpt2")), str(root / "imported"))
    write_text(root / "text")
    for file in (root / "text").iterdir():
        file.write_text(file.read_text()[::-1][:600])
    (root / "broken.jsonl").write_text('{"sentence_good": "a", "sentence_bad": "b", "UID": "c"}\n{"UID": "c"}\n')
    (root / "empty").mkdir()
    (root / "empty" / "a.txt").write_text(" \n")
    return root


def evaluated(folder: pathlib.Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Returns the exit code and the output of each command line."""
    done = run([sys.executable, "-c", FORKING, str(folder)], input=json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def said(folder) -> dict[str, tuple[int, str]]:
    source = f"--source=TextFiles(path='{folder}/text')"
    commands = {
        "newest": [f"--workdir={folder}/run"],
        "other text": [
            *(f"--workdir={folder}/moved", f"--config.data.source={source.removeprefix('--source=')}"),
            "--config.evaluate.batches=0",
        ],
        "another objective": [
            f"--from={folder}/run",
            "--config.evaluate.objective=PrefixLM()",
            f"--output={folder}/out/objective.json",
        ],
        "source": [f"--from={folder}/run@4", source, "--split=all", f"--output={folder}/out/scores.json"],
        "every validation": [f"--from={folder}/run", "--every-checkpoint"],
        "as trained": [f"--from={folder}/run@trained", f"--output={folder}/out/trained.json"],
        "every source": [f"--from={folder}/damaged", "--every-checkpoint", source, "--documents=2", "--stride=32"],
        "average": [f"--from={folder}/run@average", source, "--documents=1", "--config.mesh.data=1"],
        "tasks": [
            f"--from={folder}/run@4",
            "--tasks=grammar,everyday",
            "--examples=3",
            f"--output={folder}/out/tasks.json",
        ],
        **{f"page {number}": words for number, words in enumerate(page_commands(folder))},
        "compared": [
            *(f"--from={folder}/run@4", source, "--split=all", f"--compare-with={folder}/run@2", "--tasks=grammar"),
            *(f"--output={folder}/out/compared.json", f"--transcripts={folder}/out/transcripts.jsonl"),
        ],
        "others": [f"--from={folder}/gpt2", source, "--documents=1", "--split=all"],
    }
    return dict(zip(commands, evaluated(folder, list(commands.values())), strict=True))


def page_commands(folder: pathlib.Path) -> list[list[str]]:
    """Returns the flags of each evaluation in docs/how-to/score.md, with the run and the text of this test."""
    page = how_to("score").replace("runs/mine", f"{folder}/run").replace("'other'", f"'{folder}/text'")
    found = re.findall(r"^python -m pretrainax.evaluate (.*TextFiles.*)$", page, re.MULTILINE)
    return [shlex.split(line) for line in found]


def words(said: tuple[int, str]) -> dict[str, list[str]]:
    """Returns the words of each line, by the first word."""
    code, text = said
    assert code == 0, text
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def results(path: pathlib.Path) -> list[dict]:
    return json.loads(path.read_text())


def test_the_newest_checkpoint_gives_the_metrics_of_the_last_validation(said, folder, text):
    found = words(said["newest"])
    expected = lines(folder / "run", "valid")[-1]
    for name in ("loss", "perplexity", "accuracy", "bits_per_byte"):
        assert found[name][0] == f"{expected[name]:,.4f}"
    assert found["accuracy"][-1] == "(teacher-forced)"
    assert found["step"] == ["4"] and f"TextFiles(path='{text}'" in said["newest"][1]
    assert found["batches"][0] == "1" and int(found["batches"][2].rstrip(",")) > 1 and found["batches"][4] == "8"
    assert len([line for line in said["newest"][1].splitlines() if line.startswith("  · ")]) == 6


def test_its_results_lie_beside_the_run(said, folder):
    (file,) = (folder / "run" / "evaluations").glob("validation-ema_step_4-*.json")
    assert f"{len(results(file))} results in {file}" in said["newest"][1]
    expected = lines(folder / "run", "valid")[-1]
    for result in results(file):
        assert result["value"] == pytest.approx(expected[result["measure"]], rel=1e-6)
        assert (
            result["step"] == 4
            and result["origin"] == f"{folder}/run, step 4{AVERAGED}"
            and result["counts"]["batches"] == 1
        )


def test_the_parameters_are_those_that_the_run_validates_or_those_that_are_asked_for(said, folder):
    assert (
        words(said["newest"])["parameters"]
        == f"moving average; for the trained parameters: --from={folder}/run@trained".split()
    )
    assert (
        words(said["as trained"])["parameters"]
        == f"as trained; for their moving average: --from={folder}/run@ema".split()
    )
    (loss,) = (result["value"] for result in results(folder / "out" / "trained.json") if result["measure"] == "loss")
    assert abs(loss - lines(folder / "run", "valid")[-1]["loss"]) > 1e-3


def test_another_text_is_evaluated_wherever_the_run_is_now(said, folder):
    """The command uses the run's tokenizer. A tokenizer trained on the other text would give other ids."""
    found = words(said["other text"])
    assert f"TextFiles(path='{folder}/text'" in said["other text"][1]
    assert found["loss"][0] != f"{lines(folder / 'run', 'valid')[-1]['loss']:,.4f}"
    assert found["batches"][0] == found["batches"][2].rstrip(",")


def test_another_objective_is_asked_where_one_is_given(said, folder):
    assert said["another objective"][0] == 0, said["another objective"][1]
    found = {result["measure"]: result for result in results(folder / "out" / "objective.json")}
    line = lines(folder / "run", "valid")[-1]
    assert found["loss"]["counts"]["tokens"] < line["loss_tokens"]  # excludes the tokens of the prefix
    assert found["loss"]["how"].startswith("PrefixLM, teacher-forced")
    assert found["loss"]["value"] != pytest.approx(line["loss"], rel=1e-6)


def test_a_source_is_scored_as_python_does(said, folder):
    source = TextFiles(path=f"{folder}/text")
    expected = score_source(load(f"{folder}/run"), source, "all")
    found = results(folder / "out" / "scores.json")
    assert [r["measure"] for r in found] == ["perplexity", "bits_per_token", "bits_per_byte"]
    for result, same in zip(found, expected, strict=True):
        assert result["value"] == pytest.approx(same.value, rel=1e-5) and result["counts"] == same.counts
        assert result["standard_error"] == pytest.approx(same.standard_error, rel=1e-3)
        assert float(words(said["source"])[same.measure][0].replace(",", "")) == pytest.approx(same.value, abs=1e-3)
    assert said["source"][1].startswith(f"model  {folder}/run, step 4{AVERAGED}\n")
    assert said["source"][1].endswith(f"3 results in {folder}/out/scores.json\n")


def test_two_models_are_compared_on_the_same_documents_and_examples(said, folder):
    code, text = said["compared"]
    assert code == 0, text
    found = {r["measure"]: r for r in results(folder / "out" / "compared.json") if r["measure"].endswith("_difference")}
    assert found.keys() == {"bits_per_byte_difference", "accuracy_difference"}
    lines = [json.loads(line) for line in (folder / "out" / "transcripts.jsonl").read_text().splitlines()]
    ours, theirs = (
        [line for line in lines if line["model"] == f"{folder}/run, step {step}{AVERAGED}" and line["kind"] == "text"]
        for step in (4, 2)
    )
    nats = sum(one["nats"] - other["nats"] for one, other in zip(ours, theirs, strict=True))
    expected = nats / sum(line["bytes"] for line in ours) / np.log(2)
    assert found["bits_per_byte_difference"]["value"] == pytest.approx(expected)
    assert "distinguishable (Holm, 6 comparisons)" in text and "transcripts in" in text


def test_tasks_are_asked_as_python_does(said, folder):
    code, text = said["tasks"]
    assert code == 0 and "2 examples, 17 left out by --examples, 1 not asked: too long for the context" in text, text
    found = results(folder / "out" / "tasks.json")
    asked = run_tasks(load(f"{folder}/run@4"), load_tasks(["grammar", "everyday"]), most=3)
    for result, expected in zip(found, [of for of_task in asked for of in of_task], strict=True):
        value, interval = expected.value, expected.interval  # JSON has lists, and null for the value without examples
        as_json = {"value": None if math.isnan(value) else value, "interval": interval and list(interval), "step": 4}
        assert result == dataclasses.asdict(expected) | as_json


def test_every_checkpoint_gives_the_curve_of_the_run(said, folder):
    assert said["every validation"][0] == 0, said["every validation"][1]
    (file,) = (folder / "run" / "evaluations").glob("validation-ema_every-*.json")
    found = {(r["step"], r["measure"]): r["value"] for r in results(file)}
    for line in lines(folder / "run", "valid"):
        assert found[line["step"], "loss"] == pytest.approx(line["loss"], rel=1e-6)
    assert {step for step, _ in found} == set(STEPS)
    title, _, table, *_ = said["every validation"][1].split("\n\n")
    assert title == f"run  {folder}/run{AVERAGED}"
    assert [line.split()[0] for line in table.splitlines()] == ["step", "2", "4"]


def test_its_picture_has_curves(said, folder):
    (file,) = (folder / "run" / "evaluations").glob("validation-ema_every-*.png")
    pixels = image.imread(file)
    assert f"wrote {file}" in said["every validation"][1]
    assert (np.abs(pixels[..., :3] - np.array([0x3E, 0x7C, 0xB1]) / 255).max(axis=-1) < 0.02).sum() > 500


def test_a_damaged_checkpoint_is_left_out_and_named(said, folder):
    code, text = said["every source"]
    assert code == 0, text
    assert f"left out: checkpoint 2 of {folder}/damaged cannot be used: run.json changed" in text
    assert "in windows of 32 tokens every 32" in text and "at most 2 documents" in text
    (file,) = (folder / "damaged" / "evaluations").glob("text-ema_every-*.json")
    assert {r["step"] for r in results(file)} == {4}


def test_an_average_and_a_model_of_others_are_scored(said, folder):
    assert f"model  {folder}/run, mean of steps 2, 4\n" in said["average"][1], said["average"][1]
    (file,) = (folder / "gpt2" / "evaluations").glob("text-model-*.json")
    found = results(file)[0]
    assert found["step"] is None and found["origin"] == f"{folder}/gpt2" and found["counts"]["documents"] == 1


def test_the_commands_of_the_page_do_what_it_says(said, folder):
    pages = [value for name, value in said.items() if name.startswith("page")]
    assert len(pages) > 1 and {code for code, _ in pages} == {0}, pages
    assert "bits_per_byte" in pages[0][1] and ".png" in pages[1][1]


def test_what_counts_are_fields():
    for path in (*evaluate_module.VALIDATION_FIELDS, *evaluate_module.TEXT_SCORE_FIELDS):
        get(tiny.get_config(), path)


@pytest.mark.slow
def test_mistakes_are_one_line_each(folder):
    of_run, text = f"--from={folder}/run", f"--source=TextFiles(path='{folder}/text')"
    mistakes = [
        ([of_run, "--config=tests/support/tiny.py:gpt"], "--config=FILE is not for this command"),
        ([of_run, "--config.optimizer.learning_rate=1"], "learning_rate changes nothing in a validation: leave it out"),
        ([of_run, "--config.model.num_layers=1"], "--config.model.num_layers changes nothing in a validation"),
        ([of_run, "--config.tokenizer.path=x"], "--config.tokenizer.path changes nothing in a validation"),
        (
            [f"--from={folder}/asked", "--config.objective=CausalLM(mask_documents=True)"],
            "--config.objective changes nothing in a validation: leave it out",
        ),
        (
            [f"--from={folder}/asked", "--stride=4"],
            "config.data.near_duplicates, config.mesh, config.evaluate.batches, config.evaluate.objective",
        ),
        ([of_run, "--config.evaluate.batchs=1"], "config.evaluate has no field 'batchs', did you mean 'batches'?"),
        ([of_run, "--config.data.source.path=no/such"], "config.data.source.path is 'no/such', which does not exist"),
        ([of_run, text, "--config.evaluate.batches=1"], "--config.evaluate.batches changes nothing with --source"),
        ([of_run, "--stride=4"], "--stride is for --source. Without it, the command repeats the run's own validation"),
        ([of_run, text, "--stride=99"], "stride=99: it must be a whole number from 1, for the most context"),
        ([of_run, text, "--context=65"], "context=65: it must be a whole number from 1 to 64, the positions"),
        ([of_run, text, "--by-word"], "by_word=True changes nothing for this decoder"),
        ([of_run, text, "--documents=0"], "--documents=0"),
        ([of_run, f"--source={folder}/text"], f"did you mean TextFiles(path='{folder}/text')?"),
        ([of_run, "--source=TextFile(path='x')"], "unknown Source 'TextFile'"),
        ([of_run, f"--source=TextFiles(path='{folder}/empty')"], "holds no text to score (validation split"),
        ([of_run, f"--workdir={folder}/run"], "--from and --workdir mean the same here"),
        ([of_run, "--tasks=gramar"], "unknown task 'gramar', did you mean 'grammar'?"),
        ([of_run, "--tasks=grammar,blimp"], "the task blimp comes without examples: give them, as --tasks=blimp:my"),
        ([of_run, f"--tasks=blimp:{folder}/broken.jsonl"], "broken.jsonl:2: no field 'sentence_good', allowed: UID"),
        ([of_run, f"--tasks=blimp:{folder}/empty"], "is no file, no folder with .jsonl files and no pattern"),
        ([of_run, "--tasks=grammar", "--examples=0"], "--examples=0: it must be at least 1"),
        ([of_run, "--examples=3"], "--examples is for --tasks: set --tasks too, or leave it out"),
        ([of_run, "--tasks=grammar", "--split=all"], "--split is for --source: set --source too, or leave it out"),
        ([f"{of_run}@best", "--every-checkpoint"], "without @best"),
        ([f"--from={folder}/imported@ema", "--every-checkpoint"], "keeps no moving average of its parameters"),
        ([f"{of_run}@3"], "checkpoint 3 of"),
        ([f"--from={folder}/empty", text], "is neither a run"),
        ([f"--from={folder}/none"], "none"),
        # These errors occur before the evaluation, so that no results are lost.
        ([of_run, f"--output={folder}/text"], f"--output={folder}/text is a folder, it must be a file"),
        ([of_run, text, "--transcripts=/dev/null/x"], "--transcripts=/dev/null/x cannot be written: File exists"),
        (
            [f"--from={folder}/gpt2"],
            "is a Hugging Face directory, without a validation split: set a data source, such as --source=",
        ),
        ([f"--from={folder}/gpt2", text, "--every-checkpoint"], "is a Hugging Face directory: leave it out"),
        (
            [f"--from={folder}/gpt2", text, "--config.mesh.data=1"],
            "this model has no training config, so --config.mesh.data",
        ),
        ([f"--from={folder}/imported"], "an imported model has no dataset; set a data source, such as --source="),
        ([f"--from={folder}/other"], "whose ids mean other text: restore the run's own tokenizer/ folder"),
        ([f"--from={folder}/other", text], "whose ids mean other text: restore the run's own tokenizer/ folder"),
    ]
    for (given, said), (code, text) in zip(mistakes, evaluated(folder, [m[0] for m in mistakes]), strict=True):
        assert code == 2 and said in text and len(text.splitlines()) == 1, (given, text)
