"""Neither side deletes the last copy of a file because the other side has lost its copy."""

import hashlib
import os
import shutil

import pytest

from pretrainax.config import RunFailed
from pretrainax.storage import copies, places, run_objects
from pretrainax.storage.store import Store
from tests.storage.test_places import another_machine, checkpoint, names, write


def contents(folder):
    found = {}
    for path, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(path, name)) as f:
                found[os.path.relpath(os.path.join(path, name), folder)] = f.read()
    return found


def empty(url, keep=lambda name: False):
    store = Store(url)
    store.delete([name for name in store.objects() if not keep(name)])


def finished(url):
    files = {"config.json": "{}", "metrics.jsonl": "1\n", **checkpoint(10), **checkpoint(20)}
    with places.working_copy(url) as folder:
        write(folder, files)
    return folder, files


def aside(use, url):
    folder = copies.copy_of(url, use).folder
    (name,) = (name for name in os.listdir(folder) if name.startswith("aside-"))
    return os.path.join(folder, name, url.rpartition("/")[2])


KEPT = {
    "nothing": lambda name: False,
    "leases": lambda name: name.startswith(run_objects.LEASES),
    "all_but_a_checkpoint": lambda name: "checkpoints/20" not in name,
    "manifests": lambda name: name.endswith("manifest.sha256") or name.startswith(run_objects.LEASES),
    "the_config": lambda name: name == "config.json",
}


@pytest.mark.first(2)
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_bucket_has_lost_is_sent_again_by_the_machine_that_has_it(url, kept, monkeypatch, capsys):
    _, files = finished(url)
    empty(url, KEPT[kept])
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url) as folder:
        assert contents(folder) == files
    assert f"{url} has lost or changed" in capsys.readouterr().err
    assert names(url) == sorted({**files, "metrics.jsonl.00000": ""}.keys() - {"metrics.jsonl"})


@pytest.mark.first(1)
def test_a_bucket_that_another_machine_has_continued_and_lost_deletes_nothing(url, monkeypatch, tmp_path, capsys):
    first = os.environ["XDG_CACHE_HOME"]
    _, files = finished(url)
    another_machine(tmp_path, monkeypatch)
    with places.working_copy(url):
        pass
    empty(url, KEPT["leases"])
    monkeypatch.setenv("XDG_CACHE_HOME", first)
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url) as folder:
        assert contents(folder) == {}
    assert contents(aside("work", url)) == files
    assert "the local copies are now in" in capsys.readouterr().err


@pytest.mark.first(1)
def test_a_reader_of_an_emptied_bucket_keeps_its_copy(url, capsys):
    store = Store(url)
    for name, content in (checkpoint(10) | {"config.json": "{}"}).items():
        store.write(name, content.encode())
    folder = places.local_path(url)
    places.complete(folder)
    empty(url)
    places.local_path(url)
    assert contents(aside("read", url)) == checkpoint(10) | {"config.json": "{}"}
    assert capsys.readouterr().err.count("the local copies are now in") == 1


def test_a_reader_follows_a_run_that_deletes_old_checkpoints(url, capsys):
    store = Store(url)
    for name, content in checkpoint(10).items():
        store.write(name, content.encode())
    folder = places.local_path(url)
    places.complete(folder)
    for name, content in checkpoint(20).items():
        store.write(name, content.encode())
    store.delete(checkpoint(10))
    assert os.listdir(os.path.join(places.local_path(url), "checkpoints")) == ["20"]
    assert capsys.readouterr().err == ""


def test_a_copy_that_is_gone_here_is_fetched_and_not_deleted_there(url, monkeypatch, capsys):
    folder, files = finished(url)
    before = names(url)
    shutil.rmtree(folder)
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url) as folder:
        places.complete(os.path.join(folder, "checkpoints/20"))
        assert contents(folder)["checkpoints/20/params/d/a"] == "array 20"
        assert contents(folder)["config.json"] == "{}"
    assert names(url) == before
    assert "fetching again" in capsys.readouterr().err


def test_a_copy_that_is_removed_during_the_run_deletes_nothing_there(url):
    with places.working_copy(url) as folder:
        write(folder, files := {"config.json": "{}", **checkpoint(10)})
        places._mirrors[folder].push()
        shutil.rmtree(folder)
        places._mirrors[folder].push()
    assert names(url) == sorted(files)


