"""`pretrainax watch` serves the page of runs in training, only to its user."""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types

import pytest

from pretrainax import watch
from pretrainax.config import UserError
from pretrainax.reporting.live_server import LiveServer, Pages
from pretrainax.reporting.run_lines import RunLines
from pretrainax.runs.run_status import status_table
from tests.support.http_servers import running
from tests.support.runs import ENV, ROOT
from tests.test_report import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def fail() -> str:
    raise UserError("no line yet")


@pytest.fixture
def server():
    with running(LiveServer(Pages(lambda: "<p>page</p>", fail), 0)) as server:
        yield server


def get(server, path, host=None):
    """Returns the status, the headers and the body of a GET request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    with contextlib.closing(connection):
        connection.putrequest("GET", path, skip_host=True)
        for value in [f"127.0.0.1:{server.server_port}"] if host is None else host:
            connection.putheader("Host", value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def test_the_page_needs_the_token(server):
    status, headers, body = get(server, f"/{server.token}/")
    assert (status, body) == (200, "<p>page</p>") and headers["Cache-Control"] == "no-store"
    assert headers["Content-Type"] == "text/html; charset=utf-8" and headers["Server"] is None
    assert server.url.startswith("http://127.0.0.1:") and len(server.token) >= 43  # 256 bits in base64


@pytest.mark.parametrize(
    "path", ["/", "//", "/data", "/favicon.ico", "/x{token}/", "/{short}/", "/%2e%2e/", "/?{token}", "/%C3%A9/", "*"]
)
def test_a_request_without_the_token_gets_404(server, path):
    assert get(server, path.format(token=server.token, short=server.token[:-1]))[0] == 404


@pytest.mark.parametrize(
    "path", ["../", "../../etc/passwd", "%2e%2e/etc/passwd", "data/..", "metrics.jsonl", "/etc/passwd"]
)
def test_no_path_names_a_file(server, path):
    assert get(server, f"/{server.token}/{path}")[0] == 404


@pytest.mark.parametrize(
    "host", [[], ["evil.example"], ["127.0.0.1"], ["localhost:1"], ["localhost:{0}", "evil.example"]]
)
def test_a_request_to_another_host_gets_404(server, host):
    """After DNS rebinding, the name of a foreign page leads to this machine."""
    host = [value.format(server.server_port) for value in host]
    assert get(server, f"/{server.token}/", host)[0] == 404
    assert get(server, f"/{server.token}/", [f"localhost:{server.server_port}"])[0] == 200


def test_an_error_is_an_answer_and_other_methods_are_refused(server):
    assert get(server, f"/{server.token}/data")[::2] == (503, "no line yet\n")
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", f"/{server.token}/", b"x")
        assert connection.getresponse().status == 501


def test_a_port_that_is_in_use_is_one_line(server):
    with pytest.raises(UserError, match=f"^--port={server.server_port} cannot be opened"):
        LiveServer(server.pages, server.server_port)


@pytest.mark.parametrize(
    "error, is_printed", [(BrokenPipeError, False), (ConnectionResetError, False), (KeyError, True)]
)
def test_a_browser_that_closes_its_connection_prints_nothing(capfd, error, is_printed):
    def answer():
        raise error

    with running(LiveServer(Pages(answer, fail), 0)) as server, pytest.raises(http.client.RemoteDisconnected):
        get(server, f"/{server.token}/")
    assert ("Traceback" in capfd.readouterr().err) == is_printed


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    write_run(tmp_path / "runs" / "a", [1.0])
    folder = str(tmp_path / "runs")
    watch.check_links(folder, [f"{folder}/a"])
    (tmp_path / "runs" / "a" / "copy.jsonl").symlink_to("metrics.jsonl")  # a link inside the folder
    watch.check_links(folder, [f"{folder}/a"])
    (tmp_path / "runs" / "a" / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"config.json leads to a place outside of .*runs: remove the link"):
        watch.check_links(folder, [f"{folder}/a"])


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Returns the URL and the folder of two runs that a command serves."""
    folder = tmp_path_factory.mktemp("watched") / "runs"
    write_run(folder / "wide", [5.0, 4.0, 3.5])
    write_run(folder / "deep<script>alert(1)</script>".replace("/", "|"), [5.5, 3.25])
    (folder / "wide" / "goodput.json").write_text(
        json.dumps([{"began": time.time() - 40, "step": 30, "done": False, "seconds": {"steps": 30, "saving": 10}}])
    )
    (folder / "wide" / "samples.txt").write_text("step 30\n  · 90%  [the] <b>cat</b>\n")
    (folder / "later").mkdir()
    (folder / "later" / "metrics.jsonl").touch()
    words = [sys.executable, "-m", "pretrainax", "watch", str(folder), "--seconds=1"]
    with subprocess.Popen(words, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip(), folder
        finally:
            process.kill()


def test_a_run_of_long_steps_is_running_after_its_first_line(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    # The second line comes 50 steps later.
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 250, time.time() - 250))
    line = {"step": 50, "split": "train", "loss": 1.0, "step_seconds": 10.0}
    report = types.SimpleNamespace(runs=[RunLines("a", [line])], records=[types.SimpleNamespace(experiment=None)])
    assert status_table(report, [str(tmp_path)])[1][2] == "running"


def read(url: str):
    """Returns the body of the response of a URL."""
    address, path = re.fullmatch(r"http://([\d.:]+)(/.*)", url).groups()
    connection = http.client.HTTPConnection(address, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return answer.read().decode()


@pytest.mark.slow
def test_the_page_shows_progress_and_follows_the_runs(watched):
    url, folder = watched
    page = read(url)
    assert "deep<script>" not in page and "connect-src 'self'" in page and "const seconds = 1.0" in page
    assert not re.findall(r"(?:src|href)=.?(?:https?:)?//", page)
    fragments = json.loads(read(f"{url}data"))["fragments"]
    status = fragments["STATUS"]
    assert fragments["SAMPLES"] == "<h2>Samples of wide</h2><pre>step 30\n  · 90%  [the] &lt;b&gt;cat&lt;/b&gt;\n</pre>"
    assert "<td>75.0%</td>" in status and "<td>running</td>" in status and status.count("<tr>") == 3
    with open(folder / "wide" / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 40, "split": "train", "loss": 3.125, "step_seconds": 1.0}) + "\n")
    os.utime(folder / "wide" / "metrics.jsonl", (time.time() - 500, time.time() - 500))
    fresh = json.loads(read(f"{url}data"))
    assert "<td>40</td><td>3.125" in fresh["fragments"]["STATUS"] and "no line for 0:08" in fresh["fragments"]["STATUS"]
    (curve,) = [run["curves"]["loss"]["train"]["y"]["step"] for run in fresh["data"]["runs"] if run["name"] == "wide"]
    assert curve == [5.0, 4.0, 3.5, 3.125]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
def test_a_browser_draws_the_page_and_updates_it(watched, tmp_path):
    url, _ = watched
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*words, "--virtual-time-budget=5000", url], capture_output=True, text=True, timeout=120)
    assert re.search(r'<p class="said">updated at \d', done.stdout), done.stderr
    drawn = done.stdout.partition('<div class="charts">')[2].partition("<script>")[0]
    assert "<path" in drawn and "deep&lt;script&gt;" in done.stdout
