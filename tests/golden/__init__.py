"""Defines tiny models of every family, and stores the results that transformers computes with them."""

import importlib
import pathlib

from pretrainax import zoo
from tests.golden.case import shrunk
from tests.support import written

_GROUPS = sorted(
    f.stem for f in pathlib.Path(__file__).parent.glob("*.py") if f.stem not in ("__init__", "case", "make")
)
# name -> Case
CASES = {
    name: case for group in _GROUPS for name, case in importlib.import_module(f"tests.golden.{group}").CASES.items()
}
_DONE = {id(case.family) for case in (CASES | written.CASES).values()}
# Families without a case get a default case.
CASES |= {
    family.prefix + next(iter(family.sizes)): shrunk(family)
    for family in zoo.FAMILIES
    if family.huggingface is not None and id(family) not in _DONE
}
