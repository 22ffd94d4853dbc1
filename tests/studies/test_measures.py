"""Tests the measures of a study on tiny runs."""

import dataclasses
import itertools
import json
import os
import pathlib

import numpy as np
import pytest

from pretrainax.config import Experiment
from pretrainax.data.sources import JsonLines
from pretrainax.runs.train import train
from pretrainax.studies import run_measures, task_measure
from pretrainax.studies.measures import BitsPerByte, TaskScore, Throughput, ValidationLoss
from pretrainax.studies.outcomes import MeasureContext
from pretrainax.studies.study import Measure
from tests.support import tiny

WORDS = ("good", "bad")
FLAGS = (
    *("--config.train.steps=4", "--config.schedule.warmup_steps=1", "--config.train.global_batch_size=8"),
    *("--config.data.sequence_length=16", "--config.data.packing=OneEach()"),
    "--config.objective=Classification(labels=('good', 'bad'))",
)


def write_records(path: pathlib.Path, count: int, seed: int, labels=WORDS) -> str:
    rng = np.random.default_rng(seed)
    records = [
        (word, f"the {word} film {i} is a {word} film of the year") for i, word in enumerate(rng.choice(WORDS, count))
    ]
    names = dict(zip(WORDS, labels, strict=True))
    path.write_text("".join(json.dumps({"text": text, "label": names[word]}) + "\n" for word, text in records))
    return str(path)


@dataclasses.dataclass
class Pretrained:
    folder: str
    experiment: Experiment
    texts: JsonLines

    def task(self, folder: pathlib.Path, **fields) -> TaskScore:
        """Returns a measure whose test records are in `folder`."""
        source = JsonLines(path=self.texts.path, valid_path=str(folder / "test.jsonl"))
        cache = f"--config.data.cache_dir={pathlib.Path(self.folder).parent / 'cache'}"
        return TaskScore("words", source=source, **({"flags": (*FLAGS, cache), "rates": (1e-4, 1e-3)} | fields))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Pretrained:
    """Trains a tiny BERT for three steps."""
    folder = tmp_path_factory.mktemp("measures")
    source = JsonLines(path=write_records(folder / "train.jsonl", 120, 0), valid_fraction=0.4)
    experiment = tiny.get_config("bert")
    experiment.data.source, experiment.data.cache_dir = source, str(folder / "cache")
    experiment.tokenizer.vocab_size = 120
    experiment.train.steps, experiment.evaluate.every, experiment.trackers = 3, 3, ()
    assert train(experiment, str(folder / "run")) == 0
    return Pretrained(str(folder / "run"), experiment, source)


def without_record_equals(outcome, sums, counts) -> None:
    """Checks that the changes are those of a ratio of sums when each record is omitted."""
    without = (sums.sum() - sums) / (counts.sum() - counts)
    np.testing.assert_allclose(outcome.changes, outcome.value - without, atol=1e-12)  # float64 rounding


def test_bits_per_byte_has_a_value_for_each_document_and_repeats_bit_for_bit(pretrained):
    measure = BitsPerByte("bits", pretrained.texts, split="all", share=0.2)

    def call(**fields):
        return measure.outcomes(pretrained.folder, pretrained.experiment, MeasureContext(**fields))

    first, repeated, tuning = call(), call(downstream_seeds=(0, 1)), call(is_tuning=True)
    assert len(first) == 1 and len(repeated) == 2
    assert first[0].value == repeated[1].value and first[0].changes.tobytes() == repeated[0].changes.tobytes()
    assert len(first[0].changes) + len(tuning[0].changes) <= 120 and len(first[0].changes) > len(tuning[0].changes)
    ((name, baseline),) = measure.baselines(pretrained.folder, pretrained.experiment, MeasureContext()).items()
    assert name == "byte frequencies" and len(baseline.changes) == len(first[0].changes)
    # Letters and spaces have unequal frequencies, so the value is below 8 bits, plus the length.
    assert 2 < baseline.value < 9
    assert not measure.larger_is_better and measure.unit == "bits per byte"


