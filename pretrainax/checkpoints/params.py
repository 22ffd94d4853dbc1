"""Restores checkpoint parameters with given shardings; writes and reads parameters block by block."""

import errno
import functools
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.errors import save_errors
from pretrainax.checkpoints.paths import exact_path
from pretrainax.checkpoints.run_json import RUN_JSON, read_run_json, signature_of, signatures, write_run_json
from pretrainax.checkpoints.steps import parameter_files
from pretrainax.config import UserError
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names
from pretrainax.storage.places import complete

Params = dict[str, PyTree]  # a nested dict of parameter arrays, or of their shapes and dtypes
Initializer = Callable[[list[str]], dict[str, jax.Array]]  # paths of parameters -> their initial values, sharded
Index = tuple[slice, ...]  # location of a block in an array: one slice per axis
TRAINED, EMA = "params", "ema"  # folders of a checkpoint: trained parameters, and their moving average
_BLOCK_BYTES = 1 << 26  # maximum bytes of a block, the unit in which a parameter is written and read
CODEC = {"driver": "zarr3", "codecs": [{"name": "zstd", "configuration": {"level": 1}}]}


def load_steps(step_directories: Sequence[str], abstract_params: Params, folder: str = TRAINED) -> Params:
    """Loads the parameters of one checkpoint, or their mean over several checkpoints.

    If the run is in an object store, missing files are downloaded first.

    Args:
      step_directories: folders of the checkpoints.
      abstract_params: jax.ShapeDtypeStructs with the target shardings.
      folder: TRAINED, or EMA for the moving average of the parameters.

    Raises:
      UserError: as in `load_parts`.
    """
    for step_directory in step_directories:
        complete(step_directory, parameter_files(folder))
    if len(step_directories) > 1:
        return average_params(step_directories, abstract_params, folder)
    return load_parts(step_directories[0], {folder: abstract_params})[folder]


def average_params(step_directories: Sequence[str], abstract_params: Params, folder: str = TRAINED) -> Params:
    """Averages the parameters of several checkpoints in float64; each device reads only its own shards.

    Args:
      step_directories: folders of the checkpoints, whose files must be local.
      abstract_params: jax.ShapeDtypeStructs with the target shardings.
      folder: TRAINED, or EMA for the moving average of the parameters.

    Raises:
      UserError: as in `load_parts`, for any of the checkpoints.
    """
    for step_directory in step_directories:
        _check_arrays(step_directory, signatures({folder: abstract_params}))

    def read(path: str, index: Index) -> np.ndarray:
        return _mean([_open(_store(step_directory, folder), path) for step_directory in step_directories], index)

    means = {
        path: jax.make_array_from_callback(x.shape, x.sharding, functools.partial(read, path))
        for path, x in _by_path(abstract_params).items()
    }
    return jax.tree.unflatten(jax.tree.structure(abstract_params), means.values())


def _mean(arrays: Sequence[ts.TensorStore], index: Index) -> np.ndarray:
    """Reads block `index` of each array and averages the blocks in float64; casts the mean to the arrays' dtype.

    Args:
      arrays: stored arrays of the same shape and dtype.
    """
    blocks = (array[index].read().result() for array in arrays)
    if len(arrays) == 1:
        return next(blocks)
    return np.asarray(sum(block.astype(np.float64) for block in blocks) / len(arrays), arrays[0].dtype.numpy_dtype)


def _by_path(tree: Params) -> dict[str, PyTree]:
    return dict(zip(parameter_names(tree), jax.tree.leaves(tree), strict=True))


def load_parts(step_directory: str, abstract_parts: dict[str, PyTree]) -> dict[str, PyTree]:
    """Restores parts of a checkpoint (subfolders, for example `params`) with the given shardings.

    Args:
      abstract_parts: {name of the part: tree of jax.ShapeDtypeStructs with the target shardings}.

    Raises:
      UserError: the saved arrays of these parts differ in path, shape or dtype.
    """
    _check_arrays(step_directory, signatures(abstract_parts))
    return ocp.load_checkpointables(exact_path(step_directory), abstract_parts)


def _check_arrays(step_directory: str, expected: dict[str, str]) -> None:
    """Raises UserError unless the parts of a checkpoint contain exactly the expected arrays.

    Args:
      expected: {"part/path": dtype and shape of the array}, as `signatures` returns it.
    """
    parts, stored = {name.split("/")[0] for name in expected}, read_run_json(step_directory)["arrays"]
    stored = {name: signature for name, signature in stored.items() if name.split("/")[0] in parts}
    common = expected.keys() & stored.keys()
    problems = (
        [f"{name} {expected[name]} is missing" for name in expected if name not in common]
        + [f"{name} {stored[name]} is unexpected" for name in stored if name not in common]
        + [f"{n} is {stored[n]}, expected {expected[n]}" for n in expected if n in common and stored[n] != expected[n]]
    )
    if problems:
        raise UserError(
            f"checkpoint {step_directory} is from another model or optimizer ({'; '.join(problems)}); "
            f"its config.json, two folders up, has the matching fields of config.model and config.optimizer"
        )


# --- block by block ------------------------------------------------------------------------------------------------


