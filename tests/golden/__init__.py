"""Tiny models of every family, and what transformers computes with them."""

import importlib
import pathlib

_GROUPS = sorted(
    f.stem for f in pathlib.Path(__file__).parent.glob("*.py") if f.stem not in ("__init__", "case", "make")
)
# name -> Case
CASES = {
    name: case for group in _GROUPS for name, case in importlib.import_module(f"tests.golden.{group}").CASES.items()
}
