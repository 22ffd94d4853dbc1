"""Saves and restores a run, and knows which checkpoint can be trusted.

A step of a run is the folder `checkpoints/<step>/`: what Orbax wrote (`params/`, `optimizer/`), `run.json` (shapes,
metrics and what the loop remembers) and `manifest.sha256`, the SHA-256 of every file in the format of `sha256sum -c`.
Orbax has no checksums of array data: a flipped bit would come back as a wrong weight, without a word.
A folder gets its name only once it is complete, hashed and flushed to disk, so a kill at any moment leaves whole steps.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging as standard_logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, Optional

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from pretrainax.config import RunFailed, UserError
from pretrainax.paths import parameter_names

MANIFEST = "manifest.sha256"
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
        self.keep = keep
        self.best_metric = best_metric
        self.warnings = []  # one line for each step that `restore_newest` had to pass over
        self._distrusted = set()  # those steps: not deleted, not counted among the newest, replaced when saved again
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending = None  # (step, future) of the save under way
        os.makedirs(self.directory, exist_ok=True)
        standard_logging.getLogger("absl").addFilter(_not_orbax_traceback)
        if jax.process_index() == 0:
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
        notes = json.dumps(notes, indent=1)  # now: the caller goes on changing `extra`
        staging = self._path(step, ".saving")
        with _naming(step):
            response = ocp.save_checkpointables_async(staging, parts)
        self._pending = step, self._writer.submit(self._finish, step, staging, response, notes)

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

    def restore_newest(self, abstract_state: Any) -> Optional[tuple[int, Any, dict]]:
        """(step, state, extra) of the newest step whose every file has its checksum; None where there is no step.

        Args:
          abstract_state: jax.ShapeDtypeStructs with the shardings to restore into, whatever they were when saved.

        Raises:
          UserError: there are steps and all are damaged (nothing is deleted); or the arrays are not those of
            `abstract_state`: names each that is missing, not wanted, or of another shape or dtype.
        """
        self.wait()
        found = -1
        if jax.process_index() == 0:
            step, damaged = _newest_valid(self.directory)
            self.warnings = [f"checkpoint {s} is not used: {faults}" for s, faults in damaged.items()]
            self._distrusted = set(damaged)
            for line in self.warnings:
                logging.warning(line)
            found = -1 if step is None else step
        step = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if step < 0:
            return None
        path = self._path(step)
        parts = _load(path, _parts(abstract_state))
        state = abstract_state.replace(params=parts["params"], **parts["optimizer"])
        return step, state, _read_notes(path)["extra"]

    def _path(self, step: int, suffix: str = "") -> str:
        return os.path.join(self.directory, f"{step}{suffix}")

    def _finish(self, step: int, staging: str, response: Any, notes: str) -> None:
        """In the background: waits for Orbax, adds notes and manifest, names the folder, deletes older steps."""
        try:
            response.result()
            if jax.process_index() == 0:
                _write(os.path.join(staging, NOTES), notes)
                _seal(staging)
                if os.path.exists(self._path(step)):
                    os.rename(self._path(step), self._path(step, ".replaced"))
                os.rename(staging, self._path(step))
                _sync(self.directory)
                self._distrusted.discard(step)
                self._delete_older(step)
        finally:  # what a failed save wrote makes room again
            if jax.process_index() == 0:
                self._clear_unfinished()

    def _delete_older(self, newest: int) -> None:
        """Keeps the newest ones, the best one, and whatever did not verify: a person may want to look at that."""
        losses = {}
        for step in _steps(self.directory):
            if step not in self._distrusted and os.path.exists(os.path.join(self._path(step), MANIFEST)):
                with contextlib.suppress(OSError, ValueError, KeyError):  # damaged since: not ours to judge here
                    losses[step] = _read_notes(self._path(step))["metrics"].get(self.best_metric)
        scored = [step for step in losses if losses[step] is not None]
        wanted = {newest, *list(losses)[-self.keep :], *([min(scored, key=losses.get)] if scored else [])}
        for step in losses.keys() - wanted:
            os.rename(self._path(step), self._path(step, ".deleted"))  # at once, so that no half of it keeps the name

    def _clear_unfinished(self) -> None:
        for name in os.listdir(self.directory):
            if match := _UNFINISHED.fullmatch(name):
                path, whole = os.path.join(self.directory, name), self._path(int(match[1]))
                if match[2] == "replaced" and not os.path.exists(whole):
                    os.rename(path, whole)  # killed before its successor took the name
                else:
                    shutil.rmtree(path, ignore_errors=True)


def load_params(workdir: str, abstract_params: Any) -> Any:
    """The parameters, and nothing else, of the newest valid checkpoint of a run.

    Args:
      workdir: the run directory that holds `checkpoints/`.
      abstract_params: jax.ShapeDtypeStructs with shardings.

    Raises:
      UserError: no valid checkpoint there; or a parameter is missing, not wanted, or of another shape or dtype.
    """
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    step, damaged = _newest_valid(directory) if os.path.isdir(directory) else (None, {})
    if step is None:
        raise UserError(f"{workdir} holds no checkpoint; it must be the --workdir of a run that has saved one")
    for other, faults in damaged.items():
        logging.warning("checkpoint %d of %s is not used: %s", other, workdir, faults)
    return _load(os.path.join(directory, str(step)), {"params": abstract_params})["params"]


# --- which step ----------------------------------------------------------------------------------------------------


def _steps(directory: str) -> list[int]:
    return sorted(int(name) for name in os.listdir(directory) if name.isdecimal())


def _newest_valid(directory: str) -> tuple[Optional[int], dict[int, str]]:
    """The newest step that verifies, and what is wrong with each newer one; UserError where none of them does."""
    damaged = {}
    for step in reversed(_steps(directory)):
        faults = _faults(os.path.join(directory, str(step)))
        if not faults:
            return step, damaged
        damaged[step] = ", ".join(faults)
    if damaged:
        lines = "; ".join(f"step {step}: {faults}" for step, faults in damaged.items())
        raise UserError(
            f"every checkpoint in {directory} is damaged ({lines}); none was deleted: repair or move that folder away"
        )
    return None, {}


def _faults(step_directory: str) -> list[str]:
    """What differs between a step and its manifest; empty for a valid step."""
    try:
        with open(os.path.join(step_directory, MANIFEST), encoding="utf-8") as f:
            lines = [re.fullmatch(r"([0-9a-f]{64})  (.+)\n", line) for line in f]
    except FileNotFoundError:
        return [f"{MANIFEST} missing"]
    except (OSError, UnicodeDecodeError) as error:
        return [f"{MANIFEST}: {_reason(error)}"]
    if not lines or None in lines:
        return [f"{MANIFEST} broken"]
    expected = {match[2]: match[1] for match in lines}
    files = _files(step_directory)
    both = sorted(expected.keys() & set(files))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(_digest_or_reason, (os.path.join(step_directory, name) for name in both))
    changed = [
        f"{n} {'changed' if len(d) == 64 else d}" for n, d in zip(both, digests, strict=True) if d != expected[n]
    ]
    missing = [f"{name} missing" for name in sorted(expected.keys() - set(files))]
    return changed + missing + [f"{name} not in {MANIFEST}" for name in sorted(set(files) - expected.keys())]


def _files(step_directory: str) -> list[str]:
    """Relative paths; the manifest and hidden files (file managers, NFS) are no part of a step."""
    found = []
    for folder, _, names in os.walk(step_directory):
        found += [os.path.relpath(os.path.join(folder, n), step_directory) for n in names if not n.startswith(".")]
    return sorted(name for name in found if name != MANIFEST)


def _digest(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _digest_or_reason(path: str) -> str:
    try:
        return _digest(path)
    except OSError as error:
        return f"unreadable ({_reason(error)})"


# --- writing -------------------------------------------------------------------------------------------------------


def _seal(step_directory: str) -> None:
    """Writes the manifest. Flushes the files first: over a power cut it must not outlive what it vouches for."""
    names = _files(step_directory)
    paths = [os.path.join(step_directory, name) for name in names]
    for folder, _, _ in os.walk(step_directory):
        _sync(folder)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(_sync, paths))
        digests = list(pool.map(_digest, paths))
    manifest = os.path.join(step_directory, MANIFEST)
    _write(manifest, "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)))
    _sync(manifest)
    _sync(step_directory)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """Orbax logs the traceback of each of its threads that fails; `wait` raises the same error, once."""
    return "_SignalingThread.run() raised" not in str(record.msg)


# --- contents ------------------------------------------------------------------------------------------------------


def _parts(state: Any) -> dict[str, Any]:
    """Two folders, so that parameters can be read without the optimizer's two copies of them."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {"params": fields.pop("params"), "optimizer": fields}


def _signatures(tree: Any) -> dict[str, str]:
    """{"params/decoder/…/kernel": "float32[4,256,8,32]"}."""
    arrays = jax.tree.leaves(tree)
    texts = [f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]" for x in arrays]
    return dict(zip(parameter_names(tree), texts, strict=True))


def _finite(metrics: dict) -> dict:
    """A loss that is not a number cannot be the best one."""
    return {name: float(x) if x is not None and math.isfinite(x) else None for name, x in metrics.items()}


def _read_notes(step_directory: str) -> dict:
    with open(os.path.join(step_directory, NOTES), encoding="utf-8") as f:
        return json.load(f)


def _load(step_directory: str, abstract_parts: dict[str, Any]) -> dict[str, Any]:
    """Restores the given parts into their shardings, if they are exactly what was saved."""
    wanted = _signatures(abstract_parts)
    stored = _read_notes(step_directory)["arrays"]
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
