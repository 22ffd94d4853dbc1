"""Tests that each tracker has a complete run after a resume and a rollback, by its own reader, without secrets."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pretrainax.data.sources import TextFiles
from pretrainax.runs import final_report, samples
from pretrainax.runs.train import train
from pretrainax.trackers import MLflow, TensorBoard, TrackedRun, Trackers, WandB
from pretrainax.trackers.progress import Progress
from tests.support import tiny
from tests.support.runs import ENV, ROOT, lines
from tests.training.test_loss_spikes import plant, rare, settings

pytestmark = pytest.mark.slow

SECRET = "hunter2hunter2hunter2hunter2hunter2hunter2"
OF_EXTRAS = {"wandb": WandB(mode="offline"), "mlflow": MLflow()}


def tracked(text, cache, steps: int):
    """Makes the config of a run in which the batches of steps 13 to 15 cause a spike and a rollback to step 8."""
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.mesh.data = 8
    experiment.train = settings(
        steps=steps, global_batch_size=8, log_every=2, spike_window=8, spike_steps=2, rollback_steps=3, rollback_skip=6
    )
    experiment.evaluate.every, experiment.evaluate.batches = 6, 1
    experiment.evaluate.prompts = (f"see https://me:{SECRET}@host",)
    experiment.checkpoint.every, experiment.checkpoint.keep = 2, 3
    there = [tracker for name, tracker in OF_EXTRAS.items() if importlib.util.find_spec(name) is not None]
    experiment.trackers = (TensorBoard(), *there)
    return experiment


@pytest.fixture(scope="module")
def workdir(text, cache, tmp_path_factory) -> pathlib.Path:
    """Trains 8 steps, resumes from step 6, which logs step 8 again, rolls back from 14 to 8, and ends at step 20."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
            patch.setenv(name, SECRET)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(final_report, "draw_curves", lambda *_: None)
        patch.setattr(samples, "show_samples", lambda run, params, say, *_: say(f"see https://me:{SECRET}@host ⟶ x"))
        plant(patch, (12, 13, 14), rare)
        assert train(tracked(text, cache, 8), str(folder)) == 0
        shutil.rmtree(folder / "checkpoints" / "8")
        assert train(tracked(text, cache, 20), str(folder), extend=True) == 0
    return folder


LOGGED = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]


def test_metrics_jsonl_has_each_step_once(workdir):
    assert [line["step"] for line in lines(workdir, "train")] == LOGGED


def test_tensorboard_has_each_step_once_as_metrics_jsonl_has_it(workdir):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for split in ("train", "valid"):  # Both have the same tag, and therefore one chart.
        events = accumulator.EventAccumulator(str(workdir / "events" / split)).Reload()
        found = [(event.step, np.float32(event.value)) for event in events.Scalars("loss")]
        assert found == [(line["step"], np.float32(line["loss"])) for line in lines(workdir, split)]


def test_tensorboard_has_config_samples_and_hyperparameters(workdir):
    # TensorBoard's pages read the events with this class.
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    texts = accumulator.EventAccumulator(str(workdir / "events")).Reload()
    (config,) = texts.Tensors("config/text_summary")
    (samples,) = texts.Tensors("samples/text_summary")
    assert b"| optimizer.type | `AdamW` |" in config.tensor_proto.string_val[0]
    assert (samples.step, samples.tensor_proto.string_val[0].decode()) == (20, "see https://***@host ⟶ x")
    final = accumulator.EventAccumulator(str(workdir / "events" / "hparams")).Reload()
    assert "hparams" in final.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name
    (loss,) = final.Tensors("final/loss")
    assert (loss.step, loss.tensor_proto.float_val[0]) == (20, np.float32(lines(workdir, "valid")[-1]["loss"]))


def wandb_runs(workdir) -> dict[str, list[dict]]:
    """Returns the history of each run, from the files of all starts, with the reader of the W&B client."""
    pytest.importorskip("wandb")
    found: dict[str, list[dict]] = {}
    reader = "import sys; from wandb.cli.cli import cli; cli(['leet', 'inspect', '--json', sys.argv[1]])"
    for folder in sorted((workdir / "wandb").glob("offline-run-*")):
        run = folder.name.split("-", 3)[3]
        done = subprocess.run([sys.executable, "-c", reader, str(folder)], capture_output=True, text=True, check=True)
        records = map(json.loads, done.stdout.splitlines())
        found.setdefault(run, []).extend(r["history"]["item"] for r in records if r["type"] == "history")
    return found


def test_wandb_offline_goes_on_in_one_run_without_a_step_twice_and_after_a_rollback_in_a_marked_one(workdir):
    remembered = Progress.load(str(workdir), "WandB")
    runs = wandb_runs(workdir)
    assert list(runs) == [remembered.first, f"{remembered.first}-1"] and remembered.run == f"{remembered.first}-1"
    trained = [[row for row in rows if "train/loss" in row] for rows in runs.values()]
    before, after = ([(row["_step"], row["train/loss"]) for row in rows] for rows in trained)
    assert [step for step, _ in before] == [2, 4, 6, 8, 10, 12]
    assert after == [(line["step"], line["loss"]) for line in lines(workdir, "train") if line["step"] > 8]
    assert [row["_step"] for row in runs[remembered.run] if "valid/loss" in row] == [12, 18, 20]


