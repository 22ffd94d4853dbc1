"""Serves local stores: fsspec's in-memory store, and the APIs of Cloud Storage and S3, each with its real client."""

import os
import time
import types
import uuid

import pytest

from pretrainax.storage import places, store
from tests.support import fake_gcs, moto_s3
from tests.support.fake_hub import hub_server  # noqa: F401

# gcsfs queries the type of the bucket by gRPC, at an address that a test cannot set.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'pretrainax[test]'")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Creates mirrors below the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_mirrors", {})


@pytest.fixture
def no_patience(monkeypatch):
    """Fails the test if a request is repeated."""
    again = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("asked again"))
    monkeypatch.setattr(store, "time", again)


@pytest.fixture
def gcs(monkeypatch):
    """Serves gs://bucket."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'pretrainax[gcs]'")
    with fake_gcs.serving() as server:
        monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": server.url, "token": "anon"})
        monkeypatch.setenv("FSSPEC_GS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
        yield server


@pytest.fixture(scope="session")
def s3_server():
    """Serves the S3 protocol."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'pretrainax[s3]'")
    pytest.importorskip("moto.server", reason="moto is not installed: pip install 'pretrainax[test]'")
    with moto_s3.serving() as url:
        yield url


@pytest.fixture
def s3(s3_server, monkeypatch):
    """Serves s3://bucket."""
    monkeypatch.setitem(fsspec.config.conf, "s3", moto_s3.settings(s3_server))
    return s3_server


@pytest.fixture(params=["gs", "s3"])
def raw(request):
    """Yields a URL, and a function that creates objects below it with any name, even if no file can have this name."""
    folder = uuid.uuid4().hex
    if request.param == "gs":
        server = request.getfixturevalue("gcs")
        yield f"gs://bucket/{folder}", lambda name, content=b"1": server.put(f"bucket/{folder}/{name}", content, None)
    else:
        client = moto_s3.client(request.getfixturevalue("s3"))
        put = lambda name, content=b"1": client.put_object(Bucket="bucket", Key=f"{folder}/{name}", Body=content)  # noqa: E731
        yield f"s3://bucket/{folder}", put


@pytest.fixture(params=["memory", "gs", "s3"])
def url(request):
    """Yields a URL without objects below it."""
    if request.param == "gs":
        request.getfixturevalue("gcs")
    elif request.param == "s3":
        request.getfixturevalue("s3")
    return f"{request.param}://bucket/{uuid.uuid4().hex}"
