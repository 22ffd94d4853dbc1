"""Where documents come from. A source names its shards, reads one of them as text, and has a fingerprint.

Shards are small picklable descriptions, so that processes can read different ones at a time.
"""

import ast
import collections
import dataclasses
import gzip
import importlib.metadata
import json
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import Choice, UserError, nearest, to_json
from pretrainax.data import files


class Source(Choice):
    """Base of the sources. `split` is "train" or "valid"."""

    pairs: ClassVar[bool] = False  # documents are (source, target)

    def components(self) -> tuple["Source", ...]:
        """The sources that a mixture is made of, each with a corpus of its own."""
        return (self,)

    def rates(self, sizes: Sequence[int]) -> list[tuple[float, tuple[float, ...]]]:
        """(from which share of the training on, weight of each component). sizes: documents of each."""
        return [(0.0, (1.0,))]

    def fingerprint(self) -> str:
        """Changes whenever the text may have changed."""
        raise NotImplementedError

    def shards(self, split: str) -> list[Any]:
        raise NotImplementedError

    def read(self, shard: Any, skipped: collections.Counter) -> Iterator[str]:
        """The documents of a shard. Counts in `skipped`, by reason, what it leaves out."""
        raise NotImplementedError


# --- the embedded corpus -------------------------------------------------------------------------------------------


class Module(NamedTuple):
    name: str
    path: str


@dataclasses.dataclass
class PythonDocs(Source):
    """The documentation that is on every machine where PretrainAX is: about 12 MB of English, nothing downloaded.

    Docstrings of the Python standard library and of numpy, scipy, jax, flax and optax, one document a module, and the
    topics of Python's language reference. Files are parsed, never imported or run. Tests are left out. About 3 % of
    the modules, chosen by their name, are for validation.
    """

    def fingerprint(self) -> str:
        # Versions, not contents: this runs at the start of every training run.
        versions = {package: importlib.metadata.version(package) for package in _DOCUMENTED_PACKAGES}
        return files.digest("PythonDocs 1", list(sys.version_info), versions)

    def shards(self, split: str) -> list[list[Module]]:
        modules = sorted({*_standard_library(), *(m for p in _DOCUMENTED_PACKAGES for m in _package(p))})
        chosen = [m for m in modules if (files.fraction(m.name.encode()) < 0.03) == (split == "valid")]
        megabytes = np.cumsum([os.path.getsize(m.path) for m in chosen]) >> 20
        cuts = np.flatnonzero(np.diff(megabytes)) + 1  # a shard: about 1 MB of source
        return [chosen[i:j] for i, j in zip([0, *cuts], [*cuts, len(chosen)], strict=True)]

    def read(self, shard: list[Module], skipped: collections.Counter) -> Iterator[str]:
        for module in shard:
            with open(module.path, "rb") as f, warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes
                warnings.simplefilter("ignore", DeprecationWarning)  # the same, before Python 3.12
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
                    yield documents.encode("utf-8", "replace").decode()  # a docstring may hold lone surrogates


_DOCUMENTED_PACKAGES = ("numpy", "scipy", "jax", "flax", "optax")
_NO_DOCUMENTATION = re.compile(
    r"(^|/)(tests?|testing|idle_test|lib2to3|__pycache__|site-packages|dist-packages|test_[^/]*|[^/]*_test\.py|conftest\.py)(/|$)"
)


def _standard_library() -> Iterator[Module]:
    root = sysconfig.get_path("stdlib")
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            yield from _module(os.path.relpath(path, root), path)


def _package(name: str) -> Iterator[Module]:
    for file in importlib.metadata.files(name) or ():
        yield from _module(file.as_posix(), str(file.locate()))


def _module(relative: str, path: str) -> Iterator[Module]:
    relative = relative.replace(os.sep, "/")
    if relative.endswith(".py") and not _NO_DOCUMENTATION.search(relative):
        yield Module(relative.removesuffix(".py").removesuffix("/__init__").replace("/", "."), path)


