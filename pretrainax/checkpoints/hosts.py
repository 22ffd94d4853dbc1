"""Saves and restores the checkpoints of multi-process runs in an object store, without a shared disk.

Each process has its own local copy of the run's folder. The process writes its shards to this copy and uploads them.
Its last upload is a report, `hosts/NAME.json`, with the SHA-256 of each uploaded file and the array blocks in it.
Process 0 waits for the reports, joins the OCDBT stores of all processes without reading their values (`shards.py`), and
then uploads run.json and the manifest of all files. File names are unique to one save, so files of an earlier attempt
are never used or overwritten.

To restore, each process downloads the files that it reads and verifies them against the manifest. A checkpoint is valid
if the files of all processes are valid.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Optional, TypeVar

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from pretrainax.checkpoints import manifest, steps
from pretrainax.checkpoints.checkpoints import Checkpoints, parts_of
from pretrainax.checkpoints.errors import save_errors
from pretrainax.checkpoints.params import check_readable
from pretrainax.checkpoints.paths import exact_path
from pretrainax.checkpoints.run_json import RUN_JSON, write_run_json
from pretrainax.checkpoints.shards import (
    HostShards,
    host_shards,
    is_value_file,
    join_shards,
    read_by_process,
    regions,
    write_shards,
)
from pretrainax.config import RunFailed, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import path_below
from pretrainax.sharding.param_paths import PyTree
from pretrainax.storage import places
from pretrainax.storage.mirror import Mirror
from pretrainax.storage.store import print_message

_POLL = 0.2  # seconds between two checks for files of other processes
_RETRY = 5.0  # seconds between two attempts while the store does not respond
_PATH = 4096  # maximum bytes of a path on Linux
T = TypeVar("T")


def open_checkpoints(
    directory: str, keep: int, select_by: str, keeps: Callable[[int], bool], progress: Callable[[], None]
) -> Checkpoints:
    """Opens a run's checkpoints: `HostCheckpoints` if each process has its own folder, otherwise `Checkpoints`.

    The arguments are as in `Checkpoints`.
    """
    cls = HostCheckpoints if jax.process_count() > 1 and places.is_working_copy(directory) else Checkpoints
    return cls(directory, keep, select_by, keeps, progress)


class HostCheckpoints(Checkpoints):
    """Like `Checkpoints`, for runs in which each process has its own folder: a local copy of the same URL."""

    def __init__(self, directory: str, *args, **kwargs):
        """Opens the checkpoint folder as `Checkpoints` does; all processes must do this at the same time."""
        super().__init__(directory, *args, **kwargs)
        mirror = places.mirror_of(self.directory)
        assert mirror is not None  # the run is in an object store
        self._mirror: Mirror = mirror
        self._prefix = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
        self._saves = 0
        self._metadata: dict[str, bytes] = {}  # contents of Orbax's metadata files, by name; the same for all steps

    def save(self, step: int, state: PyTree, extra: dict, metrics: Optional[dict] = None) -> None:
        """Saves as `Checkpoints.save` does; first waits for the previous save, which process 0 completes last."""
        self.wait()
        parts = parts_of(state)
        with save_errors(step):
            self._metadata = self._metadata or _metadata_files(parts)
            if jax.process_index() == 0:
                write_run_json(self._path(step, ".saving.json"), step, parts, extra, metrics)
            shards = {name: host_shards(part) for name, part in parts.items()}
        self.progress()
        self._saves += 1
        self._pending = step, self._writer.submit(self._finish_host, step, f"{self._prefix:08x}-{self._saves}", shards)

    def share(self) -> None:
        """Waits for the last save, then copies process 0's checkpoints to all processes through the store."""
        self.wait()
        if jax.process_index() == 0:
            places.synchronize(self.directory)
        multihost_utils.sync_global_devices("checkpoints are sent")
        if jax.process_index():
            places.synchronize(self.directory)

    @property
    def _owns_folder(self) -> bool:
        return True

    def _finish_host(self, step: int, attempt: str, shards: dict[str, dict[str, HostShards]]) -> None:
        """Writes this process's shards; then process 0 completes the checkpoint, while other processes upload.

        Args:
          step: step of the checkpoint.
          attempt: a part of the file names that is unique to this save but the same in all processes.
          shards: {part: {path of the array: shards of this process}}.
        """
        staging, target = self._path(step, ".saving"), self._path(step)
        try:
            owner = f"{attempt}.{jax.process_index()}"
            for part, arrays in shards.items():
                write_shards(os.path.join(staging, part), owner, arrays)
                self.progress()
            report = {"files": manifest.flush_and_hash(staging), "regions": {n: regions(a) for n, a in shards.items()}}
            os.makedirs(os.path.join(staging, "hosts"))
            write_atomically(os.path.join(staging, _report(owner)), json.dumps(report))
            if jax.process_index() == 0:
                self._complete_checkpoint(step, attempt)
            else:
                shutil.rmtree(target, ignore_errors=True)
                os.rename(staging, target)
                self._delete_older_shards(step)
            self.progress()
            places.upload_soon(self.directory)
        finally:
            self._clear_unfinished()

    def _complete_checkpoint(self, step: int, attempt: str) -> None:
        """Waits for all processes' shards, joins them, and gives the checkpoint folder its final name.

        Only process 0 calls this method.
        """
        staging, target = self._path(step, ".saving"), self._path(step)
        owners = [f"{attempt}.{i}" for i in range(jax.process_count())]
        reports = self._reports(target, [_report(owner) for owner in owners[1:]])
        remote_digests: dict[str, str] = {}
        for name, report in reports.items():
            remote_digests |= json.loads(report)["files"]
            write_atomically(os.path.join(staging, name), report)
        for name in remote_digests:
            if not is_value_file(name):
                object_name = os.path.relpath(path_below(target, name), self._mirror.root)
                _retry(lambda n=name, o=object_name: self._mirror.store.get(o, path_below(staging, n)))
        for name, content in self._metadata.items():
            os.makedirs(os.path.dirname(os.path.join(staging, name)), exist_ok=True)
            write_atomically(os.path.join(staging, name), content)
        for part in {name.partition("/")[0] for name in self._metadata if "/" in name}:
            join_shards(os.path.join(staging, part), owners)
        os.rename(self._path(step, ".saving.json"), os.path.join(staging, RUN_JSON))
        check_readable(staging)
        manifest.write_manifest(staging, remote_digests)
        _retry(lambda: self._mirror.finish_folder(target, staging, [*remote_digests, *reports]))
        manifest.fsync_path(self.directory)
        self._damaged_steps.discard(step)
        self._delete_older(step)

    def _reports(self, folder: str, names: list[str]) -> dict[str, bytes]:
        """Waits until the other processes have uploaded their reports; returns {name: content of the report}.

        Args:
          names: paths of the reports, relative to the checkpoint folder.
        """
        while names:
            if (reports := _retry(lambda: self._mirror.read_sent(folder, names))) is not None:
                return reports
            time.sleep(_POLL)
        return {}

    def _delete_older_shards(self, newest: int) -> None:
        """Deletes the local shards of checkpoints that process 0 has deleted in the store.

        The method keeps the checkpoint just before `newest`, because process 0 may not have completed it yet.
        """
        with contextlib.suppress(UserError):  # if the store does not respond, the next save retries
            remote = self._mirror.store.objects(os.path.relpath(self.directory, self._mirror.root))
            complete_steps = {name.split("/")[-2] for name in remote if name.endswith(f"/{manifest.MANIFEST}")}
            for step in [step for step in steps.list_steps(self.directory) if step < newest][:-1]:
                if str(step) not in complete_steps:
                    shutil.rmtree(self._path(step), ignore_errors=True)

    def _newest_valid(self, abstract_state: PyTree, up_to: Optional[int]) -> Optional[int]:
        self.share()
        parts, damaged = parts_of(abstract_state), {}
        untried = steps.candidates(self.directory, up_to) if jax.process_index() == 0 else []
        while (step := int(multihost_utils.broadcast_one_to_all(np.int32(untried.pop(0) if untried else -1)))) >= 0:
            problem = self._faults(step, parts)
            if problem and jax.process_index():
                logging.warning("process %d: checkpoint %d is not used: %s", jax.process_index(), step, problem)
            faulty_processes = np.flatnonzero(multihost_utils.process_allgather(np.array([bool(problem)])))
            if not len(faulty_processes):
                break
            damaged[step] = problem or f"process {faulty_processes[0]} found it damaged"
        if jax.process_index() == 0:
            if step < 0:
                steps.check_any_valid(self.directory, damaged)
            self._record_damaged(damaged)
        return None if step < 0 else step

    def _faults(self, step: int, parts: dict[str, PyTree]) -> str:
        """Downloads and verifies the checkpoint files that this process reads; returns the faults, or "" if none."""
        try:
            problems = steps.faults(self.directory, step, lambda name: not is_value_file(name))
            if not problems:
                problems = steps.faults(self.directory, step, read_by_process(parts, self._read_regions(step)))
        except RunFailed as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise
            problems = [str(e)]
        except FileNotFoundError as e:
            problems = [f"{e} is gone"]
        return ", ".join(problems)

    def _read_regions(self, step: int) -> dict[str, dict]:
        """Reads the bounds of the array blocks that each process wrote, as {OCDBT store: {part: {array: bounds}}}.

        Returns {} for a checkpoint of a single-process run.
        """
        folder = os.path.join(self._path(step), "hosts")
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return {name.removesuffix(".json"): read_object(os.path.join(folder, name))["regions"] for name in names}