def write_params(workdir: str, abstract_params: Params, read: Callable[[str, Index], np.ndarray], extra: dict) -> None:
    """Writes a checkpoint of step 0 that contains only parameters, block by block.

    At most one block is in memory at a time. Orbax first writes a checkpoint in which each array has a single element.
    TensorStore then replaces these arrays with the parameters, in chunks of at most one layer.

    Args:
      workdir: folder of the run; it must not contain a checkpoint of step 0.
      abstract_params: shapes and dtypes of the parameters.
      read: returns a block, given the parameter's path and the block's index; called once per block.
      extra: content of "extra" in run.json, any JSON object.
    """
    directory = os.fspath(exact_path(os.path.join(workdir, "checkpoints")))
    os.makedirs(directory, exist_ok=True)
    staging, target = (os.path.join(directory, name) for name in ("0.saving", "0"))
    if os.path.exists(target):
        raise UserError(f"{workdir} has a checkpoint already: set another --workdir")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with save_errors(0):
            ocp.save_checkpointables(
                exact_path(staging), {"params": jax.tree.map(lambda x: np.zeros(1, x.dtype), abstract_params)}
            )
        store = _store(staging)
        ts.KvStore.open(store).result().delete_range(ts.KvStore.KeyRange()).result()
        for path, x in zip(parameter_names(abstract_params), jax.tree.leaves(abstract_params), strict=True):
            chunk = _chunk(path, x.shape, x.dtype.itemsize)
            with save_errors(0):
                array = ts.open(
                    # Otherwise blocks of zeros are not written, and Orbax fails without them.
                    {**array_spec(store, path), "store_data_equal_to_fill_value": True},
                    create=True,
                    shape=x.shape,
                    dtype=x.dtype.name,
                    chunk_layout=ts.ChunkLayout(chunk_shape=chunk),
                    codec=ts.CodecSpec(CODEC),
                ).result()
            for start in itertools.product(*(range(0, n, size) for n, size in zip(x.shape, chunk, strict=True))):
                index = tuple(slice(i, min(i + c, n)) for i, c, n in zip(start, chunk, x.shape, strict=True))
                block = read(path, index)
                with save_errors(0):
                    array[index].write(block).result()
        write_run_json(os.path.join(staging, RUN_JSON), 0, {"params": abstract_params}, extra)
        with save_errors(0):
            check_readable(staging)
        manifest.write_manifest(staging)
        os.rename(staging, target)
        manifest.fsync_path(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_params(*step_directories: str, folder: str = TRAINED) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yields (path, start, block) for each block of a checkpoint's parameters, or of the mean over several checkpoints.

    A block is a slice of the parameter along its first axis, which begins at `start` and is as long as a stored chunk.

    Args:
      step_directories: folders of checkpoints of one run.
      folder: TRAINED, or EMA for the moving average of the parameters.
    """
    stores = [_store(step_directory, folder) for step_directory in step_directories]
    for name in read_run_json(step_directories[0])["arrays"]:
        part, _, path = name.partition("/")
        if part == folder:
            arrays = [_open(store, path) for store in stores]
            rows = arrays[0].chunk_layout.read_chunk.shape[0]
            for start in range(0, arrays[0].shape[0], rows):
                yield path, start, _mean(arrays, (slice(start, min(start + rows, arrays[0].shape[0])),))


def check_readable(step_directory: str) -> None:
    """Checks that each array of a new checkpoint can be opened, as it would be on restore.

    Raises:
      OSError: an array is missing, or its shape or dtype differs from run.json.
    """
    for name, signature in read_run_json(step_directory)["arrays"].items():
        part, _, path = name.partition("/")
        try:
            array = _open(_store(step_directory, part), path)
        except ValueError as e:  # from TensorStore, for any missing file
            raise OSError(errno.EIO, f"{name} cannot be read back ({' '.join(str(e).split())[:200]})") from e
        if (actual := signature_of(array.shape, array.dtype.numpy_dtype)) != signature:
            raise OSError(errno.EIO, f"{name} was written as {signature} and reads as {actual}")


def _open(store: dict, path: str) -> ts.TensorStore:
    return ts.open(array_spec(store, path), open=True).result()


def _store(step_directory: str, part: str = TRAINED) -> dict:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{exact_path(step_directory)}/{part}/"}}


def array_spec(store: dict, path: str) -> dict:
    """Returns the TensorStore spec of an array in an Orbax checkpoint, without a cache.

    Args:
      store: spec of the key-value store that contains the arrays of a part.
      path: path of the array within the part, for example "decoder/blocks/kernel".
    """
    return {
        "driver": "zarr3",
        "kvstore": {**store, "path": f"{path.replace('/', '.')}/"},
        "context": {"cache_pool": {"total_bytes_limit": 0}},
    }


def _chunk(path: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks in which a parameter is stored.

    A chunk contains one layer of a stacked parameter, or the whole parameter if it is not stacked. Chunks of more than
    `_BLOCK_BYTES` bytes are split further, along the leading axes first.
    """
    chunk = [1, *shape[1:]] if is_stacked(path) else list(shape)
    for axis, n in enumerate(chunk):
        size = itemsize * math.prod(chunk)
        if size > _BLOCK_BYTES:
            chunk[axis] = max(1, n * _BLOCK_BYTES // size)
    return tuple(chunk)
