"""Every command of the how-to guides is valid: the real parsers read its flags, and its config is valid."""

import json
import re
import runpy
import subprocess
import sys

import pytest

from pretrainax.config.validation import validate
from tests.support.docs_pages import commands, how_to
from tests.support.runs import ENV, ROOT

COMMANDS = commands(how_to())
NAMES = sorted({words[1] for words in COMMANDS})
# Parses each command line in a separate process, forked from a process with all imports.
PARSER = """
import json, os, sys
import pretrainax.data.objectives, pretrainax.interop.start, pretrainax.optim, pretrainax.trackers, pretrainax.zoo
from pretrainax import cli

def main():
    cli.experiment(files=False)
    return 0

for words in json.load(sys.stdin):
    child = os.fork()
    if not child:
        sys.argv = words
        try:
            cli.run(main)
        except SystemExit as e:
            sys.stderr.flush()
            os._exit(e.code or 0)  # to end as any other would take half a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def start(words: list[str], **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *words], env=ENV | {"PYTHONPATH": str(ROOT)}, text=True, **kwargs)


@pytest.mark.slow
def test_every_config_of_a_recipe_is_sound(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "words.txt").write_text("床前\n")
    (tmp_path / "runs" / "tokenizer").mkdir(parents=True)
    # Fine-tuning starts from these folders. The test reads only their config.json.
    for name, family in {"bert": "bert", "student": "bert", "t5": "t5", "gpt2": "gpt2"}.items():
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "config.json").write_text(f'{{"model_type": "{family}"}}')
    configured = [words for words in COMMANDS if any(word.startswith("--config=") for word in words)]
    assert len(configured) >= 20
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    out, err = start(["-c", PARSER], cwd=tmp_path, **pipes).communicate(
        json.dumps([["recipe", *(word for word in words if word.startswith("--config"))] for words in configured])
    )
    assert [words for words, code in zip(configured, out.split(), strict=True) if code != "0"] == [], err


@pytest.mark.slow
def test_every_other_flag_is_one_of_its_command():
    started = {name: start(["-m", "pretrainax", name, "--help"], stdout=subprocess.PIPE) for name in NAMES}
    helps = {name: process.communicate()[0] for name, process in started.items()}
    for command in COMMANDS:
        name, *words = command[1:]
        own = [
            word[2:].partition("=")[0] for word in words if word.startswith("--") and not word.startswith("--config")
        ]
        own = [flag.removeprefix("no") for flag in own]
        assert [flag for flag in own if not re.search(rf"--(\[no\])?{flag}\b", helps[name])] == [], command


def test_every_config_of_the_table_of_machines_is_one():
    files = re.findall(r"`(configs/\w+\.py)(?::(\w+))?`", how_to("choose-a-size"))
    assert len(files) >= 8
    for file, variant in files:
        validate(runpy.run_path(str(ROOT / file))["get_config"](variant), files=False)
