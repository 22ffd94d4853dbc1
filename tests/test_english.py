"""Limits the rate of hard phrases in docs, docstrings, comments and messages.

The patterns are a smoke detector, not a judge. A sentence may need such a phrase, but a page full of them needs an
editor.
"""

import ast
import io
import pathlib
import re
import tokenize

import pytest

from tests.support.runs import ROOT

MOST = 7.0  # hits per 1,000 words; five other codebases of the field have 4.3 to 6.0
RARE = 0.3  # the same for the two patterns that slow readers down most
CLAUSE, PASSIVE = "a clause instead of a noun", "a passive without an actor"
VERBS = "returns? yields? gives? holds? says? tells? counts? names? finds? reads? writes? makes? takes?".replace(
    " ", "|"
)
PATTERNS = {
    CLAUSE: rf"\b(?:{VERBS}) (?:what|where|how|which|whether|those|that which|the one|one that)\b",
    PASSIVE: r"\b(?:is|are|was|were|be) "
    r"(?:said|told|asked|refused|announced|shown|named|counted|known|kept|made anew|left out|taken|meant)\b",
    "a fronted clause": r"(?:^|[.:;] )(?:Of|As|Where|What|Whether|So|Such|Those|Beside|Within)\b[^.]{0,60}[,:]",
    "a pronoun for a noun": r"\b(?:those of|that of|one that|such (?:a|as)|so many|as many as|in the place of|"
    r"of its own|by itself|no more than)\b",
    "beside": r"\bbesides?\b",
    "wants": r"\b(?:wants|asks to be|knows of|has to do|can be had|worth having|comes? with it)\b",
    "a home-made noun": r"\b(?:figures?|texts|house|pieces of documents|ways? of|turns?|made again|what is kept)\b",
    "a rare adverb": r"\b(?:anew|seldom|whichever|whoever|hence|thereof|wherever|meanwhile|sooner|dearer|farther|"
    r"rather than one)\b",
}
LONG = 35  # words in a sentence
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_of_page(path: pathlib.Path) -> str:
    """Returns a Markdown page without code blocks and tables."""
    text = re.sub(r"```.*?```", " ", path.read_text(), flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def prose_of_code(path: pathlib.Path) -> str:
    """Returns the docstrings, f-strings and comments of a Python file."""
    text = path.read_text()
    tree, parts = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            parts.append(docstring)
        elif isinstance(node, ast.JoinedStr):
            parts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values))
    comments = (
        t.string.lstrip("# ")
        for t in tokenize.generate_tokens(io.StringIO(text).readline)
        if t.type == tokenize.COMMENT
    )
    return "\n".join([*parts, *comments])


def rates(text: str) -> dict[str, float]:
    """Returns hits per 1,000 words by pattern, and the sum under "total"."""
    words, flat = len(re.findall(r"[A-Za-z']+", text)), re.sub(r"\s+", " ", text)
    hits = {
        name: len(
            re.findall(pattern, text if "^" in pattern else flat, re.MULTILINE if "^" in pattern else re.IGNORECASE)
        )
        for name, pattern in PATTERNS.items()
    }
    hits["a long sentence"] = sum(len(sentence.split()) > LONG for sentence in re.split(r"(?<=[.!?])\s", flat))
    return {name: 1000 * n / words for name, n in (hits | {"total": sum(hits.values())}).items()}


PAGES = {
    "README": [ROOT / "README.md"],
    "CONTRIBUTING": [ROOT / "CONTRIBUTING.md"],
    "CHANGELOG": [ROOT / "CHANGELOG.md"],
    "docs": sorted((ROOT / "docs").rglob("*.md")),
    "benchmarks": sorted((ROOT / "benchmarks").glob("*.md")),
    "records": sorted((ROOT / "records").glob("*.md")),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_easy_to_read(name):
    found = rates("\n".join(map(prose_of_page, PAGES[name])))
    assert found["total"] <= MOST and found[CLAUSE] <= RARE and found[PASSIVE] <= RARE, found


def test_the_package_is_easy_to_read():
    found = rates("\n".join(map(prose_of_code, sorted((ROOT / "pretrainax").rglob("*.py")))))
    assert found["total"] <= MOST and found[CLAUSE] <= RARE and found[PASSIVE] <= RARE, found


def test_a_hard_sentence_is_noticed():
    hard = "Returns what adds the pull to zero. The rate is said by the config. Of a GPU, three were not fitted."
    found = rates(hard)
    assert found[CLAUSE] and found[PASSIVE] and found["a fronted clause"]
    assert rates("Returns the weight-decay transformation, masked by `DECAY`.")["total"] == 0


def test_the_design_is_short():
    assert len((ROOT / "docs" / "design.md").read_text().split()) <= 3000
