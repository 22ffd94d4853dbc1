"""Tests local mirrors of remote folders: fetched files, sent files, their order, and the lease."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from pretrainax.config import RunFailed
from pretrainax.storage import lease, mirror, places, run_objects
from pretrainax.storage.lease import Lease
from pretrainax.storage.store import Store
from tests.support.tiers import few


def write(root, files):
    for name, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
        with open(os.path.join(root, name), "w") as f:
            f.write(content)


def checkpoint(step):
    files = {f"checkpoints/{step}/params/d/a": f"array {step}", f"checkpoints/{step}/run.json": "{}"}
    return files | {f"checkpoints/{step}/manifest.sha256": f"of {step}"}


def names(url):
    return [name for name in Store(url).objects() if not name.startswith(run_objects.LEASES)]


def another_machine(tmp_path, monkeypatch):
    """Makes this machine forget its local copies and its state."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{random.random()}"))
    monkeypatch.setattr(places, "_mirrors", {})


def test_a_folder_of_this_machine_is_itself():
    with (
        places.working_copy("runs/a") as folder,
        places.uploaded_output("b/c") as output,
        places.lazy_folder("~/d") as cache,
    ):
        assert (folder, output, cache, places.local_path("e@best")) == ("runs/a", "b/c", "~/d", "e@best")


@pytest.mark.first(1)
def test_what_a_run_writes_is_there_at_its_end(url, monkeypatch, tmp_path):
    with places.working_copy(url) as folder:
        write(folder, {"config.json": "{}", **checkpoint(10)})
    assert names(url) == sorted(["config.json", *checkpoint(10)])
    another_machine(tmp_path, monkeypatch)
    with places.working_copy(url) as folder:
        assert os.path.exists(os.path.join(folder, "checkpoints/10/run.json"))
        assert not os.path.exists(os.path.join(folder, "checkpoints/10/params"))  # arrays are fetched on request
        places.complete(os.path.join(folder, "checkpoints/10"))
        assert open(os.path.join(folder, "checkpoints/10/params/d/a")).read() == "array 10"


@pytest.mark.first(2)
def test_other_processes_begin_with_what_the_first_has_done(url):
    """The other processes see the files at once, not only after the sender's next scan."""
    with places.working_copy(url) as first, places.working_copy(url, process=1) as second:
        with places.process_zero_first(first):
            write(first, {"tokenizer.json": "{}"})
        assert "tokenizer.json" in names(url)
        with places.process_zero_first(second):
            assert os.listdir(second) == ["tokenizer.json"]
    with places.process_zero_first("runs/of this machine"):
        pass


def test_ranges_of_an_object_that_is_gone_name_it(url, tmp_path, monkeypatch):
    with places.working_copy(url) as folder:
        write(folder, {"corpora/a.bin": "abcdef"})
    another_machine(tmp_path, monkeypatch)
    with places.lazy_folder(url) as folder:
        path, cached = os.path.join(folder, "corpora/a.bin"), places.mirror_of(folder)
        assert cached.read_ranges([(path, 1, 3), (path, 4, 6)]) == [b"bc", b"ef"]
        Store(url).delete(["corpora/a.bin"])
        with pytest.raises(mirror.ObjectDeleted, match=r"one of corpora/a.bin to corpora/a.bin is no longer in "):
            cached.read_ranges([(path, 1, 3)])


def test_what_is_on_its_way_is_not_sent(url):
    with places.working_copy(url) as folder:
        write(
            folder,
            {"checkpoints/5.saving/params/a": "", "checkpoints/5.saving.json": "", "run.lock": "", "a.tmp-h-1": ""},
        )
    assert names(url) == []


def test_a_checkpoint_that_is_deleted_is_deleted_there_also_where_its_arrays_never_came(url, monkeypatch, tmp_path):
    with places.working_copy(url) as folder:
        write(folder, checkpoint(10) | checkpoint(20))
    another_machine(tmp_path, monkeypatch)
    with places.working_copy(url) as folder:
        shutil.rmtree(os.path.join(folder, "checkpoints/10"))
    assert names(url) == sorted(checkpoint(20))


def test_what_vouches_for_others_goes_last_and_is_taken_away_first(url, monkeypatch):
    with places.working_copy(url) as folder:
        write(folder, checkpoint(10) | {"config.json": "{}"})
    order = []
    monkeypatch.setattr(Store, "put", lambda self, path, name: order.append(("put", name)))
    monkeypatch.setattr(Store, "delete", lambda self, names: order.extend(("delete", name) for name in names))
    monkeypatch.setattr(Store, "stamp", lambda self, name: mirror.Stamp(1, str(len(order))))
    write(folder, {name: content + " anew" for name, content in checkpoint(10).items()} | checkpoint(20))
    places._mirrors[folder].push()
    last = "checkpoints/10/manifest.sha256"
    arrays = [i for i, (_, name) in enumerate(order) if not name.endswith("manifest.sha256")]
    assert order.index(("delete", last)) < min(arrays) and max(arrays) < order.index(("put", last))
    assert max(arrays) < order.index(("put", "checkpoints/20/manifest.sha256"))


