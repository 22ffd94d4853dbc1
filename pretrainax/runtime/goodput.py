"""Measures how a run spends its time, from its first start to its end, including all restarts.

Goodput is the time of new steps divided by the total time. Steps that are repeated after a restart do not count.

A "start" is one process of the run, from its beginning to its last write of goodput.json. Every second of a start
belongs to one part: a key of PARTS, or the part of a user's callback. The time between two starts is the part "down".

`goodput.json` in the workdir has the seconds of each start by part. The run rewrites the whole file at each log, so
after a kill the time since the last log counts as time between starts. If the workdir is in an object store, the last
entry also has "last_sent": the newest step with a complete checkpoint in the object store at that time.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any, Optional

from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import elapsed
from pretrainax.storage import places

PARTS = {
    "steps": "steps",
    "redone": "steps done again after a restart or a rollback",
    "starting": "starting: imports, building the model",
    "preparing": "preparing the data",
    "restoring": "restoring a checkpoint or initializing",
    "compiling": "compiling: the first step",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "profiling": "writing profiles",
    "finishing": "final tables and plots",
    "down": "between the starts",
}


class Goodput:
    """Measures the time of this process; each second counts for the current part, which is "starting" at first."""

    def __init__(self, workdir: str, age: float = 0.0, primary: bool = True):
        """Begins the measurement, and reads the earlier starts of the run.

        Args:
          age: seconds since this process started.
          primary: True for the one process of the run that reads and writes goodput.json.
        """
        self.path, self.primary = os.path.join(workdir, "goodput.json"), primary
        self._earlier, self.damaged = _read(self.path) if primary else ([], 0)  # damaged: number of invalid entries
        self.furthest = max((start["step"] for start in self._earlier), default=0)  # highest step of all starts
        self._seconds = dict.fromkeys(PARTS, 0.0) | {"starting": age}
        self._began, self._part, self._since = time.time() - age, "starting", time.perf_counter()

    def age(self) -> float:
        """Returns the seconds since this process started."""
        self.to(self._part)
        return sum(self._seconds.values())

    def to(self, part: str) -> None:
        """Counts the time from now on for `part`, until the next call."""
        now = time.perf_counter()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Counts the time inside this context for `part`, and the time after the context for the previous part."""
        before = self._part
        self.to(part)
        try:
            yield
        finally:
            self.to(before)

    def step(self, number: int) -> None:
        """Counts the time from now on for step `number`, as "steps" or, if the step was done before, as "redone"."""
        part = "steps" if number > self.furthest else "redone"
        self.furthest = max(self.furthest, number)
        if part != self._part:
            self.to(part)

    def save(self, done: bool = False) -> None:
        """Writes goodput.json.

        done: True if the run has ended, so that the time until a later start (of an extended run) does not count.
        """
        if not self.primary:
            return
        self.to(self._part)
        start: dict = {"began": self._began, "step": self.furthest, "done": done, "seconds": self._seconds}
        if places.is_working_copy(self.path):
            start["last_sent"] = places.last_uploaded_step(self.path)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            write_atomically(self.path, json.dumps([*self._earlier, start], indent=1))

    def table(self) -> str:
        """Returns a text with the goodput and a table of the seconds of each part, without parts below 0.05 s."""
        self.to(self._part)
        starts = [*self._earlier, {"began": self._began, "done": False, "seconds": self._seconds}]
        seconds = total(starts)
        all_seconds = sum(seconds.values())
        rows = [(PARTS.get(part, part), of_part) for part, of_part in seconds.items() if of_part >= 0.05]
        times = f"{len(starts)} starts" if len(starts) > 1 else "1 start"
        sent = f", {places.upload_status(self.path)}" if places.is_working_copy(self.path) else ""
        return "\n".join(
            [
                f"goodput {seconds['steps'] / all_seconds:.1%} of {elapsed(all_seconds)}, {times}{sent}",
                text_table([(label, f"{elapsed(s):>10}", f"{s / all_seconds:6.1%}") for label, s in rows], indent="  "),
                "",
            ]
        )


def total(starts: list[dict]) -> dict[str, float]:
    """Returns the seconds of each part, summed over all starts, and of the time between starts ("down").

    The time after a start that ended the run does not count.
    """
    parts = dict.fromkeys([*PARTS, *(part for start in starts for part in start["seconds"])])
    seconds = {part: sum(start["seconds"].get(part, 0.0) for start in starts) for part in parts}
    for start, following in zip(starts, starts[1:], strict=False):
        gap = following["began"] - start["began"] - sum(start["seconds"].values())
        seconds["down"] += 0.0 if start["done"] else max(gap, 0.0)  # negative if the system clock was changed
    return seconds


def process_age() -> float:
    """Returns the seconds since this process started, or 0 if the system is not Linux."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])  # proc(5): starttime after boot, field 22
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def _read(path: str) -> tuple[list[dict], int]:
    """Returns the valid starts in a goodput.json, and the number of invalid entries.

    A damaged file raises no error, because it must not stop the training.
    """
    try:
        with open(path, encoding="utf-8") as f:
            entries = json.load(f)
    except FileNotFoundError:
        return [], 0
    except (OSError, ValueError, RecursionError):
        return [], 1
    entries = entries if isinstance(entries, list) else [entries]
    starts = [start for entry in entries if (start := _start(entry)) is not None]
    return starts, len(entries) - len(starts)


def _start(entry: Any) -> Optional[dict]:
    """Returns an entry of goodput.json, with 0 s for missing parts; None if the entry is invalid."""
    try:
        values = {name: entry[name] for name in ("began", "step", "done", "seconds")}
        values["seconds"] = dict.fromkeys(PARTS, 0.0) | values["seconds"]
        numbers = [values["began"], values["step"], *values["seconds"].values()]
    except (TypeError, KeyError):
        return None
    good = all(isinstance(x, int | float) and math.isfinite(x) for x in numbers) and isinstance(values["done"], bool)
    return values if good else None
