"""Tests distillation runs: the stored state, resumption, the layers of the initial student, and errors."""

import dataclasses
import json
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pretrainax
from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.params import write_params
from pretrainax.config import UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines
from pretrainax.distill import TEACHER, DistilBERT, Distillation
from pretrainax.interop import directories
from pretrainax.interop.adaptations import Layers
from pretrainax.interop.adapted_start import adapted_start
from pretrainax.interop.origin import find_origin
from pretrainax.interop.run_start import TrainedStart
from pretrainax.interop.start import load_plain
from pretrainax.interop.teacher import teacher_of
from pretrainax.layers.compute import resolve_auto
from pretrainax.models.flops import flops_per_step
from pretrainax.planning.memory import estimate
from pretrainax.runs.custom_model import CustomStart
from pretrainax.runs.description import describe
from pretrainax.runs.train import open_run, train
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.param_paths import flat
from pretrainax.tasks import Classification
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.training import train as core
from pretrainax.training.restore import restore_or_init
from pretrainax.training.wrapped import trained_model
from tests.support import tiny
from tests.support.runs import assert_same_run, lines, run_json

pytestmark = pytest.mark.slow


def experiment_of(text, cache, layers, distillation=None, steps=4):
    e = tiny.get_config("bert")
    e.model.num_layers, e.model.norm_at, e.model.embedding_norm = layers, "post", True
    e.data.source.path, e.data.cache_dir = str(text), str(cache)
    e.train.steps, e.train.log_every, e.train.ema_decay = steps, 2, 0.5
    e.schedule.warmup_steps, e.optimizer.learning_rate = 1, 1e-2
    e.evaluate.every, e.checkpoint.every, e.checkpoint.keep = 4, 2, 5
    e.distill = distillation
    return e


def without_finish():
    """Skips the plots and samples at the end of a run."""
    return mock.patch.object(core, "finish")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distillation")


def untrained(experiment, workdir, tokenizer):
    """Writes an untrained run, with random parameters large enough for distinct outputs."""
    shapes, rng = models.abstract_params(experiment.model), np.random.RandomState(0)
    whole = {path: 0.2 * rng.standard_normal(x.shape).astype("f4") for path, x in flat(shapes).items()}
    extra = {"tokenizer": tokenizer.fingerprint}
    write_params(str(workdir), shapes, lambda path, index: np.ascontiguousarray(whole[path][index]), extra)
    (workdir / "config.json").write_text(config_lib.dump(experiment))
    tokenizer.save(str(workdir / "tokenizer"))


@pytest.fixture(scope="module")
def teacher(folder, text, cache):
    experiment = experiment_of(text, cache, layers=4)
    untrained(experiment, folder / "teacher", prepare(experiment, report=lambda line: None).tokenizer)
    return folder / "teacher"


def narrow(teacher, text, cache):
    """Makes a student of another width, with losses of hidden states, embeddings, relations and soft targets."""
    distillation = Distillation(str(teacher), hidden=1.0, embeddings=1.0, relations=1.0, relation_heads=2)
    experiment = experiment_of(text, cache, 2, distillation, steps=6)
    experiment.model.d_model, experiment.model.num_heads = 16, 2
    return experiment


@pytest.fixture(scope="module")
def student(folder, teacher, text, cache):
    with without_finish():
        assert train(narrow(teacher, text, cache), str(folder / "student")) == 0
    return folder / "student"


def test_lines_of_training_and_of_validation_have_each_part(student):
    trained = lines(student, "train")
    parts = {"soft_loss", "hidden_loss", "embedding_loss", "relation_loss"}
    assert all(parts | {"loss", "distillation_loss"} <= line.keys() for line in trained)
    # All weights are 1, except 0.5 for the soft targets. rel: the steps have different numbers of predictions.
    for line in trained:
        whole = sum(line[name] for name in parts) - 0.5 * line["soft_loss"]
        assert line["distillation_loss"] == pytest.approx(whole, rel=0.05)
    assert trained[-1]["distillation_loss"] < 0.8 * trained[0]["distillation_loss"]
    validated = lines(student, "valid")
    assert all(parts | {"distillation_loss", "combined_loss"} <= line.keys() for line in validated)
    for line in validated:  # All batches of a validation have nearly equally many predictions.
        assert line["combined_loss"] == pytest.approx(0.5 * line["loss"] + line["distillation_loss"], rel=1e-3)


