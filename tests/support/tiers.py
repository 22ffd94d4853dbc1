"""The slow tier of the tests: what `make test` leaves to `make test-slow`, case by case.

A test over all models always runs with a few that have every brick between them. Each model's logits, hidden states and
gradients are held to the golden files in any case.
"""

from collections.abc import Iterable
from typing import Any

import pytest

ALWAYS = {
    *("bert", "albert", "electra_small", "electra-discriminator", "deberta", "modernbert", "longformer"),
    *("gpt2", "llama", "llama3", "gemma3", "deepseek_v3", "gpt_oss"),
    *("t5", "t5_1_1", "bart", "switch"),
}


def few(cases: Iterable[str], always: Iterable[str] = ALWAYS) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`, all but those named in the slow tier."""
    cases, always = list(cases), set(always)
    assert always & set(cases), f"none of {sorted(always)} is among {cases}"
    return [case if case in always else pytest.param(case, marks=pytest.mark.slow) for case in cases]
