"""Monitors a run's processes, so that all stop after the same step and none waits for a dead process.

    with watchdog.Watchdog() as peers:  # around all code that waits for other processes, right after `host.start_jax`
        for step in ...:
            ...  # dispatch the step
            peers.beat(step)
            leaving = peers.agree(preemption.requested)  # once per step, in every process

Every second, each process writes a status record into the key-value store of `jax.distributed`, run by process 0.
Process 0 reads all records and writes its decision: which process is dead, when all stop, and whether all are done. The
other processes read only the decision. All communication runs in threads alongside training, so a long compilation or
a slow save does not look like a dead process.

Each process measures silence in ticks of its own thread, not with a clock. A clock may jump, and a process that was
itself stopped for a minute must not conclude that the other processes are dead.

JAX has its own heartbeats; `jax.distributed.initialize(heartbeat_timeout_seconds=…)` sets their timeout (100 s).
Measured without a Watchdog, with two processes on CPUs and a heartbeat timeout of 10 s: after one process was killed or
frozen, the other aborted (SIGABRT, exit code 134 in a shell) after 8.4 to 9.7 s, or after 0.7 s if process 0 was
killed. It printed a C++ stack trace, and only process 0 printed the number of the dead process. JAX therefore ends a
run that hangs, but without a useful exit code or the name of the machine. JAX does not send an error to the other
processes, and its processes do not agree on a common last step. This module does both. The timeout of JAX stays at
100 s as a second safeguard.
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

TICK = 1.0  # seconds between two heartbeats
SILENCE = 20  # ticks without a heartbeat after which a process counts as dead
STUCK = 600  # ticks without a step after which process 0 prints the step of each process
_RUNS = itertools.count()  # number of Watchdogs so far; the store keys of each one contain its number
_ANY_TIME = 30 * 24 * 3600 * 1000  # in milliseconds, practically no timeout; another thread detects a dead process
_GRACE = 2.0  # seconds in which another process may raise the same error as the failed process


class Watchdog:
    """A context manager that sends heartbeats to the other processes, and ends this process if one of them dies.

    The exit code is then 1. On a normal exit, the context waits until all processes have left it. An exception ends
    the other processes too, with the same exit code and a line that names this process, which then exits without
    waiting for them. In a run of one process, the watchdog only checks that the steps make progress.

    stuck_after: seconds without progress after which this process ends with exit code 1, or 0 for no limit.
    """

    def __init__(self, stuck_after: float = 0.0):
        state = distributed_state()
        self._stuck_after = stuck_after
        self._client, self._index, self._count = state.client, state.process_id, state.num_processes
        self._address = state.coordinator_address
        self._keys = f"pretrainax/{next(_RUNS)}"
        self._lock = threading.Condition()  # protects the state that `agree` shares with the threads
        self._wake, self._all_done, self._finished, self._failure_sent = (threading.Event() for _ in range(4))
        self._state = "running"  # "done" | "failed"
        self._failure: Optional[tuple[str, int]] = None  # message and exit code of this process
        self._step: Optional[int] = None
        self._zero_first_calls = 0  # number of calls of `zero_first`
        self._calls = 0  # number of finished calls of `agree`
        self._stop_requested = False  # True if this process should stop
        self._calls_at_stop: Optional[int] = None  # `_calls` at a stop request; the next call waits for `_target`
        self._target: Optional[int] = None  # number of the call of `agree` after which all processes stop
        self._ticks, self._last_step = 0, 0  # ticks of this process: current number; at the last step
        self._last_heartbeats: dict[int, tuple[int, int]] = {}  # process -> (its last tick, our tick at arrival)
        self._records: dict[int, dict] = {}  # in process 0: the newest record of each process
        self._decision = {"tick": 0, "asked": False, "target": None, "all_done": False, "end": None}  # of process 0

    def __enter__(self) -> "Watchdog":
        if self._count > 1:
            self._last_heartbeats = {i: (-1, 0) for i in (range(1, self._count) if self._index == 0 else [0])}
            if self._index:
                self._catch_abort()
            self._communication = threading.Thread(target=self._communicate, name="talking", daemon=True)
            self._communication.start()
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
            self._finished.set()
            self._wake.set()
            self._communication.join()
        else:
            if _may_follow_a_dead_process(error):
                time.sleep((SILENCE + 3) * TICK)  # if another process is dead, the watching thread reports it first
            line = " ".join(str(error).split()) or type(error).__name__
            self._failure = line, getattr(error, "exit_code", 1)
            self._state = "failed"
            self._wake.set()
            self._failure_sent.wait(2 * TICK)
            atexit.register(self._leave)  # runs before the exit handler of JAX, which waits for the others

    @contextlib.contextmanager
    def zero_first(self) -> Iterator[None]:
        """Runs the body of the context in process 0 first, and then in the other processes."""
        self._zero_first_calls += 1
        key = f"{self._keys}/turn/{self._zero_first_calls}"
        if self._index:
            self._client.blocking_key_value_get(key, _ANY_TIME)
        yield
        if self._index == 0 and self._count > 1:
            self._client.key_value_set(key, "done")

    def beat(self, step: Optional[int]) -> None:
        """Records, without communication, that `step` was dispatched, so that a hanging run can be detected.

        step: number of the step. If None, no more steps follow, and the watchdog stops checking for progress.
        """
        self._step, self._last_step = step, self._ticks

    def progress(self) -> None:
        """Records progress that is not a step, for example a validation batch."""
        self._last_step = self._ticks

    def agree(self, stop: bool) -> bool:
        """Returns True in the same call in all processes, soon after any of them has passed `stop=True`.

        Every process calls this method once per step, and stops after the step if the result is True. The method only
        blocks after a stop request: each process then blocks in its next call and reports how many calls it has
        finished. All processes stop at the first call that none of them has finished.
        """
        if self._count == 1:
            return stop
        with self._lock:
            if stop and not self._stop_requested:
                self._stop_requested = True
                self._wake.set()
            while (self._stop_requested or self._calls_at_stop is not None) and self._target is None:
                self._lock.wait(TICK)
            self._calls += 1
            return self._target is not None and self._calls >= self._target

    # --- the communication thread ----------------------------------------------------------------------------------

    def _communicate(self) -> None:
        """Exchanges status records once per TICK, and ten times as often while the processes agree on the last step."""
        tick = 0
        while not self._finished.is_set():
            tick += 1
            try:
                failed = self._state == "failed"
                self._exchange(tick)
                if failed:
                    self._failure_sent.set()
            except jax.errors.JaxRuntimeError:
                pass  # the store does not respond, which counts as silence of process 0
            is_deciding = self._target is None and (self._stop_requested or self._calls_at_stop is not None)
            self._wake.wait(TICK / 10 if is_deciding else TICK)
            self._wake.clear()

    def _exchange(self, tick: int) -> None:
        """Writes this process's status record, makes the decision in process 0, and applies the newest decision."""
        record = {
            "tick": tick,
            "host": socket.gethostname(),
            "step": self._step,
            "wanted": self._stop_requested,
            "promised": self._calls_at_stop,
            "state": self._state,
            "failure": self._failure,
        }
        self._client.key_value_set(f"{self._keys}/process/{self._index}", json.dumps(record), allow_overwrite=True)
        if self._index == 0:
            self._decide(tick)
        self._apply_decision(json.loads(self._client.key_value_try_get(f"{self._keys}/word")))

    def _decide(self, tick: int) -> None:
        """Reads all processes' status records and writes the decision; runs only in process 0."""
        pairs = self._client.key_value_dir_get(f"{self._keys}/process/")
        self._records = {int(key.rpartition("/")[2]): json.loads(text) for key, text in pairs}
        records, decision = self._records.values(), self._decision
        for index in self._last_heartbeats.keys() & self._records.keys():
            self._update_heartbeat(index, self._records[index]["tick"])
        running = [r for r in records if r["state"] == "running"]
        if any(r["wanted"] for r in running):
            decision["asked"] = True
        if decision["asked"] and decision["target"] is None and all(r["promised"] is not None for r in running):
            decision["target"] = max((r["promised"] for r in running), default=0) + 1
        decision["all_done"] = len(records) == self._count and all(r["state"] == "done" for r in records)
        failed = {i: r["failure"] for i, r in self._records.items() if r["state"] == "failed"}
        if failed and decision["end"] is None:
            index, (line, code) = min(failed.items())
            decision["end"] = f"{self._name(index)} failed: {line}", code, _GRACE
        decision["tick"] = tick
        self._client.key_value_set(f"{self._keys}/word", json.dumps(decision), allow_overwrite=True)

    def _apply_decision(self, decision: dict) -> None:
        """Stores process 0's decision for `agree` and `__exit__`; ends this process if the run must end."""
        if self._index:
            self._update_heartbeat(0, decision["tick"])
        with self._lock:
            if decision["asked"] and self._calls_at_stop is None:
                self._calls_at_stop = self._calls
                self._wake.set()
            self._target = decision["target"]
            self._lock.notify_all()
        if decision["all_done"]:
            self._all_done.set()
        if decision["end"] is not None:
            self._end(*decision["end"])

    def _update_heartbeat(self, index: int, tick: int) -> None:
        if self._last_heartbeats[index][0] != tick:
            self._last_heartbeats[index] = tick, self._ticks

    # --- the watching thread: it makes no call that may hang ---------------------------------------------------------

    def _watch(self) -> None:
        """Counts ticks, detects silent processes, and checks this process's progress."""
        while not self._all_done.is_set():
            time.sleep(TICK)
            self._ticks += 1
            for index, (_, heartbeat_tick) in self._last_heartbeats.items():
                if self._ticks - heartbeat_tick >= SILENCE:
                    line = (
                        f"{self._name(index)} has sent no heartbeat for {round(SILENCE * TICK)} s: it was killed, is "
                        "frozen or has no network; run the same command to resume from the last checkpoint"
                    )
                    if self._index:
                        self._end(line, 1, 0.0)
                    elif self._decision["end"] is None:
                        self._decision["end"] = line, 1, 0.0
            if self._step is not None:
                self._check_progress(self._ticks - self._last_step)

    def _check_progress(self, idle: int) -> None:
        """Prints the step of each process after STUCK ticks without progress; ends this process after `stuck_after`."""
        if idle == STUCK and self._index == 0 and self._count > 1:
            steps = ", ".join(f"{i} at step {r['step']}" for i, r in sorted(self._records.items()))
            print(f"no step for {round(STUCK * TICK)} s; all processes are alive: {steps}", file=sys.stderr)
        if self._stuck_after and idle * TICK >= self._stuck_after:
            line = (
                f"no step after {self._step} for {self._stuck_after:,.0f} s (config.train.stuck_after): a device or a "
                "collective hangs; run the same command to resume from the last checkpoint"
            )
            self._end(line, 1, 0.0)

    def _name(self, index: int) -> str:
        host = self._records.get(index, {}).get("host")
        suffix = f" on {host}" if host else " (the coordinator)" if index == 0 else ""
        return f"process {index} of {self._count}{suffix}"

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self, line: str, code: int, grace: float) -> None:
        """Ends this process after `grace` seconds with the message `line`, or with its own error if it has one."""
        time.sleep(grace)
        if self._state == "failed":
            time.sleep(10)  # the main thread prints the error and exits
        else:
            print(f"pretrainax: {line}", file=sys.stderr)
        self._leave(code)

    def _leave(self, code: Optional[int] = None) -> None:
        """Exits without JAX's exit handler, which is a barrier that would wait for dead processes.

        code: exit code. If None, uses the exit code of this process's own failure.
        """
        if self._index == 0:
            time.sleep(2 * TICK + _GRACE)  # the store ends with this process; all must read its last decision first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._failure[1] if code is None else code)

    def _catch_abort(self) -> None:
        """Handles JAX's abort, which comes within 0.1 s of process 0's end, with an error message and exit code 1."""

        def explain(number: int) -> None:
            address = self._address.rpartition(":")
            try:
                socket.create_connection((address[0].strip("[]"), int(address[2])), timeout=2).close()
            except OSError:
                os.write(2, f"pretrainax: {self._name(0)} is gone: no connection to {''.join(address)}; ".encode())
                os.write(2, b"run the same command to resume from the last checkpoint\n")
                os._exit(1)
            libc.signal(number, None)  # process 0 is alive, so the abort has another cause

        libc = ctypes.CDLL(None)
        self._explain = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
        libc.signal(signal.SIGABRT, self._explain)


def _may_follow_a_dead_process(error: Optional[BaseException]) -> bool:
    """Returns True if a dead process may have caused the error, i.e. a collective (or a save that uses one) failed."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None
