"""Runs a function in a forked process, which may hang, die or print anything."""

import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Optional


def run_forked(call: Callable[[], Optional[int]], said: pathlib.Path, seconds: float) -> tuple[Optional[int], str]:
    """Returns the exit status, or None after a timeout, and the output, which is also in the file `said`.

    The result of `call`, or of its SystemExit, is the exit status; a traceback gives 1.
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
    """Runs `call` in this process and ends the process."""
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
