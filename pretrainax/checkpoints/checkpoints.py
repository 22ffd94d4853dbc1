"""Saves and restores the checkpoints of a run, and verifies their checksums.

A checkpoint is the folder `checkpoints/<step>/`, where the step is the number of updates before the checkpoint. The
folder contains:

- `params/`, `optimizer/`, and `ema/` if the run has a moving average of its parameters. These parts of the checkpoint
  are Orbax folders.
- `run.json`: array shapes, validation metrics and the state of the training loop.
- `manifest.sha256`: the SHA-256 of every file, in the format of `sha256sum -c`. Orbax has no checksums for array data,
  so without the manifest a flipped bit would silently change a weight.

A folder gets its final name only after its arrays have been reopened and all files have been hashed and flushed to
disk. Even if the process is killed, every checkpoint with a final name is therefore complete.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable
from typing import Optional

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.best import best_of
from pretrainax.checkpoints.errors import save_errors, silence_orbax
from pretrainax.checkpoints.params import check_readable, load_parts
from pretrainax.checkpoints.paths import exact_path
from pretrainax.checkpoints.run_json import RUN_JSON, read_run_json, write_run_json
from pretrainax.checkpoints.steps import UNFINISHED, list_steps, newest_valid_step, skipped_messages
from pretrainax.config import UserError
from pretrainax.sharding.param_paths import PyTree

# Orbax divides the writing of a replicated array among its replicas, and compiles a program for each shape and slice:
# 80 programs (1.5 s) for the first save of a tiny model on 8 devices. Arrays with smaller slices are not divided.
_MIN_SLICE_BYTES = 2**20


class Checkpoints:
    """Saves and restores one run's checkpoints; keeps the `keep` newest, the best, and the permanent checkpoints.

    The state to save is a flax dataclass with a field `params` and an optional field `ema`. At most one save is in
    progress at a time. With several processes, all processes must call every method; process 0 hashes, renames and
    deletes files.
    """

    def __init__(
        self,
        directory: str,
        keep: int,
        select_by: str = "loss",
        keeps: Callable[[int], bool] = lambda step: False,
        progress: Callable[[], None] = lambda: None,
    ):
        """Creates the checkpoint folder, and deletes incomplete checkpoints that a killed process left there.

        Args:
          directory: the folder `checkpoints` of the run.
          keep: number of newest checkpoints to keep.
          select_by: name of the validation metric that selects the best checkpoint.
          keeps: returns True for a step whose checkpoint is permanent, i.e. never deleted.
          progress: called after each stage of a save, for the watchdog of the run; also in the writer thread.
        """
        self.directory = os.fspath(exact_path(directory))
        self.keep, self.select_by, self.keeps, self.progress = keep, select_by, keeps, progress
        self.warnings: list[str] = []  # one line for each damaged checkpoint that `restore_newest` skipped
        # Steps of damaged checkpoints: never deleted, not counted among the newest, and replaced by a save of the step.
        self._damaged_steps: set[int] = set()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: Optional[tuple[int, concurrent.futures.Future]] = None  # step and future of the save in progress
        os.makedirs(self.directory, exist_ok=True)
        silence_orbax()
        self._clear_unfinished()

    def save(self, step: int, state: PyTree, extra: dict, metrics: Optional[dict] = None) -> None:
        """Copies the state, then writes a checkpoint in the background, replacing any existing checkpoint of `step`.

        First waits for the previous save.

        Args:
          step: number of updates before the checkpoint.
          state: the training state; when this method returns, its buffers may be donated to the next update.
          extra: state of the training loop, as any JSON object; `restore_newest` returns it.
          metrics: validation metrics of this step. If None, the checkpoint cannot be the best.

        Raises:
          RunFailed: the previous save failed, or this save failed before its background part began.
        """
        self.wait()
        parts = parts_of(state)
        staging = self._path(step, ".saving")
        with save_errors(step):
            if jax.process_index() == 0:
                # Written before Orbax starts, because the caller may change `extra` later. Fails at once if the folder
                # is not writable; Orbax would wait 300 s.
                write_run_json(self._path(step, ".saving.json"), step, parts, extra, metrics)
            context = ocp.Context()
            context.array.saving.min_slice_bytes_for_replica_parallel = _MIN_SLICE_BYTES
            with context:
                response = ocp.save_checkpointables_async(exact_path(staging), parts)
        self.progress()
        self._pending = step, self._writer.submit(self._finish, step, staging, response)

    def wait(self) -> None:
        """Waits until the last save has finished; raises RunFailed if the save failed."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with save_errors(step):
                future.result()

    def check(self) -> None:
        """Raises RunFailed if the last save has failed by now; does not wait for a save in progress."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def close(self) -> None:
        """Waits for the last save, stops the writer thread and deletes temporary files."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._clear_unfinished()  # Orbax may write files after its save has failed

    def drop_after(self, step: int) -> None:
        """Deletes the undamaged checkpoints after `step`, for a rollback to `step`."""
        self.wait()
        if self._owns_folder:
            for later in list_steps(self.directory):
                if later > step and later not in self._damaged_steps:
                    os.rename(self._path(later), self._path(later, ".deleted"))
        self._clear_unfinished()

    def restore_newest(self, abstract_state: PyTree, up_to: Optional[int] = None) -> Optional[tuple[int, PyTree, dict]]:
        """Restores the newest valid checkpoint; returns (step, state, extra), or None if there are no checkpoints.

        A checkpoint is valid if all its files match their checksums.

        Args:
          abstract_state: jax.ShapeDtypeStructs with the target shardings; the saved shardings may differ.
          up_to: restores the newest valid step that is at most `up_to`, or else the oldest valid step after it. If
            None, restores the newest valid step.

        Raises:
          UserError: all checkpoints are damaged (none is deleted), the checkpoint has no optimizer state, or its arrays
            differ from `abstract_state`. The message lists missing and unexpected arrays, and arrays with a different
            shape or dtype.
        """
        self.wait()
        if (step := self._newest_valid(abstract_state, up_to)) is None:
            return None
        if up_to is None and jax.process_index() == 0:  # a killed process may have left more than `keep` checkpoints
            self._delete_older(step)
            self._clear_unfinished()
        path = self._path(step)
        stored = read_run_json(path)
        if not any(name.startswith("optimizer/") for name in stored["arrays"]):
            raise UserError(
                f"{path} has only imported parameters, from which a run cannot resume: start a run in another "
                f"--workdir with --config.checkpoint.init_from={os.path.dirname(self.directory)}"
            )
        parts = load_parts(path, parts_of(abstract_state))
        other_fields = parts.pop("optimizer")
        state = abstract_state.replace(**parts, **other_fields)
        return step, state, stored["extra"]

    def share(self) -> None:
        """Waits for the last save, so that all processes find the same checkpoints in their shared folder."""
        self.wait()

    def _newest_valid(self, abstract_state: PyTree, up_to: Optional[int]) -> Optional[int]:
        """Returns the step that all processes restore, or None without checkpoints; warns about damaged checkpoints."""
        newest = -1
        if jax.process_index() == 0:
            step, damaged = newest_valid_step(self.directory, up_to)
            self._record_damaged(damaged)
            newest = -1 if step is None else step
        step = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return None if step < 0 else step

    def _record_damaged(self, damaged: dict[int, str]) -> None:
        self.warnings = skipped_messages(self.directory, damaged)
        self._damaged_steps |= set(damaged)
        for line in self.warnings:
            logging.warning(line)

    def _path(self, step: int, suffix: str = "") -> str:
        return os.path.join(self.directory, f"{step}{suffix}")

    @property
    def _owns_folder(self) -> bool:
        """Returns True if this process renames and deletes files in the folder; in a shared folder, only process 0."""
        return jax.process_index() == 0

    def _finish(self, step: int, staging: str, response: ocp.AsyncResponse[None]) -> None:
        """Completes a save after Orbax has written the arrays.

        Adds run.json, reopens all arrays, writes the manifest, gives the folder its final name, and deletes older
        checkpoints.

        Args:
          step: step of the checkpoint.
          staging: temporary path of the checkpoint folder.
          response: Orbax's save in progress.
        """
        try:
            response.result()
            self.progress()
            if jax.process_index() == 0:
                os.rename(self._path(step, ".saving.json"), os.path.join(staging, RUN_JSON))
                check_readable(staging)
                manifest.write_manifest(staging)
                self.progress()
                if os.path.exists(self._path(step)):
                    os.rename(self._path(step), self._path(step, ".replaced"))
                os.rename(staging, self._path(step))
                manifest.fsync_path(self.directory)
                self._damaged_steps.discard(step)
                self._delete_older(step)
        finally:
            self._clear_unfinished()  # frees the space of a failed save

    def _delete_older(self, newest: int) -> None:
        """Deletes all checkpoints except the `keep` newest, the best, the permanent, and the damaged checkpoints.

        Damaged checkpoints remain for inspection. An unscheduled checkpoint, saved because the process had to exit,
        remains if it is `newest`, but does not count among the `keep` newest checkpoints. The set of remaining
        checkpoints, and therefore the target of a rollback, then depends only on the schedule.

        Args:
          newest: step of the newest checkpoint.
        """
        runs, scheduled = {}, []
        for step in list_steps(self.directory):
            if step not in self._damaged_steps and os.path.exists(os.path.join(self._path(step), manifest.MANIFEST)):
                with contextlib.suppress(UserError):  # damaged after its save: `restore_newest` reports it
                    runs[step] = read_run_json(self._path(step))
                    scheduled += [step] if runs[step]["extra"].get("is_scheduled", True) else []
        permanent = set(filter(self.keeps, runs))  # not counted among the newest
        newest_scheduled = [step for step in scheduled if step not in permanent][-self.keep :]
        for step in runs.keys() - {newest, *newest_scheduled, best_of(runs, self.select_by)} - permanent:
            # Renamed before its deletion, so that no partly deleted folder has the name of a checkpoint.
            os.rename(self._path(step), self._path(step, ".deleted"))

    def _clear_unfinished(self) -> None:
        """Deletes the files of interrupted saves and deletions, if this process owns the folder.

        If a process was killed while replacing a checkpoint, the old checkpoint gets its name back.
        """
        for name in os.listdir(self.directory) if self._owns_folder else ():
            if match := UNFINISHED.fullmatch(name):
                path, final = os.path.join(self.directory, name), self._path(int(match[1]))
                if match[2] == "replaced" and not os.path.exists(final):
                    os.rename(path, final)  # killed before the new folder was renamed
                elif os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.remove(path)


def parts_of(state: PyTree) -> dict[str, PyTree]:
    """Splits a training state into the parts of a checkpoint: "params", "ema" if not None, and "optimizer".

    "optimizer" contains all other fields. Each part is a folder, so parameters can be read without the optimizer state.
    """
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    parts = {name: fields.pop(name) for name in ("params", "ema") if name in fields}
    return {name: part for name, part in parts.items() if part is not None} | {"optimizer": fields}
