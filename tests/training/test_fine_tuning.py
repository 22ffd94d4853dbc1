"""Tests fine-tuning of a pretrained model: its initial parameters, validation, resumption and errors."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from pretrainax.adapt import LoRA, PrefixTuning
from pretrainax.config import Classify, Experiment, MeshConfig, UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.config.validation import complete
from pretrainax.data.objectives import NextSentencePrediction
from pretrainax.data.packing import OneEach
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.inference.load import load
from pretrainax.interop import directories, start
from pretrainax.interop.run_start import TrainedStart
from pretrainax.runs import header
from pretrainax.runs.train import train
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.scoring.record_scores import score_records
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tasks import Chunks, Classification, Regression
from pretrainax.training import loss_spikes
from pretrainax.training.metrics import read_metrics
from tests.support import tiny
from tests.support.built import build_run
from tests.support.runs import arrays, lines, run_json
from tests.support.tiers import few

pytestmark = pytest.mark.slow

TRAIN, VALID = 40, 21  # Records; a batch has 8.


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Writes records of two strings and a label to two files."""
    folder, rng = tmp_path_factory.mktemp("records"), np.random.RandomState(0)
    for split, count in (("train", TRAIN), ("valid", VALID)):
        words = enumerate(rng.choice(["aus ", "le ten ", "mir "], count))
        made = [
            {"a": word * 3, "b": "lost " * (i % 40), "label": i % 2, "labels": [i % 2], "score": i / 10}
            for i, word in words
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    return JsonLines(path=str(folder / "train.jsonl"), valid_path=str(folder / "valid.jsonl"))


@pytest.fixture(scope="module")
def pretrained(text, cache, tmp_path_factory):
    """Pretrains a tiny BERT with both heads for two steps."""
    experiment = tiny.get_config("bert")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.model.pair_head, experiment.train.steps = True, 2
    experiment.model.norm_at, experiment.model.embedding_norm = "post", True
    experiment.objective, experiment.data.sequence_length = NextSentencePrediction(), 64
    workdir = tmp_path_factory.mktemp("pretrained") / "bert"
    assert train(experiment, str(workdir)) == 0
    return str(workdir)


def fine_tuning(pretrained, records, cache, task=None) -> Experiment:
    experiment = read_config_file("finetune:classification", pretrained)
    experiment.data.source, experiment.data.cache_dir = records, str(cache)
    experiment.data.prepare_workers, experiment.data.sequence_length = 1, 24
    experiment.objective = task or Classification(text_field="a", pair_field="b", labels=("0", "1"))
    experiment.train.steps, experiment.train.global_batch_size, experiment.train.log_every = 4, 8, 1
    experiment.evaluate.every = experiment.checkpoint.every = 2
    experiment.checkpoint.keep, experiment.checkpoint.keep_at = 3, (0,)
    experiment.schedule.warmup_steps = 1
    experiment.objective.complete(experiment)
    return experiment


@pytest.fixture(scope="module")
def tuned(pretrained, records, cache, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    assert train(fine_tuning(pretrained, records, cache), str(workdir)) == 0
    return workdir


def flat(params):
    return dict(zip(parameter_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))


def test_it_starts_from_what_is_pretrained_but_for_the_heads(pretrained, tuned):
    before, after = flat(load(pretrained).params), flat(load(f"{tuned}@0").params)
    kept = [path for path in after if not path.startswith("classifier")]
    assert all((before[path] == after[path]).all() for path in kept) and len(kept) > 10
    assert (after["classifier/dense/kernel"] == before["pair_head/dense/kernel"]).all()  # BERT's pooler
    assert {path.partition("/")[0] for path in before.keys() - after.keys()} == {
        *("masked_lm_head", "pair_head", "unembedding")
    }


def test_the_header_names_what_is_fresh_and_what_is_left_out(pretrained, records, cache, tmp_path):
    ((_, said),) = TrainedStart().describe(fine_tuning(pretrained, records, cache), str(tmp_path))
    assert said.startswith(f"from {pretrained}, step 2; fresh: classifier/output; left out: masked_lm_head/dense,")
    assert "pair_head/dense" not in said and "pair_head/output" in said


@pytest.mark.parametrize(
    "task, redrawn",
    [
        (Classification(text_field="a", labels=("0", "1")), False),
        (Classification(text_field="a", labels=("1", "0")), True),
        (Classification(text_field="a", label_field="labels", labels=("0", "1"), multi_label=True), True),
    ],
)
def test_answers_of_a_start_are_kept_where_they_are_those_of_the_task(task, redrawn, tuned, records, cache, tmp_path):
    """A start from a task with the same answers keeps its answer layer. The pooler is part of the model and stays."""
    experiment = fine_tuning(str(tuned), records, cache, task)
    ((_, said),) = TrainedStart().describe(experiment, str(tmp_path))
    wanted = "fresh: classifier/output" if redrawn else "with its answers: classifier/output"
    assert said == f"from {tuned}, step 4; {wanted}"
    experiment.train.steps = 1
    assert train(experiment, str(tmp_path / "run")) == 0
    before, start = flat(load(str(tuned)).params), flat(load(f"{tmp_path}/run@0").params)
    same = {path for path, x in before.items() if (start[path] == x).all()}
    assert before.keys() - same == ({"classifier/output/kernel", "classifier/output/bias"} if redrawn else set())


def test_spikes_are_looked_for_in_the_loss(pretrained, records, cache, tmp_path, monkeypatch):
    """The detector reads the loss, whatever metric selects the best checkpoint: the accuracy may jump."""
    seen, observe = [], loss_spikes.observe_step
    monkeypatch.setattr(loss_spikes, "observe_step", lambda *words: (seen.append(words[2]), observe(*words)))
    assert train(fine_tuning(pretrained, records, cache), str(tmp_path / "run")) == 0
    trained = [
        line["loss"] for line in read_metrics(str(tmp_path / "run" / "metrics.jsonl")) if line["split"] == "train"
    ]
    np.testing.assert_allclose(seen, trained, rtol=1e-6)


@pytest.mark.parametrize("name", ["sst2", "stsb", "conll2003", "squad", "race", "record", "retrieval"])
@pytest.mark.parametrize("is_published", [True, False])
def test_fields_of_the_head_can_be_set_whatever_a_run_starts_from(name, is_published, pretrained, monkeypatch):
    """Checks also a model that transformers lacks: its head was None until the task made one."""
    if not is_published:
        monkeypatch.setattr(start, "describe_model", lambda *_: (_ for _ in ()).throw(UserError("none like it")))
    experiment = read_config_file(f"finetune:{name}", pretrained)
    wanted = experiment.objective.head(experiment.model)
    assert type(experiment.model.head) is type(wanted) and experiment.model.head.left_open() == experiment.model.head
    complete(experiment)
    assert "auto" not in vars(experiment.model.head).values()
    assert not list(experiment.model.head.problems(experiment))


def test_each_config_has_a_task_of_its_own():
    one, other = (read_config_file("finetune:alpaca", None) for _ in range(2))
    one.objective.answers, one.data.source.valid_fraction = 7, 0.5
    assert other.objective.answers != 7 and other.data.source.valid_fraction != 0.5


def test_a_validation_has_each_record_once_and_the_figures(tuned):
    valid = [line for line in read_metrics(str(tuned / "metrics.jsonl")) if line["split"] == "valid"]
    assert [line["labels"] for line in valid] == [VALID, VALID]
    assert all({"accuracy", "f1", "matthews", "accuracy_f1"} <= line.keys() for line in valid)
    assert all("perplexity" not in line and "bits_per_token" not in line for line in valid)
    right = valid[-1]["accuracy"] * VALID
    assert right == pytest.approx(round(right))


def test_it_resumes_bit_for_bit(pretrained, records, cache, tuned, tmp_path):
    shutil.copytree(tuned, again := tmp_path / "run")
    shutil.rmtree(again / "checkpoints" / "4")
    assert train(fine_tuning(pretrained, records, cache), str(again)) == 0
    assert lines(again) == lines(tuned)
    whole, found = arrays(tuned), arrays(again)
    assert all((whole[path] == found[path]).all() for path in whole) and whole.keys() == found.keys()


def test_one_device_answers_what_eight_do(pretrained, records, cache, tuned):
    experiment = fine_tuning(pretrained, records, cache)
    prepared, found = prepare(experiment, report=lambda line: None), []
    for devices in (1, 8):
        mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
        with jax.set_mesh(mesh):
            run = build_run(experiment, prepared, mesh, Watchdog())
            params = load(str(tuned), mesh=mesh).params
            _, answers, notes = run.validation.predict(params)
            found.append((answers, run.validate(params)))
    assert [note["label"] for note in notes] == [i % 2 for i in range(VALID)]  # in file order
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-6)
    last = read_metrics(str(tuned / "metrics.jsonl"))[-1]
    assert found[1][1] == pytest.approx({name: last[name] for name in found[1][1]}, abs=1e-6)


def test_buckets_are_of_the_training_alone(pretrained, records, cache, tmp_path, capsys):
    task = Regression(text_field="a", pair_field="b", label_field="score")
    experiment = fine_tuning(pretrained, records, cache, task)
    experiment.model.head = Classify(num_labels=1, kind="regression", pooling="max")
    experiment.data.packing, experiment.train.steps = OneEach(buckets=(12,)), 2
    experiment.checkpoint.init_from = None
    assert train(experiment, str(tmp_path / "run")) == 0
    assert "RANDOM INITIALIZATION: config.checkpoint.init_from is not set" in capsys.readouterr().err
    (line,) = (line for line in read_metrics(str(tmp_path / "run" / "metrics.jsonl")) if line["split"] == "valid")
    assert line["labels"] == VALID and line["squared_error"] == pytest.approx(line["loss"])
    assert {"pearson", "spearman"} <= line.keys()


def test_it_goes_to_transformers_and_back(tuned, tmp_path):
    directories.export_workdir(str(tuned), str(tmp_path / "there"))
    described = json.loads((tmp_path / "there" / "config.json").read_text())
    assert described["architectures"] == ["BertForSequenceClassification"]
    assert described["id2label"] == {"0": "0", "1": "1"}
    directories.import_directory(str(tmp_path / "there"), str(tmp_path / "back"))
    mine, again = load(str(tuned)), load(str(tmp_path / "back"))
    assert again.config.head == dataclasses.replace(mine.config.head, dropout_rate=None)
    assert again.experiment.objective == Classification(labels=("0", "1"))
    theirs = flat(again.params)
    assert all((x == theirs[path]).all() for path, x in flat(mine.params).items())


@pytest.mark.parametrize("tuning", few([LoRA(rank=2), PrefixTuning(length=2)], [LoRA(rank=2)]))
def test_under_a_tuning_the_head_of_the_task_is_trained_too(tuning, pretrained, records, cache, tmp_path):
    experiment = fine_tuning(pretrained, records, cache)
    experiment.tuning, experiment.optimizer.learning_rate = tuning, 0.1
    experiment.checkpoint.keep_at = ()
    if isinstance(tuning, PrefixTuning):
        experiment.data.packing = OneEach()
    assert train(experiment, str(tmp_path / "run")) == 0
    stored = {name.split("/", 1)[1] for name in run_json(tmp_path / "run")["arrays"] if name.startswith("params/")}
    heads = {path for path in stored if path.startswith("classifier/")}
    assert {path.rpartition("/")[0] for path in heads} == {"classifier/dense", "classifier/output"}
    assert all("lora" in path or "prefix" in path for path in stored - heads)
    loaded = load(str(tmp_path / "run"))
    assert loaded.config.head == experiment.model.head and loaded.parameters.keys() >= heads
    if tuning.is_mergeable:
        line = directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "merged"))
        assert "merged" in line


