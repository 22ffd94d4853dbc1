"""Provides a pool of worker processes, and lock files that synchronize the processes of one machine."""

import contextlib
import copyreg
import dataclasses
import fcntl
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, Optional

from pretrainax.config import UserError
from pretrainax.config.config_file import file_with_classes, import_file

_GUARD = "worker processes import your own script: put its code that trains under `if __name__ == '__main__':`"

# cloudpickle, also in Grain's workers, would copy this marker in a dataclass; dataclasses recognize it by its identity.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


class Workers:
    """A pool of worker processes, which start on the first call with several tasks.

    The workers exit if this process is killed. `worked` is True after the first call, even if no worker process was
    started.
    """

    def __init__(self, count: int):
        """Creates the pool without starting processes.

        Args:
          count: the number of processes, or 0 for one per available core. With 1, tasks run in the current process.
        """
        self._count = count or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
        )
        self._context = multiprocessing.get_context("spawn")  # not fork, because JAX and tokenizers start threads
        self._stop: Optional[Connection] = None  # a pipe's write end; closing it tells the workers to stop their tasks
        self._pool: Optional[ProcessPoolExecutor] = None
        self._signals: list[signal.Signals] = []  # signals whose default action `__exit__` restores
        self.worked = False

    def __enter__(self) -> "Workers":
        self._signals = _raise_on_ending_signals() if self._count > 1 else []
        return self

    def __exit__(self, *_) -> None:
        if self._stop is not None:
            self._stop.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)

    def run(self, function: Callable, tasks: list[tuple]) -> Iterator:
        """Calls function(*task) in the pool for each task, and yields the results in order of completion.

        If there is only one task or one worker, runs the tasks in the current process.

        Raises:
          UserError: a worker process was killed.
        """
        self.worked = True
        if self._count == 1 or len(tasks) <= 1:
            yield from itertools.starmap(function, tasks)
            return
        if self._pool is None:
            check_shared_memory("prepare_workers", self._count, alone=1)
            stopped, self._stop = self._context.Pipe(duplex=False)
            arguments = stopped, "false", file_with_classes()
            self._pool = ProcessPoolExecutor(self._count, self._context, _initialize_worker, arguments)
        try:
            for future in as_completed([self._pool.submit(*_picklable(function, *task)) for task in tasks]):
                yield future.result()
        except BrokenProcessPool as e:
            raise UserError(
                "a tokenizing process ended, possibly killed for lack of memory: "
                f"config.data.prepare_workers is {self._count}, set it lower; {_GUARD}"
            ) from e

    def apart(self, function: Callable, *arguments: Any) -> Any:
        """Calls function(*arguments) in a separate process, whose memory is freed at the end, and returns the result.

        In the separate process, the library `tokenizers` uses several threads. If the pool has only one worker, the
        function runs in the current process.

        Raises:
          UserError: the separate process was killed.
        """
        self.worked = True
        if self._count == 1:
            return function(*arguments)
        check_shared_memory("prepare_workers", self._count, alone=1)
        interrupted, interrupt = self._context.Pipe(duplex=False)  # closed by an exception
        initial = interrupted, file_with_classes()
        with ProcessPoolExecutor(1, self._context, _initialize_separate_worker, initial) as pool:
            try:
                return pool.submit(*_picklable(function, *arguments)).result()
            except BrokenProcessPool as e:
                raise UserError(
                    f"the process that trains the tokenizer ended, possibly killed for lack of memory; {_GUARD}"
                ) from e
            except BaseException:
                interrupt.close()
                raise


def _picklable(function: Callable, *arguments: object) -> tuple:
    """Returns a function and its arguments, for the same call, that a worker process can unpickle.

    Workers import the script or module of the program, but no notebook: its classes are pickled by value.
    """
    if hasattr(sys.modules["__main__"], "__file__"):
        return function, *arguments
    import cloudpickle  # imported here, because its import is slow

    return _call, cloudpickle.dumps((function, arguments))


def _call(pickled: bytes) -> object:
    function, arguments = pickle.loads(pickled)
    return function(*arguments)


def _raise_on_ending_signals() -> list[signal.Signals]:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that `Workers` ends its processes and releases its semaphores.

    By default, these signals kill this process at once. Returns the signals that had their default action; signals that
    are ignored (`nohup`) or have a handler are left alone. Only the main thread can set handlers.
    """

    def end(number: int, _: Any) -> None:
        for ending in signals:
            signal.signal(ending, signal.SIG_IGN)  # the exit is under way
        name = signal.Signals(number).name
        print(f"pretrainax: {name}: the preparation ends; the same command continues it", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    signals = [s for s in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(s) == signal.SIG_DFL]
    for number in signals:
        signal.signal(number, end)
    return signals


_stopped = threading.Event()  # in a worker process: whether its parent process has told it to stop


def _initialize_worker(stop: Connection, threads: str, config_file: Optional[str]) -> None:
    """Initializes a process of the pool.

    Args:
      stop: the read end of a pipe, whose write end the parent closes to stop the tasks. A `multiprocessing.Event` would
        block the parent forever if a signal had killed a worker that waits for it.
      threads: TOKENIZERS_PARALLELISM; "true": several threads, "false": one thread per process.
      config_file: a config file with classes that the tasks may contain, or None.
    """
    _initialize(threads, config_file)
    _call_after(lambda: stop.poll(None), _stopped.set)


def _initialize_separate_worker(interrupted: Connection, config_file: Optional[str]) -> None:
    _initialize("true", config_file)
    _call_after(lambda: interrupted.poll(None), _exit)


def _initialize(threads: str, config_file: Optional[str]) -> None:
    if config_file is not None:
        import_file(config_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process also receives and handles SIGINT
    os.environ["TOKENIZERS_PARALLELISM"] = threads
    _call_after(multiprocessing.parent_process().join, _exit)


def _call_after(wait: Callable, function: Callable) -> None:
    """Calls `function` as soon as `wait` returns; `wait` runs in a daemon thread."""
    threading.Thread(target=lambda: (wait(), function()), daemon=True).start()


def _exit() -> None:
    os._exit(1)


def check_shared_memory(field: str, count: int, alone: int) -> None:
    """Raises UserError if processes cannot share memory, for example in a container without /dev/shm.

    Args:
      field: the field of config.data that sets the number of processes, for the error message.
      count: the value of the field.
      alone: the value of the field that disables worker processes.
    """
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as e:
        raise UserError(
            f"config.data.{field} is {count}, but processes cannot share memory here (/dev/shm: {e.strerror}): "
            f"set config.data.{field}={alone}, or mount /dev/shm (docker run --shm-size=1g)"
        ) from e


def until_stopped(items: Iterator) -> Iterator:
    """Yields the items, but raises InterruptedError as soon as the parent process tells this worker to stop."""
    for item in items:
        if _stopped.is_set():
            raise InterruptedError("stopped by the parent process")
        yield item


@contextlib.contextmanager
def locked(path: str, report: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock on the file `path`.lock in the context, after waiting for any other process that holds it.

    The operating system releases the lock when a process dies. If the file system does not support locks, the context
    runs without a lock.

    Args:
      path: the file or folder that the lock protects.
      report: prints a message for the user before waiting.

    Raises:
      UserError: the current process is a worker that is still importing the main script; it would wait for its parent
        forever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(_GUARD)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that prepares {path}")
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:  # the file system does not support locks
            pass
        yield
