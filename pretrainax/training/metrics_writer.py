"""Prints a run's progress to stderr and writes metrics.jsonl.

Each log prints one line. A terminal also shows a progress bar below the lines.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Optional

import numpy as np

from pretrainax.config import RunFailed
from pretrainax.config.metric import STANDARD_ERRORS
from pretrainax.files.errors import counted
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import clock, scientific
from pretrainax.reporting.visible import visible
from pretrainax.training.metric_labels import format_metric, label_and_format_among, validation_parts
from pretrainax.training.metrics import remove_lines_after

if TYPE_CHECKING:  # only a terminal needs it
    import tqdm


class MetricsWriter:
    """Writes and prints the metrics of one run; does nothing in processes other than the primary process."""

    def __init__(
        self, workdir: str, total_steps: int, resume_step: int = 0, primary: bool = True, select_by: str = "loss"
    ):
        """Opens metrics.jsonl, removing the lines of any steps after `resume_step`.

        Args:
          select_by: the metric that selects the best checkpoint.
        """
        self.workdir, self.total_steps, self.primary, self.select_by = workdir, total_steps, primary, select_by
        self.path = os.path.join(workdir, "metrics.jsonl")
        self.model = ""  # description of the model, the subtitle of the plot; set by `header`
        self._validated = False  # whether a validation was logged
        if primary:
            os.makedirs(workdir, exist_ok=True)
            self._open(resume_step)

    def _open(self, step: int) -> None:
        damaged = remove_lines_after(self.path, step)
        with open(self.path, "ab+") as f:
            f.seek(0)
            self._lines = sum(1 for _ in f)
        self._file = open(self.path, "a", encoding="utf-8")
        self._bar = _bar(self.total_steps, step) if sys.stderr.isatty() and step < self.total_steps else None
        # (step, time) of the log from which the remaining time is estimated; later compilation moves the time
        self._first_log: Optional[tuple[int, float]] = None
        if damaged:
            verb = "is" if damaged == 1 else "are"
            self.note(
                f"{counted(damaged, 'line')} {verb} damaged in {self.path} and removed; the original is "
                f"{self.path}.damaged"
            )

    def size(self) -> Optional[dict[str, int]]:
        """Returns the size of metrics.jsonl as {"bytes": …, "lines": …}, or None if this is not the primary process."""
        return {"bytes": os.path.getsize(self.path), "lines": self._lines} if self.primary else None

    def check(self, saved: Optional[Mapping[str, int]], step: int) -> None:
        """Warns if metrics.jsonl is smaller than it was when a checkpoint was saved; does not stop the run.

        Args:
          saved: the `size` when the checkpoint was saved, or None if unknown.
          step: the step of the checkpoint.
        """
        if saved and (size := self.size()) and any(size[name] < saved[name] for name in size):
            self.note(
                f"WARNING: {self.path} has lost lines of steps up to {step:,}: it has {size['lines']:,} lines and "
                f"{size['bytes']:,} bytes, and had {saved['lines']:,} lines and {saved['bytes']:,} bytes when step "
                f"{step:,} was saved. Training continues; curves and reports lack these lines. To recover them, stop, "
                "restore the file from a copy, and run the same command again"
            )

    def rewind(self, step: int) -> None:
        """Removes the lines of steps after `step`, because the run is about to repeat these steps."""
        self.close()
        if self.primary:
            self._open(step)

    def header(self, rows: list[tuple[str, str]]) -> None:
        """Prints a table of names and values; keeps the value of the row "model" as the subtitle of curves.png."""
        self.model = dict(rows).get("model", "")
        self.note(f"PretrainAX\n{text_table(rows, indent='  ')}\n")

    def note(self, text: str) -> None:
        """Prints a line above the progress bar, if there is one, with control characters replaced by visible ones."""
        text = visible(text)
        if self.primary and self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self.primary:
            print(text, file=sys.stderr, flush=True)

    def log(self, step: int, split: str, metrics: Mapping[str, object]) -> None:
        """Appends a line to metrics.jsonl, and prints the progress or the validation metrics.

        Args:
          split: "train" or "valid".
          metrics: {name: number}, at least "loss"; None and non-finite numbers become null in the file, also in a dict
            as value, which is not printed.

        Raises:
          RunFailed: the file cannot be written, for example because the disk is full.
        """
        if not self.primary:
            return
        nested = {name: _finite(value) for name, value in metrics.items() if isinstance(value, dict)}
        numbers = {name: number(value) for name, value in metrics.items() if name not in nested}
        line = json.dumps({"step": step, "split": split, **numbers, **nested}, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
            self._lines += 1
        except OSError as error:
            raise RunFailed(
                f"could not write the metrics of step {step} to {self.path} after {os.path.getsize(self.path):,} "
                f"bytes: {error.strerror}"
            ) from error
        if split == "train":
            self._progress(step, numbers)
        else:
            parts = validation_parts(numbers, self.select_by, nested.get(STANDARD_ERRORS, {}))
            self.note(" · ".join((f"step {step}/{self.total_steps}", *parts)))
            if not self._validated:
                self._first_log, self._validated = None, True  # the first validation compiled

    def close(self) -> None:
        """Closes metrics.jsonl and the progress bar."""
        if self.primary:
            self._file.close()
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _progress(self, step: int, metrics: dict[str, Optional[float]]) -> None:
        """Prints the training metrics and the estimated time remaining, and updates the progress bar."""
        now, compiling = time.perf_counter(), metrics.get("compile_seconds") or 0.0
        first_step, start = self._first_log or (step, now - compiling)
        self._first_log = first_step, start + compiling
        steps, elapsed = step - first_step, now - start - compiling
        seconds = elapsed / steps if steps else metrics.get("step_seconds")
        parts = [f"loss {format_metric(metrics['loss'], '.3f')}"]
        if (distillation_loss := metrics.get("distillation_loss")) is not None:
            parts.append(f"distillation {distillation_loss:.3f}")
        if self.select_by != "loss" and self.select_by in metrics:
            label, spec = label_and_format_among(self.select_by, metrics)
            parts.append(f"{label} {format_metric(metrics[self.select_by], spec)}")
        if (rate := metrics.get("learning_rate")) is not None:
            parts.append(f"lr {scientific(rate)}")
        if (speed := metrics.get("tokens_per_second")) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if (mfu := metrics.get("mfu")) is not None:
            parts.append(f"MFU {mfu:.1%}")
        if seconds is not None:
            parts.append(f"ETA {clock(seconds * (self.total_steps - step))}")
        shown = [*parts, f"compiled in {compiling:.1f} s"] if compiling else parts
        self.note(" · ".join((f"step {step}/{self.total_steps}", *shown)))  # stays after the bar is closed
        if self._bar is not None:
            self._bar.set_description_str(parts[-1], refresh=False)
            self._bar.update(step - self._bar.n)


def number(value: object) -> Optional[float]:
    """Converts a number to a type that JSON supports: int, float, or None for NaN, infinity and None."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None  # pyright: ignore[reportArgumentType]


def _finite(values: dict) -> dict:
    """Converts nested numbers and arrays to JSON types, and those that are not finite to None."""
    return json.loads(json.dumps(values, default=lambda x: np.asarray(x).tolist()), parse_constant=lambda _: None)


def _bar(total: int, done: int) -> "tqdm.tqdm":
    import tqdm

    template = "{percentage:3.0f}% {bar:24} {n_fmt}/{total_fmt} · {desc}"
    return tqdm.tqdm(
        total=total, initial=done, bar_format=template, file=sys.stderr, dynamic_ncols=True, ascii=" ━", desc="starting"
    )
