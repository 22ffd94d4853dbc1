"""Provides a pool of worker processes, and lock files that synchronize the processes of one machine."""

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
        self._stop: Any = None  # event that tells the workers to stop their tasks
        self._pool: Optional[ProcessPoolExecutor] = None
        self.worked = False

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

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
            self._stop = self._context.Event()
            self._pool = ProcessPoolExecutor(self._count, self._context, _initialize_worker, (self._stop, "false"))
        try:
            for future in as_completed([self._pool.submit(function, *task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool as e:
            raise UserError(
                "a tokenizing process was killed, possibly for lack of memory: "
                f"config.data.prepare_workers is {self._count}, set it lower"
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
        interrupted = self._context.Event()
        with ProcessPoolExecutor(1, self._context, _initialize_separate_worker, (interrupted,)) as pool:
            try:
                return pool.submit(function, *arguments).result()
            except BrokenProcessPool as e:
                raise UserError("the process that trains the tokenizer was killed, possibly for lack of memory") from e
            except BaseException:
                interrupted.set()
                raise


_stop: Any = None  # in a worker process: the stop event of the parent's `Workers`; None in other processes


def _initialize_worker(stop: Any, threads: str) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process also receives and handles SIGINT
    os.environ["TOKENIZERS_PARALLELISM"] = threads  # "true": several threads | "false": one thread per process

    _exit_after(multiprocessing.parent_process().join)


def _initialize_separate_worker(interrupted: Any) -> None:
    _initialize_worker(None, "true")
    _exit_after(interrupted.wait)


def _exit_after(wait: Callable) -> None:
    """Exits this process with status 1 as soon as `wait` returns; `wait` runs in a daemon thread."""

    def end():
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


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
    """Yields the items, but raises InterruptedError as soon as the parent process sets this worker's stop event."""
    for item in items:
        if _stop is not None and _stop.is_set():
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
        raise UserError("worker processes import the main script again: put its code under if __name__ == '__main__'")
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
