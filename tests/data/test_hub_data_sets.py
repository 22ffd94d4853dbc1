"""Tests reading datasets by their names on the hub with the real client, and the errors of missing datasets."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.fake_hub import serving
from tests.support.runs import ROOT

pytestmark = pytest.mark.slow

LINES = b"".join(b'{"text": "line %d of some text"}\n' % i for i in range(50))
# The client reads the address of the hub when it is imported, so each reading needs a new process.
READ = """
import collections, json, sys
from pretrainax.config import UserError
from pretrainax.data.sources import HuggingFace
for name, streaming in json.loads(sys.argv[1]):
    source = HuggingFace(path=name, streaming=streaming)
    try:
        shards = source.shards("train")
        said = [[text for part in shards for text in source.read(part, collections.Counter())], source.fingerprint()]
    except UserError as e:
        said = [e.exit_code, str(e)]
    print(json.dumps(said))
"""


@pytest.fixture
def server():
    """Serves a hub with org/data, org/gated and org/program."""
    with serving() as server:
        valid = b"".join(LINES.splitlines(keepends=True)[:4])
        server.repository("datasets/org/data").commit({"train.jsonl": LINES, "validation.jsonl": valid})
        server.repository("datasets/org/gated").commit({"train.jsonl": LINES})
        server.repositories["datasets/org/gated"].gated = True
        server.repository("datasets/org/program").commit({"program.py": b"raise SystemExit(3)"})
        yield server


def read(endpoint, tmp_path, *wanted, **env):
    """Reads the datasets in a new process, and returns its output for each."""
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"} | env
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(wanted)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_data_sets_of_the_hub(server, tmp_path):
    names = [("org/data", True), ("org/data", False), ("org/gated", True), ("org/none", True), ("org/program", True)]
    streamed, copied, gated, none, program = read(server.url, tmp_path, *names)
    texts = [json.loads(line)["text"] for line in LINES.splitlines()]
    assert streamed[0] == copied[0] == texts
    log_in = "log in by `hf auth login`, or set HF_TOKEN"
    place = "config.data.source.path is"
    assert gated == [
        2,
        f"{place} 'org/gated' is gated: ask for access at {server.url}/datasets/org/gated, then {log_in}",
    ]
    assert none == [
        2,
        f"{place} 'org/none': {server.url} has no dataset org/none: check the name; if it is private, {log_in}",
    ]
    assert program[0] == 2 and "Dataset scripts are no longer supported" in program[1]


def test_a_data_set_without_a_network(server, tmp_path):
    before, after = (("org/data", False),), (("org/data", False), ("org/gated", True))
    (online,) = read(server.url, tmp_path, *before)
    cached, lacking = read(server.url, tmp_path, *after, HF_HUB_OFFLINE="1")
    assert cached == online  # including the fingerprint, which identifies the text of a run
    assert lacking[0] == 1 and "the hub does not respond" in lacking[1] and "without HF_HUB_OFFLINE" in lacking[1]
