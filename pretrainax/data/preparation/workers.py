"""Worker processes for tasks, and locks between the processes of one machine."""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Optional

from pretrainax.config import UserError


class Workers:
    """Worker processes, started on demand for two or more tasks. They always end with this process."""

    def __init__(self, count: int):
        """count: the number of processes; 0: one per core, 1: only this process."""
        self._count = count or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
        )
        self._context = multiprocessing.get_context("spawn")  # no fork: JAX and tokenizers have threads
        self._stop: Any = None  # tells workers to stop
        self._pool: Optional[ProcessPoolExecutor] = None
        self.worked = False

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable, tasks: list[tuple]) -> Iterator:
        """Yields function(*task) for each task, in order of completion."""
        self.worked = True
        if self._count == 1 or len(tasks) <= 1:
            yield from itertools.starmap(function, tasks)
            return
        if self._pool is None:
            check_shared_memory("prepare_workers", self._count, alone=1)
            self._stop = self._context.Event()
            self._pool = ProcessPoolExecutor(self._count, self._context, _start_worker, (self._stop, "false"))
        try:
            for future in as_completed([self._pool.submit(function, *task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool as e:
            raise UserError(
                "a tokenizing process was killed, possibly for lack of memory: "
                f"config.data.prepare_workers is {self._count}, set it lower"
            ) from e

    def apart(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function in a separate process with all threads, which frees its memory at the end."""
        self.worked = True
        if self._count == 1:
            return function(*arguments)
        check_shared_memory("prepare_workers", self._count, alone=1)
        interrupted = self._context.Event()
        with ProcessPoolExecutor(1, self._context, _start_apart, (interrupted,)) as pool:
            try:
                return pool.submit(function, *arguments).result()
            except BrokenProcessPool as e:
                raise UserError("the process that trains the tokenizer was killed, possibly for lack of memory") from e
            except BaseException:
                interrupted.set()
                raise


_stop: Any = None  # in a worker process: the event of its Workers


def _start_worker(stop: Any, threads: str) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too and handles it
    os.environ["TOKENIZERS_PARALLELISM"] = threads  # "false": one thread per process

    _end_after(multiprocessing.parent_process().join)


def _start_apart(interrupted: Any) -> None:
    _start_worker(None, "true")
    _end_after(interrupted.wait)


def _end_after(wait: Callable) -> None:
    """Ends this process as soon as `wait` returns."""

    def end():
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def check_shared_memory(field: str, count: int, alone: int) -> None:
    """Raises UserError if processes cannot share memory, as in a container without /dev/shm.

    Args:
      field: the field of config.data with the number of processes, `count`.
      alone: its value for work without worker processes.
    """
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as e:
        raise UserError(
            f"config.data.{field} is {count}, but processes cannot share memory here (/dev/shm: {e.strerror}): "
            f"set config.data.{field}={alone}, or mount /dev/shm (docker run --shm-size=1g)"
        ) from e


def until_stopped(items: Iterator) -> Iterator:
    """Yields the items; raises InterruptedError after the parent process sets the stop event."""
    for item in items:
        if _stop is not None and _stop.is_set():
            raise InterruptedError("stopped by the parent process")
        yield item


@contextlib.contextmanager
def locked(path: str, report: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`.lock, which the system releases when a process dies."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker would wait for its parent
        raise UserError("worker processes import the main script again: put its code under if __name__ == '__main__'")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that prepares {path}")
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield
