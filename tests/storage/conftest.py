"""Stores of this machine: fsspec's own in memory, Cloud Storage's API and S3's, each over its real client."""

import os
import uuid

import pytest

from pretrainax.storage import places
from tests.support import fake_gcs
from tests.support.fake_hub import hub_server  # noqa: F401

# gcsfs asks what kind of bucket it is by gRPC, at an address that no test can set
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'pretrainax[test]'")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keeps twins below the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_twins", {})


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
    """Serves S3's protocol."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'pretrainax[s3]'")
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'pretrainax[test]'")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """Serves s3://bucket."""
    settings = {
        "endpoint_url": s3_server,
        "key": "test",
        "secret": "test",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    fs = fsspec.filesystem("s3")
    if not fs.exists("bucket"):
        fs.call_s3("create_bucket", Bucket="bucket")
    yield fs


@pytest.fixture(params=["memory", "gs", "s3"])
def url(request):
    """Gives a URL below which there is nothing."""
    if request.param == "gs":
        request.getfixturevalue("gcs")
    elif request.param == "s3":
        request.getfixturevalue("s3")
    return f"{request.param}://bucket/{uuid.uuid4().hex}"
