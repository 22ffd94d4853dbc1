"""Tests a run in phases: each phase trains as configured, and resuming across a boundary changes nothing."""

import contextlib
import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest

from pretrainax.config import Phase, UserError
from pretrainax.data.sources import TextFiles
from pretrainax.inference.load import load, load_origin
from pretrainax.interop.directories import export_workdir
from pretrainax.interop.origin import Origin
from pretrainax.runs.resume_check import LOSS_RTOL
from pretrainax.runs.row_recorder import row_digests
from pretrainax.runs.train import train
from pretrainax.training import train as core
from pretrainax.training.callbacks import Callback
from pretrainax.zoo.llama import llama
from tests.support import tiny
from tests.support.runs import arrays, lines, run, run_json, steps

pytestmark = pytest.mark.slow

FIRST = Phase(share=0.5, sequence_length=16, global_batch_size=16, theta=1000.0, learning_rate=1e-3)


@pytest.fixture(scope="module")
def experiment(text, cache):
    """Makes 6 steps of a small LLaMA: 3 of 16 short rows with another rotary base, 3 of 8 rows with dropout."""
    experiment = tiny.get_config("gpt")
    sizes = {"vocab_size": 512, "num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_kv_heads": 2}
    experiment.model = dataclasses.replace(llama("3_8b"), **sizes)
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.mesh.data, experiment.train.on_spike, experiment.train.spike_deviations = 8, "stop", 1e6
    experiment.train.steps, experiment.train.log_every, experiment.schedule.warmup_steps = 6, 2, 1
    experiment.evaluate.every, experiment.evaluate.batches, experiment.checkpoint.every = 4, 1, 100
    experiment.checkpoint.keep, experiment.checkpoint.keep_at = 1, (0, 2, 3, 4)
    experiment.phases = (FIRST, Phase(dropout_rate=0.1))
    return experiment


class Digests(Callback):
    """A callback that stores digests of the rows of each batch."""

    def __init__(self):
        self.of_steps = {}

    def on_batch(self, step, batch):
        self.of_steps[step] = row_digests(batch)


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    """Trains a run without interruption; returns its folder and its batches."""
    workdir, seen = tmp_path_factory.mktemp("whole") / "run", Digests()
    assert train(experiment, str(workdir), callbacks=[seen]) == 0
    return workdir, seen.of_steps


@pytest.fixture
def quick(monkeypatch):
    """Skips the tables, the plot and the samples at the end of a run."""
    monkeypatch.setattr(core, "finish", lambda *_: None)


# --- training --------------------------------------------------------------------------------------------------------


def test_lines_say_their_phase_each_of_which_ends_with_one(whole):
    workdir, batches = whole
    assert [(x["step"], x["phase"]) for x in lines(workdir, "train")] == [(2, 1), (3, 1), (4, 2), (6, 2)]
    assert [(x["step"], x["phase"]) for x in lines(workdir, "valid")] == [(3, 1), (4, 2), (6, 2)]
    assert {step: len(rows) for step, rows in batches.items()} == dict(enumerate([16] * 3 + [8] * 3, 1))


def test_the_rate_is_that_of_the_phase_on_the_schedule_of_the_run(experiment, whole):
    rate = experiment.schedule.build(1.0, 6)
    peaks = {2: 1e-3, 3: 1e-3, 4: 3e-3, 6: 3e-3}
    for line in lines(whole[0], "train"):
        assert line["learning_rate"] == pytest.approx(peaks[line["step"]] * float(rate(line["step"] - 1)))


def test_what_is_validated_is_the_same_in_each_phase(whole):
    assert {line["loss_tokens"] for line in lines(whole[0], "valid")} == {8 * 32}


