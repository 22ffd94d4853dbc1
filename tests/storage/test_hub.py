"""Tests models of the hub: fetched files, skipped files and messages, with the real client and a local server."""

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import time

import pytest
from huggingface_hub import constants

from pretrainax.config import UserError
from pretrainax.files import paths
from pretrainax.storage import hub, places
from pretrainax.tokenization.chat import read_templates
from tests.support.fake_hub import forget
from tests.support.runs import ROOT

SMALL = {"config.json": b'{"model_type": "gpt2"}', "tokenizer.json": b"{}", "vocab.json": b"{}", "merges.txt": b"a b"}
WEIGHTS = bytes(range(256)) * 400
REST = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"\x80\x04pickled",
    "modeling_custom.py": b"raise SystemExit",
    "flax_model.msgpack": b"\x80",
    "onnx/model.safetensors": WEIGHTS,
    "original/params.json": b"{}",
    "runs/events.out.tfevents": b"1",
    ".gitattributes": b"",
    "consolidated.safetensors": WEIGHTS,
}
NAME = "hf:org/tiny"


@pytest.fixture
def server(hub_server):
    hub_server.repository("org/tiny").commit({**SMALL, "model.safetensors": WEIGHTS, **REST})
    return hub_server


def names(folder):
    return {os.path.relpath(os.path.join(d, f), folder) for d, _, files in os.walk(folder) for f in files}


def test_weights_come_when_they_are_asked_for_and_nothing_else_ever(server, capsys):
    folder = places.local_path(NAME)
    assert names(folder) == set(SMALL)
    commit = server.repositories["org/tiny"].references["main"]
    size = sum(map(len, SMALL.values()))
    assert capsys.readouterr().err == (
        f"pretrainax: {NAME} is commit {commit[:12]}: fetching its configs and tokenizer, 4 files, {size} bytes\n"
    )
    places.complete(folder)
    assert names(folder) == {*SMALL, "model.safetensors"}
    assert open(f"{folder}/model.safetensors", "rb").read() == WEIGHTS
    assert capsys.readouterr().err == (
        f"pretrainax: {NAME} is commit {commit[:12]}: fetching its weights, 1 file, 102,400 bytes\n"
    )
    assert {path.rpartition("/")[2] for path in server.fetched()} == {*SMALL, "model.safetensors"}


def test_a_second_process_fetches_nothing(server, monkeypatch, capsys):
    places.complete(places.local_path(NAME))
    fetched = len(server.fetched())
    forget(monkeypatch)
    capsys.readouterr()
    places.complete(places.local_path(NAME))
    assert len(server.fetched()) == fetched and capsys.readouterr().err == ""


def test_a_revision_is_what_it_names(server):
    repository = server.repositories["org/tiny"]
    newer = repository.commit({**SMALL, "vocab.json": b"[1]"}, "refs/pr/1")
    assert open(f"{places.local_path(f'{NAME}@refs/pr/1')}/vocab.json").read() == "[1]"
    assert hub.pinned_name(f"{NAME}@refs/pr/1") == f"{NAME}@{newer}"
    assert places.local_path(f"{NAME}@{newer}") == places.local_path(f"{NAME}@refs/pr/1")
    assert places.local_path(NAME) != places.local_path(f"{NAME}@{newer}")


def test_a_name_stands_for_one_commit_in_a_process(server, monkeypatch):
    first = places.local_path(NAME)
    server.repositories["org/tiny"].commit({**SMALL, "vocab.json": b"[2]"})
    assert places.local_path(NAME) == first
    forget(monkeypatch)
    assert places.local_path(NAME) != first


def test_shards_are_those_of_the_index(server):
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    shards = {name: WEIGHTS for name in index["weight_map"].values()}
    index = {"model.safetensors.index.json": json.dumps(index).encode()}
    server.repository("org/shards").commit({**SMALL, **index, **shards, **REST})
    folder = places.local_path("hf:org/shards")
    assert names(folder) == {*SMALL, *index}
    places.complete(folder)
    assert names(folder) == {*SMALL, *index, *shards}


def test_the_files_of_modules_and_the_named_chat_templates_come_with_the_configs(server):
    extra = {"1_Pooling/config.json": b"{}", "additional_chat_templates/rag.jinja": b"{{ documents }}"}
    server.repository("org/chat").commit({**SMALL, "chat_template.jinja": b"{{ messages }}", **extra, **REST})
    folder = places.local_path("hf:org/chat")
    assert names(folder) == {*SMALL, "chat_template.jinja", *extra}
    assert read_templates(folder) == {"default": "{{ messages }}", "rag": "{{ documents }}"}