def test_neither_the_teacher_nor_the_maps_are_in_what_is_loaded_or_exported(student, teacher, folder):
    stored = run_json(student)["arrays"]
    assert {name for name in stored if name.startswith("params/distillation/")} == {
        "params/distillation/hidden/kernel",
        "params/distillation/embedded/kernel",
    }
    assert sum(name.startswith("params/") for name in stored) == 2 + len(pretrainax.load(str(student)).parameters)
    loaded = pretrainax.load(str(student))
    assert not any("distillation" in path for path in loaded.parameters) and loaded.experiment.distill is None
    assert pretrainax.load(f"{student}@average").parameters.keys() == loaded.parameters.keys()
    directories.export_workdir(str(student), str(folder / "exported"))
    exported = pretrainax.load(str(folder / "exported")).parameters
    for path, x in loaded.parameters.items():
        np.testing.assert_array_equal(exported[path], x)


@pytest.mark.slow
def test_a_run_that_was_cut_short_ends_the_same_though_its_teacher_went_on(student, teacher, folder, text, cache):
    part, moved = folder / "part", folder / "moved"
    shutil.copytree(student, part)
    for step in (4, 6):
        shutil.rmtree(part / "checkpoints" / str(step))
    (part / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines(part) if x["step"] <= 2))
    shutil.copytree(teacher / "checkpoints" / "0", teacher / "checkpoints" / "1")  # another teacher checkpoint
    with without_finish():
        assert train(narrow(teacher, text, cache), str(part)) == 0
    shutil.rmtree(teacher / "checkpoints" / "1")
    assert_same_run(part, student)
    known = json.loads((part / "teacher.json").read_text())
    assert (known["directory"], known["steps"]) == (str(teacher), [0])
    shutil.rmtree(part / "checkpoints" / "6")
    shutil.copytree(teacher, moved)
    (part / "teacher.json").write_text(json.dumps(known | {"directory": str(moved), "sha256": "0" * 64}))
    line = f"learns from the teacher of config.distill, and needs step 0 of {moved}, which is not what it was"
    with pytest.raises(UserError, match=line):
        train(narrow(teacher, text, cache), str(part))
    (part / "teacher.json").write_text(json.dumps(known | {"directory": str(folder / "gone")}))
    with pytest.raises(UserError, match=f"needs step 0 of {folder / 'gone'}, which cannot be read: restore it"):
        train(narrow(teacher, text, cache), str(part))


def test_a_teacher_that_is_not_there_or_of_other_ids_is_refused(teacher, text, cache, tmp_path):
    gone = experiment_of(text, cache, 2, Distillation(str(tmp_path / "gone")))
    with pytest.raises(UserError, match="config.distill.teacher: .*gone"):
        train(gone, str(tmp_path / "run"))
    other = experiment_of(text, cache, 2, Distillation(str(teacher)))
    other.tokenizer = dataclasses.replace(other.tokenizer, vocab_size=300)
    with pytest.raises(UserError, match="has another tokenizer .400 ids, here 300.*set config.tokenizer="):
        train(other, str(tmp_path / "run"))


def test_a_plan_and_a_run_count_the_teacher_s_memory_and_its_forward(student, teacher, text, cache):
    experiment = narrow(teacher, text, cache)
    alone = dataclasses.replace(experiment, distill=None)
    sizes = dict.fromkeys(AXES, 1)
    planned, plain = estimate(experiment, sizes), estimate(alone, sizes)
    numbers = sum(x.size for x in jax.tree.leaves(pretrainax.load(str(teacher)).params))
    assert planned.frozen == 4 * numbers and plain.frozen == 0
    assert planned.parameters == plain.parameters + 2 * 4 * 16 * 32  # the projections
    with open_run(experiment) as run:
        lengths = run.work.lengths
        step = experiment.train.global_batch_size, lengths.inputs, lengths.targets
        own, theirs = (flops_per_step(model, *step) for model in (experiment.model, run.model.teacher_config))
        assert run.work.flops_per_step == pytest.approx(own + theirs / 3)
        assert run.parameters == plain.parameters / 4
        assert "width 32; 1,024 parameters map states to this width" in dict(describe(run))["teacher"]


def test_attention_runs_by_the_kernel_that_holds_its_logits_where_they_are_compared(teacher, text, cache):
    for weight, kernel in ((1.0, "xla"), (0.0, "auto")):
        experiment = experiment_of(text, cache, 2, Distillation(str(teacher), attention=weight))
        model = trained_model(experiment, resolve_auto(experiment.train), teacher_of(experiment))
        assert model.compute.attention == model.teacher.compute.attention == kernel


