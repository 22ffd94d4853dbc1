"""Handles SIGTERM, SIGINT and SIGHUP, which end a run early."""

import ctypes
import os
import signal
import sys
import threading
import time

PREEMPTED = 75  # EX_TEMPFAIL of <sysexits.h>: run the same command again
_SAME_SIGNAL_SECONDS = 0.5  # signals within this time count as one: Linux sends one per thread of a dead parent
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT = "PRETRAINAX_PARENT"  # environment variable: process ID of the process that started this run
_PR_SET_PDEATHSIG = 1  # constant of <sys/prctl.h>


def end_with_parent() -> None:
    """Ends this process if the environment variable PARENT is set but the parent process is dead.

    On Linux, this process also ends if the parent process dies later.
    """
    if PARENT in os.environ:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):  # the parent is already dead
            os._exit(1)


class PreemptionHandler:
    """Handles the signals in `ENDING`: the first one requests a save and an exit, a second one exits immediately.

    A closing terminal may send SIGHUP twice, or after another signal. SIGHUP therefore never counts as the second
    signal. Under `nohup`, which ignores SIGHUP, the signal remains ignored.

    `answer` is the message that the process prints after the first signal.

    Python runs a signal handler only when the main thread returns to Python code, which may never happen while it waits
    for a device. A separate thread therefore receives the signals through a pipe.
    """

    def __enter__(self):
        self.requested, self.answer = False, "saving after this step"
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True).start()
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled_signals = [s for s in ENDING if not (s == signal.SIGHUP and ignores_hangup)]
        self._previous = {s: signal.signal(s, lambda *_: None) for s in handled_signals}
        self._previous_pipe = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_end)  # ends the thread

    def _listen(self, read_end: int) -> None:
        """Reads signal numbers from the pipe: requests an exit at the first signal, exits at a second signal."""
        first_time = 0.0  # time of the first signal
        with open(read_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] not in self._previous:
                    continue
                is_second = self.requested and time.monotonic() - first_time > _SAME_SIGNAL_SECONDS
                if is_second and number[0] != signal.SIGHUP:
                    os._exit(128 + number[0])
                if not self.requested:
                    self.requested, first_time = True, time.monotonic()
                    name = signal.Signals(number[0]).name
                    print(f"\n{name}: {self.answer}; a second signal exits immediately", file=sys.stderr, flush=True)
