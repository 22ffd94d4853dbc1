"""What a run shows while it goes on and leaves behind: metrics.jsonl, TensorBoard events, progress, curves.png.

Without a terminal, progress is one line a log; with one, a bar. All of it goes to stderr.
"""

import functools
import json
import math
import os
import sys
import time
from typing import Any, Optional

from pretrainax.config import RunFailed
from pretrainax.config.atomic_files import write_atomically
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import clock, scientific

_FLUSH_SECONDS = 30


class _Events:
    """A TensorBoard file, written here and now: the thread of tensorboardX's own writer ends at a full disk or a clock
    that jumps, and a run would wait for it forever."""

    def __init__(self, folder: str, resume_step: int):
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary, self._next_flush = event_pb2.Event, summary_pb2.Summary, 0.0
        os.makedirs(folder, exist_ok=True)
        # The name holds the second; the suffix: a rollback within a second of the start has a file of its own.
        self._writer = event_file_writer.EventsWriter(os.path.join(folder, "events"), f".{resume_step}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # what came after this step is not shown
        self._write(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def add(self, step: int, values: dict[str, float]) -> None:
        summary = self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write_event(event)
        if time.monotonic() > self._next_flush:  # which waits for the disk
            self._writer.flush()
            self._next_flush = time.monotonic() + _FLUSH_SECONDS

    def close(self) -> None:
        self._writer.close()


class Metrics:
    """The figures of one run. Only the primary process writes and prints; in the others every method does nothing."""

    def __init__(self, workdir: str, total_steps: int, resume_step: int = 0, primary: bool = True):
        """Goes on in the files of an earlier start, without what they hold of steps after `resume_step`."""
        self.workdir, self.total_steps, self.primary = workdir, total_steps, primary
        self.path = os.path.join(workdir, "metrics.jsonl")
        self.model = ""  # one line for the picture; from the header
        if primary:
            os.makedirs(workdir, exist_ok=True)
            self._open(resume_step)

    def _open(self, step: int) -> None:
        cut_after(self.path, step)
        self._file = open(self.path, "a", encoding="utf-8")
        self._bar = _bar(self.total_steps, step) if sys.stderr.isatty() and step < self.total_steps else None
        self._first = None  # (step, time) of the first log: what the remaining time is reckoned from
        self.resume_step = step

    def rewind(self, step: int) -> None:
        """Takes back what was logged of the steps after `step`, which are about to be run again."""
        if self.primary:
            self.close()
            self._open(step)

    def header(self, rows: list[tuple[str, str]]) -> None:
        """A table of names and values. The row "model" becomes the subtitle of the picture."""
        self.model = dict(rows).get("model", "")
        self.note(f"PretrainAX\n{text_table(rows, indent='  ')}\n")

    def note(self, text: str) -> None:
        """A line between the others, above the bar where there is one."""
        if self.primary and self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self.primary:
            print(text, file=sys.stderr, flush=True)

    def log(self, step: int, split: str, figures: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, points to TensorBoard, and moves the progress on.

        Args:
          split: "train" or "valid".
          figures: numbers by name, at least "loss"; one that is None or not finite is null in the file.

        Raises:
          RunFailed: the files cannot be written (a full disk).
        """
        if not self.primary:
            return
        figures = {name: _number(value) for name, value in figures.items()}
        line = json.dumps({"step": step, "split": split, **figures}, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
            self._events.add(step, {f"{split}/{name}": x for name, x in figures.items() if x is not None})
        except OSError as error:
            raise RunFailed(
                f"could not write the metrics of step {step} in {self.workdir}: {error.strerror}"
            ) from error
        if split == "train":
            self._progress(step, figures)
        else:
            self.note(_join(f"step {step}/{self.total_steps}", *_validation(figures)))

    def finish(self, figures: dict[str, float], baseline: dict[str, float]) -> None:
        """The table of the last validation beside the unigram baseline of the same targets, and curves.png.

        Args:
          figures: "loss" (nats a target), "perplexity", "accuracy" (fraction).
          baseline: "loss", "accuracy".
        """
        if not self.primary:
            return
        baseline = {"perplexity": _exp(baseline["loss"]), **baseline}
        rows = [("", "model", "unigram baseline")]
        for name, label, form in (
            ("loss", "validation loss", "{:.4f}"),
            ("perplexity", "perplexity", "{:,.2f}"),
            ("accuracy", "accuracy", "{:.2%}"),
        ):
            rows.append((label, form.format(figures[name]), form.format(baseline[name])))
        self.note(f"\n{text_table(rows, '<>', indent='  ', gap='   ')}\n")
        self.draw(baseline["loss"])

    def draw(self, baseline_loss: Optional[float] = None) -> None:
        """curves.png of everything logged so far."""
        from pretrainax.reporting import curves  # here: matplotlib takes long to import

        path = os.path.join(self.workdir, "curves.png")
        name = os.path.basename(os.path.abspath(self.workdir))
        curves.draw(path, read(self.path), title=name, subtitle=self.model, baseline_loss=baseline_loss)
        self.note(f"curves: {path}")

    def close(self) -> None:
        if not self.primary:
            return
        self._file.close()
        if "_events" in vars(self):
            self._events.close()
            del self._events
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @functools.cached_property
    def _events(self) -> "_Events":
        """Made at the first log, after the first step: the import takes a second where torch is installed."""
        return _Events(os.path.join(self.workdir, "events"), self.resume_step)

    def _progress(self, step: int, figures: dict[str, Optional[float]]) -> None:
        now = time.perf_counter()
        self._first = self._first or (step, now)
        steps, elapsed = step - self._first[0], now - self._first[1]
        seconds = elapsed / steps if steps else figures.get("step_seconds")
        parts = [f"loss {_show(figures['loss'], '.3f')}"]
        if (rate := figures.get("learning_rate")) is not None:
            parts.append(f"lr {scientific(rate)}")
        if (speed := figures.get("tokens_per_second")) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if (mfu := figures.get("mfu")) is not None:
            parts.append(f"MFU {mfu:.1%}")
        if seconds is not None:
            parts.append(f"ETA {clock(seconds * (self.total_steps - step))}")
        if self._bar is not None:
            self._bar.set_description_str(_join(*parts), refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.note(_join(f"step {step}/{self.total_steps}", *parts))


def summarize(sums: dict[str, tuple], bytes_per_token: Optional[float] = None) -> dict:
    """{name: (sum, count)} as the figures of one line.

    Bits per byte compare models across tokenizers. They need `bytes_per_token`, the mean length in UTF-8 of a target
    token, and a loss that is a likelihood of the text: a causal one. None for the others.
    """
    loss = float(sums["loss"][0]) / max(float(sums["loss"][1]), 1e-9)
    figures = {
        "loss": loss,
        "perplexity": _exp(loss),
        "bits_per_token": loss / math.log(2),
        "accuracy": float(sums["accuracy"][0]) / max(float(sums["accuracy"][1]), 1e-9),
        "loss_tokens": float(sums["loss"][1]),
    }
    for name in sums:
        if name.startswith(("pair_", "replaced_")):  # losses and accuracies of further heads
            figures[name] = float(sums[name][0]) / max(float(sums[name][1]), 1e-9)
    if bytes_per_token:
        figures["bits_per_byte"] = figures["bits_per_token"] / bytes_per_token
    return figures


# --- the file ------------------------------------------------------------------------------------------------------


def read(path: str) -> list[dict]:
    """The lines of a metrics.jsonl; without the last one if a kill cut it short."""
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def cut_after(path: str, step: int) -> None:
    """Leaves the lines of steps up to `step`, byte for byte; the steps after it are about to be run again."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as f:
        lines = f.readlines()
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept))


def _number(value: Any) -> Optional[float]:
    """JSON has no NaN and no infinity, and knows no NumPy."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


# --- words ---------------------------------------------------------------------------------------------------------


def _bar(total: int, done: int) -> Any:
    import tqdm

    shape = "{percentage:3.0f}% {bar:24} {n_fmt}/{total_fmt} · {desc}"
    return tqdm.tqdm(
        total=total, initial=done, bar_format=shape, file=sys.stderr, dynamic_ncols=True, ascii=" ━", desc="starting"
    )


def _validation(figures: dict[str, Optional[float]]) -> list[str]:
    forms = {"loss": "validation loss {:.4f}", "perplexity": "perplexity {:,.2f}", "accuracy": "accuracy {:.2%}"}
    return [form.format(figures[name]) for name, form in forms.items() if figures.get(name) is not None]


def _join(*parts: str) -> str:
    return " · ".join(parts)


def _show(value: Optional[float], form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # the largest whose exponential a float64 holds is 709