def test_a_student_is_validated_without_its_teacher(student, teacher, text, cache):
    with open_run(dataclasses.replace(narrow(teacher, text, cache), distill=None)) as run:
        params = load_plain(find_origin(str(student)).steps, run.abstract_state.params)
        found = run.validate(params)
    assert found["loss"] == lines(student, "valid")[-1]["loss"]


@pytest.mark.slow
def test_a_loss_of_a_user_stands_beside_the_teacher(teacher, text, cache, tmp_path):
    def own_loss(outputs, batch):
        return {"own_loss": (jnp.float32(3.0), jnp.float32(2.0))}

    with without_finish():
        assert train(narrow(teacher, text, cache), str(tmp_path), start=CustomStart(own_loss)) == 0
    first = lines(tmp_path, "train")[0]
    assert first["own_loss"] == 1.5 and first["distillation_loss"] > 0


# --- the layers of the initial student -------------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "chosen", "layers"), (("run", "evenly", [0, 2]), ("huggingface", (3, 1), [3, 1])))
def test_a_student_starts_with_the_layers_that_are_chosen(kind, chosen, layers, teacher, text, cache, folder, tmp_path):
    if kind == "huggingface":
        start = folder / "teacher-exported"
        directories.export_workdir(str(teacher), str(start))
    else:
        start = teacher
    whole = pretrainax.load(str(start)).parameters
    experiment = experiment_of(text, cache, 2, DistilBERT(str(start)), steps=1)
    experiment.tokenizer = PretrainedTokenizer(path=str(teacher / "tokenizer"))
    experiment.checkpoint.init_from = str(start)
    experiment.checkpoint.adapt = (Layers(chosen),)
    said = dict(TrainedStart().describe(experiment, str(tmp_path)))
    assert said["adapted"].endswith(f": layers {layers[0]}, {layers[1]} of the 4 of the encoder")
    with open_run(experiment) as run:
        state, _ = restore_or_init(run, Checkpoints(str(tmp_path / "checkpoints"), 1))
        first = flat(run.plain(state.params)[1])
        taught = flat(run.frozen[TEACHER])
    for path, x in whole.items():
        wanted = x[np.array(layers)] if "/blocks/" in path else x
        np.testing.assert_array_equal(first[path], wanted, err_msg=path)
        np.testing.assert_array_equal(taught[path], x, err_msg=path)
    assert first.keys() == whole.keys()


def test_layers_that_are_not_there_are_refused(teacher, text, cache):
    origin, model = find_origin(str(teacher)), experiment_of(text, cache, 3).model
    with pytest.raises(UserError, match="neither of 3 layers of config.model and the 4 of the encoder there divides"):
        adapted_start(origin, model, (Layers(),), fresh_heads=False)
    for layers in ((0, 1), (0, 1, 4)):
        with pytest.raises(UserError, match="layers must be 3 numbers from 0 to 3, one for each layer"):
            adapted_start(origin, model, (Layers(layers),), fresh_heads=False)


# --- a task ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_is_learnt_from_a_teacher_of_the_same_labels(teacher, cache, tmp_path):
    records = [{"text": "aus le ten " * (1 + i % 3), "label": i % 2} for i in range(24)]
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def fine_tuning(start):
        e = read_config_file("finetune:classification", str(start))
        e.data.source = JsonLines(path=str(tmp_path / "train.jsonl"), valid_path=str(tmp_path / "valid.jsonl"))
        e.data.cache_dir, e.data.prepare_workers, e.data.sequence_length = str(cache), 1, 16
        e.objective = Classification(text_field="text", labels=("0", "1"))
        e.train.steps, e.train.global_batch_size, e.schedule.warmup_steps, e.train.log_every = 2, 8, 1, 1
        e.objective.complete(e)
        return e

    experiment = fine_tuning(teacher)
    untrained(experiment, tmp_path / "tuned", load_tokenizer(str(teacher / "tokenizer")))
    with without_finish():
        experiment.model.num_layers, experiment.checkpoint.adapt = 2, (Layers(),)
        experiment.distill = Distillation(str(tmp_path / "tuned"), hidden=1.0, attention=1.0)
        assert train(experiment, str(tmp_path / "student")) == 0
    line = lines(tmp_path / "student", "train")[-1]
    assert {"soft_loss", "hidden_loss", "attention_loss", "distillation_loss", "loss", "labels"} <= line.keys()
    experiment.objective = dataclasses.replace(experiment.objective, labels=("1", "0"))
    with pytest.raises(UserError, match="has the labels .'0', '1'., config.objective.labels is .'1', '0'.: set it"):
        TrainedStart().describe(experiment, str(tmp_path / "other"))