def test_metrics_are_sent_in_parts_of_which_only_the_new_ones_go(url, monkeypatch, tmp_path):
    monkeypatch.setattr(mirror, "PART", 100)
    lines = "".join(f'{{"step": {i}}}\n' for i in range(50))
    with places.working_copy(url) as folder:
        write(folder, {"metrics.jsonl": lines})
        places._mirrors[folder].push()
        written = []
        original = Store.write
        monkeypatch.setattr(Store, "write", lambda s, name, content: (written.append(name), original(s, name, content)))
        write(folder, {"metrics.jsonl": lines + '{"step": 50}\n'})
        places._mirrors[folder].push()
        assert [name for name in written if "metrics" in name] == [f"metrics.jsonl.{len(lines) // 100:05d}"]
    another_machine(tmp_path, monkeypatch)
    assert open(os.path.join(places.local_path(url), "metrics.jsonl")).read() == lines + '{"step": 50}\n'


def test_metrics_that_were_cut_are_shorter_there_too(url, monkeypatch, tmp_path):
    monkeypatch.setattr(mirror, "PART", 100)
    with places.working_copy(url) as folder:
        write(folder, {"metrics.jsonl": "x" * 950})
        places._mirrors[folder].push()
        write(folder, {"metrics.jsonl": "x" * 120})
    another_machine(tmp_path, monkeypatch)
    assert open(os.path.join(places.local_path(url), "metrics.jsonl")).read() == "x" * 120


def test_the_machine_that_was_last_at_work_goes_on_with_what_it_had_not_sent(url, monkeypatch):
    with places.working_copy(url) as folder:
        write(folder, {"metrics.jsonl": "1\n"})
    write(folder, {"metrics.jsonl": "1\n2\n", **checkpoint(10)})  # as after a kill before the sender could send them
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url) as folder:
        assert open(os.path.join(folder, "metrics.jsonl")).read() == "1\n2\n"
    assert sorted(checkpoint(10))[0] in names(url)


@pytest.mark.first(2)
def test_what_another_machine_has_overtaken_is_put_aside(url, monkeypatch, tmp_path, capsys):
    first = os.environ["XDG_CACHE_HOME"]
    with places.working_copy(url) as folder:
        write(folder, {"metrics.jsonl": "1\n"})
    write(folder, {"metrics.jsonl": "1\nnot sent\n"})
    another_machine(tmp_path, monkeypatch)
    with places.working_copy(url) as other:
        write(other, {"metrics.jsonl": "1\n2\n3\n"})
    monkeypatch.setenv("XDG_CACHE_HOME", first)
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url) as folder:
        assert open(os.path.join(folder, "metrics.jsonl")).read() == "1\n2\n3\n"
    said = capsys.readouterr().err
    aside = said.split("files that were not sent are now in ")[1].split("\n")[0]
    assert open(os.path.join(aside, "metrics.jsonl")).read() == "1\nnot sent\n"


def test_a_reader_sees_what_is_there_now(url):
    store = Store(url)
    store.write("a/b", b"1")
    assert open(os.path.join(places.local_path(url), "a/b")).read() == "1"
    store.write("a/b", b"22")
    store.write("c", b"3")
    store.delete(["x"])
    assert open(os.path.join(places.local_path(url), "a/b")).read() == "22"
    store.delete(["c"])
    assert os.listdir(places.local_path(url)) == ["a"]


def test_a_url_may_be_of_an_object_a_checkpoint_of_a_run_or_several_objects(url):
    store = Store(url)
    for name in ("text/a.txt", "text/b.txt", "text/c.bin"):
        store.write(name, name.encode())
    assert open(places.local_path(f"{url}/text/a.txt")).read() == "text/a.txt"
    assert places.local_path(f"{url}@best").endswith("@best") and os.path.isdir(
        places.local_path(f"{url}@best")[: -len("@best")]
    )


def test_of_a_pattern_what_matches_comes(url):
    store = Store(url)
    for name in ("text/a.txt", "text/b.txt", "text/c.bin"):
        store.write(name, name.encode())
    pattern = places.local_path(f"{url}/text/*.txt")
    assert sorted(os.listdir(os.path.dirname(pattern))) == ["a.txt", "b.txt"] and pattern.endswith("*.txt")


