"""Saves and restores a run, and knows which checkpoint can be trusted.

A step of a run is the folder `checkpoints/<step>/`: what Orbax wrote (`params/`, `optimizer/`), `run.json` (shapes,
metrics and what the loop remembers) and `manifest.sha256`, the SHA-256 of every file in the format of `sha256sum -c`.
Orbax has no checksums of array data: a flipped bit would come back as a wrong weight, without a word.
A folder gets its name only once it is complete, hashed and flushed to disk, so a kill at any moment leaves whole steps.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import logging as standard_logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Optional

import jax
import numpy as np
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from pretrainax.checkpoints import manifest
from pretrainax.config import RunFailed, UserError
from pretrainax.config.json_files import read_object
from pretrainax.sharding.param_paths import parameter_names

NOTES = "run.json"
_UNFINISHED = re.compile(r"(\d+)\.(saving|replaced|deleted)\b.*")  # folders on their way to or from `<step>`


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the best one.

    A checkpoint's state is a flax dataclass with a field `params`. One save is under way at a time. With several
    processes all of them call every method; process 0 hashes, names and deletes.
    """

    def __init__(self, directory: str, keep: int, best_metric: str = "loss"):
        """Clears what a killed process left half-done. `best_metric`: lower is better."""
        self.directory = os.path.abspath(directory)
        self.keep, self.best_metric = keep, best_metric
        self.warnings = []  # one line for each step that `restore_newest` had to pass over
        self._distrusted = set()  # those steps: not deleted, not counted among the newest, replaced when saved again
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending = None  # (step, future) of the save under way
        os.makedirs(self.directory, exist_ok=True)
        for name in ("absl", "concurrent.futures"):
            standard_logging.getLogger(name).addFilter(_not_orbax_traceback)
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # of a save that failed
        self._clear_unfinished()

    def save(self, step: int, state: Any, extra: dict, metrics: Optional[dict] = None) -> None:
        """Copies the state and returns; the writing goes on in the background. A step that exists is replaced.

        Args:
          state: may be donated to the next update at once.
          extra: anything JSON can hold; comes back from `restore_newest`.
          metrics: {"loss": …} of this step; without it the step cannot be the best one.

        Raises:
          RunFailed: this save or the one before, for which it waits, could not be written.
        """
        self.wait()
        parts = _parts(state)
        notes = {"step": step, "metrics": _finite(metrics or {}), "arrays": _signatures(parts), "extra": extra}
        staging = self._path(step, ".saving")
        with _naming(step):
            if jax.process_index() == 0:
                # Before the caller changes `extra`, and before Orbax, which waits 300 s for a folder it cannot make.
                manifest.write(self._path(step, ".saving.json"), json.dumps(notes, indent=1))
            response = ocp.save_checkpointables_async(staging, parts)
        self._pending = step, self._writer.submit(self._finish, step, staging, response)

    def wait(self) -> None:
        """Returns when the last save is on disk and verified; raises RunFailed if it could not be written."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with _naming(step):
                future.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._clear_unfinished()  # what Orbax still wrote when its save had failed

    def drop_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, which a rollback has found to be bad."""
        self.wait()
        if jax.process_index() == 0:
            for later in _steps(self.directory):
                if later > step and later not in self._distrusted:
                    os.rename(self._path(later), self._path(later, ".deleted"))
        self._clear_unfinished()

    def restore_newest(self, abstract_state: Any, up_to: Optional[int] = None) -> Optional[tuple[int, Any, dict]]:
        """(step, state, extra) of the newest step whose every file has its checksum; None where there is no step.

        Args:
          abstract_state: jax.ShapeDtypeStructs with the shardings to restore into, whatever they were when saved.
          up_to: the newest step up to this one, if there is one; else the oldest.

        Raises:
          UserError: there are steps and all are damaged (nothing is deleted); or the arrays are not those of
            `abstract_state`: names each that is missing, not wanted, or of another shape or dtype.
        """
        self.wait()
        found = -1
        if jax.process_index() == 0:
            step, damaged = _newest_valid(self.directory, up_to)
            self.warnings = [f"checkpoint {s} is not used: {faults}" for s, faults in damaged.items()]
            self._distrusted |= set(damaged)
            for line in self.warnings:
                logging.warning(line)
            found = -1 if step is None else step
        step = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if step < 0:
            return None
        path = self._path(step)
        if not any(name.startswith("optimizer/") for name in read_notes(path)["arrays"]):
            raise UserError(
                f"{path} holds imported parameters alone, which no run can resume from: start one in another --workdir "
                f"with --config.checkpoint.init_from={os.path.dirname(self.directory)}"
            )
        parts = _load(path, _parts(abstract_state))
        state = abstract_state.replace(params=parts["params"], **parts["optimizer"])
        return step, state, read_notes(path)["extra"]

    def _path(self, step: int, suffix: str = "") -> str:
        return os.path.join(self.directory, f"{step}{suffix}")

    def _finish(self, step: int, staging: str, response: Any) -> None:
        """In the background: waits for Orbax, adds notes and manifest, names the folder, deletes older steps."""
        try:
            response.result()
            if jax.process_index() == 0:
                os.rename(self._path(step, ".saving.json"), os.path.join(staging, NOTES))
                manifest.seal(staging)
                if os.path.exists(self._path(step)):
                    os.rename(self._path(step), self._path(step, ".replaced"))
                os.rename(staging, self._path(step))
                manifest.sync(self.directory)
                self._distrusted.discard(step)
                self._delete_older(step)
        finally:
            self._clear_unfinished()  # what a failed save wrote makes room again

    def _delete_older(self, newest: int) -> None:
        """Keeps the newest ones, the best one, and whatever did not verify: a person may want to look at that."""
        losses = {}
        for step in _steps(self.directory):
            if step not in self._distrusted and os.path.exists(os.path.join(self._path(step), manifest.MANIFEST)):
                with contextlib.suppress(UserError):  # damaged since: not ours to judge here
                    losses[step] = read_notes(self._path(step))["metrics"].get(self.best_metric)
        scored = [step for step in losses if losses[step] is not None]
        wanted = {newest, *list(losses)[-self.keep :], *([min(scored, key=losses.get)] if scored else [])}
        for step in losses.keys() - wanted:
            os.rename(self._path(step), self._path(step, ".deleted"))  # at once, so that no half of it keeps the name

    def _clear_unfinished(self) -> None:
        for name in os.listdir(self.directory) if jax.process_index() == 0 else ():
            if match := _UNFINISHED.fullmatch(name):
                path, whole = os.path.join(self.directory, name), self._path(int(match[1]))
                if match[2] == "replaced" and not os.path.exists(whole):
                    os.rename(path, whole)  # killed before its successor took the name
                elif os.path.isdir(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.remove(path)


def load_params(workdir: str, abstract_params: Any) -> Any:
    """The parameters, and nothing else, of the newest valid checkpoint of a run.

    Args:
      workdir: the run directory that holds `checkpoints/`.
      abstract_params: jax.ShapeDtypeStructs with shardings.

    Raises:
      UserError: no valid checkpoint there; or a parameter is missing, not wanted, or of another shape or dtype.
    """
    return _load(newest_step(workdir), {"params": abstract_params})["params"]


def newest_step(workdir: str, step: Optional[int] = None) -> str:
    """The folder of the newest valid checkpoint of a run, or of `step`; UserError where there is none."""
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    if step is not None:
        path = os.path.join(directory, str(step))
        faults = manifest.faults(path) if os.path.isdir(path) else ["it is not there"]
        if faults:
            raise UserError(f"checkpoint {step} of {workdir} cannot be used: {', '.join(faults)}")
        return path
    step, damaged = _newest_valid(directory) if os.path.isdir(directory) else (None, {})
    if step is None:
        raise UserError(f"{workdir} holds no checkpoint; it must be the --workdir of a run that has saved one")
    for other, faults in damaged.items():
        logging.warning("checkpoint %d of %s is not used: %s", other, workdir, faults)
    return os.path.join(directory, str(step))


# --- parameters block by block -------------------------------------------------------------------------------------

_BLOCK_BYTES = 1 << 26  # of a parameter, that are in memory at a time
_CODEC = {"driver": "zarr3", "codecs": [{"name": "zstd", "configuration": {"level": 1}}]}
Index = tuple[slice, ...]  # one slice an axis


def write_params(workdir: str, abstract_params: Any, read: Callable[[str, Index], np.ndarray], extra: dict) -> None:
    """A step 0 that holds parameters alone, written without ever holding one of them whole.

    Orbax writes the folder around arrays of one number each; TensorStore puts the real ones in their place, in chunks
    of one layer, or of a part of it.

    Args:
      abstract_params: shapes and dtypes.
      read: the block of the parameter of this path at this index; asked for each block once.
      extra: anything JSON can hold.
    """
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    os.makedirs(directory, exist_ok=True)
    staging, target = (os.path.join(directory, name) for name in ("0.saving", "0"))
    if os.path.exists(target):
        raise UserError(f"{workdir} holds a checkpoint already: take another --workdir")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with _naming(0):
            ocp.save_checkpointables(staging, {"params": jax.tree.map(lambda x: np.zeros(1, x.dtype), abstract_params)})
        store = _store(staging)
        ts.KvStore.open(store).result().delete_range(ts.KvStore.KeyRange()).result()
        for path, x in zip(parameter_names(abstract_params), jax.tree.leaves(abstract_params), strict=True):
            chunk = _chunk(path, x.shape, x.dtype.itemsize)
            with _naming(0):
                array = ts.open(
                    _array(store, path),
                    create=True,
                    shape=x.shape,
                    dtype=x.dtype.name,
                    chunk_layout=ts.ChunkLayout(chunk_shape=chunk),
                    codec=ts.CodecSpec(_CODEC),
                ).result()
            for start in itertools.product(*(range(0, n, size) for n, size in zip(x.shape, chunk, strict=True))):
                index = tuple(slice(i, min(i + c, n)) for i, c, n in zip(start, chunk, x.shape, strict=True))
                block = read(path, index)
                with _naming(0):
                    array[index].write(block).result()
        arrays = _signatures({"params": abstract_params})
        notes = {"step": 0, "metrics": {}, "arrays": arrays, "extra": extra}
        manifest.write(os.path.join(staging, NOTES), json.dumps(notes, indent=1))
        manifest.seal(staging)
        os.rename(staging, target)
        manifest.sync(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_params(step_directory: str) -> Iterator[tuple[str, int, np.ndarray]]:
    """(path, start, block) of each parameter of a step, in blocks along its first axis, as small as its chunks are."""
    store = _store(step_directory)
    for name in read_notes(step_directory)["arrays"]:
        part, _, path = name.partition("/")
        if part == "params":
            array = ts.open(_array(store, path), open=True).result()
            rows = array.chunk_layout.read_chunk.shape[0]
            for start in range(0, array.shape[0], rows):
                yield path, start, array[start : min(start + rows, array.shape[0])].read().result()


def _store(step_directory: str) -> dict:
    return {"driver": "ocdbt", "base": f"file://{step_directory}/params/"}


def _array(store: dict, path: str) -> dict:
    """An array as Orbax names it; nothing of it is kept in memory after its use."""
    return {
        "driver": "zarr3",
        "kvstore": {**store, "path": f"{path.replace('/', '.')}/"},
        "context": {"cache_pool": {"total_bytes_limit": 0}},
    }


def _chunk(path: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """One layer of a stack, or as many of the first rows as make a block."""
    chunk = [1 if "/blocks/" in path and axis == 0 else n for axis, n in enumerate(shape)]
    for axis, n in enumerate(chunk):
        size = itemsize * math.prod(chunk)
        if size > _BLOCK_BYTES:
            chunk[axis] = max(1, n * _BLOCK_BYTES // size)
    return tuple(chunk)


# --- which step ----------------------------------------------------------------------------------------------------


def _steps(directory: str) -> list[int]:
    return sorted(int(name) for name in os.listdir(directory) if name.isdecimal())


def _newest_valid(directory: str, up_to: Optional[int] = None) -> tuple[Optional[int], dict[int, str]]:
    """The newest step that verifies, and what is wrong with each newer one; UserError where none of them does.

    With `up_to`, the newest up to that step, or the oldest after it.
    """
    damaged, steps = {}, _steps(directory)[::-1]
    if up_to is not None:
        steps.sort(key=lambda step: (step > up_to, abs(step - up_to)))
    for step in steps:
        faults = manifest.faults(os.path.join(directory, str(step)))
        if not faults:
            return step, damaged
        damaged[step] = ", ".join(faults)
    if damaged:
        lines = "; ".join(f"step {step}: {faults}" for step, faults in damaged.items())
        raise UserError(
            f"every checkpoint in {directory} is damaged ({lines}); none was deleted: repair or move that folder away"
        )
    return None, {}


# --- writing -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(step: int) -> Iterator[None]:
    """Whatever stops a save (disk, permissions, Orbax, TensorStore) becomes one line; `--debug` shows the cause."""
    try:
        yield
    except Exception as error:
        raise RunFailed(f"could not save step {step}: {_reason(error)}; earlier checkpoints are kept") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if match := re.search(r"os_error_code='(\d+)'", text):  # TensorStore's way of giving errno
        return os.strerror(int(match[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {text[:200]}"


def _not_orbax_traceback(record: standard_logging.LogRecord) -> bool:
    """Orbax logs the traceback of each of its threads that fails or comes late; `wait` raises the same error, once."""
    return "_SignalingThread.run() raised" not in str(record.msg) and "loop is closed" not in str(record.exc_info)


# --- contents ------------------------------------------------------------------------------------------------------


def _parts(state: Any) -> dict[str, Any]:
    """Two folders, so that parameters can be read without the optimizer's two copies of them."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {"params": fields.pop("params"), "optimizer": fields}


def _signatures(tree: Any) -> dict[str, str]:
    """{"params/decoder/…/kernel": "float32[4,256,8,32]"}."""
    texts = [f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(tree)]
    return dict(zip(parameter_names(tree), texts, strict=True))


def _finite(metrics: dict) -> dict:
    """A loss that is not a number cannot be the best one."""
    return {name: float(x) if x is not None and math.isfinite(x) else None for name, x in metrics.items()}


def read_notes(step_directory: str) -> dict:
    path = os.path.join(step_directory, NOTES)
    notes = read_object(path)
    if lost := [name for name in ("arrays", "metrics", "extra") if not isinstance(notes.get(name), dict)]:
        raise UserError(f"{path} is not what a checkpoint has: no {', '.join(lost)}")
    return notes


def _load(step_directory: str, abstract_parts: dict[str, Any]) -> dict[str, Any]:
    """Restores the given parts into their shardings, if they are exactly what was saved."""
    wanted = _signatures(abstract_parts)
    stored = read_notes(step_directory)["arrays"]
    stored = {name: text for name, text in stored.items() if name.split("/")[0] in abstract_parts}
    both = wanted.keys() & stored.keys()
    problems = (
        [f"{name} {wanted[name]} is missing" for name in wanted if name not in both]
        + [f"{name} {stored[name]} is not wanted" for name in stored if name not in both]
        + [f"{n} is {stored[n]}, wanted {wanted[n]}" for n in wanted if n in both and stored[n] != wanted[n]]
    )
    if problems:
        raise UserError(
            f"checkpoint {step_directory} is of another model or optimizer ({'; '.join(problems)}); "
            f"its config.json, two folders up, has the fields of config.model and config.optimizer that fit"
        )
    return ocp.load_checkpointables(step_directory, abstract_parts)