@pytest.mark.slow
def test_the_client_is_imported_where_a_model_of_the_hub_is_named():
    code = "import sys, pretrainax.cli, pretrainax.interop.origin; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ).returncode == 0


def test_a_flag_takes_a_model_of_the_hub_where_it_is_read():
    from_, workdir = (paths._PathParser(takes_hub) for takes_hub in (True, False))
    assert from_.parse(f"{NAME}@v1") == f"{NAME}@v1"
    with pytest.raises(ValueError, match="write hf:org/name or hf:org/name@revision"):
        from_.parse("hf://org/name")
    with pytest.raises(ValueError, match="only --from, --base, --compare-with, .*export --push=org/name"):
        workdir.parse(NAME)
    assert workdir.parse("./hf:org/name") == "./hf:org/name"


# --- errors


def line(call, *args):
    """Returns the error line of a call, and its exit code."""
    with pytest.raises(UserError) as raised:
        call(*args)
    assert "\n" not in str(raised.value)
    return str(raised.value), raised.value.exit_code


def test_pickles_are_not_fetched(server):
    described = {"config.json": b'{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'}
    server.repository("org/old").commit({**SMALL, **described, "pytorch_model.bin": b"\x80\x04", "rust_model.ot": b""})
    folder = places.local_path("hf:org/old")  # its tokenizer is available
    said, code = line(places.complete, folder)
    assert code == 2 and said.startswith("hf:org/old holds pytorch_model.bin and no safetensors: such files can run")
    assert "hf:org/old@refs/pr/1" in said and "import BertForMaskedLM as M; M.from_pretrained('org/old')" in said
    assert not any("pytorch_model.bin" in path for _, path, _ in server.requests)


def test_a_model_without_weights(server):
    server.repository("org/empty").commit(SMALL)
    assert line(places.complete, places.local_path("hf:org/empty")) == (
        "hf:org/empty holds no safetensors: use a model with safetensors",
        2,
    )


def test_names_of_a_hostile_listing_lead_nowhere(server, tmp_path):
    repository = server.repository("org/evil")
    hostile = ["../../../evil.json", "/etc/evil.json", "..json", ".evil.json", "a/../../evil.json", "C:\\evil.json"]
    hostile += [
        "%2e%2e%2fevil.json",
        "evil\n.json",
        "evil.json/../../x.json",
        "~/evil.json",
        "1_Pooling/../config.json",
        "additional_chat_templates/../evil.jinja",
    ]
    repository.commit({**SMALL, **{name: b"{}" for name in hostile}})
    assert names(places.local_path("hf:org/evil")) == set(SMALL)
    for name in (
        "../../x.safetensors",
        "/etc/passwd",
        "model.safetensors/../../a.safetensors",
        ".a.safetensors",
        "a.bin",
    ):
        index = json.dumps({"weight_map": {"a": name}}).encode()
        repository.commit({**SMALL, "model.safetensors.index.json": index, name: WEIGHTS}, "of_shards")
        hub._models.clear()
        said, code = line(places.complete, places.local_path("hf:org/evil@of_shards"))
        assert code == 2 and repr(name) in said
    assert not [path for path in names(tmp_path) if "evil" in os.path.basename(path)]


def test_a_description_that_is_too_large_is_left_out_with_a_line(server, monkeypatch, capsys):
    monkeypatch.setattr(hub, "MAX_BYTES", 20)
    folder = places.local_path(NAME)
    sizes = {name: len(content) for name, content in SMALL.items()}
    assert max(sizes.values()) > 20 and names(folder) == {name for name, size in sizes.items() if size <= 20}
    assert "config.json is skipped: it has 22 bytes, the limit is 20" in capsys.readouterr().err


def test_a_listing_without_a_commit_is_of_no_hub(server):
    repository = server.repositories["org/tiny"]
    repository.commits["../../../x"] = repository.commits[repository.references["main"]]
    repository.references["main"] = "../../../x"
    said, code = line(places.local_path, NAME)
    assert code == 2 and "is not a hub" in said


@pytest.mark.parametrize(
    "name",
    ["hf:", "hf:/a", "hf://org/name", "hf:org/name/more", "hf:org/name@", "hf:org/../x", "hf:org/n@../../x", "hf:a b"],
)
def test_names_that_no_model_has(name, server):
    said, code = line(places.local_path, name)
    assert code == 2 and "write hf:org/name or hf:org/name@revision" in said and not server.requests