def test_the_left_side_alone_is_another_measure(pretrained):
    both, left = (BitsPerByte(given, pretrained.texts, share=0.2, given=given) for given in ("own", "left"))
    values = [x.outcomes(pretrained.folder, pretrained.experiment, MeasureContext())[0] for x in (both, left)]
    assert values[0].value != values[1].value and len(values[0].changes) == len(values[1].changes)


def test_the_validation_loss_is_that_of_the_final_documents(pretrained):
    measure, context = ValidationLoss("loss"), MeasureContext()
    (final,), (tuning,) = (
        measure.outcomes(pretrained.folder, pretrained.experiment, MeasureContext(is_tuning=is_tuning))
        for is_tuning in (False, True)
    )
    lines = map(json.loads, pathlib.Path(pretrained.folder, "metrics.jsonl").read_text().splitlines())
    whole = next(line["loss"] for line in lines if line["split"] == "valid")
    # The targets weigh the losses; the tuning documents have a fifth of them. Without training, the losses of documents
    # differ by less than 5 %.
    assert 0.8 * final.value + 0.2 * tuning.value == pytest.approx(whole, rel=0.01)
    baseline = measure.baselines(pretrained.folder, pretrained.experiment, context)["token frequencies"]
    assert baseline.value < final.value and len(baseline.changes) == len(final.changes)


def test_the_run_is_opened_once_for_the_baseline_and_the_model(pretrained, monkeypatch):
    measure, opened, context = ValidationLoss("once"), [], MeasureContext()
    open_run = run_measures.open_run
    monkeypatch.setattr(run_measures, "open_run", lambda experiment: opened.append(experiment) or open_run(experiment))
    measure.baselines(pretrained.folder, pretrained.experiment, context)
    (outcome,) = measure.outcomes(pretrained.folder, pretrained.experiment, context)
    assert len(opened) == 1
    (alone,) = ValidationLoss("alone").outcomes(pretrained.folder, pretrained.experiment, context)
    assert outcome.value == alone.value and outcome.changes.tobytes() == alone.changes.tobytes()


def test_throughput_is_a_time_without_records(pretrained):
    measure = Throughput("speed")
    (outcome,) = measure.outcomes(pretrained.folder, pretrained.experiment, MeasureContext())
    assert outcome.value > 0 and outcome.changes is None and measure.is_time


def test_a_timed_fine_tuning_has_30_updates_and_no_compilation(pretrained, tmp_path, monkeypatch):
    lengths, lines = [], [{"split": "train", "step": 30, "step_seconds": 0.5}]

    def fine_tune(measure, *_):
        lengths.append(task_measure._config(measure, pretrained.folder).train.steps)

    for name, value in (
        ("_fine_tune", fine_tune),
        ("_test_outcome", lambda *_: None),
        ("read_metrics", lambda _: lines),
    ):
        monkeypatch.setattr(task_measure, name, value)
    # The times are the start, the end of training and the end of the test; the first run compiles.
    clock = itertools.cycle((0.0, 100.0, 200.0, 0.0, 5.0, 7.0))
    monkeypatch.setattr(task_measure.time, "perf_counter", lambda: next(clock))
    context, run = MeasureContext(downstream_seeds=(0, 1)), 5.0 + 270 * 0.5
    # numbers of fine-tuning runs; a third rate extends an edge
    for rate_of, choose, others in (("arm", 3, 0), ("run", 0, 3)):
        measure = pretrained.task(tmp_path, flags=(*FLAGS, "--config.train.steps=300"), rate_of=rate_of)
        timed = measure.timed(pretrained.folder, pretrained.experiment, context)
        assert timed == (choose * run, others * run + 2 * (run + 2.0), 3 * run)
    assert lengths == [30] * 4