def test_mlflow_goes_on_in_one_run_without_a_step_twice_and_after_a_rollback_in_one_below(workdir):
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    remembered = Progress.load(str(workdir), "MLflow")
    first, last = map(client.get_run, (remembered.first, remembered.run))
    history = client.get_metric_history(first.info.run_id, "train/loss")
    assert [point.step for point in history] == [2, 4, 6, 8, 10, 12]
    assert first.data.tags["pretrainax.counts_until_step"] == "8" and first.info.status == "KILLED"
    after = [(point.step, point.value) for point in client.get_metric_history(last.info.run_id, "train/loss")]
    assert after == [(line["step"], line["loss"]) for line in lines(workdir, "train") if line["step"] > 8]
    assert last.data.tags["mlflow.parentRunId"] == first.info.run_id and last.info.status == "FINISHED"
    assert last.data.params["optimizer.type"] == "AdamW" and "final/loss" in last.data.metrics
    assert {file.path for file in client.list_artifacts(last.info.run_id)} == {"config.md", "samples"}


def test_nothing_secret_is_in_what_trackers_write(workdir):
    written = [path for name in ("events", "trackers", "wandb", "mlflow") for path in (workdir / name).rglob("*")]
    files = [path for path in (*written, workdir / "mlflow.db") if path.is_file()]
    assert files and [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []


# --- unreachable servers ---------------------------------------------------------------------------------------------


def said_of(tracker, workdir) -> str:
    said = []
    trackers = Trackers([tracker], TrackedRun(str(workdir)), said.append)
    trackers.log_metrics(1, "train", {"loss": 1.0})
    trackers.close()
    (line,) = said
    assert line.startswith(f"tracker {type(tracker).__name__} is disabled: ") and "\n" not in line
    return line


ONLINE = """
import sys
from tests.trackers.test_tracked_runs import WandB, said_of
print(said_of(WandB(mode="online"), sys.argv[1]))
"""


def online(folder, **more: str) -> str:
    """Returns the messages about W&B, from a separate process, because the client caches keys."""
    pytest.importorskip("wandb")
    env = {name: value for name, value in ENV.items() if name != "WANDB_API_KEY"} | {"HOME": str(folder)} | more
    args = [sys.executable, "-c", ONLINE, str(folder)]
    return subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_wandb_without_a_key_is_a_line(tmp_path):
    assert "UserError: no W&B key found: run `wandb login`, set WANDB_API_KEY" in online(tmp_path)


@pytest.mark.slow
def test_wandb_without_a_network_is_a_line(tmp_path):
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "3", "WANDB_API_KEY": SECRET}
    said = online(tmp_path, **nowhere)
    assert "127.0.0.1:9" in said and SECRET not in said


def test_mlflow_without_its_server_is_a_line(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "127.0.0.1" in said_of(MLflow(tracking_uri="http://127.0.0.1:9"), tmp_path)


def test_a_full_disk_under_the_event_files_is_a_line(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "OSError: [Errno 28] No space left on device" in said_of(TensorBoard(), tmp_path)


def test_a_damaged_memory_of_a_tracker_is_a_line(tmp_path):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "MLflow.json").write_text("{")
    pytest.importorskip("mlflow")
    assert "MLflow.json is not a JSON file" in said_of(MLflow(), tmp_path)


def test_wandb_online_rewinds_where_the_server_may_and_else_begins_another_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    opened, refuses = [], False

    class Here:
        url, config = "https://there", {}

        def __init__(self, **given):
            if refuses and "resume_from" in given:
                raise wandb.errors.CommError("rewind is not enabled")
            opened.append({name: given[name] for name in ("id", "resume", "resume_from") if name in given})
            self.id, self.summary = given["id"], {}

        def log(self, values, step): ...
        def finish(self, exit_code=0): ...

    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", Here)
    writer = WandB(mode="online").open(TrackedRun(str(tmp_path)))
    writer.write_metrics(12, "train", {"loss": 1.0})
    writer.rewind(8)
    first = opened[0]["id"]
    assert opened == [{"id": first, "resume": "allow"}, {"id": first, "resume_from": f"{first}?_step=8"}]
    refuses = True
    writer.rewind(6)
    assert opened[2] == {"id": f"{first}-2", "resume": "allow"}
    assert Here.config["rollback"]["not_rewound_as"] == "CommError: rewind is not enabled"


# --- without trackers ------------------------------------------------------------------------------------------------

PLAIN = """
import sys
import pretrainax
assert not [name for name in sys.modules if name.startswith("pretrainax.")]
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from tests.support import tiny
experiment = tiny.get_config("gpt")
experiment.data.source, experiment.data.cache_dir = TextFiles(path=sys.argv[1]), sys.argv[2]
experiment.train.steps, experiment.evaluate.batches, experiment.schedule.warmup_steps = 1, 1, 1
assert train(experiment, sys.argv[3]) == 0
print(sorted({"wandb", "mlflow", "sqlalchemy", "tensorboard", "torch"} & set(sys.modules)))
"""


def test_a_plain_run_imports_no_tracker_but_tensorboardx(text, cache, tmp_path):
    args = [sys.executable, "-c", PLAIN, str(text), str(cache), str(tmp_path / "run")]
    done = subprocess.run(args, cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert list((tmp_path / "run" / "events" / "train").iterdir())
