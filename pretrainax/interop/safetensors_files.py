"""Reads and writes the safetensors files of a model, one tensor at a time.

A file (https://github.com/huggingface/safetensors) consists of the header length in 8 bytes, a JSON header ({name:
{dtype, shape, data_offsets}}), and the tensors in row-major order. Each tensor can therefore be memory-mapped: the
reader loads only the accessed bytes of a tensor, and the writer need not hold all tensors in memory.

The format has no checksums. The reader checks the header against the size of the file. Flipped bits in the data are
detected only if the directory has a manifest.sha256, as all PretrainAX exports do.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from pretrainax.config import UserError
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import name_problem
from pretrainax.files.regular_files import check_regular
from pretrainax.storage.hub import conversion_command
from pretrainax.storage.places import complete

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")  # other weight formats, mostly pickles


Tensors: TypeAlias = Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape of each tensor, by name


class _TensorLocation(NamedTuple):
    """The location of a tensor in a safetensors file."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # offset from the start of the file in bytes


class Reader:
    """Reads the tensors in the safetensors files of a directory; `reader[name]` returns an array."""

    def __init__(self, directory: str, single: str = SINGLE):
        """Reads and checks the headers of all files; raises UserError for invalid files.

        Args:
          single: name of the file that contains all tensors. With the default name, the tensors may instead be in
            several files with an index.
        """
        complete(directory)
        self._locations: dict[str, _TensorLocation] = {}
        indexed = _read_index(directory) if single == SINGLE else {}
        for name in sorted(set(indexed.values())) if indexed else [single]:
            for tensor, location in _read_header(os.path.join(directory, name)).items():
                if tensor in self._locations or indexed.get(tensor, name) != name:
                    raise UserError(f"{directory}: tensor {tensor} is in {name} and in another file")
                self._locations[tensor] = location
        missing = sorted(indexed.keys() - self._locations.keys())
        if missing:
            raise UserError(f"{directory}: {INDEX} lists tensors that its files do not hold: {', '.join(missing)}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: location.shape for name, location in self._locations.items()}

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        return {name: location.dtype for name, location in self._locations.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the tensor `name` as a read-only memory map, whose data is read on access."""
        return _memory_map(self._locations[name], "r")


class Writer:
    """Creates safetensors files for tensors of known shapes; `writer[name]` returns a writable array.

    All tensors are initially zero.

    Args:
      directory: existing folder for the files.
      tensors: dtype and shape of each tensor, by name.
      shard_bytes: maximum total size in bytes of the tensors in one file. A file with a single tensor may be larger.
      single: name of the file if one file is enough.
    """

    def __init__(self, directory: str, tensors: Tensors, shard_bytes: int, single: str = SINGLE):
        self._locations: dict[str, _TensorLocation] = {}
        shards, size = [[]], 0
        for name, (dtype, shape) in tensors.items():
            needed = np.dtype(dtype).itemsize * math.prod(shape)
            if shards[-1] and size + needed > shard_bytes:
                shards, size = [*shards, []], 0
            shards[-1].append(name)
            size += needed
        files = (
            [single]
            if len(shards) == 1
            else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        )
        for file, names in zip(files, shards, strict=True):
            self._create(os.path.join(directory, file), {name: tensors[name] for name in names})
        if len(files) > 1:
            total = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
            }
            with open(os.path.join(directory, INDEX), "w", encoding="utf-8") as f:
                f.write(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the tensor `name` as a writable memory map of its file."""
        return _memory_map(self._locations[name], "r+")

    def _create(self, path: str, tensors: Tensors) -> None:
        """Creates a file at `path` with zeros for all `tensors`, and records the locations of the tensors."""
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + np.dtype(dtype).itemsize * math.prod(shape)
            header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [start, end]}
        header_bytes = json.dumps(header, separators=(",", ":")).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)  # aligns the data to 8 bytes
        with open(path, "wb") as f:
            f.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
            f.flush()
            # Allocates all bytes now, because a write to a memory map kills the process if the disk is full.
            os.posix_fallocate(f.fileno(), 0, 8 + len(header_bytes) + end)
        for name, (dtype, shape) in tensors.items():
            start = 8 + len(header_bytes) + header[name]["data_offsets"][0]
            self._locations[name] = _TensorLocation(path, np.dtype(dtype), tuple(shape), start)


def _memory_map(location: _TensorLocation, mode: str) -> np.ndarray:
    if math.prod(location.shape) == 0:
        return np.empty(location.shape, location.dtype)
    return np.memmap(location.file, location.dtype, mode, location.start, location.shape)


def _read_index(directory: str) -> dict[str, str]:
    """Reads the index of a sharded model; returns each tensor's file name, or {} if the model is in a single file.

    The single file has priority over the index, as in transformers.

    Raises:
      UserError: the index is invalid, or both the single file and the index are missing.
    """
    path = os.path.join(directory, INDEX)
    if os.path.exists(os.path.join(directory, SINGLE)):
        return {}
    if not os.path.exists(path):
        raise UserError(_missing_weights_message(directory))
    index = read_object(path).get("weight_map")
    if not isinstance(index, dict):
        raise UserError(f"{path} is no index of safetensors files: it has no weight_map")
    files = {tensor: str(file) for tensor, file in index.items()}
    for file in set(files.values()):
        if os.path.basename(file) != file or file.startswith(".") or name_problem(file):
            raise UserError(f"{path} lists the file {file!r}, it must be in this directory")
        if not os.path.exists(os.path.join(directory, file)):
            raise UserError(f"{path} lists {file}, which is missing")
    return files


def _missing_weights_message(directory: str) -> str:
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    other_files = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if other_files:
        return (
            f"{directory} holds {', '.join(other_files)} and no {SINGLE}; pickles are not supported because they can "
            "run code. If you trust the files, convert them with transformers: "
            f"{conversion_command(directory, directory)}"
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX}"


def _read_header(path: str) -> dict[str, _TensorLocation]:
    """Reads the header of a file; returns the location of each tensor by name, and raises UserError for invalid files.

    The safetensors library checks that tensors neither overlap nor leave gaps.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="np"):
            pass
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header: dict[str, dict] = json.loads(f.read(length))
    except (SafetensorError, OSError, ValueError, MemoryError) as e:  # MemoryError: too large to map
        raise UserError(f"{path} is incomplete or no safetensors file ({e}): download it again") from e
    locations = {}
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] not in _DTYPES:
                raise UserError(f"{path}: {name} is {entry['dtype']}, supported are {', '.join(_DTYPES)}")
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            locations[name] = _TensorLocation(path, dtype, tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
    return locations
