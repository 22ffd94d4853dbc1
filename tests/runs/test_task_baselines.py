"""Tests the comparison of a fine-tuned model with the baselines of its task."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from pretrainax.config import Classify, UserError
from pretrainax.data.packing import OneEach
from pretrainax.data.sources import JsonLines
from pretrainax.data.sources.base import Record
from pretrainax.runs import task_baselines
from pretrainax.runs.task_baselines import Validated
from pretrainax.runs.train import open_run, train
from pretrainax.tasks import Classification
from pretrainax.tasks.baselines import Baseline
from pretrainax.tokenization import WordPiece
from tests.support import tiny

TASK = Classification(labels=("no", "yes"))
RNG = np.random.default_rng(0)
LABELS = RNG.random(400) < 0.7
VALIDATED = Validated(
    TASK, [{"label": int(x)} for x in LABELS], [Record((f"text {i}",), {"label": int(x)}) for i, x in enumerate(LABELS)]
)
CONSTANT = VALIDATED.answers(Baseline("label frequencies", np.tile(np.log([0.3, 0.7]), (400, 1)), is_constant=True))


def logits(accuracy, confidence=2.0):
    """Returns the logits of a model with an expected accuracy of `accuracy`."""
    truth = np.where(RNG.random(400) < accuracy, LABELS, ~LABELS)
    return confidence * np.eye(2)[truth.astype(int)]


def lines(outputs, *baselines, select_by="macro_f1"):
    model = VALIDATED.answers(Baseline("model", outputs))
    gains = task_baselines._gains(VALIDATED, select_by, model, [CONSTANT, *baselines])
    return "\n".join(task_baselines._gain_lines(gains, select_by))


@pytest.mark.parametrize("select_by", ["accuracy", "macro_f1", "loss"])
def test_a_model_with_one_answer_is_warned_of(select_by):
    said = lines(np.tile(np.log([0.3, 0.7]), (400, 1)), select_by=select_by)
    assert "WARNING: the model does not beat its baseline" in said and "label frequencies" in said


@pytest.mark.parametrize("select_by", ["accuracy", "macro_f1", "loss"])
def test_a_model_that_has_learned_is_not_warned_of(select_by):
    said = lines(logits(0.9), select_by=select_by)
    assert "WARNING" not in said and said.count("the model is better") >= 1


def test_a_model_behind_a_bag_of_words_is_said_to_be_worse_without_a_warning():
    words = VALIDATED.answers(Baseline("bag of words", logits(0.95)))
    said = lines(logits(0.8), words)
    assert (
        "gain over bag of words -0." in said
        and " (standard error): the model is worse" in said
        and "WARNING" not in said
    )


@pytest.mark.parametrize("select_by", ["accuracy", "macro_f1", "loss"])
def test_a_model_whose_outputs_are_not_numbers_has_no_gain(select_by):
    said = lines(np.full((400, 2), np.nan), select_by=select_by)
    assert f"{select_by}: gain over label frequencies +nan (standard error unknown)" in said and "WARNING" in said


@pytest.mark.slow
def test_the_error_of_macro_f1_covers_its_spread_over_samples():
    """Compares the bootstrap error of one sample with the spread of the gain over 300 samples of 400 records."""

    def gain(seed, error=False):
        rng = np.random.default_rng(seed)
        truth = rng.random(400) < 0.7
        said = np.where(rng.random(400) < 0.8, truth, ~truth)
        notes = [{"label": int(x)} for x in truth]
        drawn = Validated(TASK, notes, [Record((str(i),), note) for i, note in enumerate(notes)])
        model = drawn.answers(Baseline("model", np.eye(2)[said.astype(int)]))
        constant = drawn.answers(Baseline("prior", np.tile([0.0, 1.0], (400, 1)), is_constant=True))
        if error:
            return drawn.gain("macro_f1", model, constant).standard_error
        return model.metrics["macro_f1"] - constant.metrics["macro_f1"]

    spread = np.std([gain(seed) for seed in range(300)])
    errors = [gain(seed, error=True) for seed in range(2)]
    assert np.mean(errors) == pytest.approx(spread, rel=0.25)  # 3 times 5 % (resamples) and 4 % (spread)


def test_a_source_without_training_records_is_a_line(monkeypatch):
    def fail(*_):
        raise UserError("config.data.source has no training record")

    monkeypatch.setattr(task_baselines, "_outputs", lambda *_: (None, [], []))
    monkeypatch.setattr(task_baselines, "training_records", fail)
    valid_batches = SimpleNamespace(streams=[SimpleNamespace(objective=TASK)])
    run = SimpleNamespace(validation=SimpleNamespace(valid_batches=valid_batches))
    said = task_baselines.compare_task(run, None, {})
    assert said == "no baselines: config.data.source has no training record"


# --- runs -------------------------------------------------------------------------------------------------------------


def fine_tuning(folder, labels=("good", "bad")):
    """Returns a tiny BERT that finds the label in a text; half of the validation records are duplicates."""
    rng = np.random.default_rng(1)
    for split, count in (("train", 96), ("valid", 40)):
        words = rng.choice(labels, count)
        rows = [{"text": f"the {word} {i // 2} film", "label": word} for i, word in enumerate(words)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:10]))
    experiment = tiny.get_config("bert")
    experiment.data.source = JsonLines(path=str(folder / "train.jsonl"), valid_path=str(folder / "valid.jsonl"))
    experiment.data.cache_dir, experiment.data.packing = str(folder / "cache"), OneEach()
    experiment.data.drop_duplicates, experiment.data.sequence_length = True, 24
    experiment.model.masked_lm_head, experiment.model.head = False, Classify()
    experiment.tokenizer = WordPiece(vocab_size=60)
    experiment.objective = Classification()
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 3, 3, 0
    experiment.evaluate.select_by = ""
    experiment.objective.complete(experiment)
    return experiment


@pytest.mark.slow
def test_the_end_of_a_run_compares_with_the_baselines_of_its_records(tmp_path, capsys):
    experiment = fine_tuning(tmp_path)
    assert train(experiment, str(tmp_path / "run")) == 0
    said = capsys.readouterr().err
    table = said.partition("baselines, from ")[2]
    header = table.splitlines()[2].split("   ")
    assert [word.strip() for word in header if word.strip()] == ["model", "label frequencies", "bag of words"]
    (row,) = [line for line in table.splitlines() if line.startswith("  accuracy  ")]
    assert row.endswith("100.00%")  # the bag of words
    assert "accuracy: gain over bag of words" in table and "loss: gain over label frequencies" in table


@pytest.mark.slow
def test_one_prediction_gives_the_metrics_and_the_comparison_with_the_baselines(tmp_path, monkeypatch):
    with open_run(fine_tuning(tmp_path)) as run:
        params = run.fresh_state().params
        metrics, predicted = run.validate(params), run.validation.predict(params)
        monkeypatch.setattr(run.validation, "predict", lambda params: pytest.fail("a second prediction"))
        assert run.experiment.validation_objective.metrics_of(run, predicted) == metrics
        assert "accuracy: gain over bag of words" in task_baselines.compare_task(run, params, metrics, predicted)


def test_a_record_that_was_held_out_is_not_one_of_the_split(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "it rains", "label": "no"}\n')
    data = SimpleNamespace(source=JsonLines(path=str(tmp_path / "train.jsonl"), valid_fraction=1e-9))
    stream = SimpleNamespace(record=lambda row: SimpleNamespace(tokens=np.array([1])))
    run = SimpleNamespace(
        experiment=SimpleNamespace(data=data),
        validation=SimpleNamespace(valid_batches=SimpleNamespace(streams=[stream])),
        prepared=SimpleNamespace(tokenizer=None),
    )
    with pytest.raises(UserError, match="left no record for validation, so that one record was held out; set config"):
        task_baselines.records_of_rows(run, TASK, [0])


@pytest.mark.slow
def test_records_without_their_duplicates_are_found_in_the_source(tmp_path):
    experiment = fine_tuning(tmp_path)
    with open_run(experiment) as run:
        task = run.validation.valid_batches.streams[0].objective
        count = run.validation.valid_batches.rows_per_epoch
        records = task_baselines.records_of_rows(run, task, range(count))
        train_records, total = task_baselines.training_records(run, task)
    rows = [json.loads(line) for line in (tmp_path / "valid.jsonl").read_text().splitlines()]
    assert [record.texts for record in records] == [(text,) for text in dict.fromkeys(row["text"] for row in rows)]
    assert len(train_records) >= total == run.prepared.train[0].num_records


@pytest.mark.slow
def test_uneven_labels_select_by_macro_f1_and_the_header_says_why(tmp_path, capsys):
    experiment = fine_tuning(tmp_path)
    rows = [{"text": f"film {i}", "label": "bad" if i % 10 else "good"} for i in range(90)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(experiment, str(tmp_path / "run")) == 0
    assert "best checkpoint by macro_f1, because 90.0% of the training labels are 'bad'" in capsys.readouterr().err
    experiment = fine_tuning(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment.evaluate.select_by = "accuracy"
    with open_run(experiment) as run:
        assert run.experiment.select_by == "accuracy"


@pytest.mark.parametrize("metric", ["accuracy", "matthews"])
def test_changes_are_those_of_the_metric_without_each_record(metric):
    model = VALIDATED.answers(Baseline("model", logits(0.8)))
    changes = VALIDATED.changes(metric, model)
    rest = [i for i in range(400) if i != 7]
    validated = Validated(TASK, [VALIDATED.notes[i] for i in rest], [VALIDATED.records[i] for i in rest])
    without = validated.answers(Baseline("model", model.outputs[rest])).metrics[metric]
    (number,) = np.unique(VALIDATED.clusters[7])
    assert len(changes) == 400 and changes[number] == pytest.approx(
        model.metrics[metric] - without, abs=1e-12
    )  # float64


@pytest.mark.parametrize("metric", ["accuracy", "matthews"])
def test_the_only_record_has_no_change(metric):
    one = Validated(TASK, VALIDATED.notes[:1], VALIDATED.records[:1])
    assert one.changes(metric, one.answers(Baseline("model", logits(0.8)[:1]))).tolist() == [0.0]


def test_records_of_one_group_are_left_out_together():
    records = [Record((f"text {i // 2}",), note) for i, note in enumerate(VALIDATED.notes)]
    model = VALIDATED.answers(Baseline("model", logits(0.8)))
    assert len(VALIDATED._replace(records=records).changes("matthews", model)) == 200
