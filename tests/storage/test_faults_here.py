"""Local disk faults and other errors do not end the sender, and are not reported as network errors."""

import errno
import os
import time

import pytest

from pretrainax.config import RunFailed
from pretrainax.storage import mirror, places
from pretrainax.storage.store import Store
from tests.storage.test_places import checkpoint, names, write


def await_(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug"), MemoryError()]
)
def test_the_sender_survives_any_failure_and_sends_once_it_is_over(url, error, monkeypatch, capsys):
    monkeypatch.setattr(places, "UPLOAD_PERIOD", 0.05)
    monkeypatch.setattr(places, "WARNING_PERIOD", 0.2)
    failing, original, said = [True], mirror.Mirror._link_files, []
    monkeypatch.setattr(places, "print_message", said.append)

    def hold(self, *args):
        if failing[0]:
            raise error
        return original(self, *args)

    with places.working_copy(url) as folder:
        write(folder, checkpoint(10))
        await_(lambda: places.last_uploaded_step(folder) == 10)
        monkeypatch.setattr(mirror.Mirror, "_link_files", hold)
        write(folder, checkpoint(20))
        await_(lambda: sum("nothing was sent for" in line for line in said) >= 2)
        assert places.last_uploaded_step(folder) == 10
        failing[0] = False
        await_(lambda: places.last_uploaded_step(folder) == 20)
        assert "checkpoints/20/manifest.sha256" in names(url)
    told = next(line for line in said if "nothing was sent for" in line)
    assert "(last sent: step 10): the run continues in" in told
    assert any("has all files again" in line for line in said)


def test_a_failure_at_the_end_says_where_the_files_are(url, monkeypatch, capsys):
    with pytest.raises(
        RunFailed, match="ValueError: a bug; run the same command on this machine to continue and send the rest"
    ):
        with places.working_copy(url) as folder:
            monkeypatch.setattr(mirror.Mirror, "push", lambda *_, **__: (_ for _ in ()).throw(ValueError("a bug")))
    assert f"files that were not sent are in {folder}" in capsys.readouterr().err


def test_a_lease_is_renewed_after_any_failure(url, monkeypatch):
    from pretrainax.storage import lease

    monkeypatch.setattr(lease, "HEARTBEAT", 0.02)
    tries = []
    monkeypatch.setattr(lease.Lease, "check", lambda self: tries.append(1) or 1 / 0)
    with lease.Lease(Store(url), "here"):
        await_(lambda: len(tries) > 3)


@pytest.mark.parametrize(
    ("obstacle", "said"), [("file", "Not a directory|File exists"), ("folder", "Is a directory")], ids=str
)
def test_a_local_obstacle_is_told_with_its_path_and_not_tried_again(url, obstacle, said, no_patience, tmp_path):
    Store(url).write("a/b.txt", b"1")
    target = tmp_path / "here" / "a" / "b.txt"
    if obstacle == "file":
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "a").write_text("")
    else:
        target.mkdir(parents=True)
    with pytest.raises(RunFailed, match=f"{target}: ({said}) on this machine"):
        Store(url).get("a/b.txt", str(target))
    assert [name for name in os.listdir(tmp_path / "here") if name.startswith(".")] == []


def test_a_file_that_cannot_be_read_is_told_with_its_path_and_not_tried_again(url, no_patience, tmp_path):
    with pytest.raises(RunFailed, match=f"{tmp_path}/none: No such file or directory on this machine"):
        Store(url).put(str(tmp_path / "none"), "a")


def test_a_full_disk_is_told_with_its_path_and_not_tried_again(url, no_patience, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = Store(url)
    target.write("a", b"1")
    monkeypatch.setattr(target._fs, "get_file", full)
    with pytest.raises(RunFailed, match=f"{tmp_path}/a: No space left on device on this machine"):
        target.get("a", str(tmp_path / "a"))


def test_what_has_no_room_is_refused_before_it_is_fetched(url, monkeypatch):
    Store(url).write("a", b"123")
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2})())
    with pytest.raises(RunFailed, match="3 bytes are to be fetched, but .* has only 2 free"):
        places.local_path(url)


# --- runs that continue while another process reads them -------------------------------------------------------------


def live_run(url, steps):
    for step in steps:
        for name, content in checkpoint(step).items():
            Store(url).write(name, content.encode())


def test_a_reader_lists_again_when_what_it_fetches_is_deleted(url, monkeypatch):
    live_run(url, [10])
    original, once = Store.get, []

    def get(self, name, path):
        if not once:
            once.append(name)
            live_run(url, [20])
            self.delete(checkpoint(10))
        original(self, name, path)

    monkeypatch.setattr(Store, "get", get)
    assert os.listdir(os.path.join(places.local_path(url), "checkpoints")) == ["20"]


def test_a_store_that_lists_what_it_does_not_have_is_one_line(url, monkeypatch):
    live_run(url, [10])
    monkeypatch.setattr(Store, "get", lambda self, name, path: (_ for _ in ()).throw(FileNotFoundError(name)))
    with pytest.raises(RunFailed, match="was deleted while it was fetched"):
        places.local_path(url)


def test_the_newest_step_is_another_one_when_the_run_deletes_the_first(url, monkeypatch, tmp_path):
    import hashlib

    from pretrainax.checkpoints import steps

    def save(step):
        files = {"params/d/a": f"array {step}", "optimizer/d/b": "x", "run.json": steps_run_json(step)}
        lines = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items())]
        for name, text in (files | {"manifest.sha256": "".join(lines)}).items():
            Store(url).write(f"checkpoints/{step}/{name}", text.encode())

    def steps_run_json(step):
        return f'{{"step": {step}, "metrics": {{}}, "arrays": {{}}, "extra": {{}}}}'

    save(10)
    folder = places.local_path(url)
    original, once = Store.get, []

    def get(self, name, path):
        if not once:
            once.append(name)
            save(20)
            self.delete(n for n in self.objects() if n.startswith("checkpoints/10/"))
        original(self, name, path)

    monkeypatch.setattr(Store, "get", get)
    found = steps.find_checkpoint(folder, needed=steps.parameter_files("params"))
    assert found == os.path.join(folder, "checkpoints", "20")
    assert sorted(os.listdir(found)) == ["manifest.sha256", "params", "run.json"]  # without the optimizer's state