def test_a_task_of_words_has_baselines(pretrained, tmp_path):
    record = json.dumps({"tokens": ["good", "film"], "tags": ["B-X", "O"]}) + "\n"
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(4 * record)
    source = JsonLines(path=str(tmp_path / "train.jsonl"), valid_path=str(tmp_path / "test.jsonl"))
    objective = "--config.objective=TokenClassification(words_field='tokens', tags_field='tags', labels=('O', 'B-X'))"
    measure = TaskScore("tags", "token_classification", source, (objective, "--config.train.steps=4"), "f1")
    found = measure.baselines(pretrained.folder, pretrained.experiment, MeasureContext())
    assert found["most frequent tag of each word"].value == 1.0


@pytest.mark.slow
def test_a_task_is_scored_on_the_test_records(pretrained, tmp_path):
    write_records(tmp_path / "test.jsonl", 30, 1)
    measure = pretrained.task(tmp_path, metric="matthews")
    context = MeasureContext(downstream_seeds=(0, 1))
    choice = measure.choose(pretrained.folder, pretrained.experiment, context)
    context = context._replace(choice=choice)
    outcomes = measure.outcomes(pretrained.folder, pretrained.experiment, context)
    again = measure.outcomes(pretrained.folder, pretrained.experiment, context)
    assert [x.changes.tobytes() for x in outcomes] == [x.changes.tobytes() for x in again]
    assert len(outcomes) == 2 and all(len(x.changes) == 30 for x in outcomes)
    assert len(choice["scores"]) == 3  # The best of two rates is at an edge, so a third rate follows.
    baselines = measure.baselines(pretrained.folder, pretrained.experiment, context)
    assert baselines["bag of words"].value == 1.0 and baselines["label frequencies"].value == 0.0
    assert measure.unit == "matthews" and measure.larger_is_better


@pytest.mark.slow
def test_wrong_labels_of_the_test_records_change_the_score_but_not_the_rate(pretrained, tmp_path):
    found = {}
    for name, labels in (("right", WORDS), ("wrong", WORDS[::-1])):
        (tmp_path / name).mkdir()
        write_records(tmp_path / name / "test.jsonl", 30, 1, labels)
        measure = pretrained.task(tmp_path / name, metric="accuracy")
        choice = measure.choose(pretrained.folder, pretrained.experiment, MeasureContext())
        (outcome,) = measure.outcomes(pretrained.folder, pretrained.experiment, MeasureContext(choice=choice))
        found[name] = choice, outcome
    (choice, right), (other_choice, wrong) = found.values()
    assert choice == other_choice
    assert right.value == pytest.approx(1 - wrong.value)  # The values are shares of 30 records.
    without_record_equals(right, right_records(right), np.ones(30))


def right_records(outcome) -> np.ndarray:
    """Recovers the correct records from the changes of an accuracy: their changes are positive."""
    return (outcome.changes > 0).astype(float) if outcome.value < 1 else np.ones(len(outcome.changes))


@pytest.mark.slow
def test_a_deleted_test_file_does_not_disturb_the_choice_of_the_rate(pretrained, tmp_path):
    measure = pretrained.task(tmp_path / "absent")
    assert measure.choose(pretrained.folder, pretrained.experiment, MeasureContext())["learning_rate"] > 0


@pytest.mark.parametrize(
    ("measure", "problem"),
    [
        (TaskScore("x", task="sst3"), "sst3"),
        (TaskScore("x", task="text_to_text", source=JsonLines("a", valid_path="b")), "writes texts"),
        (TaskScore("x", source=JsonLines("a")), "no test records of its own"),
        (TaskScore("x", source=JsonLines("a", valid_path="b"), metric="acuracy"), "accuracy"),
        (TaskScore("x", source=JsonLines("a", valid_path="b"), rates=(1e-3,)), "two positive learning rates"),
        (TaskScore("x", source=JsonLines("a", valid_path="b"), selection=1.0), "selection is 1.0"),
        (TaskScore("x", source=JsonLines("a", valid_path="b"), flags=("train.steps=3",)), "--config.FIELD=VALUE"),
        (BitsPerByte("x", JsonLines("a"), share=2.0), "share of the bytes"),
        (ValidationLoss("x", metric="lose"), "loss"),
    ],
)
def test_problems_are_one_line_each(measure, problem):
    found = list(measure.problems(tiny.get_config("gpt")))
    assert any(problem in line for line in found) and all("\n" not in line for line in found)


