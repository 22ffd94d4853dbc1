"""Names and files of others never determine where this machine writes."""

import os
import stat

import pytest

from pretrainax.config import UserError
from pretrainax.files.paths import path_problem
from pretrainax.files.private_folders import private_folder
from pretrainax.storage import copies, places
from pretrainax.storage.store import Store

OUTSIDE = ["../../../../up.txt", "a/../../../up.txt", "/abs.txt", "a//b.txt", "./a", "x" * 300]


def files_below(folder):
    return {os.path.join(path, name) for path, _, names in os.walk(folder) for name in names}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_object_whose_name_leads_outside_is_refused_and_nothing_is_written(raw, name, tmp_path, no_patience):
    url, put = raw
    put("config.json", b"{}")
    put(name)
    with pytest.raises(UserError, match=r"has an object '.*, and no file can have its name"):
        places.local_path(url)
    assert [path for path in files_below(tmp_path) if not path.endswith("record.json")] == []


@pytest.mark.parametrize(
    "name", ["..%2f..%2fup.txt", "%2e%2e/up.txt", "a\\..\\..\\up.txt", "…/ü", "x" * 250, "q?x#y&z"]
)
def test_an_unusual_name_is_a_file_below_the_copy(raw, name):
    url, put = raw
    put(name, b"content")
    with open(os.path.join(places.local_path(url), name)) as f:
        assert f.read() == "content"


def test_a_pattern_matches_no_name_that_leads_outside(raw):
    url, put = raw
    put("a.txt")
    put("../b.txt")
    try:
        found = places.local_path(f"{url}/*.txt")
    except UserError as e:
        assert "no file can have its name" in str(e)
    else:
        assert os.listdir(os.path.dirname(found)) == ["a.txt"]


@pytest.mark.parametrize("url", ["gs://b/../../x", "gs://b/./x", "gs://b//x", "s3://..", f"gs://b/{'x' * 256}"])
def test_a_url_that_leads_outside_is_refused(url):
    assert path_problem(url).startswith("it is not a valid URL of an object or folder")
    with pytest.raises(UserError):
        places.local_path(url)


@pytest.mark.parametrize("url", ["gs://", "s3:///", "gs:///x"])
def test_a_url_without_a_bucket_is_refused(url):
    with pytest.raises(UserError, match="names no bucket"):
        places.local_path(url)


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@bucket/x", "gs://a:b@c"])
def test_a_url_with_credentials_is_refused(url):
    assert "a key and a secret" in path_problem(url)


# --- markers of folders ----------------------------------------------------------------------------------------------


def test_markers_of_folders_are_no_objects(raw):
    url, put = raw
    for marker in ("", "sub/", "sub/deep/", "empty/"):
        put(marker, b"")
    put("sub", b"")
    put("sub/deep/a.txt")
    assert list(Store(url).objects()) == ["sub/deep/a.txt"]
    assert files_below(folder := places.local_path(url)) == {os.path.join(folder, "sub/deep/a.txt")}
    assert not Store(f"{url}/sub").is_object()
    assert places.local_path(f"{url}/*").endswith("*")


def test_a_run_goes_on_in_a_folder_with_markers(raw):
    url, put = raw
    for marker in ("", "checkpoints/", "checkpoints/10/", "run.lease/"):
        put(marker, b"")
    for _ in range(2):
        with places.working_copy(url) as folder:
            os.makedirs(os.path.join(folder, "checkpoints/10"), exist_ok=True)
            with open(os.path.join(folder, "checkpoints/10/manifest.sha256"), "w") as f:
                f.write("x")
    assert "checkpoints/10/manifest.sha256" in Store(url).objects()


def test_an_object_with_the_name_of_a_folder_is_refused_in_a_line_that_names_both(raw):
    url, put = raw
    put("a")
    put("a/b.txt")
    with pytest.raises(
        UserError, match=r"has the object 'a' and, in a folder of the same name, 'a/b\.txt': rename one"
    ):
        places.local_path(url)


