"""The processes of one run: they stop after the same step, and none waits for one that is gone.

    with watchdog.Watchdog() as peers:  # around all that waits for other processes, right after `host.start_jax`
        for step in ...:
            ...  # dispatch the step
            peers.beat(step)
            leaving = peers.agree(preemption.requested)  # once a step, in every process

Every second each process leaves a record in the key-value store of `jax.distributed`, which lives in process 0. Process
0 reads them all and leaves its word: who is gone, where to stop, that all are done. The others read the word alone.
All of it goes on in threads beside the training: a long compilation or a slow save is no silence.

Silence is counted in ticks of the process's own thread and not by a clock: a clock may jump, and a process that was
stopped for a minute itself blames nobody.

JAX has heartbeats of its own, and `jax.distributed.initialize(heartbeat_timeout_seconds=…)` says how long a silence may
be (100 s). Two processes on CPUs, one of them killed or frozen, heartbeats of 10 s and no Watchdog: the other aborts
(SIGABRT, exit code 134 in a shell) after 8.4 to 9.7 s, after 0.7 s if process 0 was killed. It leaves a stack trace of
C++, before which process 0 alone says the number of the one that is gone. So JAX ends a run that hangs. It gives no
exit code to act on, names no machine, passes no error of one process on to the others, and finds no step at which all
stop: that is what this module is for. JAX's 100 s stay as they are, behind it.
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.runtime.cluster import distributed_state

TICK = 1.0  # seconds between two signs of life
SILENCE = 20  # ticks without one, after which a process counts as gone
STUCK = 600  # ticks without a step, after which it is said where each process stands
_RUNS = itertools.count()  # runs of these processes, one after the other: each has keys of its own
_ANY_TIME = 30 * 24 * 3600 * 1000  # milliseconds: when the other process is gone, another thread notices
_GRACE = 2.0  # seconds in which a process that heard of an error may come upon the same one by itself


class Watchdog:
    """Tells the other processes that this one is alive, and ends it with exit code 1 when one of them is gone.

    A context manager. Left in the ordinary way, it waits until all have come that far. Left by an exception, it ends
    the others too, with the same exit code and a line that names this process, and spares this one the wait for them
    when it exits. A run of one process is watched for steps alone.

    stuck_after: seconds without progress after which this process ends with exit code 1; 0: never.
    """

    def __init__(self, stuck_after: float = 0.0):
        own = distributed_state()
        self._stuck_after = stuck_after
        self._client, self._index, self._count = own.client, own.process_id, own.num_processes
        self._address = own.coordinator_address
        self._keys = f"pretrainax/{next(_RUNS)}"
        self._lock = threading.Condition()  # over what `agree` shares with the threads
        self._wake, self._all_done, self._over, self._told = (threading.Event() for _ in range(4))
        self._state = "running"  # "done" | "failed"
        self._failure: Optional[tuple[str, int]] = None  # line and exit code, of this process
        self._step: Optional[int] = None
        self._turns = 0  # of `zero_first`
        self._calls = 0  # of `agree`, that have returned
        self._wanted = False  # this process wants to stop
        self._promised: Optional[int] = None  # `_calls` when asked where to stop; the next one waits for `_target`
        self._target: Optional[int] = None  # the call after which all stop
        self._ticks, self._last_step = 0, 0  # of this process's own thread; at the last step
        self._heard: dict[int, tuple[int, int]] = {}  # process -> (its tick, own tick when that was new)
        self._records: dict[int, dict] = {}  # process 0: the newest of each
        self._word = {"tick": 0, "asked": False, "target": None, "all_done": False, "end": None}  # process 0's

    def __enter__(self) -> "Watchdog":
        if self._count > 1:
            self._heard = {i: (-1, 0) for i in (range(1, self._count) if self._index == 0 else [0])}
            if self._index:
                self._catch_abort()
            self._talking = threading.Thread(target=self._talk, name="talking", daemon=True)
            self._talking.start()
        if self._count > 1 or self._stuck_after:
            threading.Thread(target=self._watch, name="watching", daemon=True).start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.beat(None)
        if self._count == 1:
            self._all_done.set()
            return
        if error is None:
            self._state = "done"
            self._wake.set()
            self._all_done.wait()
            self._over.set()
            self._wake.set()
            self._talking.join()
        else:
            if _may_be_an_echo(error):
                time.sleep((SILENCE + 3) * TICK)  # if a process is gone, the line that names it ends this one meanwhile
            line = " ".join(str(error).split()) or type(error).__name__
            self._failure = line, getattr(error, "exit_code", 1)
            self._state = "failed"
            self._wake.set()
            self._told.wait(2 * TICK)
            atexit.register(self._leave)  # runs before JAX's, which waits for the others

    @contextlib.contextmanager
    def zero_first(self) -> Iterator[None]:
        """Lets process 0 do what is inside before all others do it, who find it done."""
        self._turns += 1
        key = f"{self._keys}/turn/{self._turns}"
        if self._index:
            self._client.blocking_key_value_get(key, _ANY_TIME)
        yield
        if self._index == 0 and self._count > 1:
            self._client.key_value_set(key, "done")

    def beat(self, step: Optional[int]) -> None:
        """Notes that `step` is on its way to the devices, to be told of a run that hangs; costs nothing. None: there
        are no more, and what comes now may take as long as it likes."""
        self._step, self._last_step = step, self._ticks

    def progress(self) -> None:
        """Notes that something is done that is no step: a batch of a validation."""
        self._last_step = self._ticks

    def agree(self, stop: bool) -> bool:
        """Returns whether to leave after this step: True in every process at the same call, once `stop` was in any.

        Every process calls it once a step. It waits for nothing until one process wants to stop. Then each stays in
        the call it comes to and says how many it has left behind, and all stop at the first that none has.
        """
        if self._count == 1:
            return stop
        with self._lock:
            if stop and not self._wanted:
                self._wanted = True
                self._wake.set()
            while (self._wanted or self._promised is not None) and self._target is None:
                self._lock.wait(TICK)
            self._calls += 1
            return self._target is not None and self._calls >= self._target

    # --- the thread that talks --------------------------------------------------------------------------------------

    def _talk(self) -> None:
        tick = 0
        while not self._over.is_set():
            tick += 1
            try:
                failed = self._state == "failed"
                self._exchange(tick)
                if failed:
                    self._told.set()
            except jax.errors.JaxRuntimeError:
                pass  # the store does not answer: a silence of process 0
            deciding = self._target is None and (self._wanted or self._promised is not None)
            self._wake.wait(TICK / 10 if deciding else TICK)
            self._wake.clear()

    def _exchange(self, tick: int) -> None:
        record = {
            "tick": tick,
            "host": socket.gethostname(),
            "step": self._step,
            "wanted": self._wanted,
            "promised": self._promised,
            "state": self._state,
            "failure": self._failure,
        }
        self._client.key_value_set(f"{self._keys}/process/{self._index}", json.dumps(record), allow_overwrite=True)
        if self._index == 0:
            self._preside(tick)
        self._listen(json.loads(self._client.key_value_try_get(f"{self._keys}/word")))

    def _preside(self, tick: int) -> None:
        """Reads all records, decides, and says so; in process 0."""
        pairs = self._client.key_value_dir_get(f"{self._keys}/process/")
        self._records = {int(key.rpartition("/")[2]): json.loads(text) for key, text in pairs}
        records, word = self._records.values(), self._word
        for index in self._heard.keys() & self._records.keys():
            self._hear(index, self._records[index]["tick"])
        running = [r for r in records if r["state"] == "running"]
        if any(r["wanted"] for r in running):
            word["asked"] = True
        if word["asked"] and word["target"] is None and all(r["promised"] is not None for r in running):
            word["target"] = max((r["promised"] for r in running), default=0) + 1
        word["all_done"] = len(records) == self._count and all(r["state"] == "done" for r in records)
        failed = {i: r["failure"] for i, r in self._records.items() if r["state"] == "failed"}
        if failed and word["end"] is None:
            index, (line, code) = min(failed.items())
            word["end"] = f"{self._name(index)} failed: {line}", code, _GRACE
        word["tick"] = tick
        self._client.key_value_set(f"{self._keys}/word", json.dumps(word), allow_overwrite=True)

    def _listen(self, word: dict) -> None:
        if self._index:
            self._hear(0, word["tick"])
        with self._lock:
            if word["asked"] and self._promised is None:
                self._promised = self._calls
                self._wake.set()
            self._target = word["target"]
            self._lock.notify_all()
        if word["all_done"]:
            self._all_done.set()
        if word["end"] is not None:
            self._end(*word["end"])

    def _hear(self, index: int, tick: int) -> None:
        if self._heard[index][0] != tick:
            self._heard[index] = tick, self._ticks

    # --- the thread that watches: it calls nothing that may hang ---------------------------------------------------

    def _watch(self) -> None:
        while not self._all_done.is_set():
            time.sleep(TICK)
            self._ticks += 1
            for index, (_, heard) in self._heard.items():
                if self._ticks - heard >= SILENCE:
                    line = (
                        f"{self._name(index)} has not been heard of for {round(SILENCE * TICK)} s: it was killed, is "
                        "frozen or cut off; the same command goes on from the last checkpoint"
                    )
                    if self._index:
                        self._end(line, 1, 0.0)
                    elif self._word["end"] is None:
                        self._word["end"] = line, 1, 0.0
            if self._step is not None:
                self._look_for_steps(self._ticks - self._last_step)

    def _look_for_steps(self, idle: int) -> None:
        """Says where each process stands after STUCK ticks without progress; ends this one after `stuck_after`."""
        if idle == STUCK and self._index == 0 and self._count > 1:
            stand = ", ".join(f"{i} at step {r['step']}" for i, r in sorted(self._records.items()))
            print(f"no step for {round(STUCK * TICK)} s; all processes are alive: {stand}", file=sys.stderr)
        if self._stuck_after and idle * TICK >= self._stuck_after:
            line = (
                f"no step after {self._step} for {self._stuck_after:,.0f} s (config.train.stuck_after): a device or a "
                "collective hangs; the same command goes on from the last checkpoint"
            )
            self._end(line, 1, 0.0)

    def _name(self, index: int) -> str:
        host = self._records.get(index, {}).get("host")
        what = f" on {host}" if host else ", which all others meet at," if index == 0 else ""
        return f"process {index} of {self._count}{what}"

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self, line: str, code: int, grace: float) -> None:
        """Ends this process: with `line`, or with its own error if it has one."""
        time.sleep(grace)
        if self._state == "failed":
            time.sleep(10)  # the main thread says what it was, and leaves
        else:
            print(f"pretrainax: {line}", file=sys.stderr)
        self._leave(code)

    def _leave(self, code: Optional[int] = None) -> None:
        """Leaves without waiting for anyone: JAX's own way out is a barrier with those that are gone."""
        if self._index == 0:
            time.sleep(2 * TICK + _GRACE)  # the store ends with this process: all read its last word before
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._failure[1] if code is None else code)

    def _catch_abort(self) -> None:
        """When process 0 ends, JAX aborts the others within 0.1 s. This puts a line and exit code 1 in place of it."""

        def explain(number: int) -> None:
            address = self._address.rpartition(":")
            try:
                socket.create_connection((address[0].strip("[]"), int(address[2])), timeout=2).close()
            except OSError:
                os.write(2, f"pretrainax: {self._name(0)} is gone: nothing answers at {''.join(address)}; ".encode())
                os.write(2, b"the same command goes on from the last checkpoint\n")
                os._exit(1)
            libc.signal(number, None)  # another reason: abort as usual

        libc = ctypes.CDLL(None)
        self._explain = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
        libc.signal(signal.SIGABRT, self._explain)


def _may_be_an_echo(error: Optional[BaseException]) -> bool:
    """Returns True if a process that is gone may be the reason: a collective fails here, or the save that needs one."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None
