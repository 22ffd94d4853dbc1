"""The slow tier of the tests: the cases that `make test` leaves to `make test-all`.

A test over all models always runs with a few models that together have every component. All models are compared with
the golden files in any case: logits, hidden states and gradients. A test over meshes always runs with the meshes that
split the most axes.
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
    """Returns cases for `pytest.mark.parametrize`; the slow tier has all cases except for `always`.

    A tuple is a case of several parameters.
    """
    cases, always = list(cases), list(always)
    assert any(case in always for case in cases), f"none of {always} is among {cases}"
    slow = [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in cases]
    return [case if case in always else param for case, param in zip(cases, slow, strict=True)]
