"""Saves and restores the checkpoints of a run, and verifies their checksums.

A step of a run is the folder `checkpoints/<step>/`. It contains the folders of Orbax (`params/`, `optimizer/`, and
`ema/` if the run has a moving average of its parameters), `run.json` (shapes, metrics and the state of the training
loop) and `manifest.sha256`, the SHA-256 of every file in the format of `sha256sum -c`. Orbax has no checksums of array
data: without the manifest, a flipped bit would become a wrong weight without an error.
A folder gets its final name only after its arrays were read back and all files were hashed and flushed to disk, so a
kill at any moment leaves only whole steps.
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
from pretrainax.checkpoints.best import best_step
from pretrainax.checkpoints.errors import save_errors, silence_orbax
from pretrainax.checkpoints.params import check_readable, load_parts
from pretrainax.checkpoints.paths import exact_path
from pretrainax.checkpoints.run_json import RUN_JSON, read_run_json, write_run_json
from pretrainax.checkpoints.steps import UNFINISHED, list_steps, newest_valid_step, skipped_messages
from pretrainax.config import UserError
from pretrainax.sharding.param_paths import PyTree


class Checkpoints:
    """Saves and restores the checkpoints of one run; keeps the newest `keep`, the best one, and permanent ones.

    A checkpoint's state is a flax dataclass with a field `params` and an optional field `ema`. At most one save is in
    progress. With several processes, all of them call every method; process 0 hashes, renames and deletes.
    """

    def __init__(
        self,
        directory: str,
        keep: int,
        select_by: str = "loss",
        keeps: Callable[[int], bool] = lambda step: False,
    ):
        """Deletes incomplete files of a killed process.

        Args:
          select_by: the metric that selects the best checkpoint.
          keeps: returns True for steps that are never deleted.
        """
        self.directory = os.fspath(exact_path(directory))
        self.keep, self.select_by, self.keeps = keep, select_by, keeps
        self.warnings: list[str] = []  # one line for each step that `restore_newest` skipped
        # Skipped steps: never deleted, not counted among the newest, and replaced when saved again.
        self._distrusted: set[int] = set()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: Optional[tuple[int, concurrent.futures.Future]] = None  # step and save in progress
        os.makedirs(self.directory, exist_ok=True)
        silence_orbax()
        self._clear_unfinished()

    def save(self, step: int, state: PyTree, extra: dict, metrics: Optional[dict] = None) -> None:
        """Copies the state and returns; writes in the background. Replaces an existing checkpoint of the step.

        Args:
          state: may be donated to the next update at once.
          extra: any JSON value; `restore_newest` returns it.
          metrics: validation metrics of this step; without them the step cannot be the best one.

        Raises:
          RunFailed: this save failed, or the previous one, for which this method waits.
        """
        self.wait()
        parts = parts_of(state)
        staging = self._path(step, ".saving")
        with save_errors(step):
            if jax.process_index() == 0:
                # Now: the caller may change `extra` later, and Orbax waits 300 s for a folder that it cannot create.
                write_run_json(self._path(step, ".saving.json"), step, parts, extra, metrics)
            response = ocp.save_checkpointables_async(exact_path(staging), parts)
        self._pending = step, self._writer.submit(self._finish, step, staging, response)

    def wait(self) -> None:
        """Waits until the last save is on disk and hashed; raises RunFailed if the save failed."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with save_errors(step):
                future.result()

    def close(self) -> None:
        """Waits for the last save, stops the writer thread and deletes temporary files."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._clear_unfinished()  # files that Orbax wrote after its save had failed

    def drop_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, which a rollback discards."""
        self.wait()
        if self._owns:
            for later in list_steps(self.directory):
                if later > step and later not in self._distrusted:
                    os.rename(self._path(later), self._path(later, ".deleted"))
        self._clear_unfinished()

    def restore_newest(self, abstract_state: PyTree, up_to: Optional[int] = None) -> Optional[tuple[int, PyTree, dict]]:
        """Restores (step, state, extra) of the newest valid step; returns None if there is no step.

        A step is valid if all its files match their checksums.

        Args:
          abstract_state: jax.ShapeDtypeStructs with the target shardings; the saved shardings may differ.
          up_to: restores the newest step up to this one; if there is none, the oldest step.

        Raises:
          UserError: all steps are damaged (none is deleted); or the arrays differ from `abstract_state`. The message
            lists missing and unexpected arrays, and arrays with another shape or dtype.
        """
        self.wait()
        if (step := self._newest_valid(abstract_state, up_to)) is None:
            return None
        if up_to is None and jax.process_index() == 0:  # a killed process may have left more than `keep`
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
        rest = parts.pop("optimizer")
        state = abstract_state.replace(**parts, **rest)
        return step, state, stored["extra"]

    def share(self) -> None:
        """Waits for the last save, after which all processes see the same checkpoints in their shared folder."""
        self.wait()

    def _newest_valid(self, abstract_state: PyTree, up_to: Optional[int]) -> Optional[int]:
        """Returns the step that all processes restore; logs the skipped steps."""
        newest = -1
        if jax.process_index() == 0:
            step, damaged = newest_valid_step(self.directory, up_to)
            self._distrust(damaged)
            newest = -1 if step is None else step
        step = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return None if step < 0 else step

    def _distrust(self, damaged: dict[int, str]) -> None:
        self.warnings = skipped_messages(self.directory, damaged)
        self._distrusted |= set(damaged)
        for line in self.warnings:
            logging.warning(line)

    def _path(self, step: int, suffix: str = "") -> str:
        return os.path.join(self.directory, f"{step}{suffix}")

    @property
    def _owns(self) -> bool:
        """Returns True if this process renames and deletes files in the folder."""
        return jax.process_index() == 0

    def _finish(self, step: int, staging: str, response: ocp.AsyncResponse[None]) -> None:
        """Waits for Orbax, adds run.json, reads back, adds the manifest, renames the folder, deletes older steps."""
        try:
            response.result()
            if jax.process_index() == 0:
                os.rename(self._path(step, ".saving.json"), os.path.join(staging, RUN_JSON))
                check_readable(staging)
                manifest.write_manifest(staging)
                if os.path.exists(self._path(step)):
                    os.rename(self._path(step), self._path(step, ".replaced"))
                os.rename(staging, self._path(step))
                manifest.fsync_path(self.directory)
                self._distrusted.discard(step)
                self._delete_older(step)
        finally:
            self._clear_unfinished()  # frees the space of a failed save

    def _delete_older(self, newest: int) -> None:
        """Deletes all steps but the newest, the best, permanent ones, and damaged ones, which a user may inspect.

        An unscheduled save, of a process that had to exit, is kept as `newest` but not counted among the `keep`
        newest. The set of steps, and so the target of a rollback, then depends on the schedule alone.
        """
        values, scheduled = {}, []
        for step in list_steps(self.directory):
            if step not in self._distrusted and os.path.exists(os.path.join(self._path(step), manifest.MANIFEST)):
                with contextlib.suppress(UserError):  # damaged meanwhile: `restore_newest` reports it
                    run = read_run_json(self._path(step))
                    values[step] = run["metrics"].get(self.select_by)
                    scheduled += [step] if run["extra"].get("is_scheduled", True) else []
        permanent = set(filter(self.keeps, values))  # not counted among the newest
        last = [step for step in scheduled if step not in permanent][-self.keep :]
        for step in values.keys() - {newest, *last, best_step(values, self.select_by)} - permanent:
            os.rename(self._path(step), self._path(step, ".deleted"))  # atomic: no partly deleted folder has the name

    def _clear_unfinished(self) -> None:
        """Deletes folders of interrupted saves and deletions; restores the name of an interrupted replacement."""
        for name in os.listdir(self.directory) if self._owns else ():
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
    """Splits a state into folders; parameters can then be read without the optimizer state."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    parts = {name: fields.pop(name) for name in ("params", "ema") if name in fields}
    return {name: part for name, part in parts.items() if part is not None} | {"optimizer": fields}