def test_measures_have_no_problem_with_what_they_support():
    source = JsonLines(os.devnull, valid_path=os.devnull)
    measures = [TaskScore("x", source=source), BitsPerByte("x", source), ValidationLoss("x"), Throughput("x")]
    for variant in ("bert", "gpt", "t5"):
        assert not [line for x in measures for line in x.problems(tiny.get_config(variant))]


def test_a_model_without_token_predictions_has_no_bits_per_byte():
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head = False
    assert len(list(BitsPerByte("x", JsonLines("a")).problems(experiment))) == 1


def test_losses_of_other_objectives_and_tokenizers_are_not_compared():
    arms = {name: tiny.get_config(name) for name in ("bert", "gpt")}
    found = list(ValidationLoss("loss").differences(arms))
    assert len(found) == 2 and "config.tokenizer" in found[1]
    assert not list(ValidationLoss("loss").differences({"a": tiny.get_config(), "b": tiny.get_config()}))


@pytest.mark.parametrize("batches, size, is_same", [(5, 32, False), (20, 8, False), (0, 16, False), (10, 8, True)])
def test_losses_of_other_rows_are_not_compared(batches, size, is_same):
    one, other = tiny.get_config(), tiny.get_config()
    one.evaluate.batches, one.train.global_batch_size = 5, 16
    other.evaluate.batches, other.train.global_batch_size = batches, size
    found = list(ValidationLoss("loss").differences({"a": one, "b": other}))
    assert bool(found) != is_same and all("evaluate.batches" in line for line in found)


def test_an_edge_of_the_rates_is_widened_once(monkeypatch):
    asked = []
    monkeypatch.setattr(task_measure, "_selection_score", lambda measure, folder, rate, _: asked.append(rate) or rate)
    measure = TaskScore("x", source=JsonLines("a", valid_path="b"), rates=(0.01, 0.1))
    choice = task_measure.choose(measure, "run", MeasureContext())
    assert asked == [0.01, 0.1, 1.0] and choice["learning_rate"] == 1.0
    assert "edge" in choice["unfinished"]


@pytest.mark.parametrize("rates, scores", [((0.01, 0.1, 1.0), (0.9, 0.5, 0.2)), ((0.01, 0.1, 1.0), (0.2, 0.5, 0.9))])
def test_a_rate_beyond_the_edge_with_the_same_score_is_not_chosen(rates, scores, monkeypatch):
    known = dict(zip(rates, scores, strict=True))
    monkeypatch.setattr(task_measure, "_selection_score", lambda measure, folder, rate, _: known.get(rate, 0.9))
    choice = task_measure.choose(TaskScore("x", rates=rates), "run", MeasureContext())
    assert choice["learning_rate"] == rates[scores.index(0.9)] and choice["unfinished"] == ""


def test_rates_with_the_same_score_are_not_an_edge(monkeypatch):
    asked = []
    monkeypatch.setattr(task_measure, "_selection_score", lambda measure, folder, rate, _: asked.append(rate) or 0.0)
    measure = TaskScore("x", source=JsonLines("a", valid_path="b"), rates=(0.01, 0.1))
    choice = task_measure.choose(measure, "run", MeasureContext())
    assert asked == [0.01, 0.1] and choice["unfinished"] == "x: all learning rates have the same score, 0"


def test_a_study_file_can_name_the_measures():
    assert {"BitsPerByte", "TaskScore", "Throughput", "ValidationLoss"} <= set(Measure.names())
