"""Tries something in a process that is forked for it, which may hang, die, or print what it likes."""

import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Optional


def run_forked(call: Callable[[], Optional[int]], said: pathlib.Path, seconds: float) -> tuple[Optional[int], str]:
    """Returns the exit code, None where there was no end in so many seconds, and all that was printed, into `said`.

    What `call` returns, or raises as SystemExit, is the exit code; 1 after a traceback.
    """
    pid = os.fork()
    if pid == 0:
        _become(call, said)
    deadline = time.monotonic() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, said.read_text(errors="replace")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1]), said.read_text(errors="replace")


def _become(call: Callable[[], Optional[int]], said: pathlib.Path) -> None:
    """Calls in this process, which ends with it."""
    code = 1
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = call() or 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
