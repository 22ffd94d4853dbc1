"""The pages of docs/, the commands and code blocks in them, and the commands in the docstrings of configs."""

import re
import shlex

from pretrainax.config.reference import docstring_of
from tests.support.runs import ROOT

DOCS = ROOT / "docs"
# The Python blocks of these pages form one session, in this order.
USE_PAGES = "load hub logits generate fill embed label-records score compare-families tasks".split()


def how_to(*names: str) -> str:
    """Returns the text of how-to guides, one after another; without names, of all guides."""
    files = [DOCS / "how-to" / f"{name}.md" for name in names] or sorted((DOCS / "how-to").glob("*.md"))
    return "\n".join(file.read_text() for file in files)


def config_commands(name: str) -> list[list[str]]:
    """Returns the commands in the docstring of a config, as words."""
    docstring = docstring_of(ROOT / "configs" / f"{name}.py")
    found = re.findall(r"^    python .*?(?=\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return [shlex.split(command) for command in found]


def commands(page: str) -> list[list[str]]:
    """Returns the `pretrainax` commands of the shell blocks of a page, as words that begin with "pretrainax"."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    split = [shlex.split(line) for line in lines]
    named = [["pretrainax", w[2][11:].replace("_", "-"), *w[3:]] if w[:2] == ["python", "-m"] else w for w in split]
    return [words for words in named if words[0] == "pretrainax"]
