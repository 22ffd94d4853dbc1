"""Runs of several processes without a common disk, in a bucket: killed, resumed, and the same as one undisturbed."""

import hashlib
import random
import time

import pytest

from pretrainax.storage.store import Store
from tests.support import fake_gcs, runs
from tests.support.pod import Pod, lines, whole_steps

RUN, WHOLE, CACHE, TEXT = "gs://bucket/runs/a", "gs://bucket/runs/whole", "gs://bucket/cache", "gs://bucket/text/*.txt"


@pytest.fixture
def pod(gcs, tmp_path, monkeypatch):
    for name, value in fake_gcs.environment(gcs.url).items():
        monkeypatch.setitem(runs.ENV, name, value)
    for file in runs.write_text(tmp_path / "text").iterdir():
        Store("gs://bucket/text").put(str(file), file.name)
    pod = Pod(tmp_path, TEXT, CACHE)
    yield pod
    for process in pod.processes:
        process.kill()
        process.wait()


def check_manifests(workdir):
    """All that a checkpoint is made of is in the bucket as its manifest says, and nothing beside it."""
    store = Store(workdir)
    for step in whole_steps(workdir):
        folder = f"checkpoints/{step}"
        sums = dict(line.split("  ")[::-1] for line in store.read(f"{folder}/manifest.sha256").decode().splitlines())
        there = {name.removeprefix(f"{folder}/") for name in store.objects(folder)}
        assert there == {*sums, "manifest.sha256"}
        for name, digest in sums.items():
            assert hashlib.sha256(store.read(f"{folder}/{name}")).hexdigest() == digest


def kill_and_resume(pod, killed, wiped, run=RUN):
    """Kills processes once a second checkpoint is there, perhaps loses the disk of one, and goes on to the end."""
    pod.await_checkpoints(run, 2)
    time.sleep(random.uniform(0, 1))
    pod.kill(*killed)
    if wiped is not None:
        pod.wipe(wiped)
    pod.start(run)
    pod.finish()
    assert "resumed at step" in pod.said(), pod.said()
    check_manifests(run)
    assert lines(run) == lines(WHOLE)


def test_a_run_whose_processes_are_killed_goes_on_and_ends_as_one_that_is_not(pod):
    pod.start(WHOLE, RUN)  # one after the other
    kill_and_resume(pod, killed=(0, 1), wiped=1)


@pytest.mark.slow
def test_whichever_process_is_killed_and_whichever_disk_is_lost(pod):
    pod.start(WHOLE)
    pod.finish()
    for killed in [(0, 1), (0,), (1,)]:
        for wiped in (None, 0, 1):
            pod.start(run := f"{RUN}-{killed}-{wiped}")
            kill_and_resume(pod, killed, wiped, run)


@pytest.mark.slow
def test_another_number_of_processes_or_devices_goes_on(pod):
    pod.start(WHOLE, count=2, fsdp=4)
    pod.finish()
    for steps, count, fsdp in [(14, 4, 4), (16, 1, 2), (18, 2, 2)]:
        pod.start(WHOLE, count=count, fsdp=fsdp, steps=steps)
        pod.finish()
        assert f"resumed at step {steps - 2}" in pod.said()
        check_manifests(WHOLE)
