"""Accounts for the time of a run, from its first start to its end, over all its restarts.

Goodput is the time in steps over all time: seconds in which the devices are at work on steps that are not a repetition.
Every second of a start belongs to one part, of PARTS or a user's callback; a start is a process, from its beginning to
its last sign of life, and what lies between two starts is a part too. `goodput.json` in the workdir holds the seconds
of each start. It is replaced as a whole at each log, so a kill costs what came after the last one, which then counts as
between the starts. Of a run in a store, the last entry also has "last_sent": the newest step whose whole checkpoint the
store had then.
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
    "restoring": "restoring a checkpoint, or initialising",
    "compiling": "compiling: the first step",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "profiling": "writing profiles",
    "finishing": "the tables and pictures of the end",
    "down": "between the starts",
}


class Goodput:
    """The clock of this start: it runs on one part at a time, "starting" at first."""

    def __init__(self, workdir: str, age: float = 0.0, primary: bool = True):
        """age: seconds that the start is old already; primary: only that process reads and writes the file."""
        self.path, self.primary = os.path.join(workdir, "goodput.json"), primary
        self._before, self.damaged = _read(self.path) if primary else ([], 0)  # the starts before; entries left out
        self.furthest = max((start["step"] for start in self._before), default=0)  # step that was reached by any
        self._seconds = dict.fromkeys(PARTS, 0.0) | {"starting": age}
        self._began, self._part, self._since = time.time() - age, "starting", time.perf_counter()

    def age(self) -> float:
        """Returns the seconds since the start began."""
        self.to(self._part)
        return sum(self._seconds.values())

    def to(self, part: str) -> None:
        """Counts the time from now on as that of `part`."""
        now = time.perf_counter()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Counts the time inside as that of `part`, and after it as before."""
        before = self._part
        self.to(part)
        try:
            yield
        finally:
            self.to(before)

    def step(self, number: int) -> None:
        """Counts the time as that of this step: of the first time, or of a repetition."""
        part = "steps" if number > self.furthest else "redone"
        self.furthest = max(self.furthest, number)
        if part != self._part:
            self.to(part)

    def save(self, done: bool = False) -> None:
        """Writes the file. done: the run has ended; the time until it is looked at again is nobody's."""
        if not self.primary:
            return
        self.to(self._part)
        start: dict = {"began": self._began, "step": self.furthest, "done": done, "seconds": self._seconds}
        if places.is_at_work(self.path):
            start["last_sent"] = places.last_sent(self.path)
        with contextlib.suppress(OSError):  # a full disk: a run does not end for its clock
            write_atomically(self.path, json.dumps([*self._before, start], indent=1))

    def table(self) -> str:
        """Returns the parts in their order, those without time left out."""
        self.to(self._part)
        starts = [*self._before, {"began": self._began, "done": False, "seconds": self._seconds}]
        seconds = total(starts)
        every = sum(seconds.values())
        rows = [(PARTS.get(part, part), of_part) for part, of_part in seconds.items() if of_part >= 0.05]
        times = f"{len(starts)} starts" if len(starts) > 1 else "1 start"
        sent = f", {places.sent_line(self.path)}" if places.is_at_work(self.path) else ""
        return "\n".join(
            [
                f"goodput {seconds['steps'] / every:.1%} of {elapsed(every)}, {times}{sent}",
                text_table([(label, f"{elapsed(s):>10}", f"{s / every:6.1%}") for label, s in rows], indent="  "),
                "",
            ]
        )


def total(starts: list[dict]) -> dict[str, float]:
    """Returns the seconds of each part over all starts; their sum is the time since the first one began."""
    parts = dict.fromkeys([*PARTS, *(part for start in starts for part in start["seconds"])])
    seconds = {part: sum(start["seconds"].get(part, 0.0) for start in starts) for part in parts}
    for one, after in zip(starts, starts[1:], strict=False):
        gap = after["began"] - one["began"] - sum(one["seconds"].values())
        seconds["down"] += 0.0 if one["done"] else max(gap, 0.0)  # less than nothing: somebody has set the clock
    return seconds


def process_age() -> float:
    """Returns the seconds since this process was started; 0 where only Linux could tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])  # proc(5): starttime, field 22, after the boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def _read(path: str) -> tuple[list[dict], int]:
    """Returns the starts so far, and how many entries are damaged: the clock of a run is no reason not to train."""
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
    """Returns an entry of the file with all parts of the time; None where it is not what `Goodput.save` has written."""
    try:
        found = {name: entry[name] for name in ("began", "step", "done", "seconds")}
        found["seconds"] = dict.fromkeys(PARTS, 0.0) | found["seconds"]
        numbers = [found["began"], found["step"], *found["seconds"].values()]
    except (TypeError, KeyError):
        return None
    good = all(isinstance(x, int | float) and math.isfinite(x) for x in numbers) and isinstance(found["done"], bool)
    return found if good else None
