"""Tests pushing folders to the hub: one commit, replaced weights, and errors."""

import pytest
from huggingface_hub import constants

from pretrainax.config import UserError
from pretrainax.storage import hub

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 99, "README.md": b"---\nlicense: mit\n---\n# A card"}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / "export").mkdir(exist_ok=True)
        (tmp_path / "export" / name).write_bytes(content)
    return str(tmp_path / "export")


@pytest.fixture
def logged_in(hub_server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    return hub_server


def there(server, repository):
    """Returns the files of the main branch."""
    found = server.repositories[repository]
    return found.commits[found.references["main"]]


def test_a_push_makes_a_repository_and_sends_all(logged_in, folder, capsys):
    said = hub.push(folder, "me/model", is_private=False)
    assert {name: content for name, content in there(logged_in, "me/model").items() if name in FILES} == FILES
    commit = logged_in.repositories["me/model"].references["main"]
    assert said == f"pushed to {logged_in.url}/me/model as commit {commit[:12]}"
    assert not logged_in.repositories["me/model"].private
    assert "hf_known" not in said + "".join(capsys.readouterr())


def test_weights_that_were_there_before_are_taken_away(logged_in, folder):
    old = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2", "notes.md": b"mine"}
    logged_in.repository("me/model").commit({**old, "model.safetensors.index.json": b"{}"})
    hub.push(folder, "me/model", is_private=False)
    assert set(there(logged_in, "me/model")) == {*FILES, "notes.md"}


def test_a_push_replaces_an_adapter_or_an_embedding_model(logged_in, folder):
    names = ("adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.model")
    names += ("modules.json", "1_Pooling/config.json", "generation_config.json", "manifest.sha256")
    names += ("additional_chat_templates/rag.jinja",)
    own = {"results.json": b"{}", "plots/config.json": b"{}"}
    logged_in.repository("me/model").commit({name: b"{}" for name in names} | own)
    hub.push(folder, "me/model", is_private=False)
    assert set(there(logged_in, "me/model")) == {*FILES, *own}


def test_a_private_push_is_never_seen_by_others(logged_in, folder):
    hub.push(folder, "me/model", is_private=True)
    assert logged_in.repositories["me/model"].private
    before = dict(there(logged_in, "me/model"))
    logged_in.repositories["me/model"].private = False
    with pytest.raises(UserError, match="is public already"):
        hub.push(folder, "me/model", is_private=True)
    assert there(logged_in, "me/model") == before


@pytest.mark.parametrize("name", ["model", "me/model@v1", "a b", "hf:me/model", "me/a/b", "../x/y"])
def test_names_that_nothing_is_pushed_to(logged_in, name):
    with pytest.raises(UserError, match="it must be org/name, without a revision"):
        hub.check_push(name)


def test_a_push_without_a_token(hub_server, folder):
    with pytest.raises(UserError, match="no token is set here: log in by `hf auth login`, or set HF_TOKEN"):
        hub.push(folder, "me/model", is_private=False)
    assert not hub_server.requests


def test_a_push_to_what_belongs_to_others(logged_in, folder):
    with pytest.raises(UserError, match="You don't have the rights to create a model") as raised:
        hub.push(folder, "others/model", is_private=False)
    assert "hf_known" not in str(raised.value)


def test_a_push_with_a_token_that_is_not_known(hub_server, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    with pytest.raises(UserError) as raised:
        hub.push(folder, "me/model", is_private=False)
    assert "secret" not in str(raised.value) and raised.value.exit_code == 2


def test_a_push_to_a_busy_hub_goes_on(logged_in, folder, monkeypatch, capsys):
    monkeypatch.setattr(hub, "_FIRST_PAUSE", 0.05)
    logged_in.faults = [("/repos/create", 429, {"Retry-After": "0"}), ("/commit/", 503, {"Retry-After": "0"})]
    hub.push(folder, "me/model", is_private=False)
    assert FILES.items() <= there(logged_in, "me/model").items()
    assert "the hub is busy (it responds with 429)" in capsys.readouterr().err


def test_a_push_that_breaks_off_changes_nothing(logged_in, folder, monkeypatch):
    logged_in.repository("me/model").commit({"config.json": b"old"})
    monkeypatch.setattr(hub, "PATIENCE", 0.0)
    logged_in.faults = [("/lfs/objects/batch", 400, {})]
    with pytest.raises(UserError):
        hub.push(folder, "me/model", is_private=False)
    assert there(logged_in, "me/model") == {"config.json": b"old"}


def test_a_push_without_a_network(logged_in, folder, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="the transfer broke off") as raised:
        hub.push(folder, "me/model", is_private=False)
    assert raised.value.exit_code == 1
