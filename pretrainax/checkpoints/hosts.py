"""Checkpoints of a run of several processes whose workdir is in an object store: they share no disk.

Each process writes its shards to its own twin, and sends them. `hosts/NAME.json`, which it sends last, has their
SHA-256 and which blocks of which arrays they are. Process 0 waits for those of all, joins the stores without a value of
the others (`shards.py`), and sends run.json and the manifest, in which all files are, last. Names are of this save
alone, so that nothing that an earlier attempt has left counts or is overwritten.

A restore brings to each process, and compares with the manifest, what it reads; a step is used where all have found
what they need.
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
    OwnArray,
    are_values,
    join_shards,
    needed_here,
    own_shards,
    regions,
    write_shards,
)
from pretrainax.config import RunFailed, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import path_below
from pretrainax.sharding.param_paths import PyTree
from pretrainax.storage import places
from pretrainax.storage.store import say
from pretrainax.storage.twin import Twin

_LOOK = 0.2  # seconds between two looks for what others send
_AWAY = 5.0  # seconds between two tries where the store does not answer
_PATH = 4096  # bytes of a path, on Linux
T = TypeVar("T")


def open_checkpoints(directory: str, keep: int, select_by: str, keeps: Callable[[int], bool]) -> Checkpoints:
    """Returns what saves and restores a run, as `Checkpoints`: for processes that share a folder, or that do not."""
    kind = HostCheckpoints if jax.process_count() > 1 and places.is_at_work(directory) else Checkpoints
    return kind(directory, keep, select_by, keeps)


class HostCheckpoints(Checkpoints):
    """Saves and restores as `Checkpoints`, where each process has a folder of its own: the twin of one URL."""

    def __init__(self, directory: str, *args, **kwargs):
        """Opens them as `Checkpoints`; all processes do."""
        super().__init__(directory, *args, **kwargs)
        twin = places.twin_around(self.directory)
        assert twin is not None  # of a run in a store
        self._twin: Twin = twin
        self._start = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
        self._saves = 0
        self._frame: dict[str, bytes] = {}  # what Orbax writes around the arrays of a step, by name

    def save(self, step: int, state: PyTree, extra: dict, metrics: Optional[dict] = None) -> None:
        """Saves as `Checkpoints.save`; in process 0 the save before is waited for until all have sent theirs."""
        self.wait()
        parts = parts_of(state)
        with save_errors(step):
            self._frame = self._frame or _frame(parts)
            if jax.process_index() == 0:
                write_run_json(self._path(step, ".saving.json"), step, parts, extra, metrics)
            shards = {name: own_shards(part) for name, part in parts.items()}
        self._saves += 1
        self._pending = step, self._writer.submit(self._finish_own, step, f"{self._start:08x}-{self._saves}", shards)

    def share(self) -> None:
        """Waits as `wait`, and has each process see the checkpoints that process 0 sees."""
        self.wait()
        if jax.process_index() == 0:
            places.share(self.directory)
        multihost_utils.sync_global_devices("checkpoints are sent")
        if jax.process_index():
            places.share(self.directory)

    @property
    def _owns(self) -> bool:
        return True

    def _finish_own(self, step: int, attempt: str, shards: dict[str, dict[str, OwnArray]]) -> None:
        """Writes the shards of this process; those of a follower are then sent, and process 0 makes a whole of all."""
        staging, target = self._path(step, ".saving"), self._path(step)
        try:
            owner = f"{attempt}.{jax.process_index()}"
            for part, arrays in shards.items():
                write_shards(os.path.join(staging, part), owner, arrays)
            report = {"files": manifest.flushed(staging), "regions": {n: regions(a) for n, a in shards.items()}}
            os.makedirs(os.path.join(staging, "hosts"))
            write_atomically(os.path.join(staging, _report(owner)), json.dumps(report))
            if jax.process_index() == 0:
                self._make_whole(step, attempt)
            else:
                shutil.rmtree(target, ignore_errors=True)
                os.rename(staging, target)
                self._forget_older(step)
            places.send_soon(self.directory)
        finally:
            self._clear_unfinished()

    def _make_whole(self, step: int, attempt: str) -> None:
        """Waits for the shards of the others, joins them with its own, and gives the folder its name; in process 0."""
        staging, target = self._path(step, ".saving"), self._path(step)
        owners = [f"{attempt}.{i}" for i in range(jax.process_count())]
        sent = self._sent(target, [_report(owner) for owner in owners[1:]])
        elsewhere: dict[str, str] = {}
        for name, report in sent.items():
            elsewhere |= json.loads(report)["files"]
            write_atomically(os.path.join(staging, name), report)
        for name in elsewhere:
            if not are_values(name):
                place = os.path.relpath(path_below(target, name), self._twin.root)
                _patiently(lambda n=name, p=place: self._twin.store.get(p, path_below(staging, n)))
        for name, content in self._frame.items():
            os.makedirs(os.path.dirname(os.path.join(staging, name)), exist_ok=True)
            write_atomically(os.path.join(staging, name), content)
        for part in {name.partition("/")[0] for name in self._frame if "/" in name}:
            join_shards(os.path.join(staging, part), owners)
        os.rename(self._path(step, ".saving.json"), os.path.join(staging, RUN_JSON))
        check_readable(staging)
        manifest.seal(staging, elsewhere)
        _patiently(lambda: self._twin.adopt(target, staging, [*elsewhere, *sent]))
        manifest.sync(self.directory)
        self._distrusted.discard(step)
        self._delete_older(step)

    def _sent(self, folder: str, names: list[str]) -> dict[str, bytes]:
        """Returns what the others have sent, once all have."""
        while names:
            if (found := _patiently(lambda: self._twin.read_sent(folder, names))) is not None:
                return found
            time.sleep(_LOOK)
        return {}

    def _forget_older(self, newest: int) -> None:
        """Deletes the shards of steps that process 0 has deleted; that before the newest may be on its way."""
        with contextlib.suppress(UserError):  # the store is away: another time
            there = self._twin.store.objects(os.path.relpath(self.directory, self._twin.root))
            whole = {name.split("/")[-2] for name in there if name.endswith(f"/{manifest.MANIFEST}")}
            for step in [step for step in steps.list_steps(self.directory) if step < newest][:-1]:
                if str(step) not in whole:
                    shutil.rmtree(self._path(step), ignore_errors=True)

    def _newest_valid(self, abstract_state: PyTree, up_to: Optional[int]) -> Optional[int]:
        self.share()
        parts, damaged = parts_of(abstract_state), {}
        tried = steps.in_order(self.directory, up_to) if jax.process_index() == 0 else []
        while (step := int(multihost_utils.broadcast_one_to_all(np.int32(tried.pop(0) if tried else -1)))) >= 0:
            found = self._faults(step, parts)
            if found and jax.process_index():
                logging.warning("process %d: checkpoint %d is not used: %s", jax.process_index(), step, found)
            where = np.flatnonzero(multihost_utils.process_allgather(np.array([bool(found)])))
            if not len(where):
                break
            damaged[step] = found or f"process {where[0]} has found it damaged"
        if jax.process_index() == 0:
            if step < 0:
                steps.check_none_is_left(self.directory, damaged)
            self._distrust(damaged)
        return None if step < 0 else step

    def _faults(self, step: int, parts: dict[str, PyTree]) -> str:
        """Returns what is wrong with those files of a step that this process reads, which are brought; else ""."""
        try:
            found = steps.faults(self.directory, step, lambda name: not are_values(name))
            if not found:
                found = steps.faults(self.directory, step, needed_here(parts, self._written(step)))
        except RunFailed as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise
            found = [str(e)]
        except FileNotFoundError as e:
            found = [f"{e} is gone"]
        return ", ".join(found)

    def _written(self, step: int) -> dict[str, dict]:
        """Returns what each process has written of a step; of one that none of several wrote, nothing."""
        folder = os.path.join(self._path(step), "hosts")
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return {name.removesuffix(".json"): read_object(os.path.join(folder, name))["regions"] for name in names}


def _report(owner: str) -> str:
    return f"hosts/{owner}.json"


def _patiently(call: Callable[[], T]) -> T:
    """Returns what a call returns, once the store answers: a save that waits loses nothing."""
    said = False
    while True:
        try:
            return call()
        except UserError as e:
            if not said:
                say(f"{e}; the save waits for it")
            said = True
            time.sleep(_AWAY)


def _frame(parts: dict[str, PyTree]) -> dict[str, bytes]:
    """Returns the files in which Orbax keeps the trees of a step; all processes call it, and process 0 writes."""
    with tempfile.TemporaryDirectory(prefix="pretrainax") as own:
        path = np.frombuffer(os.fsencode(own).ljust(_PATH, b"\0"), np.uint8)
        folder = os.path.join(os.fsdecode(bytes(multihost_utils.broadcast_one_to_all(path)).rstrip(b"\0")), "frame")
        small = jax.tree.map(lambda x: np.zeros((1,) * x.ndim, x.dtype), parts)
        ocp.save_checkpointables(exact_path(folder), small)
        names = ["_CHECKPOINT_METADATA", *(f"{part}/_METADATA" for part in parts)]
        found = {}
        for name in names if jax.process_index() == 0 else ():
            with open(os.path.join(folder, name), "rb") as f:
                found[name] = f.read()
        multihost_utils.sync_global_devices("frame is read")
        return found or dict.fromkeys(names, b"")
