"""The Python blocks of the how-to guides about trained models run unchanged, one by one, on a trained run."""

import contextlib
import dataclasses
import io
import os
import pathlib
import re

import pytest

from pretrainax.config import Classify, LearnedPositions
from tests.golden import CASES
from tests.support.classifiers import named_labels, with_head
from tests.support.docs_pages import USE_PAGES, how_to
from tests.support.huggingface_weights import write_directory, write_run
from tests.support.runs import command, run

pytestmark = pytest.mark.slow

PAGE = how_to(*USE_PAGES)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FLAGS = "--config.checkpoint.every=10", "--config.evaluate.every=20", "--config.evaluate.prompts=('once', 'we')"


@pytest.fixture(scope="session")
def folder(tmp_path_factory, text, cache) -> pathlib.Path:
    """Creates the folder of the guides' reader: runs/mine is a trained decoder; there are an encoder and a T5."""
    root = tmp_path_factory.mktemp("use")
    done = run(command("tests/support/tiny.py:gpt", root / "runs" / "mine", text, cache, *FLAGS))
    assert done.returncode == 0, done.stderr
    (root / "printed.txt").write_text(done.stderr)
    bert = dataclasses.replace(CASES["bert_masked_lm"].config, position=LearnedPositions(64))
    write_run(root / "runs" / "bert", bert)
    (root / "exports").mkdir()
    named_labels(
        write_directory(root / "exports" / "sst2", with_head("bert", Classify(num_labels=2, kind="single"))),
        "negative",
        "positive",
    )
    write_run(root / "runs" / "t5", CASES["t5_1_1"].config, sentinels=4)
    return root


@pytest.fixture(scope="module")
def printed(folder) -> list[str]:
    """Returns the output of each block; the blocks run one after the other."""
    said, names, before = [], {}, os.getcwd()
    os.chdir(folder)
    try:
        for block in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, "docs/how-to", "exec"), names)
            said.append(out.getvalue())
    finally:
        os.chdir(before)
    return said


def said_by(code: str, printed: list[str]) -> list[str]:
    """Returns the output lines of the only block with this code."""
    (said,) = [said for block, said in zip(BLOCKS, printed, strict=True) if code in block]
    return said.splitlines()


def test_every_block_says_what_the_page_says(printed):
    for block, said in zip(BLOCKS, printed, strict=True):
        assert len(said.splitlines()) >= block.count("print(")
        for expected in re.findall(r"# (runs/mine, .*)", block):
            assert expected in said


def test_logits_and_states_have_the_shapes_that_the_page_names(printed):
    assert said_by("hidden=True", printed) == ["(2, 16, 512)", "(2, 2, 16, 32)"]


def test_a_run_shows_at_its_end_how_it_goes_on_with_the_prompts_of_its_config(folder):
    shown = (folder / "printed.txt").read_text().split("samples of config.evaluate.prompts")[1]
    assert re.search("· once ⟶ .+\n.*· we ⟶ ", shown), shown


def test_holes_are_filled_and_vectors_made_as_the_page_says(printed):
    text, *candidates = said_by("bert.fill", printed)
    assert text.startswith("the capital of france is ") and len(candidates) == 3
    text, *spans = said_by("t5.fill", printed)
    assert text.startswith("the ") and len(spans) == 2
    assert said_by("model.embed", printed) == ["(2, 32)", "(1, 16)"]


def test_what_is_counted_of_a_text_is_what_the_page_says(printed):
    assert said_by("stride=8", printed) == ["left to right, in windows of 24 tokens every 8"]


def test_records_are_labelled_as_the_page_says(printed):
    (said,) = said_by("sst2.predict", printed)
    assert re.fullmatch(
        r"\{'prediction': '(nega|posi)tive', 'probabilities': \{'negative': .*, 'positive': .*\}\}", said
    )


def test_the_table_of_names_is_what_load_takes():
    from pretrainax.interop import origin

    written = re.findall(r"^\| `(\S+)` \|", how_to("load").split("## Attributes")[0], re.MULTILINE)
    documented = re.findall(r"^    (\S+)  ", origin.__doc__, re.MULTILINE)
    assert written == documented