def _report(owner: str) -> str:
    return f"hosts/{owner}.json"


def _retry(call: Callable[[], T]) -> T:
    """Returns the result of `call`, retrying indefinitely as long as it raises UserError.

    This is safe, because no data is lost while a save waits for the store.
    """
    reported = False
    while True:
        try:
            return call()
        except UserError as e:
            if not reported:
                print_message(f"{e}; the save waits for the store")
            reported = True
            time.sleep(_RETRY)


def _metadata_files(parts: dict[str, PyTree]) -> dict[str, bytes]:
    """Returns Orbax's metadata files for a checkpoint as {name: content}; in processes other than 0, contents are b"".

    All processes must call this function, because Orbax generates the files by writing a small checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="pretrainax") as temporary:
        path = np.frombuffer(os.fsencode(temporary).ljust(_PATH, b"\0"), np.uint8)
        folder = os.path.join(os.fsdecode(bytes(multihost_utils.broadcast_one_to_all(path)).rstrip(b"\0")), "frame")
        small_parts = jax.tree.map(lambda x: np.zeros((1,) * x.ndim, x.dtype), parts)
        ocp.save_checkpointables(exact_path(folder), small_parts)
        names = ["_CHECKPOINT_METADATA", *(f"{part}/_METADATA" for part in parts)]
        contents = {}
        for name in names if jax.process_index() == 0 else ():
            with open(os.path.join(folder, name), "rb") as f:
                contents[name] = f.read()
        multihost_utils.sync_global_devices("frame is read")
        return contents or dict.fromkeys(names, b"")
