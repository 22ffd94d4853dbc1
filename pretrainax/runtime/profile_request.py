"""SIGUSR1, which asks a run for a profile and never ends it."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType
from typing import Optional

SIGNAL = signal.SIGUSR1
SOON = "a profile of the next steps follows"


class ProfileRequest:
    """Hears SIGUSR1 from `listen` on: `requested` says that nobody has answered it yet.

    A handler of Python's runs once the main thread is back in Python, which is at the boundary of a step at the latest.
    Until then the system has the signal, and nothing ends for it.
    """

    def __init__(self):
        self.requested = False
        self.refusal = ""  # why there is no profile at this time; "": there will be one
        self._other: Optional[subprocess.Popen] = None  # the process whose profile is meant

    def listen(self) -> "ProfileRequest":
        """Hears the signal in this process, and lets through one that came before, while it was held back."""
        signal.signal(SIGNAL, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])
        return self

    def hand_on(self, child: subprocess.Popen) -> None:
        """Sends what is heard to another process from now on, and what has been heard before."""
        self._other = child
        if self.requested:
            self.requested = False
            child.send_signal(SIGNAL)

    def _hear(self, number: int, frame: Optional[FrameType]) -> None:
        if self._other is not None and self._other.poll() is None:
            self._other.send_signal(SIGNAL)
            return
        said = self.refusal or ("it is asked for already" if self.requested else SOON)
        self.requested = not self.refusal
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(2, f"\nSIGUSR1: {said}\n".encode())  # a print may be what this interrupts


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Keeps the signal from this process, and from those that are started inside until they listen to it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])