def test_it_starts_from_a_task_whose_head_is_left_out(tuned, records, cache, tmp_path):
    experiment = fine_tuning(f"{tuned}@2", records, cache, Regression(text_field="a", label_field="score"))
    ((_, said),) = TrainedStart().describe(experiment, str(tmp_path))
    # The two labels have two logits and a score has one, so the last layer has another shape.
    assert said == f"from {tuned}, step 2; fresh: classifier/output; left out: classifier/output"
    directories.export_workdir(str(tuned), str(tmp_path / "there"))
    experiment.checkpoint.init_from = str(tmp_path / "there")
    ((_, said),) = TrainedStart().describe(experiment, str(tmp_path))
    assert said == f"from {tmp_path / 'there'}; fresh: classifier/output; left out: classifier/output"
    assert train(experiment, str(tmp_path / "run")) == 0
    before, after = flat(load(f"{tuned}@4").params), flat(load(f"{tmp_path / 'run'}@0").params)
    assert {path for path in after if not np.array_equal(before[path], after[path])} == {
        *("classifier/output/bias", "classifier/output/kernel")
    }


def test_records_of_a_file_give_the_figures_of_the_last_validation(tuned, records, cache, pretrained, tmp_path):
    last = read_metrics(str(tuned / "metrics.jsonl"))[-1]
    loaded = load(str(tuned))
    found = score_records(loaded, loaded.experiment, records, "valid")
    assert {result.measure: result.value for result in found} == pytest.approx(
        {name: last[name] for name in loaded.experiment.objective.metric_names}, abs=1e-6
    )
    assert found[0].counts["records"] == VALID
    directories.export_workdir(str(tuned), str(tmp_path / "there"))
    there = load(str(tmp_path / "there"))
    fields = {"text_field": "a", "pair_field": "b", "labels": ("1", "0")}  # the labels in reverse order
    there.experiment.objective, there.experiment.data.sequence_length = Classification(**fields), 24
    turned = score_records(there, there.experiment, records, "valid")
    assert turned[0].value == pytest.approx(1 - last["accuracy"])
    measures = [result.measure for result in score_records(there, there.experiment, records, "valid", records=5)]
    assert measures == ["accuracy", "f1", "matthews", "accuracy_f1", "macro_f1"]


