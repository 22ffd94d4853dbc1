"""`pretrainax doctor` prints the facts that maintainers need, and no facts that identify the user."""

import getpass
import json
import os
import socket
import sys

import pytest

import pretrainax
from pretrainax import doctor
from tests.support.runs import ENV, run

COMMAND = [sys.executable, "-m", "pretrainax", "doctor"]


def test_it_trains_and_lists_versions_devices_and_memory_without_secrets(tmp_path):
    env = ENV | {
        "HOME": str(tmp_path),
        "HF_TOKEN": "a-secret-value",
        "XLA_FLAGS": f"{ENV['XLA_FLAGS']} --xla_dump_to={tmp_path}/x",
    }
    done = run([*COMMAND, "--json"], env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["pretrainax"] == pretrainax.__version__ and "jaxlib" in found["versions"]
    assert found["backends"]["default"] == "cpu" and found["memory"]["disk, current folder"].endswith("free")
    assert found["environment"]["XLA_FLAGS"].endswith("--xla_dump_to=~/x") and "HF_TOKEN" not in found["environment"]
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["compiled product"]["works"] and checks["training"]["works"], found["checks"]
    assert checks["attention"]["detail"] == "BERT-base: xla, GPT-2: xla" and "import transformers" in checks
    assert "a-secret-value" not in done.stdout and str(tmp_path) not in done.stdout


@pytest.mark.slow
def test_a_platform_that_does_not_start_is_named_and_ends_with_1():
    done = run(COMMAND, env=ENV | {"JAX_PLATFORMS": "nosuch"})
    assert done.returncode == 1 and "nosuch" in done.stdout.partition("backends")[2].partition("memory")[0], done.stdout
    assert "✗  training" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text, public",
    [
        ("/home/ada/.venv/lib/x.so: not found", "~/.venv/lib/x.so: not found"),
        ("/home/adam/x", "/home/adam/x"),
        ("cannot reach vm-17.example.org:8476", "cannot reach <host>:8476"),
        ("vm-17: ada has no GPU; adagrad", "<host>: <user> has no GPU; adagrad"),
        ("https://ada:pass@host/x", "https://***@host/x"),
    ],
)
def test_names_of_user_and_host_are_replaced(text, public, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: "/home/ada")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "vm-17.example.org")
    assert doctor._public({"a": [text, 1]}) == {"a": [public, 1]}


def test_a_package_that_is_missing_or_broken_is_a_result():
    assert doctor._check("x", lambda: doctor._import("no_such_package", "parity")).detail == (
        "this optional check needs the package no-such-package: pip install 'pretrainax[parity]'"
    )

    def broken() -> str:
        raise AttributeError("a\nb")

    check = doctor._check("x", broken)
    assert not check.works and check.detail.startswith("AttributeError: a")
