"""Calls functions on input that nobody vouches for in a process of their own, with budgets of time and memory.

A regular expression or a template from a file of somebody else may run forever or take all memory, inside a library
that neither a signal nor an exception interrupts. The system ends the process here when its time is over, and its
allocations fail beyond its memory. It returns JSON, so whatever it does, it can only return data.

A function is named by its file, which is executed as it stands, without the packages around it: it must import little.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import Optional

from pretrainax.files.errors import UserError, shortened

_CHILD = os.path.join(os.path.dirname(__file__), "confined_child.py")
# What the process needs of the environment, in which secrets may be.
_NAMES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


class Confined:
    """A function in a process of its own, which starts at the first call (30 ms and its imports) and then stays."""

    def __init__(self, file: str, function: str, seconds: float, gib: float):
        """Sets what is called and its budgets.

        Args:
          file: a Python file, which imports what the function needs and no package of this project.
          function: its name in the file; takes what JSON can hold, returns a list of that, and raises ValueError for
            bad input.
          seconds: of one call.
          gib: of address space, 2^30 bytes; Linux enforces it.
        """
        self._command = [sys.executable, "-P", _CHILD, file, function, str(seconds), str(int(gib * 2**30))]
        self._seconds, self._gib = seconds, gib
        self._lock, self._process, self._owner = threading.Lock(), None, 0
        self._ended: Optional[weakref.finalize] = None

    def call(self, what: str, **arguments: object) -> list:
        """Returns what the function returns.

        Args:
          what: the input and where it came from, with which the line of an error begins.

        Raises:
          UserError: the function refuses its input, or a budget is exceeded.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # a fork shares its parent's pipes
                self._start()
            process = self._process
            assert process is not None and process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(arguments).encode() + b"\n")
                    process.stdin.flush()
                answer = process.stdout.readline()
            except BaseException:  # of Ctrl-C, too: the answer of this call must not become that of the next
                self.close()
                raise
            if not answer.endswith(b"\n"):
                code = process.wait()
                self.close()
                raise UserError(f"{shortened(what)} {self._reason(code)}".lstrip())
        found = json.loads(answer)
        if "error" in found:
            raise UserError(f"{shortened(what)} {found['error']}".lstrip())
        return found["value"]

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment = {name: os.environ[name] for name in _NAMES if name in os.environ}
        self._process = subprocess.Popen(self._command, **pipes, env=environment, start_new_session=True)
        self._owner, self._ended = os.getpid(), weakref.finalize(self, _end, self._process, os.getpid())

    def close(self) -> None:
        """Ends the process; the next call starts another one."""
        if self._ended is not None:
            self._ended()
        self._process = None

    def _reason(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"took more than {self._seconds:g} s, which is all that such input gets: give a simpler one"
        return f"took more than {self._gib:g} GiB of memory, or crashed (exit code {code}): give a simpler one"


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.communicate()