def test_windows_of_a_record_are_examples_and_one_record_in_the_figures(pretrained, records, cache, tuned):
    task = Classification(text_field="a", pair_field="b", labels=("0", "1"), chunks=Chunks(max_windows=3))
    experiment = fine_tuning(pretrained, records, cache, task)
    prepared = prepare(experiment, report=lambda line: None)
    windows = {"train": prepared.train[0].num_documents, "valid": prepared.valid[0].num_documents}
    for split, count in (("train", TRAIN), ("valid", VALID)):
        assert windows[split] > count and f"{split} {count} records in {windows[split]:,} windows," in prepared.summary
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    loaded = load(str(tuned), mesh=mesh)
    with jax.set_mesh(mesh):
        run = build_run(experiment, prepared, mesh, Watchdog())
        figures, (_, _, notes) = run.validate(loaded.params), run.validation.predict(loaded.params)
        warnings = [value for name, value in header.rows(run) if name == "WARNING"]
    (stream,) = run.train_batches.streams
    assert any(
        line.startswith(f"{stream.plan.statistics['records cut short']} RECORDS ARE TRUNCATED") for line in warnings
    )
    assert figures["labels"] == len(notes) == prepared.valid[0].num_documents
    assert sum(note["window"] == 0 for note in notes) == VALID and max(note["window"] for note in notes) == 2
    assert (figures["accuracy"] * VALID) == pytest.approx(round(figures["accuracy"] * VALID))
    found = score_records(loaded, experiment, records, "valid")
    assert {result.measure: result.value for result in found} == pytest.approx(
        {name: figures[name] for name in task.metric_names}, abs=1e-6
    )
    assert found[0].counts["records cut short"] > 0


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_is_no_language_model_says_no_token(tuned):
    loaded = load(str(tuned))
    for ask in (lambda: loaded.fill("a [MASK]"), lambda: loaded.score(["a"]), lambda: loaded.generate("a")):
        with pytest.raises(UserError, match="task head Classify.* no language-model head|generates no text"):
            ask()


def test_another_architecture_is_named_by_its_fields(pretrained, records, cache, tmp_path):
    experiment = fine_tuning(pretrained, records, cache)
    experiment.model.d_ff = 48
    with pytest.raises(UserError, match="holds another architecture: config.model.d_ff is 48, there 64"):
        TrainedStart().describe(experiment, str(tmp_path))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda e: setattr(e.objective, "labels", ("1", "2")), "train.jsonl:1: .*the label 0"),
        (lambda e: setattr(e.objective, "text_field", "aa"), "train.jsonl:1: no field 'aa'"),
        (lambda e: setattr(e.data, "source", TextFiles(path=__file__)), "TextFiles, which has no records"),
    ],
)
def test_records_that_do_not_fit_are_one_line(change, said, pretrained, records, cache):
    experiment = fine_tuning(pretrained, records, cache)
    experiment.objective = dataclasses.replace(experiment.objective)
    change(experiment)
    with pytest.raises(UserError, match=said):
        prepare(experiment, report=lambda line: None)


def test_a_start_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="is no directory here"):
        read_config_file("finetune:sst2", str(tmp_path / "nothing"))
