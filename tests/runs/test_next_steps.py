"""The printed commands after a run can be pasted unchanged."""

import dataclasses
import importlib.metadata
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from pretrainax.adapt import LoRA, PromptTuning
from pretrainax.config import Classify, Phase
from pretrainax.config.serialization import dump, load
from pretrainax.interop.adaptations import Layers
from pretrainax.optim import AdamW
from pretrainax.runs import next_steps
from pretrainax.tasks import Classification, TextGeneration
from tests.support import tiny
from tests.support.runs import ENV, ROOT, command, last_line, run

ODD = "it's a run; $HOME & co"


def commands(text: str) -> dict[str, list[str]]:
    """Returns the arguments of each command, by its description."""
    rows = [line.strip().split("  ", 1) for line in text.splitlines()[1:]]
    return {name: shlex.split(line) for name, line in rows}


@pytest.fixture
def workdir(tmp_path, monkeypatch, text):
    """Returns a function that writes the files of a run that the commands read, below the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))

    def write(name: str, variant: str, *phases: Phase) -> None:
        experiment = tiny.get_config(variant)
        experiment.phases = phases
        experiment.tokenizer.build(file.read_text() for file in text.iterdir()).save(f"{name}/tokenizer")
        pathlib.Path(name, "config.json").write_text(dump(experiment))

    return write


def test_each_command_names_the_run_however_its_path_is_spelled(workdir):
    workdir(ODD, "gpt")
    words = ["--config=configs/gpt2.py", "--workdir", ODD, "--config.train.steps=2"]
    found = commands(next_steps.after_training(ODD, words))
    assert found["evaluate"][-1] == f"--from={ODD}"
    exported = ["export", f"--workdir={ODD}", f"--to={ODD}-huggingface", "--config=configs/gpt2.py"]
    assert found["export to transformers"][-4:] == exported
    assert found["evaluate"][:2] == ["pretrainax", "evaluate"]
    assert found["train on from here"] == [
        "pretrainax",
        "train",
        "--config=configs/gpt2.py",
        "--config.train.steps=2",
        f"--config.checkpoint.init_from={ODD}",
        f"--config.tokenizer.path={ODD}/tokenizer",
        f"--workdir={ODD}-more",
    ]
    assert found["curves in TensorBoard"][-1] == f"--logdir={ODD}"


def test_a_run_that_goes_on_from_one_whose_start_was_adapted_takes_it_as_it_is(workdir):
    workdir("run", "gpt")
    assert "config.checkpoint.adapt" not in next_steps.after_training("run", [])
    experiment = tiny.get_config("gpt")
    experiment.checkpoint.init_from, experiment.checkpoint.adapt = "runs/shallow", (Layers(),)
    pathlib.Path("run", "config.json").write_text(dump(experiment))
    words = ["--config.checkpoint.init_from=runs/shallow", "--config.checkpoint.adapt=Layers()"]
    found = commands(next_steps.after_training("run", words))["train on from here"]
    assert [word for word in found if "checkpoint.adapt" in word] == ["--config.checkpoint.adapt=()"]
    assert [word for word in found if "init_from" in word] == ["--config.checkpoint.init_from=run"]


def test_a_longer_run_gives_its_last_phase_what_is_left(workdir):
    for last, flags in (
        (Phase(steps=30), ["--config.phases=(Phase(steps=10), Phase())"]),
        (Phase(), []),
    ):
        workdir("run", "gpt", Phase(steps=10), last)
        found = commands(next_steps.after_training("run", []))
        assert found["train longer"][2:-1] == ["--config.train.steps=80", *flags, "--extend"]


@pytest.mark.parametrize("extend", ["--extend", "--noextend"])
def test_an_extended_run_keeps_its_other_flags_and_a_new_run_is_not_extended(extend, workdir):
    workdir("run", "gpt")
    words = ["--config=tiny.py", extend, "--config.data.sequence_length=32"]
    found = commands(next_steps.after_training("run", words))
    others = ["--config=tiny.py", "--config.data.sequence_length=32"]
    assert found["train longer"][2:] == [*others, "--config.train.steps=80", "--extend", "--workdir=run"]
    assert found["train on from here"][2:4] == others and extend not in found["train on from here"]


def test_a_longer_run_of_records_keeps_its_warmup_and_needs_no_epochs(workdir):
    """The warmup is a tenth of the steps, and a run with another warmup is another run."""
    workdir("run", "bert")
    experiment = load("run/config.json")
    experiment.objective = Classification(labels=("a", "b"))
    pathlib.Path("run", "config.json").write_text(dump(experiment))
    words = ["--config=finetune:classification", "--config.train.budget=3 epochs", "--config.train.budget", "2 epochs"]
    found = commands(next_steps.after_training("run", words))
    flags = ["--config=finetune:classification", "--config.train.steps=80", "--config.schedule.warmup_steps=5"]
    assert found["train longer"][2:-1] == [*flags, "--extend"]
    assert "--config.train.budget=3 epochs" in found["train on from here"]


def test_a_model_that_cannot_be_exported_is_not_offered_to_be(workdir):
    workdir("run", "t5")
    text = next_steps.after_training("run", [])
    assert "not possible: no architecture of transformers computes this config.model" in text
    assert "huggingface export" not in text


@pytest.mark.parametrize("tuning, unused", [(LoRA(), set()), (PromptTuning(), {"generate", "train on from here"})])
def test_a_model_that_cannot_be_merged_is_not_offered_to_write_or_to_start_from(tuning, unused, workdir):
    workdir("run", "gpt")
    experiment = load("run/config.json")
    all_commands = set(commands(next_steps.after_training("run", [])))
    experiment.tuning, experiment.checkpoint.init_from = tuning, "runs/base"
    pathlib.Path("run", "config.json").write_text(dump(experiment))
    found = commands(next_steps.after_training("run", []))
    assert all_commands - set(found) == unused
    export = " ".join(found["export to transformers"])
    assert ("not possible" in export) == ("export --adapter may write it, for peft" in export) == bool(unused)


@dataclasses.dataclass
class Own(AdamW):
    pass


def test_commands_that_cannot_load_a_class_of_the_config_file_are_not_offered(workdir, monkeypatch):
    workdir("run", "gpt")
    experiment = load("run/config.json")
    experiment.optimizer = Own()
    pathlib.Path("run", "config.json").write_text(dump(experiment))
    found = commands(next_steps.after_training("run", ["--config=mine.py"]))
    reason = " ".join(found["generate, evaluate, export"])
    assert "only its config file can load a run with Own: move it to a package" in reason
    assert "evaluate" not in found and found["train longer"][2] == "--config=mine.py"
    entry = importlib.metadata.EntryPoint("Own", Own.type_name(), "pretrainax.choices")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, name: [entry])
    assert "evaluate" in commands(next_steps.after_training("run", ["--config=mine.py"]))


@pytest.mark.parametrize(
    "variant, use, words",
    [
        ("gpt", "generate", ["generate", "--from=a run", "Once upon a time"]),
        ("t5", "generate", ["generate", "--from=a run", "The <extra_id_0> walks in <extra_id_1> park"]),
        ("bert", "fill", ["generate", "--from=a run", "--fill=5", "The [MASK] walks in the park."]),
        ("elmo", None, []),
    ],
)
def test_the_first_commands_use_the_model(variant, use, words, workdir):
    workdir("a run", variant)
    for text in (next_steps.after_training("a run", []), next_steps.after_import("a run")):
        found = commands(text)
        assert [name for name in found if name in ("generate", "fill", "predict")] == ([use] if use else [])
        assert use is None or (next(iter(found)) == use and found[use] == ["pretrainax", *words])


def test_a_prompt_follows_the_template_of_the_training(workdir):
    workdir("run", "t5")
    experiment = load("run/config.json")
    experiment.objective = TextGeneration(input="sentence {{1}}: {a.text}\nTL;DR:")
    pathlib.Path("run", "config.json").write_text(dump(experiment))
    (command,) = (line for line in next_steps.after_import("run").split("\n  ") if line.startswith("generate "))
    assert shlex.split(command)[-1] == "sentence {1}: Once upon a time\nTL;DR:"


def test_a_model_with_the_head_of_a_task_predicts(workdir):
    workdir("run", "bert")
    experiment = tiny.get_config("bert")
    experiment.objective = Classification(labels=("bad", "good"))
    experiment.model = dataclasses.replace(experiment.model, masked_lm_head=False, head=Classify(2, kind="single"))
    pathlib.Path("run", "config.json").write_text(dump(experiment))
    files = ["--input=records.jsonl", "--output=predictions.jsonl"]
    assert commands(next_steps.after_import("run"))["predict"] == ["pretrainax", "predict", "--from=run", *files]


@pytest.mark.parametrize("given", [["--workdir=a b"], ["--workdir", "a b"], ["-workdir", "a b"], []])
def test_the_command_that_resumes_has_the_workdir_that_was_used_once(given, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    line = next_steps.resume_command("runs/x y", ["--config=c.py", *given, "--config.train.steps=2"])
    assert shlex.split(line) == ["pretrainax", "train", "--config=c.py", "--config.train.steps=2", "--workdir=runs/x y"]


@pytest.mark.parametrize(
    "word, quoted",
    [
        ("--config.data.source=TextFiles(path='my text')", "--config.data.source=\"TextFiles(path='my text')\""),
        ("--config.data.source=TextFiles(path='$HOME')", None),
        ("it's", None),
    ],
)
def test_an_object_is_in_double_quotes_if_the_shell_changes_nothing_in_them(word, quoted, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    line = next_steps.resume_command("run", [word])
    assert f" {quoted or shlex.quote(word)} " in line and word in shlex.split(line)


def test_the_python_is_that_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert os.path.abspath(shlex.split(next_steps.resume_command("run", []))[0]) == sys.executable
    for name in ("python", "pretrainax"):  # the programs of another environment
        (tmp_path / name).symlink_to("/bin/true")
    words = shlex.split(next_steps.resume_command("run", []))
    assert os.path.abspath(words[0]) == sys.executable and words[1:4] == ["-m", "pretrainax", "train"]
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert shlex.split(next_steps.resume_command("run", []))[0] == "pretrainax"


@pytest.mark.slow
def test_the_commands_of_a_run_do_what_they_say(tmp_path, text, cache):
    workdir = tmp_path / ODD
    flags = "--config.train.steps=2", "--config.evaluate.batches=1"
    args = command("tests/support/tiny.py:gpt", workdir, text, cache, *flags)
    done = run(args)
    assert done.returncode == 0, done.stderr
    printed = done.stderr[done.stderr.index("what next") :].splitlines()[1:]
    lines = {line.strip().split("  ")[0]: line.strip().split("  ", 1)[1] for line in printed}
    commands = ("generate", "evaluate", "export to transformers", "train longer", "train on from here")
    assert list(lines) == [*commands, "curves in TensorBoard"]
    outputs = {}
    for name in commands:
        outputs[name] = subprocess.run(lines[name], shell=True, cwd=ROOT, env=ENV, capture_output=True, text=True)
        assert outputs[name].returncode == 0, outputs[name].stderr
    assert outputs["generate"].stdout.startswith("Once upon a time")
    assert "teacher-forced" in outputs["evaluate"].stdout
    assert (pathlib.Path(f"{workdir}-huggingface") / "model.safetensors").exists()
    assert (pathlib.Path(f"{workdir}-more") / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_that_a_signal_ends_prints_the_command_that_resumes_it(tmp_path, text, cache):
    """The command may lack --workdir, in which case it would start another run."""
    code = (
        "import sys\nfrom pretrainax import main, cli\nfrom pretrainax.runs import train\n"
        "train.train = lambda *args, **kwargs: 75\ncli.run(main.main)"
    )
    args = command("tests/support/tiny.py:gpt", "unused", text, cache)
    flags = [word for word in args[3:] if not word.startswith("--workdir")]
    out = run([sys.executable, "-c", code, *flags])
    assert out.returncode == 75
    resume = shlex.split(last_line(out).removeprefix("to resume: "))
    assert resume[-len(flags) - 1 : -1] == flags and resume[-1].startswith("--workdir=runs/tiny-gpt-")