def _docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of a module or class and of what it defines, in the order of the file."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring and docstring.strip():
            yield name, docstring
    if isinstance(node, (ast.Module, ast.ClassDef, ast.If, ast.Try)):
        for child in node.body:
            inner = f"{name}.{child.name}" if hasattr(child, "name") else name
            yield from _docstrings(child, inner)


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign):  # topics = {name: text, ...}
            yield from ast.literal_eval(node.value).values()


# --- files ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class TextFiles(Source):
    """Plain UTF-8 text, one document a file (a file of over 16 MB: one document for each 16 MB, cut at a line's end).

    `path` is a file, a folder (every .txt below it) or a glob. Without `valid_path`, the last `valid_fraction` of the
    characters of each file are for validation.
    """

    path: str
    valid_path: Optional[str] = None
    valid_fraction: float = 0.1

    def problems(self, experiment: Any) -> Iterator[str]:
        yield from files.problems(self)

    def fingerprint(self) -> str:
        return files.fingerprint(self, to_json(self), (".txt",))

    def shards(self, split: str) -> list[files.FileRange]:
        shards = []
        if self.valid_path is not None:
            for file in files.find(self, split, (".txt",)):
                shards += files.ranges(file, 0, os.path.getsize(file), longest_line=1 << 20)
            return shards
        for file in files.find(self, "train", (".txt",)):
            boundary, size = files.byte_of_character(file, 1 - self.valid_fraction), os.path.getsize(file)
            start, stop = (0, boundary) if split == "train" else (boundary, size)
            shards += files.ranges(file, start, stop, longest_line=1 << 20)
        return shards

    def read(self, shard: files.FileRange, skipped: collections.Counter) -> Iterator[str]:
        with open(shard.path, "rb") as f:
            f.seek(shard.start)
            content = f.read(shard.stop - shard.start)
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as e:
            line = files.line_number(shard.path, shard.start + e.start)
            raise UserError(f"{shard.path}:{line}: byte 0x{content[e.start]:02x} is not UTF-8 ({e.reason})") from e


class Lines(NamedTuple):
    path: str
    start: int  # byte
    stop: Optional[int]  # None: to the end of a compressed file
    split: Optional[str]  # None: every document, else those of this split


@dataclasses.dataclass
class JsonLines(Source):
    """One JSON object a line, the document in its `text_field`; plain or gzip.

    `path` is a file, a folder (every .jsonl and .jsonl.gz below it) or a glob. Without `valid_path`, `valid_fraction`
    of the documents are for validation, chosen by a hash of the text, so that equal documents are in the same split.
    """

    path: str
    valid_path: Optional[str] = None
    valid_fraction: float = 0.01
    text_field: str = "text"
    on_error: str = "stop"  # at a broken line: stop | skip it and count it

    def problems(self, experiment: Any) -> Iterator[str]:
        yield from files.problems(self)
        if self.on_error not in ("stop", "skip"):
            yield f"config.data.source.on_error is {self.on_error!r}, {nearest(self.on_error, ('stop', 'skip'))}"

    def fingerprint(self) -> str:
        return files.fingerprint(self, to_json(self), _JSON_LINES)

    def shards(self, split: str) -> list[Lines]:
        wanted = None if self.valid_path is not None else split
        shards = []
        for file in files.find(self, "train" if wanted else split, _JSON_LINES):
            if file.endswith(".gz"):
                shards.append(Lines(file, 0, None, wanted))
            else:
                ranges = files.ranges(file, 0, os.path.getsize(file), longest_line=-1)
                shards += [Lines(*r, wanted) for r in ranges]
        return shards

    def read(self, shard: Lines, skipped: collections.Counter) -> Iterator[str]:
        for number, line in enumerate(_lines(shard)):
            if line.isspace():
                continue
            try:
                text = self._text(line)
                content = text.encode("utf-8")
            except (ValueError, RecursionError) as e:  # broken JSON and broken UTF-8 are ValueErrors
                if self.on_error == "skip":
                    skipped["broken lines"] += shard.split != "valid"  # else counted in both splits
                    continue
                number += files.line_number(shard.path, shard.start) if shard.start else 1
                raise UserError(f"{shard.path}:{number}: {e}; or set config.data.source.on_error=skip") from e
            if shard.split is None or (shard.split == "valid") == (files.fraction(content) < self.valid_fraction):
                yield text

    def _text(self, line: bytes) -> str:
        try:
            record = json.loads(line.decode("utf-8-sig").rstrip())
        except json.JSONDecodeError as e:
            raise ValueError(f"broken JSON at column {e.colno} ({e.msg})") from e
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object is needed, not {type(record).__name__}")
        if self.text_field not in record:
            raise ValueError(
                f"no field {self.text_field!r}, {nearest(self.text_field, record)} (set config.data.source.text_field)"
            )
        if not isinstance(record[self.text_field], str):
            kind = type(record[self.text_field]).__name__
            raise ValueError(f"field {self.text_field!r} holds {kind}, it must be a string")
        return record[self.text_field]


