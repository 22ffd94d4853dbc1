"""Implements a data source of Python documentation, which is on every machine where PretrainAX is installed."""

import ast
import collections
import dataclasses
import importlib.metadata
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pretrainax.data import files
from pretrainax.data.sources.base import Source


class Module(NamedTuple):
    """A Python module whose documentation forms one document."""

    name: str
    path: str


@dataclasses.dataclass
class PythonDocs(Source):
    """Reads Python documentation from the installed packages: about 12 MB of English text, without a download.

    The documents are the docstrings of the Python standard library and of numpy, scipy, jax, flax and optax (one
    document per module), and the topics of Python's language reference. Files are parsed, never imported or run. Tests
    are excluded. A hash of the module name selects about 3 % of the modules for validation.
    """

    def fingerprint(self) -> str:
        # Hashes versions instead of contents, because this method runs at the start of every training run.
        versions = {package: importlib.metadata.version(package) for package in _DOCUMENTED_PACKAGES}
        return files.digest("PythonDocs 1", list(sys.version_info), versions)

    def shards(self, split: str) -> list[list[Module]]:
        modules = sorted({*_standard_library(), *(m for p in _DOCUMENTED_PACKAGES for m in _package(p))})
        selected = [m for m in modules if (files.fraction(m.name.encode()) < 0.03) == (split == "valid")]
        megabytes = np.cumsum([os.path.getsize(m.path) for m in selected]) >> 20
        cuts = np.flatnonzero(np.diff(megabytes)) + 1  # about 1 MB of source code per shard
        return [selected[i:j] for i, j in zip([0, *cuts], [*cuts, len(selected)], strict=True)]

    def read(self, shard: list[Module], skipped: collections.Counter) -> Iterator[str]:
        for module in shard:
            with open(module.path, "rb") as f, warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # invalid escape sequences
                warnings.simplefilter("ignore", DeprecationWarning)  # invalid escape sequences before Python 3.12
                try:
                    tree = ast.parse(f.read())
                except (SyntaxError, ValueError, RecursionError):
                    skipped["modules that do not parse"] += 1
                    continue
            if module.name == "pydoc_data.topics":
                yield from _topics(tree)
            else:
                documents = "\n\n\n".join(f"{name}\n\n{doc}" for name, doc in _docstrings(tree, module.name))
                if documents:
                    yield documents.encode("utf-8", "replace").decode()  # docstrings may have lone surrogates


_DOCUMENTED_PACKAGES = ("numpy", "scipy", "jax", "flax", "optax")
_NO_DOCUMENTATION = re.compile(
    r"(^|/)(tests?|testing|idle_test|lib2to3|__pycache__|site-packages|dist-packages|test_[^/]*|[^/]*_test\.py|conftest\.py)(/|$)"
)


def _standard_library() -> Iterator[Module]:
    """Yields the documented modules of the Python standard library."""
    root = sysconfig.get_path("stdlib")
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            yield from _module(os.path.relpath(path, root), path)


def _package(name: str) -> Iterator[Module]:
    """Yields the documented modules of an installed package."""
    for file in importlib.metadata.files(name) or ():
        yield from _module(file.as_posix(), str(file.locate()))


def _module(relative: str, path: str) -> Iterator[Module]:
    """Yields the module of a file; yields nothing if the file is not Python code or is a test."""
    relative = relative.replace(os.sep, "/")
    if relative.endswith(".py") and not _NO_DOCUMENTATION.search(relative):
        yield Module(relative.removesuffix(".py").removesuffix("/__init__").replace("/", "."), path)


def _docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yields (qualified name, docstring) of a module, class or function, and of the definitions inside it.

    They are yielded in file order. Definitions inside functions are omitted.
    """
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring and docstring.strip():
            yield name, docstring
    if isinstance(node, (ast.Module, ast.ClassDef, ast.If, ast.Try)):
        for child in node.body:
            child_name = f"{name}.{child.name}" if hasattr(child, "name") else name
            yield from _docstrings(child, child_name)


def _topics(tree: ast.Module) -> Iterator[str]:
    """Yields the topics of Python's language reference, from the code of pydoc_data.topics."""
    for node in tree.body:
        if isinstance(node, ast.Assign):  # topics = {name: text, ...}
            yield from ast.literal_eval(node.value).values()
