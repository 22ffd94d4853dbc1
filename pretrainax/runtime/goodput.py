"""Measures how a run spends its time, from its first start to its end, including all restarts.

Goodput is the time spent on new steps divided by the total time. Steps repeated after a restart do not count as new.

A "start" is one process of the run, from its beginning to its last write of goodput.json. Every second of a start is
counted toward one part: a key of PARTS, or a user callback's own part. The time between two starts is the part "down".

`goodput.json` in the workdir contains the seconds per part of each start. The run rewrites the file at each log, so if
it is killed, the time since the last log counts as time between starts. If the workdir is in an object store, the last
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
from pretrainax.reporting.units import elapsed, percent
from pretrainax.storage import places

GOODPUT_FILE = "goodput.json"
PARTS = {
    "steps": "steps",
    "redone": "steps done again after a restart or a rollback",
    "starting": "starting: imports, building the model",
    "preparing": "preparing the data",
    "restoring": "restoring a checkpoint or initializing",
    "compiling": "compiling: the first step of each shape",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "profiling": "writing profiles",
    "finishing": "final tables and plots",
    "down": "between the starts",
}


class Goodput:
    """Measures this process's time; each second counts toward the current part, which is initially "starting"."""

    def __init__(self, workdir: str, age: float = 0.0, primary: bool = True):
        """Starts the clock and reads the times of the run's earlier processes.

        Args:
          age: seconds since this process started.
          primary: whether this is the primary process, which reads and writes goodput.json.
        """
        self.path, self.primary = os.path.join(workdir, GOODPUT_FILE), primary
        self._earlier, self.damaged = _read(self.path) if primary else ([], 0)  # damaged: number of invalid entries
        self.furthest = max((start["step"] for start in self._earlier), default=0)  # highest step of all starts
        self._seconds = dict.fromkeys(PARTS, 0.0) | {"starting": age}
        self._start_time, self._part, self._part_start = time.time() - age, "starting", time.perf_counter()

    def age(self) -> float:
        """Returns the seconds since this process started."""
        self.to(self._part)
        return sum(self._seconds.values())

    def in_steps(self) -> float:
        """Returns the seconds that this process has spent on steps and on waiting for their data."""
        self.to(self._part)
        return sum(self._seconds[part] for part in ("steps", "redone", "waiting"))

    def to(self, part: str) -> None:
        """Counts the time from this call until the next one toward `part`."""
        now = time.perf_counter()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._part_start
        self._part, self._part_start = part, now

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Counts the time inside this context toward `part`, then resumes the previous part."""
        previous_part = self._part
        self.to(part)
        try:
            yield
        finally:
            self.to(previous_part)

    def step(self, number: int) -> None:
        """Counts the following time as "steps", or as "redone" if an earlier process has already done step `number`."""
        part = "steps" if number > self.furthest else "redone"
        self.furthest = max(self.furthest, number)
        if part != self._part:
            self.to(part)

    def save(self, done: bool = False) -> None:
        """Writes goodput.json.

        done: whether the run is complete. If so, the time until it is started again to be extended does not count.
        """
        if not self.primary:
            return
        self.to(self._part)
        start: dict = {"began": self._start_time, "step": self.furthest, "done": done, "seconds": self._seconds}
        if places.is_working_copy(self.path):
            start["last_sent"] = places.last_uploaded_step(self.path)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            write_atomically(self.path, json.dumps([*self._earlier, start], indent=1))

    def table(self) -> str:
        """Formats the goodput and a table of the time spent in each part; omits parts below 0.05 s."""
        self.to(self._part)
        starts = [*self._earlier, {"began": self._start_time, "done": False, "seconds": self._seconds}]
        seconds = total(starts)
        all_seconds = sum(seconds.values())
        rows = [(PARTS.get(part, part), part_seconds) for part, part_seconds in seconds.items() if part_seconds >= 0.05]
        num_starts = f"{len(starts)} starts" if len(starts) > 1 else "1 start"
        upload_status = f", {places.upload_status(self.path)}" if places.is_working_copy(self.path) else ""
        share = percent(seconds["steps"] / all_seconds, 1)
        return "\n".join(
            [
                f"goodput {share} of {elapsed(all_seconds)}, {num_starts}{upload_status}",
                text_table([(label, f"{elapsed(s):>10}", f"{s / all_seconds:6.1%}") for label, s in rows], indent="  "),
                "",
            ]
        )


def read_goodput(workdir: str) -> tuple[Optional[float], bool]:
    """Reads the goodput of a run at its last log (None if it is not known), and whether the run is complete."""
    starts, _ = _read(os.path.join(workdir, GOODPUT_FILE))
    if not starts or not (seconds := total(starts)) or not (all_seconds := sum(seconds.values())):
        return None, False
    return seconds["steps"] / all_seconds, starts[-1]["done"]


def total(starts: list[dict]) -> dict[str, float]:
    """Sums the seconds in each part over all starts (processes), and adds the time between starts as "down".

    The time after a start that completed the run does not count.
    """
    parts = dict.fromkeys([*PARTS, *(part for start in starts for part in start["seconds"])])
    seconds = {part: sum(start["seconds"].get(part, 0.0) for start in starts) for part in parts}
    for start, following in zip(starts, starts[1:], strict=False):
        gap = following["began"] - start["began"] - sum(start["seconds"].values())
        seconds["down"] += 0.0 if start["done"] else max(gap, 0.0)  # negative if the system clock was changed
    return seconds


def seconds_of(workdir: str) -> float:
    """Returns the seconds of all starts of a run, without the time between them; 0 without a goodput.json."""
    seconds = total(_read(os.path.join(workdir, GOODPUT_FILE))[0])
    return sum(seconds.values()) - seconds["down"]


def process_age() -> float:
    """Returns the seconds since this process started, read from /proc, or 0 if the system is not Linux."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])  # proc(5): starttime after boot, field 22
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def _read(path: str) -> tuple[list[dict], int]:
    """Reads a goodput.json; returns its valid entries and the number of invalid ones.

    A damaged file raises no error, because it must not stop training.
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
    """Validates a goodput.json entry and sets missing parts to 0 s; returns None if the entry is invalid."""
    try:
        values = {name: entry[name] for name in ("began", "step", "done", "seconds")}
        values["seconds"] = dict.fromkeys(PARTS, 0.0) | values["seconds"]
        numbers = [values["began"], values["step"], *values["seconds"].values()]
    except (TypeError, KeyError):
        return None
    valid = all(isinstance(x, int | float) and math.isfinite(x) for x in numbers) and isinstance(values["done"], bool)
    return values if valid else None
