"""SIGTERM, SIGINT and SIGHUP, which end a run before its time."""

import ctypes
import os
import signal
import sys
import threading
import time

PREEMPTED = 75  # EX_TEMPFAIL of <sysexits.h>: run the same command again
_ONE = 0.5  # seconds: signals within them are one. Linux tells a process of its parent's death once for each thread
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT = "PRETRAINAX_PARENT"  # in the environment of a run that another process has started: its number
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def end_with_parent() -> None:
    """Has the system end this process, if PARENT says who has started it, when that one is killed; on Linux alone."""
    if PARENT in os.environ:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):  # it is gone already
            os._exit(1)


class PreemptionHandler:
    """Catches `ENDING`: the first signal asks the loop to save and leave, a second one leaves at once.

    A terminal that is closed may send SIGHUP twice, or after another one: it is never the second. Under `nohup`, which
    has it ignored, it stays so.

    `answer` is what the first one is told.

    A handler of Python's waits until the main thread is back in Python, which one that waits for a device may never be.
    So the signals go through a pipe to a thread.
    """

    def __enter__(self):
        self.requested, self.answer = False, "saving after this step"
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True).start()
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = [s for s in ENDING if not (s == signal.SIGHUP and ignored)]
        self._previous = {s: signal.signal(s, lambda *_: None) for s in caught}
        self._previous_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._writing)  # ends the thread

    def _listen(self, reading: int) -> None:
        asked = 0.0  # when the first signal came
        with open(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] not in self._previous:
                    continue
                again = self.requested and time.monotonic() - asked > _ONE
                if again and number[0] != signal.SIGHUP:
                    os._exit(128 + number[0])
                if not self.requested:
                    self.requested, asked = True, time.monotonic()
                    name = signal.Signals(number[0]).name
                    print(f"\n{name}: {self.answer}; once more to leave at once", file=sys.stderr, flush=True)
