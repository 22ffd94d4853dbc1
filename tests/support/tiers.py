"""The slow tier of the tests: what `make test` leaves to `make test-all`, case by case.

A test over all models always runs with a few that have every brick between them. Each model's logits, hidden states and
gradients are held to the golden files in any case. A test over meshes runs with those that split the most axes.
"""

from collections.abc import Iterable
from typing import Any

import pytest

ALWAYS = {
    *("bert", "albert", "electra_small", "electra-discriminator", "deberta", "modernbert", "longformer"),
    *("gpt2", "llama", "llama3", "gemma3", "deepseek_v3", "gpt_oss"),
    *("t5", "t5_1_1", "bart", "switch"),
}


def few(cases: Iterable[Any], always: Iterable[Any] = ALWAYS) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`, all but those of `always` in the slow tier; a tuple is of several
    parameters."""
    cases, always = list(cases), list(always)
    assert any(case in always for case in cases), f"none of {always} is among {cases}"
    slow = [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in cases]
    return [case if case in always else param for case, param in zip(cases, slow, strict=True)]
