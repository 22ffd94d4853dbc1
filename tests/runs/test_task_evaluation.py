"""Tests the scores of tasks at the validations of a run."""

import json
import pathlib

import pytest

from pretrainax.config import Classify, MixtureOfExperts, UserError
from pretrainax.inference.load import load
from pretrainax.runs import samples, task_evaluation
from pretrainax.runs.task_evaluation import TaskEvaluation
from pretrainax.runs.train import train
from pretrainax.scoring.tasks.run import load_tasks, run_tasks
from tests.support import tiny
from tests.support.runs import arrays, lines, write_text


def experiment(folder: pathlib.Path, variant: str = "gpt", tasks: tuple[str, ...] = ()):
    made = tiny.get_config(variant)
    made.data.source.path, made.data.cache_dir = str(write_text(folder / "text")), str(folder / "cache")
    made.train.steps, made.evaluate.every, made.checkpoint.every, made.trackers = 4, 2, 4, ()
    made.evaluate.tasks, made.evaluate.task_examples = tasks, 6
    return made


def pairs(folder: pathlib.Path) -> str:
    rows = [
        {"sentence_good": f"the {i} cat sat", "sentence_bad": f"cat {i} the sat", "UID": "order"} for i in range(12)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"minimal_pairs:{path}"


@pytest.mark.slow
def test_tasks_are_logged_with_errors_and_do_not_change_the_training(tmp_path, capsys):
    assert train(experiment(tmp_path), str(tmp_path / "without")) == 0
    assert train(experiment(tmp_path, tasks=(pairs(tmp_path),)), str(tmp_path / "with")) == 0
    whole, got = arrays(tmp_path / "without"), arrays(tmp_path / "with")
    assert whole.keys() == got.keys() and all((whole[name] == got[name]).all() for name in whole)
    without, valid = (lines(tmp_path / name, "valid") for name in ("without", "with"))
    name = "accuracy/task=minimal_pairs"
    first, last = (line.pop(name) for line in valid)
    assert 0 <= first <= 1
    for line in valid:
        for key in (name, f"{name}/order"):
            line.pop(key, None)
            line["standard_errors"].pop(key, None)  # missing if all examples are equal
    assert valid == without
    (task,) = run_tasks(load(str(tmp_path / "with")), load_tasks([pairs(tmp_path)]), 6)
    assert task[0].value == last  # as in `evaluate --tasks`
    said = capsys.readouterr().err
    assert (
        "task minimal_pairs" in said
        and "6 of 12 examples at each validation" in said
        and "tasks: minimal_pairs accuracy" in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bert", "t5"])
def test_other_families_score_tasks(tmp_path, variant):
    assert train(experiment(tmp_path, variant, (pairs(tmp_path),)), str(tmp_path / "run")) == 0
    assert len([line for line in lines(tmp_path / "run", "valid") if "accuracy/task=minimal_pairs" in line]) == 2


def test_samples_and_tasks_have_no_capacity_of_experts(monkeypatch, tmp_path):
    capacities = {}

    def record(module, name):
        function = getattr(module, name)

        def recorded(loaded, *arguments):
            models = loaded.experiment.model, loaded.model.config
            capacities[name] = [model.experts.capacity for model in models]
            return function(loaded, *arguments)

        monkeypatch.setattr(module, name, recorded)

    record(task_evaluation, "run_tasks")
    record(samples, "prompted")
    made = experiment(tmp_path, tasks=(pairs(tmp_path),))
    made.model.experts, made.evaluate.prompts = MixtureOfExperts(num_experts=4, capacity=1.0), ("the cat",)
    assert train(made, str(tmp_path / "run")) == 0
    assert capacities == {"run_tasks": [None, None], "prompted": [None, None]}


@pytest.mark.parametrize(("tasks", "problem"), [(("grammer",), "grammar"), (("grammar",), "task head")])
def test_tasks_that_a_run_cannot_score_are_refused(tasks, problem):
    made = tiny.get_config("bert")
    made.evaluate.tasks, made.model.head = tasks, Classify() if problem == "task head" else None
    with pytest.raises(UserError, match=problem):
        TaskEvaluation().resolve_fields(made)


def test_several_processes_are_refused(monkeypatch):
    made = tiny.get_config("gpt")
    made.evaluate.tasks = ("grammar",)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(UserError, match="several processes"):
        TaskEvaluation().resolve_fields(made)
