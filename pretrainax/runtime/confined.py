"""Calls functions on untrusted input in a separate process with limits on time and memory.

A regular expression or a template from an untrusted file may run forever or exhaust memory, inside a library that
neither a signal nor an exception can interrupt. The operating system kills the separate process at the time limit, and
allocations beyond the memory limit fail. The process returns JSON, so the result can only be data.

The process executes the file of the function without importing the packages that contain it. The file should therefore
import few modules.
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
# Environment variables that the separate process receives. Other variables may contain secrets.
_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


class Confined:
    """A function that runs in a separate process, which starts on the first call (30 ms plus imports) and is reused."""

    def __init__(self, file: str, function: str, seconds: float, gib: float):
        """Sets the function and its limits.

        Args:
          file: the Python file that defines the function. It must not import modules of this project.
          function: name of the function. It takes JSON values, returns a list of JSON values, and raises ValueError for
            invalid input.
          seconds: time limit of one call.
          gib: limit on the address space in GiB (2^30 bytes). Linux enforces it, macOS does not.
        """
        self._command = [sys.executable, "-P", _CHILD, file, function, str(seconds), str(int(gib * 2**30))]
        self._seconds, self._gib = seconds, gib
        self._lock, self._process, self._owner_pid = threading.Lock(), None, 0
        self._finalizer: Optional[weakref.finalize] = None

    def call(self, what: str, **arguments: object) -> list:
        """Calls the function in the separate process and returns its result.

        Args:
          what: description of the input and where it comes from, which begins error messages.
          arguments: the function's keyword arguments, which are JSON values.

        Raises:
          UserError: the input is invalid, or the call exceeds a limit.
        """
        with self._lock:
            if self._process is None or self._owner_pid != os.getpid():  # a fork must not use the pipes of its parent
                self._start()
            process = self._process
            assert process is not None and process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(arguments).encode() + b"\n")
                    process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # also Ctrl-C: the next call must not read the result of this call
                self.close()
                raise
            if not line.endswith(b"\n"):
                code = process.wait()
                self.close()
                raise UserError(f"{shortened(what)} {self._reason(code)}".lstrip())
        result = json.loads(line)
        if "error" in result:
            raise UserError(f"{shortened(what)} {result['error']}".lstrip())
        return result["value"]

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        self._process = subprocess.Popen(self._command, **pipes, env=environment, start_new_session=True)
        self._owner_pid, self._finalizer = os.getpid(), weakref.finalize(self, _kill, self._process, os.getpid())

    def close(self) -> None:
        """Ends the separate process; the next call starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = None

    def _reason(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"took more than {self._seconds:g} s, the limit for such input: simplify it"
        return f"took more than {self._gib:g} GiB of memory, or crashed (exit code {code}): simplify it"


def _kill(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.communicate()
