"""Tests fine-tuning on writing tasks: the start, the answers that a validation writes, and use of the model."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from pretrainax.adapt import PrefixTuning
from pretrainax.config import Experiment, UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.data.sources import JsonLines
from pretrainax.distill import Distillation
from pretrainax.evaluation.own_validation import evaluate_fully
from pretrainax.inference.load import load
from pretrainax.interop import directories
from pretrainax.runs.answer_writer import check_answers
from pretrainax.runs.train import open_run, train
from pretrainax.tasks import Instructions, TextGeneration
from pretrainax.tokenization.chat import PLAIN, read_template
from pretrainax.training.metrics import read_metrics
from tests.golden import CASES
from tests.golden.case import weights
from tests.support import tiny
from tests.support.exports import write_workdir

pytestmark = pytest.mark.slow

VALID = 11  # Records; a batch has 8.


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Writes records of a text and a label, which is the text's first word."""
    folder, rng = tmp_path_factory.mktemp("records"), np.random.RandomState(0)
    for split, count in (("train", 64), ("valid", VALID)):
        made = [{"text": f"{word} mir" + "s" * (i % 3), "label": ("aus", "le").index(word)} for i, word in
                enumerate(rng.choice(["aus", "le"], count))]  # fmt: skip
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    return JsonLines(path=str(folder / "train.jsonl"), valid_path=str(folder / "valid.jsonl"))


@pytest.fixture(scope="module")
def tuned(records, cache, tmp_path_factory):
    """Fine-tunes a tiny T5, with a validation at the end."""
    folder, config = tmp_path_factory.mktemp("t5"), CASES["t5_1_1"].config
    write_workdir(folder / "start", config, weights(config))
    experiment = fine_tuning(str(folder / "start"), records, str(cache))
    assert train(experiment, str(folder / "run")) == 0
    return folder / "run"


def fine_tuning(start: str, records, cache: str) -> Experiment:
    experiment = read_config_file("finetune:text_to_text", start)
    experiment.data.source, experiment.data.cache_dir, experiment.data.prepare_workers = records, cache, 1
    experiment.data.sequence_length, experiment.train.global_batch_size, experiment.train.steps = 20, 8, 6
    experiment.objective = TextGeneration(
        input="t, {text}", target_field="label", labels=("aus", "le"), target_length=6, answers=5
    )
    experiment.optimizer.learning_rate, experiment.schedule.warmup_steps = 1e-2, 2
    experiment.evaluate.every, experiment.checkpoint.every, experiment.checkpoint.keep_at = 6, 6, (0,)
    experiment.evaluate.select_by = "label_accuracy"
    return experiment