def test_shards_of_another_process_are_sent_again_once_the_manifest_names_them(url, monkeypatch):
    import hashlib

    shard, step = "checkpoints/10/params/ocdbt.1/d/a", "checkpoints/10"
    with places.working_copy(url), places.working_copy(url, process=1) as other:
        write(other, {shard: "shard"})
    manifest = f"{hashlib.sha256(b'shard').hexdigest()}  params/ocdbt.1/d/a\n"
    store = Store(url)
    store.write(f"{step}/manifest.sha256", manifest.encode())
    with places.working_copy(url, process=1) as other:
        assert os.path.exists(os.path.join(other, shard))
    empty(url)
    store.write(f"{step}/manifest.sha256", manifest.encode())  # as process 0 does from its own copy
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url, process=1):
        pass
    assert store.read(shard) == b"shard"


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


def metrics_of(url, monkeypatch, tmp_path):
    from pretrainax.storage import mirror

    monkeypatch.setattr(mirror, "PART", 100)
    with places.working_copy(url) as folder:
        write(folder, {"config.json": "{}", "metrics.jsonl": "".join(f"{i:09d}\n" for i in range(35))})
    another_machine(tmp_path, monkeypatch)
    return Store(url)


FAULTS = {
    "missing": (lambda store: store.delete(["metrics.jsonl.00001"]), 1, 2),
    "first_missing": (lambda store: store.delete(["metrics.jsonl.00000"]), 0, 1),
    "cut": (lambda store: store.write("metrics.jsonl.00001", b"000000010\n"), 2, 2),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_of_the_metrics_that_is_missing_stops_a_run_in_one_line(url, fault, monkeypatch, tmp_path):
    break_it, _, after = FAULTS[fault]
    break_it(metrics_of(url, monkeypatch, tmp_path))
    part = rf"metrics\.jsonl\.0000{after}"
    told = rf"has {part}, but not all of metrics\.jsonl before it.* delete {part}"
    for _ in range(2):
        with pytest.raises(RunFailed, match=told), places.working_copy(url):
            pass
    Store(url).delete(name for name in Store(url).objects() if name > f"metrics.jsonl.0000{after - 1}x")
    with places.working_copy(url) as folder:
        assert os.path.exists(os.path.join(folder, "config.json"))


@pytest.mark.first(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_gets_the_metrics_before_a_part_that_is_missing(url, fault, monkeypatch, tmp_path, capsys):
    break_it, parts, _ = FAULTS[fault]
    break_it(metrics_of(url, monkeypatch, tmp_path))
    with open(os.path.join(places.local_path(url), "metrics.jsonl")) as f:
        assert f.read().startswith("000000000\n" if parts else "")
    assert "this command leaves them out" in capsys.readouterr().err


def test_a_listing_without_a_manifest_that_is_there_deletes_no_checkpoint(url, monkeypatch, tmp_path):
    """Another machine only has the listing as information about the run."""
    finished(url)
    another_machine(tmp_path, monkeypatch)
    manifest = "checkpoints/20/manifest.sha256"
    objects = Store.objects
    monkeypatch.setattr(Store, "objects", lambda *args: {n: s for n, s in objects(*args).items() if n != manifest})
    with places.working_copy(url):
        pass
    monkeypatch.setattr(Store, "objects", objects)
    assert set(checkpoint(20)) <= set(names(url))


def hashed(step):
    """Returns a checkpoint with a manifest that contains the checksums of its files."""
    files = {name: content for name, content in checkpoint(step).items() if not name.endswith("manifest.sha256")}
    start = f"checkpoints/{step}/"
    lines = [f"{hashlib.sha256(c.encode()).hexdigest()}  {name.removeprefix(start)}\n" for name, c in files.items()]
    return files | {f"{start}manifest.sha256": "".join(lines)}


def read_whole(url, step):
    folder = places.local_path(url)
    places.complete(os.path.join(folder, f"checkpoints/{step}"))
    return folder


def test_a_reader_keeps_what_the_store_has_damaged(url, capsys):
    """The manifest in the store determines which of the two versions is the checkpoint."""
    with places.working_copy(url) as folder:
        write(folder, files := hashed(20))
    assert contents(read_whole(url, 20)) == files
    Store(url).write("checkpoints/20/params/d/a", b"array 20, and more")
    assert contents(read_whole(url, 20)) == contents(read_whole(url, 20)) == files
    assert capsys.readouterr().err.count("has lost or damaged 1 object (checkpoints/20/params/d/a), which") == 1


@pytest.mark.first(2)
def test_a_command_keeps_what_the_store_has_lost_of_a_checkpoint_with_its_manifest(url, capsys):
    """`uploaded_output` deletes local files that it has never sent, and sends new files. This file is neither."""
    with places.working_copy(url) as folder:
        write(folder, files := hashed(20))
    read_whole(url, 20)
    Store(url).delete(["checkpoints/20/params/d/a"])
    there = names(url)
    for _ in range(2):
        places._mirrors.clear()
        with places.uploaded_output(url) as folder:
            assert contents(folder) == files
    assert names(url) == there
    assert capsys.readouterr().err.count("has lost or damaged 1 object (checkpoints/20/params/d/a), which") == 1
    Store(url).write("checkpoints/20/params/d/a", files["checkpoints/20/params/d/a"].encode())
    assert contents(read_whole(url, 20)) == files
    assert "damaged" not in capsys.readouterr().err


def test_a_step_that_is_saved_anew_is_another_one_and_no_damage(url, capsys):
    with places.working_copy(url) as folder:
        write(folder, hashed(20))
    read_whole(url, 20)
    again = {name: content.replace("array", "ARRAY") for name, content in hashed(20).items()}
    digest = hashlib.sha256(b"ARRAY 20").hexdigest()
    manifest = again["checkpoints/20/manifest.sha256"].splitlines()
    again["checkpoints/20/manifest.sha256"] = f"{digest}  params/d/a\n{manifest[1]}\n"
    for name, content in again.items():
        Store(url).write(name, content.encode())
    assert contents(read_whole(url, 20)) == again
    assert "damaged" not in capsys.readouterr().err


def test_a_checkpoint_of_which_a_store_has_lost_a_part_is_whole_where_it_is_kept(url, capsys):
    with places.working_copy(url) as folder:
        write(folder, files := hashed(20))
    read_whole(url, 20)
    Store(url).delete(["checkpoints/20/manifest.sha256", "checkpoints/20/run.json"])
    places.local_path(url)
    assert contents(aside("read", url)) == files
    assert "has lost 2 objects (checkpoints/20/manifest.sha256, …)" in capsys.readouterr().err


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["params/d/a", "manifest.sha256"])
def test_a_file_that_was_damaged_here_is_fetched_and_replaces_no_good_one(url, name, monkeypatch, capsys):
    with places.working_copy(url) as folder:
        write(folder, files := hashed(20))
    monkeypatch.setattr(places, "_mirrors", {})
    write(folder, {f"checkpoints/20/{name}": "of a disk that fails"})
    with places.working_copy(url) as folder:
        assert contents(folder) == files
    assert {n: Store(url).read(n).decode() for n in names(url)} == files
    assert f"1 object (checkpoints/20/{name}) in {folder} changed after the save" in capsys.readouterr().err


@pytest.mark.first(1)
def test_a_step_that_is_saved_again_is_sent_also_when_sending_broke_off(url, monkeypatch):
    """In this case, the store has files of both saves, and no manifest."""
    with places.working_copy(url) as folder:
        write(folder, hashed(20))
    monkeypatch.setattr(places, "_mirrors", {})
    again = {name: content.replace("20", "2O") for name, content in hashed(20).items()}
    put, left = Store.put, [1]

    def breaks_off(self, path, name):
        left[0] -= 1
        if left[0] < 0:
            raise RunFailed("no network")
        put(self, path, name)

    with pytest.raises(RunFailed, match="no network"), places.working_copy(url) as folder:
        write(folder, again)
        monkeypatch.setattr(Store, "put", breaks_off)
    monkeypatch.setattr(Store, "put", put)
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url):
        pass
    assert {n: Store(url).read(n).decode() for n in names(url)} == again
