"""Handles SIGUSR1, which requests a profile of a run and never ends the run."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType
from typing import Optional

SIGNAL = signal.SIGUSR1
ACCEPTED = "a profile of the next steps follows"


class ProfileRequest:
    """Handles SIGUSR1 once `listen` has been called. After a signal, `requested` is True until the profile begins.

    Python runs a signal handler when the main thread returns to Python code, at the latest between two steps. Until
    then the signal is pending, and the process continues.
    """

    def __init__(self):
        self.requested = False
        self.refusal = ""  # reason why no profile is possible now; "": a profile is possible
        self._receiver: Optional[subprocess.Popen] = None  # the process to which the signal is forwarded

    def listen(self) -> "ProfileRequest":
        """Installs the signal handler and unblocks the signal, so that a pending signal is handled too."""
        signal.signal(SIGNAL, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])
        return self

    def forward_to(self, child: subprocess.Popen) -> None:
        """Forwards all later signals to `child`, along with an earlier request if its profile has not begun."""
        self._receiver = child
        if self.requested:
            self.requested = False
            child.send_signal(SIGNAL)

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if self._receiver is not None and self._receiver.poll() is None:
            self._receiver.send_signal(SIGNAL)
            return
        message = self.refusal or ("a profile is already requested" if self.requested else ACCEPTED)
        self.requested = not self.refusal
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, f"\nSIGUSR1: {message}\n".encode())  # `print` is not reentrant: this handler may interrupt one


@contextlib.contextmanager
def blocked_signal() -> Iterator[None]:
    """Blocks SIGUSR1 inside the context; a child process keeps it blocked until it calls `listen`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])
