"""docs/use.md runs as it stands: its Python block by block, in a folder with a trained run."""

import contextlib
import io
import os
import pathlib
import re

import pytest

from tests.support.runs import ROOT, command, run

PAGE = (ROOT / "docs" / "use.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FLAGS = "--config.checkpoint.every=10", "--config.evaluate.every=20"


@pytest.fixture(scope="session")
def folder(tmp_path_factory, text, cache) -> pathlib.Path:
    """Where the reader of the page stands: runs/mine is a decoder."""
    root = tmp_path_factory.mktemp("use")
    done = run(command("tests/support/tiny.py:gpt", root / "runs" / "mine", text, cache, *FLAGS))
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def printed(folder) -> list[str]:
    """What each block has printed, all of them run one after the other."""
    said, names, before = [], {}, os.getcwd()
    os.chdir(folder)
    try:
        for block in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, "docs/use.md", "exec"), names)
            said.append(out.getvalue())
    finally:
        os.chdir(before)
    return said


def test_every_block_says_what_the_page_says(printed):
    for block, said in zip(BLOCKS, printed, strict=True):
        assert len(said.splitlines()) >= block.count("print(")
        for expected in re.findall(r"# (runs/mine, .*)", block):
            assert expected in said


def test_logits_and_states_have_the_shapes_that_the_page_names(printed):
    (said,) = [said for block, said in zip(BLOCKS, printed, strict=True) if "hidden=True" in block]
    assert said.splitlines() == ["(2, 16, 512)", "(2, 2, 16, 32)"]


def test_the_table_of_names_is_what_load_takes():
    from pretrainax.inference import origin

    written = re.findall(r"^\| `(\S+)` \|", PAGE, re.MULTILINE)
    documented = re.findall(r"^    (\S+)  ", origin.__doc__, re.MULTILINE)
    assert written == documented