@pytest.mark.parametrize("token", [None, "hf_known"])
def test_there_is_no_such_model(server, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    said, code = line(places.local_path, "hf:org/nothing")
    then = "or the token set here has no access to it" if token else "if it is private, log in by `hf auth login`"
    assert (
        code == 2
        and f"{server.url} has no model org/nothing: check the name; {then}" in said
        and "hf_known" not in said
    )


def test_there_is_no_such_revision(server):
    said, code = line(places.local_path, f"{NAME}@v9")
    assert code == 2 and f"{NAME}@v9: org/tiny has no such revision: {server.url}/org/tiny/tree/main" in said


def test_a_gated_model_wants_a_token(server, monkeypatch):
    server.repositories["org/tiny"].gated = True
    said, code = line(places.local_path, NAME)
    assert code == 2 and said == (
        f"{NAME} is gated: ask for access at {server.url}/org/tiny, then log in by `hf auth login`, or set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    assert names(places.local_path(NAME)) == set(SMALL)


def test_a_token_that_the_hub_does_not_know(server, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    said, code = line(places.local_path, NAME)
    assert code == 2 and "does not accept the token that is set here" in said
    assert "secret" not in said + "".join(capsys.readouterr())


def test_a_busy_hub_is_asked_again(server, monkeypatch, capsys):
    monkeypatch.setattr(hub, "_FIRST_PAUSE", 0.05)
    server.faults = [
        ("/api/models/", 429, {"Retry-After": "0"}),
        ("/api/models/", 503, {"Retry-After": "0"}),
        ("merges", 429, {}),
    ]
    assert names(places.local_path(NAME)) == set(SMALL)
    said = capsys.readouterr().err
    assert "the hub is busy (it responds with 429): trying again in" in said and "(it responds with 503)" in said


def test_a_hub_that_limits_its_requests_for_long(server, capsys):
    server.faults = [("/api/models/", 429, {"RateLimit": '"api";r=0;t=290'})]
    said, code = line(places.local_path, NAME)
    assert code == 1 and "it responds with 429, and asks for a retry in 290 s" in said


def test_a_transfer_that_breaks_off_goes_on(server, monkeypatch, capsys):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # the size of the saved parts of a transfer
    folder = places.local_path(NAME)
    server.breaks = [70_000]
    places.complete(folder)
    assert open(f"{folder}/model.safetensors", "rb").read() == WEIGHTS
    assert "Trying to resume download" in capsys.readouterr().err
    ranges = [headers["Range"] for method, path, headers in server.requests if "Range" in headers and method == "GET"]
    assert ranges == ["bytes=70000-"]


def test_a_file_of_another_size_than_was_listed(server):
    server.repositories["org/tiny"].listed["model.safetensors"] = 7
    said, code = line(places.complete, places.local_path(NAME))
    assert code == 1 and "model.safetensors came with 102,400 bytes, and the hub lists 7" in said


def test_a_disk_without_room(server, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: hub.shutil._ntuple_diskusage(10, 5, 5))
    said, code = line(places.local_path, NAME)
    assert code == 1 and "are to be fetched" in said and "set HF_HOME" in said and not server.fetched()


def test_a_disk_that_fills_up(server, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/blobs/x")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    assert line(places.local_path, NAME) == (
        f"{NAME}: No space left on device at /cache/blobs/x: make room, and run the same command again",
        1,
    )


# --- a transfer by Xet, as the client does it if the package hf_xet is installed


@pytest.fixture
def by_xet(server, monkeypatch):
    """Offers large files by Xet; a function that writes their content replaces the client of this protocol."""
    from huggingface_hub import file_download

    written: list[str] = []

    def xet_get(*, incomplete_path, xet_file_data, displayed_filename, **_):
        written.append(displayed_filename)
        incomplete_path.write_bytes(server.xet[xet_file_data.file_hash])

    server.xet = {hashlib.sha256(WEIGHTS).hexdigest(): WEIGHTS}
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SHARED_BLOBS", True)  # all users of this machine share these blobs
    monkeypatch.setattr(file_download, "is_xet_available", lambda: True)
    monkeypatch.setattr(file_download, "xet_get", xet_get)
    return written


def test_large_files_may_come_by_xet(server, by_xet):
    folder = places.local_path(NAME)
    places.complete(folder)
    assert open(f"{folder}/model.safetensors", "rb").read() == WEIGHTS
    assert by_xet == ["model.safetensors"] and not any("safetensors" in path for path in server.fetched())


def test_what_comes_by_xet_has_the_size_that_is_listed(server, by_xet):
    server.xet = {name: content[:-1] for name, content in server.xet.items()}
    said, code = line(places.complete, places.local_path(NAME))
    assert code == 1 and "model.safetensors came with 102,399 bytes, and the hub lists 102,400" in said


def test_there_must_be_room_for_what_would_come_by_xet(server, by_xet, monkeypatch):
    folder = places.local_path(NAME)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: hub.shutil._ntuple_diskusage(10, 5, 5))
    said, code = line(places.complete, folder)
    assert code == 1 and "102,400 bytes are to be fetched" in said and not by_xet


# --- a kill


def test_after_a_kill_the_files_that_were_whole_stay(server, tmp_path):
    """After a kill, the client drops incomplete files, and the next process fetches them from the start."""
    names_of_shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": {"a": names_of_shards[0], "b": names_of_shards[1]}}).encode()
    shards = dict.fromkeys(names_of_shards[:1], WEIGHTS) | {names_of_shards[1]: WEIGHTS * 9}
    server.repository("org/shards").commit({**SMALL, "model.safetensors.index.json": index, **shards})
    code = "from pretrainax.storage import places; places.complete(places.local_path('hf:org/shards'))"
    env = os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_HUB_DISABLE_XET": "1"}
    server.stops = {names_of_shards[1]: 300_000}  # the server sends nothing more after this number of bytes
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)
    first = os.path.join(tmp_path, "cache", "models--org--shards", "snapshots")
    until = time.monotonic() + 60
    while not (server.stopped and any(names_of_shards[0] in name for name in names(first))):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    server.stops = {}
    before = len(server.fetched())
    folder = places.local_path("hf:org/shards")
    places.complete(folder)
    assert all(open(f"{folder}/{name}", "rb").read() == content for name, content in shards.items())
    again = [path.rpartition("/")[2] for path in server.fetched()[before:]]
    assert again == [names_of_shards[1]]
    assert not [headers for method, _, headers in server.requests if method == "GET" and "Range" in headers]


# --- without a network


@pytest.fixture(params=["HF_HUB_OFFLINE is set", "ConnectError"])
def cut_off(request, server, monkeypatch):
    """Disconnects the network, or sets the variable that states this."""

    def cut():
        forget(monkeypatch)
        if request.param == "ConnectError":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        else:
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return request.param

    return cut


def test_without_a_network_the_cache_is_used(server, cut_off, capsys):
    places.complete(places.local_path(NAME))
    why = cut_off()
    capsys.readouterr()
    folder = places.local_path(NAME)
    places.complete(folder)
    assert names(folder) == {*SMALL, "model.safetensors"}
    said = capsys.readouterr().err
    assert f"{NAME}: the hub is not reached ({why}" in said and "the copy of commit" in said and said.count("\n") == 1


def test_without_a_network_each_name_of_a_commit_is_known(server, cut_off):
    """The second name has fetched nothing, because all files were there."""
    repository = server.repositories["org/tiny"]
    repository.references["refs/pr/1"] = repository.references["v1.0"] = repository.references["main"]
    wanted = {places.local_path(f"{NAME}@{revision}") for revision in ("main", "refs/pr/1", "v1.0")}
    cut_off()
    assert {places.local_path(f"{NAME}@{revision}") for revision in ("main", "refs/pr/1", "v1.0")} == wanted


def test_a_file_that_is_listed_and_not_there(server, monkeypatch):
    server.faults = [("vocab.json", 404, {"X-Error-Code": "EntryNotFound"})]
    said, code = line(places.local_path, NAME)
    assert code == 2 and "the hub responds with 404" in said


def test_without_a_network_and_a_copy(server, cut_off):
    why = cut_off()
    said, code = line(places.local_path, NAME)
    assert (
        code == 1
        and f"the hub cannot be reached ({why}" in said
        and "the cache of this machine does not have it" in said
    )


def test_without_a_network_and_with_a_part(server, cut_off):
    places.local_path(NAME)
    cut_off()
    said, code = line(places.complete, places.local_path(NAME))
    assert code == 1 and "the cache has a part of it, without model.safetensors" in said


def test_a_hub_that_never_answers(server, monkeypatch, capsys):
    places.local_path(NAME)
    forget(monkeypatch)
    monkeypatch.setattr(hub, "_TIMEOUT", 0.2)
    server.faults = [("/api/models/", 0, {"seconds": "1"})]
    places.local_path(NAME)
    assert "ReadTimeout" in capsys.readouterr().err


def test_what_the_client_logs_is_heard_while_it_is_asked(capsys):
    logger = logging.getLogger("huggingface_hub")
    before = list(logger.handlers)
    outer, inner = hub.show_client_log(), hub.show_client_log()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # as if two sources were read alternately
    logger.warning("Retrying https://cdn.example/a?X-Amz-Signature=secret in 1s")
    inner.__exit__(None, None, None)
    assert capsys.readouterr().err == "pretrainax: Retrying https://cdn.example/a in 1s\n"
    assert logger.handlers == before and logger.propagate
