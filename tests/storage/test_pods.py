"""Runs of several processes without a shared disk, in a bucket: after kills and resumes, they equal a normal run."""

import hashlib
import random
import time

import pytest

from pretrainax.storage.store import Store
from tests.support import fake_gcs, moto_s3, runs
from tests.support.pod import Pod, lines, whole_steps

STORES = ["gs", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(params=STORES)
def pod(request, tmp_path, monkeypatch):
    """Serves a bucket with text to this process and to the processes of a pod."""
    scheme = request.param
    if scheme == "gs":
        environment = fake_gcs.environment(request.getfixturevalue("gcs").url)
    else:
        environment = moto_s3.environment(request.getfixturevalue("s3"))
    for name, value in environment.items():
        monkeypatch.setitem(runs.ENV, name, value)
    folder = f"{scheme}://bucket/{tmp_path.name}"  # several tests share the server of S3
    for file in runs.write_text(tmp_path / "text").iterdir():
        Store(f"{folder}/text").put(str(file), file.name)
    pod = Pod(tmp_path, folder)
    yield pod
    for process in pod.processes:
        process.kill()
        process.wait()


def check_manifests(workdir):
    """Asserts that the files of each checkpoint in the bucket are exactly the files in its manifest."""
    store = Store(workdir)
    for step in whole_steps(workdir):
        folder = f"checkpoints/{step}"
        sums = dict(line.split("  ")[::-1] for line in store.read(f"{folder}/manifest.sha256").decode().splitlines())
        there = {name.removeprefix(f"{folder}/") for name in store.objects(folder)}
        assert there == {*sums, "manifest.sha256"}
        for name, digest in sums.items():
            assert hashlib.sha256(store.read(f"{folder}/{name}")).hexdigest() == digest


def kill_and_resume(pod, killed, wiped, run, whole):
    """Kills processes after the second checkpoint, optionally wipes a disk, and resumes the run until its end."""
    pod.await_checkpoints(run, 2)
    time.sleep(random.uniform(0, 1))
    pod.kill(*killed)
    if wiped is not None:
        pod.wipe(wiped)
    pod.start(run)
    pod.finish()
    assert "resumed at step" in pod.said(), pod.said()
    check_manifests(run)
    assert lines(run) == lines(whole)


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_goes_on_and_ends_as_one_that_is_not(pod):
    pod.start(whole := pod.run("whole"), run := pod.run("a"))  # one after the other
    kill_and_resume(pod, (0, 1), 1, run, whole)


@pytest.mark.slow
def test_whichever_process_is_killed_and_whichever_disk_is_lost(pod):
    pod.start(whole := pod.run("whole"))
    pod.finish()
    for killed in [(0, 1), (0,), (1,)]:
        for wiped in (None, 0, 1):
            pod.start(run := pod.run(f"{killed}-{wiped}"))
            kill_and_resume(pod, killed, wiped, run, whole)


@pytest.mark.slow
def test_another_number_of_processes_or_devices_goes_on(pod):
    """Changes from two processes to four, to one, and back to two."""
    pod.start(run := pod.run("a"), count=2, fsdp=4)
    pod.finish()
    for steps, count, fsdp in [(14, 4, 4), (16, 1, 2), (18, 2, 2)]:
        pod.start(run, count=count, fsdp=fsdp, steps=steps)
        pod.finish()
        assert f"resumed at step {steps - 2}" in pod.said()
        check_manifests(run)