def test_a_run_of_the_first_phase_alone_is_as_far_the_same_bit_for_bit(experiment, whole, quick, tmp_path):
    alone = dataclasses.replace(experiment, phases=())
    alone.data = dataclasses.replace(experiment.data, sequence_length=16)
    alone.train = dataclasses.replace(experiment.train, global_batch_size=16)
    alone.optimizer = dataclasses.replace(experiment.optimizer, learning_rate=1e-3)
    alone.model = dataclasses.replace(experiment.model)
    alone.model.position = dataclasses.replace(experiment.model.position, theta=1000.0)
    seen = Digests()
    assert train(alone, str(tmp_path), callbacks=[seen]) == 0
    assert [seen.of_steps[step] for step in (1, 2, 3)] == [whole[1][step] for step in (1, 2, 3)]
    trained = [x for x in lines(tmp_path, "train") if x["step"] == 2]
    (expected,) = [x for x in lines(whole[0], "train") if x["step"] == 2]
    assert [x | {"phase": 1} for x in trained] == [expected]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_kept_at_the_steps_asked_for_beside_the_newest_and_the_best(whole):
    best = min(lines(whole[0], "valid"), key=lambda line: line["loss"])["step"]
    assert steps(whole[0]) == sorted({0, 2, 3, 4, best, 6})


def test_run_json_names_the_phase_and_spikes_are_judged_by_the_losses_of_one(whole):
    found = {}
    for step in (2, 4, 6):
        extra = json.loads((whole[0] / "checkpoints" / str(step) / "run.json").read_text())["extra"]
        found[step] = extra["phase"], len(extra["recent"])
    assert found == {2: (1, 2), 4: (2, 1), 6: (2, 3)}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 1, "fsdp": 8}], ids=["the same mesh", "another mesh"])
def test_a_resumption_across_the_boundary_is_bit_exact(experiment, whole, quick, mesh, tmp_path):
    """Another mesh has the same batches bit for bit, but adds over devices in another order."""
    (workdir, batches), kept = whole, 2  # steps of 3 before the boundary
    for step in range(kept + 1):
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(workdir / "checkpoints" / str(step), tmp_path / "checkpoints" / str(step))
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(workdir / name, tmp_path / name)
    shutil.copytree(workdir / "tokenizer", tmp_path / "tokenizer")
    resumed, seen = dataclasses.replace(experiment, mesh=dataclasses.replace(experiment.mesh, **mesh)), Digests()
    assert train(resumed, str(tmp_path), callbacks=[seen]) == 0
    assert seen.of_steps == {step: rows for step, rows in batches.items() if step > kept}
    losses = [[line["loss"] for line in lines(folder)] for folder in (workdir, tmp_path)]
    np.testing.assert_allclose(*losses, rtol=LOSS_RTOL)
    if mesh == {"data": 8}:
        expected, got = arrays(workdir), arrays(tmp_path)
        assert expected.keys() == got.keys() and run_json(tmp_path) == run_json(workdir)
        assert lines(tmp_path) == lines(workdir)
        for path in expected:
            np.testing.assert_array_equal(got[path], expected[path], err_msg=path)


def test_a_checkpoint_is_loaded_and_exported_as_its_phase_trained_it(whole, tmp_path):
    workdir = str(whole[0])
    models = {step: load(f"{workdir}@{step}").experiment for step in (2, 4)}
    assert [models[step].model.position.theta for step in (2, 4)] == [1000.0, 500_000.0]
    assert [models[step].data.sequence_length for step in (2, 4)] == [16, 32]
    for step, theta in ((2, 1000.0), (None, 500_000.0)):
        checkpoints = () if step is None else (f"{workdir}/checkpoints/{step}",)
        export_workdir(workdir, str(tmp_path / f"{step}"), checkpoints)
        written = json.loads((tmp_path / f"{step}" / "config.json").read_text())
        assert theta in (written.get("rope_theta"), written.get("rope_parameters", {}).get("rope_theta"))
    both = tuple(f"{workdir}/checkpoints/{step}" for step in (2, 4))
    with pytest.raises(UserError, match="are from phases with different positions .* cannot be averaged"):
        load_origin(Origin(workdir, both, "their mean"))


def test_each_checkpoint_that_is_kept_is_evaluated_as_its_phase_was(whole, tmp_path):
    command = [sys.executable, "-m", "pretrainax.evaluate", f"--from={whole[0]}", "--every-checkpoint"]
    done = run([*command, "--config.mesh.data=1", f"--output={tmp_path}/all.json"])
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "all.json").read_text())
    found = {result["step"]: result["value"] for result in results if result["measure"] == "loss"}
    assert sorted(found) == steps(whole[0])
    for line in lines(whole[0], "valid"):
        assert found[line["step"]] == pytest.approx(line["loss"], rel=1e-5)