_JSON_LINES = (".jsonl", ".jsonl.gz")


def _lines(shard: Lines) -> Iterator[bytes]:
    if shard.stop is not None:
        with open(shard.path, "rb") as f:
            f.seek(shard.start)
            while f.tell() < shard.stop:
                yield f.readline()
        return
    number = 0
    try:
        with gzip.open(shard.path, "rb") as f:
            for line in f:
                number += 1
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise UserError(f"{shard.path}:{number + 1}: the gzip file is broken here ({e})") from e


# --- TFDS ----------------------------------------------------------------------------------------------------------


class Records(NamedTuple):
    split: str  # TFDS's name of it
    start: int
    stop: int


@dataclasses.dataclass
class TFDS(Source):
    """A prepared TensorFlow Datasets data set in a random-access format (array_record), read without TensorFlow."""

    name: str  # "wikipedia/20230601.en", or with its version "my_set/config:1.0.0"
    data_dir: Optional[str] = None  # None: TFDS's own default
    train_split: str = "train"
    valid_split: str = "validation"
    text_field: str = "text"

    def fingerprint(self) -> str:
        info = self._builder().info
        sizes = {name: [int(n) for n in split.shard_lengths] for name, split in info.splits.items()}
        bytes_ = {name: split.num_bytes for name, split in info.splits.items()}
        return files.digest(to_json(self), info.full_name, sizes, bytes_)

    def shards(self, split: str) -> list[Records]:
        name = self.train_split if split == "train" else self.valid_split
        splits = self._builder().info.splits
        if name not in splits:
            raise UserError(f"config.data.source.{split}_split is {name!r}, {nearest(name, splits)}")
        count = splits[name].num_examples
        return [Records(name, i, min(i + 10_000, count)) for i in range(0, count, 10_000)]

    def read(self, shard: Records, skipped: collections.Counter) -> Iterator[str]:
        builder = self._builder()
        if self.text_field not in builder.info.features:
            allowed = nearest(self.text_field, builder.info.features)
            raise UserError(f"config.data.source.text_field is {self.text_field!r}, {allowed}")
        try:
            records = builder.as_data_source(split=shard.split)
        except NotImplementedError as e:
            raise UserError(f"{self.name} is prepared in a format without random access: {e}") from e
        for i in range(shard.start, shard.stop, 100):
            place = range(i, min(i + 100, shard.stop))
            for number, record in zip(place, records.__getitems__(place), strict=True):
                try:
                    yield record[self.text_field].decode("utf-8")
                except UnicodeDecodeError as e:
                    raise UserError(f"{self.name} {shard.split}:{number}: not UTF-8 ({e})") from e

    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        data_dir = None if self.data_dir is None else os.path.expanduser(self.data_dir)
        try:
            builder = tfds.builder(self.name, data_dir=data_dir)
        except tfds.core.registered.DatasetNotFoundError as e:
            raise UserError(f"config.data.source.name is {self.name!r}: TFDS has no such data set") from e
        if not builder.is_prepared():
            raise UserError(
                f"{self.name} is not prepared in {builder.data_dir}: run tfds.builder({self.name!r})"
                '.download_and_prepare(file_format="array_record"), or set config.data.source.data_dir'
            )
        return builder