def test_an_empty_file_is_an_object(raw):
    url, put = raw
    put("empty.txt", b"")
    assert os.path.getsize(os.path.join(places.local_path(url), "empty.txt")) == 0
    assert os.path.getsize(places.local_path(f"{url}/empty.txt")) == 0


# --- files next to a user's own --------------------------------------------------------------------------------------


def test_a_record_next_to_a_folder_means_nothing(tmp_path):
    Store("memory://bucket/evil").write("config.json", b"evil")
    (tmp_path / "model").mkdir()
    for name in ("model.store.json", "record.json"):
        record = '{"url": "memory://bucket/evil", "lease": 0, "objects": {"config.json": [[4, "1"], null]}}'
        (tmp_path / name).write_text(record)
    places.complete(str(tmp_path / "model"))
    assert os.listdir(tmp_path / "model") == [] and places.mirror_of(str(tmp_path / "model")) is None


def test_a_record_of_another_url_in_the_cache_means_nothing():
    copy = copies.copy_of("memory://bucket/mine", "read")
    os.makedirs(copy.root)
    with open(copy.record, "w") as f:
        f.write('{"url": "memory://bucket/evil", "lease": 0, "objects": {}}')
    assert places.mirror_of(copy.root) is None


def test_an_object_named_as_a_record_is_a_file_of_the_copy(url):
    evil = f"{url}/evil"
    Store(url).write("run.store.json", f'{{"url": "{evil}", "lease": 0, "objects": {{}}}}'.encode())
    Store(url).write("run/config.json", b"{}")
    folder = places.local_path(url)
    assert places.mirror_of(os.path.join(folder, "run")).store.url == url


def test_another_process_finds_the_store_of_a_copy(url, monkeypatch):
    Store(url).write("checkpoints/1/params/d/a", b"array")
    folder = places.local_path(url)
    monkeypatch.setattr(places, "_mirrors", {})
    places.complete(folder)
    assert os.path.exists(os.path.join(folder, "checkpoints/1/params/d/a"))


def test_a_copy_of_an_earlier_version_moves_with_its_record(url, monkeypatch, capsys):
    scheme, _, name = url.partition("://")
    with places.working_copy(url) as folder, open(os.path.join(folder, "metrics.jsonl"), "w") as f:
        f.write("1\n")
    old = os.path.join(copies.base_folder(), "work", scheme, name)
    os.makedirs(os.path.dirname(old))
    os.rename(folder, old)
    os.rename(copies.copy_of(url, "work").record, f"{old}.store.json")
    with open(os.path.join(old, "metrics.jsonl"), "a") as f:
        f.write("not sent\n")
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(url) as folder:
        assert open(os.path.join(folder, "metrics.jsonl")).read() == "1\nnot sent\n"
    assert f"the copy of {url} and its record have moved from {old}" in capsys.readouterr().err
    assert not os.path.exists(old) and not os.path.exists(f"{old}.store.json")
    assert copies.url_of_old_copy(old) == url


# --- who may read copies ---------------------------------------------------------------------------------------------


def test_copies_are_private(url):
    Store(url).write("a", b"1")
    folder = places.local_path(url)
    with places.working_copy(f"{url}/run"):
        pass
    for use in ("read", "work"):
        assert stat.S_IMODE(os.stat(os.path.join(copies.base_folder(), use)).st_mode) == 0o700
    assert folder.startswith(os.path.join(copies.base_folder(), "read"))


def test_a_folder_that_others_may_read_becomes_private(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    private_folder(str(tmp_path / "a"))
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o700


def test_a_link_or_a_file_is_no_private_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a link"):
        private_folder(str(tmp_path / "link"))
    with pytest.raises(UserError, match="cannot be made a private folder"):
        private_folder(str(tmp_path / "file"))


def test_the_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="belongs to user"):
        private_folder(str(tmp_path / "a"))
