"""Tests the objects below a URL with the client of each protocol, and the handling of faults."""

import logging
import subprocess
import sys
import threading

import fsspec
import pytest

from pretrainax.config import RunFailed, UserError
from pretrainax.storage import store as stores
from pretrainax.storage.store import Store


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(stores, "PATIENCE", 1.0)
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.01)


def test_nothing_is_below_a_new_url(url):
    assert Store(url).objects() == {}


def test_an_object_is_read_as_it_was_written(url):
    store = Store(url)
    store.write("a/b", b"text")
    assert store.read("a/b") == b"text"
    assert store.read_ranges([("a/b", 1, 3), ("a/b", 0, 1), ("a/b", 3, 4)]) == [b"ex", b"t", b"t"]
    assert list(store.objects()) == ["a/b"] and store.objects()["a/b"] == store.stamp("a/b")
    assert store.stamp("a/b").size == 4


def test_ranges_that_lie_near_each_other_are_one_request(url, monkeypatch):
    monkeypatch.setattr(stores, "NEAR", 10)
    monkeypatch.setattr(stores, "_MAX_MERGED_BYTES", 60)
    store, content = Store(url), bytes(range(256))
    for name in ("a", "b"):
        store.write(name, content)
    asked, original = [], store._fs.cat_ranges
    monkeypatch.setattr(
        store._fs, "cat_ranges", lambda *given, **more: (asked.append(given), original(*given, **more))[1]
    )
    ranges = [("a", 40, 50), ("a", 0, 4), ("b", 0, 5), ("a", 14, 30), ("a", 45, 70), ("a", 45, 47), ("a", 81, 82)]
    assert store.read_ranges(ranges) == [content[start:stop] for _, start, stop in ranges]
    ((paths, starts, stops),) = asked  # merged ranges have at most 60 bytes
    assert [path[-1] for path in paths] == ["a", "a", "a", "b"]
    assert list(zip(starts, stops, strict=True)) == [(0, 50), (45, 70), (81, 82), (0, 5)]


def test_s3_has_as_many_requests_under_way_as_others(s3, monkeypatch):
    assert Store("s3://bucket/a")._fs.config_kwargs == {"max_pool_connections": 100}
    configured = fsspec.config.conf["s3"] | {"config_kwargs": {"max_pool_connections": 7, "signature_version": "v4"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", configured)
    assert Store("s3://bucket/a")._fs.config_kwargs == {"max_pool_connections": 7, "signature_version": "v4"}


def test_another_content_has_another_version(url):
    store = Store(url)
    store.write("a", b"one")
    first = store.stamp("a")
    store.write("a", b"two")
    assert store.stamp("a").version != first.version


def test_files_go_there_and_come_back(url, tmp_path):
    store, content = Store(url), bytes(range(256)) * 40_000  # 10 MB: one request in S3, several in Cloud Storage
    (tmp_path / "file").write_bytes(content)
    store.put(str(tmp_path / "file"), "x/file")
    store.get("x/file", str(tmp_path / "new" / "file"))
    assert (tmp_path / "new" / "file").read_bytes() == content


def test_a_folder_does_not_have_the_objects_of_one_whose_name_begins_alike(url):
    Store(f"{url}/run2").write("a", b"")
    assert Store(f"{url}/run").objects() == {}


def test_of_many_that_make_an_object_one_has(url):
    store, made = Store(url), []
    threads = [threading.Thread(target=lambda i=i: made.append(store.create("a", str(i).encode()))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]


def test_deleting_what_is_gone_is_no_error(url):
    store = Store(url)
    store.write("a", b"")
    store.delete(["a", "a", "b"])
    assert store.objects() == {}


def test_what_is_not_there_is_said_as_of_a_file(url):
    with pytest.raises(FileNotFoundError):
        Store(url).read("a")


def test_patterns_stand_for_objects(url):
    store = Store(url)
    for name in ("a.txt", "b.txt", "c.bin", "sub/d.txt"):
        store.write(name, b"")
    assert store.matches("*.txt") == ["a.txt", "b.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_store_that_is_busy_is_asked_again(status, gcs):
    store = Store("gs://bucket/a")
    gcs.faults[:] = [status]
    store.write("b", b"x")
    assert store.read("b") == b"x"


@pytest.mark.parametrize("call", [lambda s: s.objects(), lambda s: s.read("b"), lambda s: s.write("b", b"x")])
def test_a_condition_that_nobody_has_set_is_an_error_of_the_store_and_asked_again(call, gcs, monkeypatch):
    """gcsfs converts any response with status 412 to FileExistsError."""
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.01)
    store = Store("gs://bucket/a")
    store.write("b", b"x")
    gcs.faults[:] = [412]
    call(store)
    assert not gcs.faults and store.read("b") == b"x"


def test_a_pattern_in_a_bucket_that_is_gone_stands_for_nothing(gcs):
    gcs.buckets.clear()
    assert Store("gs://bucket/a").matches("*.txt") == []


def test_a_store_that_is_out_of_reach_is_waited_for_and_said_once(gcs, monkeypatch, capsys):
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.01)
    store, calls = Store("gs://bucket/a"), []

    def call():
        calls.append(1)
        if len(calls) < 4:
            raise ConnectionResetError("connection reset by peer")
        return "answer"

    assert store._with_retries(call) == "answer"
    assert capsys.readouterr().err.count("does not respond (ConnectionResetError") == 1


def test_a_store_that_never_answers_is_one_line(gcs, impatient):
    store = Store("gs://bucket/a")

    def call():
        raise TimeoutError("no answer")

    with pytest.raises(RunFailed, match=r"gs://bucket/a has not responded for [01] s \(TimeoutError: no answer\)"):
        store._with_retries(call)


def test_a_store_that_refuses_is_one_line_at_once(gcs):
    store = Store("gs://bucket/a")
    gcs.forbids_writes = True
    with pytest.raises(UserError, match="gs://bucket/a refuses this user .*storage.objects.create"):
        store.write("b", b"x")


def test_a_connection_that_breaks_has_no_traceback_beside_its_line(gcs, caplog):
    """asyncio would log the error of the writing task, which nobody awaits. Other errors of asyncio stay in the log."""
    Store("gs://bucket/a")
    logger = logging.getLogger("asyncio")
    logger.error("Task exception was never retrieved", exc_info=ConnectionResetError("closing transport"))
    assert not caplog.records
    logger.error("Task exception was never retrieved", exc_info=ValueError("of somebody else"))
    assert len(caplog.records) == 1


def test_a_full_store_is_one_line_at_once(gcs):
    def call():
        raise OSError("QuotaExceeded: the account is out of space")

    with pytest.raises(RunFailed, match="is full .*make room there"):
        Store("gs://bucket/a")._with_retries(call)


def test_a_bucket_that_is_not_there_is_said(gcs):
    with pytest.raises(UserError, match="gs://other/a: there is no such bucket"):
        Store("gs://other/a").write("b", b"x")


@pytest.mark.parametrize("url, said", [("gs://", "names no bucket"), ("ftp://a/b", "is not a supported store")])
def test_what_is_no_store_is_refused(url, said):
    with pytest.raises(UserError, match=said):
        Store(url)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UserError, match=r"az://b/a needs the package .*: pip install 'pretrainax\[azure\]'"):
        Store("az://b/a")


@pytest.mark.slow
def test_a_plain_run_imports_no_library_of_stores():
    names = ("gcsfs", "s3fs", "adlfs", "boto3", "botocore")
    code = f"import sys, pretrainax.main, pretrainax.training.loop; print([m for m in sys.modules if m in {names}])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
