"""Tests reading a released file from a folder, a clone or over HTTP; a missing file gives an error of one line."""

import http.server
import subprocess

import pytest

from pretrainax.config.quotes import ReleasedFile
from pretrainax.storage.released_files import Unavailable, contains, read_released
from tests.support.http_servers import running

TEXT = "lr: 1e-4  # é\n"
FILE = ReleasedFile("some/code", "a" * 40, "configs/base model.yaml")


def committed(folder, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def server():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == f"/some/code/{'a' * 40}/configs/base%20model.yaml"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(TEXT.encode() if found else b"404: Not Found")

        def log_message(self, *_):
            pass

    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_folder_of_copies_has_the_file_at_its_commit(tmp_path):
    path = tmp_path / "some" / "code" / ("a" * 40) / "configs" / "base model.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    assert read_released(FILE, str(tmp_path)) == TEXT


@pytest.mark.parametrize("bare", [False, True])
def test_a_clone_has_the_file_of_a_commit_that_is_not_checked_out(tmp_path, bare):
    clone = tmp_path / "some" / "code"
    (clone / "configs").mkdir(parents=True)
    committed(clone, "init", "-q")
    (clone / "configs" / "base model.yaml").write_text(TEXT)
    committed(clone, "add", "-A")
    committed(clone, "commit", "-qm", "one")
    commit = committed(clone, "rev-parse", "HEAD")
    committed(clone, "rm", "-q", "configs/base model.yaml")
    committed(clone, "commit", "-qm", "two")
    copies = tmp_path
    if bare:
        copies = tmp_path / "bare"
        committed(tmp_path, "clone", "-q", "--bare", str(clone), str(copies / "some" / "code"))
    assert read_released(FILE._replace(commit=commit), str(copies)) == TEXT
    with pytest.raises(Unavailable, match=f"has no some/code@{'b' * 7}:configs/base model.yaml: fatal"):
        read_released(FILE._replace(commit="b" * 40), str(copies))


def test_a_file_that_is_in_no_copy_is_named(tmp_path):
    with pytest.raises(Unavailable, match=r"there is no .*/some/code/aaaa.*base model.yaml, and .* is not a clone"):
        read_released(FILE, str(tmp_path))


def test_a_server_returns_the_file_at_its_commit(server):
    assert read_released(FILE, server=server) == TEXT


def test_a_file_that_the_server_does_not_have_is_named(server):
    with pytest.raises(Unavailable, match=r"/some/code/a+/no.yaml was not downloaded: HTTP Error 404"):
        read_released(FILE._replace(path="no.yaml"), server=server)


def test_no_server_is_one_line():
    with pytest.raises(Unavailable, match="was not downloaded: .*refused"):
        read_released(FILE, server="http://127.0.0.1:9")


def test_spaces_and_line_breaks_in_a_quote_are_alike():
    assert contains("betas:\n  - 0.9\n  - 0.95\n", "betas: - 0.9 - 0.95")
    assert not contains("betas:\n  - 0.9\n  - 0.99\n", "betas: - 0.9 - 0.95")