def test_a_validation_writes_what_a_user_gets(tuned, records):
    loaded, (line,) = load(str(tuned)), valid_lines(tuned)
    task = loaded.experiment.objective
    with open(records.valid_path) as f:
        asked = [json.loads(line) for line in f]
    asked = [asked[i * VALID // 5] for i in range(5)]
    said = loaded.generate([f"t, {record['text']}" for record in asked], max_new_tokens=6)
    notes = [{"answer": ("aus", "le")[record["label"]]} for record in asked]
    figures = task.metrics([each.text for each in said], notes)
    assert {name: line[name] for name in task.metric_names} == figures and set(task.metric_names) == set(figures)
    assert line["loss_tokens"] >= 2 * VALID  # The loss covers all records, but only five answers are written.


@pytest.mark.slow
def test_a_student_writes_in_its_validations(tuned, records, cache, tmp_path):
    experiment = fine_tuning(str(tuned), records, str(cache))
    experiment.distill, experiment.train.steps = Distillation(str(tuned)), 1
    experiment.evaluate.every, experiment.objective.answers = 1, 1
    assert train(experiment, str(tmp_path / "run")) == 0
    assert 0 <= valid_lines(tmp_path / "run")[-1]["exact_match"] <= 1


def valid_lines(run):
    return [line for line in read_metrics(str(run / "metrics.jsonl")) if line["split"] == "valid"]


def test_its_export_names_no_labels_as_it_has_no_head(tuned, tmp_path):
    directories.export_workdir(str(tuned), str(tmp_path / "there"))
    described = json.loads((tmp_path / "there" / "config.json").read_text())
    assert described["architectures"] == ["T5ForConditionalGeneration"] and "id2label" not in described


def test_what_writes_predicts_nothing(tuned):
    with pytest.raises(UserError, match="TextGeneration, which writes texts: python -m pretrainax.generate"):
        load(str(tuned)).predict(["aus mir"])


def test_texts_are_no_records_of_it(tuned):
    with pytest.raises(UserError, match="trained by TextGeneration, on records: .* without --source"):
        load(str(tuned)).score(["aus mir"])


def test_it_starts_from_all_that_is_pretrained(tuned):
    before, after = load(str(tuned.parent / "start")).parameters, load(f"{tuned}@0").parameters
    assert before.keys() == after.keys() and all((before[path] == after[path]).all() for path in before)


def test_the_command_evaluate_writes_all_answers(tuned):
    experiment, (line,) = load(str(tuned)).experiment, valid_lines(tuned)
    evaluate_fully(experiment, ["data.cache_dir", "objective.num_beams"])
    assert experiment.objective == dataclasses.replace(experiment.objective, answers=None)
    with open_run(experiment) as run:
        params = load(str(tuned), mesh=run.mesh).params
        said, notes = run.write(run, params, experiment.objective)
        found = run.validate(params)
    assert len(said) == len(notes) == VALID
    assert found["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert found["no_label"] == sum(each.text.strip() not in ("aus", "le") for each in said)
    experiment.objective.answers = 3
    evaluate_fully(experiment, ["objective.answers"])
    assert experiment.objective.answers == 3


@pytest.mark.slow
def test_a_decoder_learns_conversations_and_its_export_has_the_template(cache, tmp_path, capsys):
    talk = [{"role": "user", "content": "le ten"}, {"role": "assistant", "content": "mir"}]
    (tmp_path / "talks.jsonl").write_text(
        "".join(json.dumps({"messages": talk * (1 + i % 2)}) + "\n" for i in range(40))
    )
    experiment = tiny.get_config("gpt")
    experiment.tokenizer.vocab_size = 263
    experiment.data.source = JsonLines(path=str(tmp_path / "talks.jsonl"), valid_path=str(tmp_path / "talks.jsonl"))
    experiment.data.cache_dir, experiment.data.sequence_length = str(cache), 64
    experiment.objective = Instructions(answers=3, max_new_tokens=4)
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 2, 2, 0
    assert train(experiment, str(tmp_path / "run")) == 0
    (line,) = valid_lines(tmp_path / "run")
    assert line["loss_tokens"] % 60 == 0 and "exact_match" in line  # 60 answers, each with its EOS
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "there"))
    assert json.loads((tmp_path / "there" / "tokenizer_config.json").read_text())["chat_template"] == PLAIN
    directories.import_directory(str(tmp_path / "there"), str(tmp_path / "back"))
    assert read_template(str(tmp_path / "back" / "tokenizer")) == PLAIN


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda e, patch: setattr(e, "tuning", PrefixTuning()), "but a model with PrefixTuning.* generates no text"),
        (
            lambda e, patch: patch.setattr(jax, "process_count", lambda: 2),
            "but a run of several processes cannot generate answers: set it to 0",
        ),
    ],
)
def test_answers_that_cannot_be_written_are_refused_before_the_first_step(change, said, monkeypatch):
    experiment = tiny.get_config("gpt")
    experiment.objective = Instructions(answers=3)
    change(experiment, monkeypatch)
    with pytest.raises(UserError, match=f"config.objective.answers is 3, {said}"):
        check_answers(experiment)
    experiment.objective.answers = 0
    check_answers(experiment)