def test_a_file_and_a_folder_that_a_command_writes_are_sent(url):
    with places.uploaded_output(f"{url}/out/results.json") as path:
        write(os.path.dirname(path), {"results.json": "{}"})
    with places.uploaded_output(f"{url}/export") as path:
        write(path, {"config.json": "{}", "model.safetensors": "x"})
    assert names(url) == ["export/config.json", "export/model.safetensors", "out/results.json"]


def test_what_fails_sends_nothing(url):
    with pytest.raises(ZeroDivisionError), places.uploaded_output(f"{url}/export") as path:
        write(path, {"config.json": "{}"})
        _ = 1 / 0
    assert names(url) == []


@pytest.mark.first(2)
def test_what_a_machine_that_was_lost_had_sent_of_a_checkpoint_is_deleted(url, monkeypatch, tmp_path):
    with places.working_copy(url) as folder:
        write(folder, checkpoint(10))
    store = Store(url)
    store.write("checkpoints/20/params/d/b", b"array")  # the machine has not sent the manifest
    store.write("checkpoints/20/run.json", b"{}")
    another_machine(tmp_path, monkeypatch)
    with places.working_copy(url) as folder:
        assert os.listdir(os.path.join(folder, "checkpoints")) == ["10"]
        write(folder, checkpoint(20))
    assert names(url) == sorted(checkpoint(10) | checkpoint(20))


def test_what_a_command_had_made_when_it_was_killed_is_sent_by_the_next_one(url, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt  # equivalent to a kill, as far as files are concerned

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
        places.uploaded_output(f"{url}/export") as path,
    ):
        write(path, {"config.json": "{}", "model.safetensors": "x"})
        patch.setattr(mirror.Mirror, "push", killed)
    assert names(url) == []
    monkeypatch.setattr(places, "_mirrors", {})
    with places.uploaded_output(f"{url}/export"):
        assert names(url) == ["export/config.json", "export/model.safetensors"]


def test_what_a_command_had_half_made_when_it_was_killed_is_not_sent(url, monkeypatch):
    with pytest.raises(KeyboardInterrupt), places.uploaded_output(f"{url}/export") as path:
        write(path, {"model.safetensors": "half"})
        raise KeyboardInterrupt
    monkeypatch.setattr(places, "_mirrors", {})
    with places.uploaded_output(f"{url}/export") as path:
        assert not os.path.exists(os.path.join(path, "model.safetensors"))
        write(path, {"config.json": "{}"})
    assert names(url) == ["export/config.json"]


def test_people_are_told_of_what_is_in_a_twin_by_its_url(url):
    with places.working_copy(f"{url}/a") as a, places.working_copy(f"{url}/a-b") as b:
        told = places.with_urls(f"{a}/curves.png, {b}@best, {a}.html: see {a}, {a}2")
    assert told == f"{url}/a/curves.png, {url}/a-b@best, {url}/a.html: see {url}/a, {url}/a2"


def test_a_single_file_that_is_written_has_no_file_beside_it_here(url):
    Store(url).write("run/config.json", b"{}")
    with places.uploaded_output(f"{url}/run/evaluations/one.json") as path:
        write(os.path.dirname(path), {"one.json": "{}"})
    assert os.listdir(os.path.join(places.local_path(f"{url}/run"), "evaluations")) == ["one.json"]


def test_two_machines_do_not_work_at_the_same_time(url, monkeypatch, tmp_path):
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    with places.working_copy(url):
        another_machine(tmp_path, monkeypatch)
        with pytest.raises(RunFailed, match="is in use by process"), places.working_copy(url):
            pass


def test_two_processes_of_a_machine_do_not_work_at_the_same_time(url):
    with (
        places.working_copy(url),
        pytest.raises(RunFailed, match="by another process of this machine"),
        places.working_copy(url),
    ):
        pass


