"""A workdir without a step is free; a workdir with steps is rejected with a short message before any preparation."""

import copy
import json

import pytest

from pretrainax.checkpoints.steps import has_checkpoints
from pretrainax.checkpoints.workdir import adopt_steps, check_workdir, has_steps
from pretrainax.config import AUTO, LearnedPositions, UserError, dump, load
from pretrainax.data.sources import TextFiles
from pretrainax.optim import AdamW, WarmupConstant
from pretrainax.runs.train import train
from pretrainax.tokenization import ByteBPE, Characters
from pretrainax.training.train_step import Update
from tests.support import tiny

FIELDS = "train.seed: 0 -> 3"


@pytest.fixture
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.evaluate.batches = 2, 1
    return experiment


def other(experiment, **train_fields):
    """Returns another config, with another seed, tokenizer and model."""
    changed = copy.deepcopy(experiment)
    changed.train.seed, changed.model.d_model, changed.tokenizer = 3, 64, ByteBPE(vocab_size=300)
    for name, value in train_fields.items():
        setattr(changed.train, name, value)
    return changed


def out_of_memory(monkeypatch):
    def fail(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(Update, "__call__", fail)


@pytest.mark.first(1)
@pytest.mark.parametrize("failure", ["mesh", "first step", "killed"])
def test_a_run_that_made_no_step_leaves_its_workdir_free(failure, experiment, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    with monkeypatch.context() as failing:
        broken = copy.deepcopy(experiment)
        if failure == "mesh":
            broken.mesh.data = 3
        elif failure == "first step":
            out_of_memory(failing)
        else:  # The run fails in the save of its first checkpoint, before its first log.
            out_of_memory(failing)
            (run / "checkpoints" / "2.saving").mkdir(parents=True)
        with pytest.raises((UserError, MemoryError)):
            train(broken, str(run))
    assert load(str(run / "config.json")).train.seed == 0 and not has_steps(str(run))
    capfd.readouterr()
    changed = other(experiment)
    assert train(changed, str(run)) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert f"replaced {run / 'config.json'} and tokenizer/, of an earlier run that made no step" in said
    stored = load(str(run / "config.json"))
    assert stored.train.seed == 3 and stored.tokenizer.vocab_size == 300
    assert len(json.loads((run / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]) < 400
    # Its steps now prevent other runs from using it.
    with pytest.raises(UserError, match="holds a run of another config"):
        train(experiment, str(run))


def test_the_same_config_takes_its_workdir_again_without_a_word(experiment, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as failing:
        out_of_memory(failing)
        with pytest.raises(MemoryError):
            # The test passes a copy, because a run sets config.data.workers.
            train(copy.deepcopy(experiment), str(tmp_path))
    capfd.readouterr()
    assert train(experiment, str(tmp_path)) == 0
    assert "replaced" not in capfd.readouterr().err


def test_a_tokenizer_of_the_user_in_a_new_workdir_is_not_deleted(experiment, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "mine.txt").write_text("mine")
    assert train(experiment, str(tmp_path)) == 0
    assert (tmp_path / "tokenizer" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "names, expected",
    [
        ([], False),
        (["10"], True),
        (["0"], True),  # an import, or a checkpoint that the user requested
        (["10.saving"], False),
        (["10.saving.json"], False),
        (["10.deleted"], False),
        (["10.replaced"], True),  # killed during a second save of this step: the old checkpoint
        (["010", ".nfs0001"], True),  # named by a user
        ([".DS_Store"], False),
        (["12.saving", "10"], True),
    ],
)
def test_what_counts_as_a_checkpoint(names, expected, tmp_path):
    assert has_checkpoints(str(tmp_path / "none")) is False
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert has_steps(str(tmp_path)) is expected


def test_lines_of_metrics_are_steps_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert not has_steps(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert has_steps(str(tmp_path))


@pytest.fixture
def started(experiment, tmp_path):
    """Returns a workdir with a checkpoint."""
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(dump(experiment))
    return tmp_path / "run"


def test_a_foreign_workdir_is_refused_before_anything_is_prepared(experiment, started, tmp_path):
    changed = other(experiment)
    changed.data.cache_dir = str(tmp_path / "cache")
    before = sorted(started.rglob("*"))
    with pytest.raises(UserError, match="holds a run of another config: .*choose another --workdir"):
        train(changed, str(started))
    assert not (tmp_path / "cache").exists()
    assert {path for path in started.rglob("*")} - set(before) <= {started / "run.lock", started / "goodput.json"}


@pytest.mark.parametrize("count", [1, 4, 5, 6, 12])
def test_at_most_five_fields_are_named_with_both_values(count, experiment, started):
    changed = copy.deepcopy(experiment)
    changed.train.seed, changed.train.global_batch_size = 3, 16
    changed.model.d_ff, changed.model.num_layers, changed.model.num_heads = 32, 1, 2
    changed.optimizer = AdamW(learning_rate=1.0, b1=0.5, b2=0.5, weight_decay=0.5)
    changed.data.sequence_length, changed.train.z_loss, changed.schedule.warmup_steps = 16, 0.5, 1
    for group, name in [
        ("train", "global_batch_size"), ("model", "d_ff"), ("model", "num_layers"), ("model", "num_heads"),
        ("optimizer", "learning_rate"), ("optimizer", "b1"), ("optimizer", "b2"), ("optimizer", "weight_decay"),
        ("data", "sequence_length"), ("train", "z_loss"), ("schedule", "warmup_steps"),
    ][count - 1 :]:  # fmt: skip
        setattr(getattr(changed, group), name, getattr(getattr(experiment, group), name))
    with pytest.raises(UserError) as refused:
        check_workdir(str(started), changed)
    message = str(refused.value)
    assert message.count(" -> ") == min(count, 5) and FIELDS in message or count > 5
    assert (f", and {count - 5} more;" in message) == (count > 5) and "\n" not in message


def test_sizes_that_only_the_data_decides_are_not_different(experiment, started):
    resolved = load(str(started / "config.json"))
    resolved.model.vocab_size, resolved.model.position = 512, LearnedPositions(32)
    resolved.tokenizer = Characters()
    (started / "config.json").write_text(dump(resolved))
    unresolved = copy.deepcopy(resolved)
    unresolved.model.vocab_size, unresolved.model.position = AUTO, LearnedPositions(AUTO)
    assert check_workdir(str(started), unresolved) == ""
    assert unresolved.model.vocab_size == AUTO  # data preparation sets it
    unresolved.train.seed = 3
    with pytest.raises(UserError, match=f"another config: {FIELDS};"):
        check_workdir(str(started), unresolved)


def test_extending_a_run_without_steps_or_without_a_config(experiment, started, tmp_path):
    with pytest.raises(UserError, match="--extend requires an existing run"):
        check_workdir(str(tmp_path), experiment, extend=True)
    experiment.schedule.warmup_steps = 0  # the learning rate of the second step depends on the number of steps
    (started / "config.json").write_text(dump(experiment))
    longer = copy.deepcopy(experiment)
    longer.train.steps = 4
    with pytest.raises(UserError, match="Add --extend"):
        check_workdir(str(started), longer)
    assert check_workdir(str(started), longer, extend=True).startswith("extended from 2 to 4 steps")
    (started / "checkpoints" / "2").rmdir()
    longer.train.steps = 1  # a run without steps may also become shorter
    assert check_workdir(str(started), longer) == "" == check_workdir(str(started), longer, extend=True)


@pytest.mark.parametrize(("steps", "budget"), [(600, None), (0, "6 epochs")])
def test_an_automatic_warmup_is_that_of_the_run_before_the_data_is_prepared(steps, budget, experiment, started):
    experiment.schedule = WarmupConstant(30)
    experiment.train.steps = 300
    (started / "config.json").write_text(dump(experiment))
    longer = copy.deepcopy(experiment)
    longer.schedule, longer.train.steps, longer.train.budget = WarmupConstant(AUTO), steps, budget
    assert adopt_steps(str(started), longer) == [] and longer.schedule.warmup_steps == 30
    # The preparation of the data sets these fields.
    longer.train.steps, longer.train.budget = 600, None
    assert check_workdir(str(started), longer) == "extended from 300 to 600 steps"
