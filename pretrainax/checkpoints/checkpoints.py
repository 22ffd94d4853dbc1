"""Saves and restores a run, and knows which checkpoint can be trusted.

A step of a run is the folder `checkpoints/<step>/`: what Orbax wrote (`params/`, `optimizer/`, and `ema/` where the
run keeps a moving average of its parameters), `run.json` (shapes, metrics and what the loop remembers) and
`manifest.sha256`, the SHA-256 of every file in the format of `sha256sum -c`. Orbax has no checksums of array data: a
flipped bit would come back as a wrong weight, without a word.
A folder gets its name only once its arrays were found in it again and all is hashed and flushed to disk: a kill at any
moment leaves whole steps.
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
from pretrainax.checkpoints.steps import UNFINISHED, list_steps, newest_valid_step, not_used
from pretrainax.config import UserError
from pretrainax.sharding.param_paths import PyTree


class Checkpoints:
    """Saves and restores the checkpoints of one run, and keeps the newest `keep`, the best one, and what is for good.

    A checkpoint's state is a flax dataclass with a field `params`, and perhaps `ema`. One save is under way at a time.
    With several processes all of them call every method; process 0 hashes, names and deletes.
    """

    def __init__(
        self,
        directory: str,
        keep: int,
        select_by: str = "loss",
        keeps: Callable[[int], bool] = lambda step: False,
    ):
        """Clears what a killed process left half-done.

        Args:
          select_by: the figure that tells the best one.
          keeps: tells of a step whether it is kept for good.
        """
        self.directory = os.fspath(exact_path(directory))
        self.keep, self.select_by, self.keeps = keep, select_by, keeps
        self.warnings: list[str] = []  # one line for each step that `restore_newest` had to pass over
        self._distrusted: set[int] = (
            set()
        )  # those steps: not deleted, not counted among the newest, replaced when saved again
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: Optional[tuple[int, concurrent.futures.Future]] = None  # step, and the save under way
        os.makedirs(self.directory, exist_ok=True)
        silence_orbax()
        self._clear_unfinished()

    def save(self, step: int, state: PyTree, extra: dict, metrics: Optional[dict] = None) -> None:
        """Copies the state and returns; the writing goes on in the background. A step that exists is replaced.

        Args:
          state: may be donated to the next update at once.
          extra: anything JSON can hold; comes back from `restore_newest`.
          metrics: of the validation of this step; without them the step cannot be the best one.

        Raises:
          RunFailed: this save or the one before, for which it waits, could not be written.
        """
        self.wait()
        parts = parts_of(state)
        staging = self._path(step, ".saving")
        with save_errors(step):
            if jax.process_index() == 0:
                # Before the caller changes `extra`, and before Orbax, which waits 300 s for a folder it cannot make.
                write_run_json(self._path(step, ".saving.json"), step, parts, extra, metrics)
            response = ocp.save_checkpointables_async(exact_path(staging), parts)
        self._pending = step, self._writer.submit(self._finish, step, staging, response)

    def wait(self) -> None:
        """Waits until the last save is on disk and hashed; raises RunFailed if it could not be written."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with save_errors(step):
                future.result()

    def close(self) -> None:
        """Waits as `wait`, and tidies up."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._clear_unfinished()  # what Orbax still wrote when its save had failed

    def drop_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, which a rollback has found to be bad."""
        self.wait()
        if self._owns:
            for later in list_steps(self.directory):
                if later > step and later not in self._distrusted:
                    os.rename(self._path(later), self._path(later, ".deleted"))
        self._clear_unfinished()

    def restore_newest(self, abstract_state: PyTree, up_to: Optional[int] = None) -> Optional[tuple[int, PyTree, dict]]:
        """Restores (step, state, extra) of the newest step whose every file has its checksum; None where there is none.

        Args:
          abstract_state: jax.ShapeDtypeStructs with the shardings to restore into, whatever they were when saved.
          up_to: restores the newest step up to this one, if there is one; else the oldest.

        Raises:
          UserError: there are steps and all are damaged (nothing is deleted); or the arrays are not those of
            `abstract_state`: names each that is missing, not wanted, or of another shape or dtype.
        """
        self.wait()
        if (step := self._newest_valid(abstract_state, up_to)) is None:
            return None
        if up_to is None and jax.process_index() == 0:  # a killed process may have left more than the schedule has
            self._delete_older(step)
            self._clear_unfinished()
        path = self._path(step)
        stored = read_run_json(path)
        if not any(name.startswith("optimizer/") for name in stored["arrays"]):
            raise UserError(
                f"{path} holds imported parameters alone, which no run can resume from: start one in another --workdir "
                f"with --config.checkpoint.init_from={os.path.dirname(self.directory)}"
            )
        parts = load_parts(path, parts_of(abstract_state))
        rest = parts.pop("optimizer")
        state = abstract_state.replace(**parts, **rest)
        return step, state, stored["extra"]

    def share(self) -> None:
        """Waits as `wait`, after which each process sees the checkpoints that are there: all look into one folder."""
        self.wait()

    def _newest_valid(self, abstract_state: PyTree, up_to: Optional[int]) -> Optional[int]:
        """Returns the step that all processes restore; says which were passed over."""
        found = -1
        if jax.process_index() == 0:
            step, damaged = newest_valid_step(self.directory, up_to)
            self._distrust(damaged)
            found = -1 if step is None else step
        step = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        return None if step < 0 else step

    def _distrust(self, damaged: dict[int, str]) -> None:
        self.warnings = not_used(self.directory, damaged)
        self._distrusted |= set(damaged)
        for line in self.warnings:
            logging.warning(line)

    def _path(self, step: int, suffix: str = "") -> str:
        return os.path.join(self.directory, f"{step}{suffix}")

    @property
    def _owns(self) -> bool:
        """Returns True if this process names and deletes what is in the folder."""
        return jax.process_index() == 0

    def _finish(self, step: int, staging: str, response: ocp.AsyncResponse[None]) -> None:
        """Waits for Orbax, adds run.json, reads back, adds the manifest, names the folder, deletes older steps."""
        try:
            response.result()
            if jax.process_index() == 0:
                os.rename(self._path(step, ".saving.json"), os.path.join(staging, RUN_JSON))
                check_readable(staging)
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
        """Keeps the newest ones, the best one, those for good, and what did not verify: a person may look at that.

        One that is saved because a process had to leave is kept as the newest, and takes no other's place: which steps
        there are follows from the schedule, and with it to which one a run is rolled back.
        """
        values, scheduled = {}, []
        for step in list_steps(self.directory):
            if step not in self._distrusted and os.path.exists(os.path.join(self._path(step), manifest.MANIFEST)):
                with contextlib.suppress(UserError):  # damaged since: not ours to judge here
                    run = read_run_json(self._path(step))
                    values[step] = run["metrics"].get(self.select_by)
                    scheduled += [step] if run["extra"].get("is_scheduled", True) else []
        for_good = set(filter(self.keeps, values))  # beside the newest: not counted among them
        last = [step for step in scheduled if step not in for_good][-self.keep :]
        for step in values.keys() - {newest, *last, best_step(values, self.select_by)} - for_good:
            os.rename(self._path(step), self._path(step, ".deleted"))  # at once, so that no half of it keeps the name

    def _clear_unfinished(self) -> None:
        """Deletes what a save or a deletion has left half-done, or gives it its name back."""
        for name in os.listdir(self.directory) if self._owns else ():
            if match := UNFINISHED.fullmatch(name):
                path, whole = os.path.join(self.directory, name), self._path(int(match[1]))
                if match[2] == "replaced" and not os.path.exists(whole):
                    os.rename(path, whole)  # killed before its successor took the name
                elif os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.remove(path)


def parts_of(state: PyTree) -> dict[str, PyTree]:
    """Divides a state into folders, so that parameters can be read without the optimizer's copies of them."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    parts = {name: fields.pop(name) for name in ("params", "ema") if name in fields}
    return {name: part for name, part in parts.items() if part is not None} | {"optimizer": fields}