@pytest.mark.slow
def test_a_lease_of_a_machine_that_is_silent_is_taken(url, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_TIMEOUT", 0.3)
    first = Lease(Store(url), "first")
    assert first._try_acquire()
    with Lease(Store(url), "second") as second:
        assert second.previous == 1 and second.number == 2


@pytest.mark.first(2)
def test_of_many_that_take_a_silent_lease_one_gets_it(url, monkeypatch):
    import threading

    monkeypatch.setattr(lease, "LEASE_TIMEOUT", 0.2)
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    Lease(Store(url), "gone")._try_acquire()
    got, over = [], threading.Event()

    def start(i):
        try:
            with Lease(Store(url), str(i)):
                got.append(i)
                over.wait(3)
        except RunFailed:
            pass

    threads = [threading.Thread(target=start, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(2)
    over.set()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_holder_whose_lease_was_taken_ends_itself(url, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    first = Lease(Store(url), "first")
    first._try_acquire()
    first.store.create(first._object_name(2), b'{"host": "other", "process": 7}')
    first.check()
    assert ended == [1]


def test_a_store_that_refuses_keeps_no_run_from_its_end_and_says_where_its_files_are(gcs, capsys, monkeypatch):
    monkeypatch.setattr(places, "UPLOAD_PERIOD", 0.1)
    with (
        pytest.raises(RunFailed, match="refuses this user .*to continue and send the rest"),
        places.working_copy("gs://bucket/r") as folder,
    ):
        gcs.forbids_writes = True
        write(folder, checkpoint(10))
        time.sleep(0.5)
    said = capsys.readouterr().err
    assert said.count("the run continues in") == 1 and f"files that were not sent are in {folder}" in said
    gcs.forbids_writes = False
    with places.working_copy("gs://bucket/r"):
        pass
    assert names("gs://bucket/r") == sorted(checkpoint(10))


def test_bytes_that_were_lost_on_the_way_are_noticed(gcs, monkeypatch):
    Store("gs://bucket/r").write("a", b"12345")
    monkeypatch.setattr(
        Store, "get", lambda self, name, path: (os.makedirs(os.path.dirname(path)), open(path, "w").close())
    )
    with pytest.raises(RunFailed, match="gs://bucket/r/a has 5 bytes, and 0 came"):
        places.local_path("gs://bucket/r")


def test_what_is_written_anew_while_it_is_brought_is_brought_once_more(gcs, monkeypatch):
    store, get = Store("gs://bucket/r"), Store.get
    store.write("a", b"12345")

    def late(self, name, path):
        monkeypatch.setattr(Store, "get", get)
        store.write("a", b"123456789")
        get(self, name, path)

    monkeypatch.setattr(Store, "get", late)
    with open(os.path.join(places.local_path("gs://bucket/r"), "a"), "rb") as file:
        assert file.read() == b"123456789"


KILLED = """
import hashlib, os, random, shutil, sys, time
from pretrainax.storage import places
places.UPLOAD_PERIOD = 0.01
with places.working_copy(sys.argv[1]) as folder:
    kept = os.path.join(folder, "checkpoints")
    os.makedirs(kept, exist_ok=True)
    step = max((int(name) for name in os.listdir(kept) if name.isdecimal()), default=0)
    print(step, flush=True)
    while True:
        step += 1
        staging = os.path.join(kept, f"{step}.saving")
        shutil.rmtree(staging, ignore_errors=True)
        os.makedirs(os.path.join(staging, "params"))
        lines = []
        for name in ("params/a", "params/b", "run.json"):
            content = os.urandom(20_000)
            with open(os.path.join(staging, name), "wb") as f:
                f.write(content)
            lines.append(hashlib.sha256(content).hexdigest() + "  " + name + chr(10))
        with open(os.path.join(staging, "manifest.sha256"), "w") as f:
            f.writelines(lines)
        os.rename(staging, os.path.join(kept, str(step)))
        with open(os.path.join(folder, "metrics.jsonl"), "a") as f:
            f.write(str(step) + chr(10))
        if step > 2:
            old = os.path.join(kept, str(step - 2))
            if os.path.exists(old):
                os.rename(old, old + ".deleted")
                shutil.rmtree(old + ".deleted", ignore_errors=True)
        time.sleep(0.01)
"""


def whole_steps(url):
    """Returns the steps whose manifest is in the store, and asserts that their files match it."""
    store, steps = Store(url), []
    for name in names(url):
        if name.endswith("manifest.sha256"):
            folder = os.path.dirname(name)
            for line in store.read(name).decode().splitlines():
                digest, _, file = line.partition("  ")
                assert hashlib.sha256(store.read(f"{folder}/{file}")).hexdigest() == digest, f"{folder}/{file}"
            steps.append(int(os.path.basename(folder)))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("is_other_machine", few([False, True], [True]), ids=["same_machine", "other_machine"])
def test_of_a_run_that_is_killed_at_any_moment_whole_checkpoints_are_there(
    gcs, is_other_machine, tmp_path, monkeypatch
):
    url, seen, generator = "gs://bucket/run", [], random.Random(0)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    program = KILLED.replace(
        "places.EVERY = 0.01", "places.EVERY = 0.01\nfrom pretrainax.storage import lease\nlease.SILENCE = 0.5"
    )
    for start in range(4):
        if is_other_machine:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(start)))
        process = subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True)
        first = int(process.stdout.readline())
        seen.append(first)
        until = time.monotonic() + 60
        while start == 0 and not any("manifest" in name for name in names(url)) and time.monotonic() < until:
            time.sleep(0.05)  # so that the next process can resume
        time.sleep(generator.uniform(0.05, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = whole_steps(url)
        assert steps
    assert seen == sorted(seen) and seen[-1] > seen[0]  # each start has resumed from a checkpoint
