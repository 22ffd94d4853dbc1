"""Shows a run while it goes on, and keeps it: progress, metrics.jsonl, the trackers of its config, curves.png.

Progress is one line a log; on a terminal a bar below says how far the run is. All of it goes to stderr.
"""

import json
import math
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Optional, SupportsFloat

from pretrainax.config import RunFailed
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import clock, scientific
from pretrainax.reporting.visible import visible
from pretrainax.storage.places import named
from pretrainax.trackers import TrackedRun, Tracker, Trackers
from pretrainax.trackers.base import Value
from pretrainax.training.metrics import MEANINGS, cut_after, meaning, of_loss, parts_among, read_metrics


class MetricsWriter:
    """Writes and prints the metrics of one run, in the primary process; in the others every method does nothing."""

    def __init__(
        self,
        workdir: str,
        total_steps: int,
        resume_step: int = 0,
        primary: bool = True,
        select_by: str = "loss",
        trackers: Sequence[Tracker] = (),
        config: Mapping[str, Value] = MappingProxyType({}),
    ):
        """Goes on in the files of an earlier start, without what they hold of steps after `resume_step`.

        Args:
          select_by: the figure that the best checkpoint is found by.
          trackers: where the run is shown too.
          config: what they show of it, as `shown_config` returns it.
        """
        self.workdir, self.total_steps, self.primary, self.select_by = workdir, total_steps, primary, select_by
        self.path = os.path.join(workdir, "metrics.jsonl")
        self.model = ""  # one line for the picture; from the header
        tracked = TrackedRun(workdir, resume_step, config)
        self.trackers = Trackers(trackers if primary else (), tracked, self.note)
        if primary:
            os.makedirs(workdir, exist_ok=True)
            self._open(resume_step)

    def _open(self, step: int) -> None:
        damaged = cut_after(self.path, step)
        with open(self.path, "ab+") as f:
            f.seek(0)
            self._lines = sum(1 for _ in f)
        self._file = open(self.path, "a", encoding="utf-8")
        self._bar = _bar(self.total_steps, step) if sys.stderr.isatty() and step < self.total_steps else None
        self._first = None  # (step, time) of the first log: what the remaining time is reckoned from
        if damaged:
            lines = "line is" if damaged == 1 else "lines are"
            self.note(f"{damaged} {lines} damaged in {self.path} and left out; as it was: {self.path}.damaged")

    def size(self) -> Optional[dict[str, int]]:
        """Returns the bytes and the lines of metrics.jsonl as it is now; None in other processes than the primary."""
        return {"bytes": os.path.getsize(self.path), "lines": self._lines} if self.primary else None

    def check(self, saved: Optional[Mapping[str, int]], step: int) -> None:
        """Warns where metrics.jsonl has less than when a checkpoint was saved: the run can go on without its log.

        Args:
          saved: what `size` was then; None: it is not known.
          step: of the checkpoint.
        """
        if saved and (now := self.size()) and any(now[name] < saved[name] for name in now):
            self.note(
                f"WARNING: {self.path} has lost lines of steps up to {step:,}: it has {now['lines']:,} lines and "
                f"{now['bytes']:,} bytes, and had {saved['lines']:,} lines and {saved['bytes']:,} bytes when step "
                f"{step:,} was saved. Training goes on; curves and reports lack them. To have them, stop, put the file "
                "back from a copy, and run the same command again"
            )

    def rewind(self, step: int) -> None:
        """Takes back what was logged of the steps after `step`, which are about to be run again."""
        if self.primary:
            self._close_files()
            self._open(step)
            self.trackers.rewind(step)

    def header(self, rows: list[tuple[str, str]]) -> None:
        """Prints a table of names and values. The row "model" becomes the subtitle of the picture."""
        self.model = dict(rows).get("model", "")
        self.note(f"PretrainAX\n{text_table(rows, indent='  ')}\n")

    def note(self, text: str) -> None:
        """Prints a line between the others, above the bar where there is one; control characters as visible signs."""
        text = visible(text)
        if self.primary and self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self.primary:
            print(text, file=sys.stderr, flush=True)

    def log(
        self,
        step: int,
        split: str,
        metrics: Mapping[str, Optional[float]],
        loads: Mapping[str, list] = MappingProxyType({}),
    ) -> None:
        """Adds a line to metrics.jsonl, points to the trackers, and moves the progress on.

        Args:
          split: "train" or "valid".
          metrics: numbers by name, at least "loss"; one that is None or not finite is null in the file.
          loads: of experts, as `expert_balance.expert_loads`: "experts" in the file, where there are any.

        Raises:
          RunFailed: the file cannot be written (a full disk).
        """
        if not self.primary:
            return
        metrics = {name: _number(value) for name, value in metrics.items()}
        apart = {"experts": dict(loads)} if loads else {}
        line = json.dumps({"step": step, "split": split, **metrics, **apart}, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
            self._lines += 1
        except OSError as error:
            raise RunFailed(
                f"could not write the metrics of step {step} in {self.workdir}: {error.strerror}"
            ) from error
        self.trackers.figures(step, split, {name: x for name, x in metrics.items() if x is not None})
        if split == "train":
            self._progress(step, metrics)
        else:
            self.note(_join(f"step {step}/{self.total_steps}", *_validation(metrics, self.select_by)))

    def finish(self, metrics: Mapping[str, Optional[float]], baseline: Mapping[str, float]) -> None:
        """Prints all figures of the last validation beside a baseline, and below those of its parts.

        Args:
          metrics: "loss" (nats a target), "perplexity", "accuracy" (fraction) and so on; "loss/source=wiki" of a part.
          baseline: those of models that know nothing of the text around a target; empty where they are not known.
        """
        if not self.primary:
            return
        title = "baseline" if "replaced_loss" in baseline else "unigram baseline"
        rows: list[tuple[str, ...]] = [("", "model", title) if baseline else ("", "model")]
        if "loss" in baseline:
            baseline = {**baseline, **of_loss(baseline["loss"])}
        trained = [line for line in read_metrics(self.path) if line["split"] == "train"]
        for name in dict.fromkeys(("loss", self.select_by)) if trained else ():
            if name in trained[-1]:
                label, form = _form_among(name, metrics)
                label = f"training {label.removeprefix('validation ')}, last line"
                rows.append((label, _show(trained[-1][name], form)))
        metrics = _told(metrics, self.select_by)
        whole = [name for name, value in metrics.items() if value is not None and "/" not in name]
        shown = sorted(whole, key=lambda name: [*_FORMS, *whole].index(name))
        for name in shown:
            label, form = _form_among(name, shown)
            of_baseline = [format(baseline[name], form)] if name in baseline else []
            rows.append((label, format(metrics[name], form), *of_baseline))
        tables = [text_table(rows, "<>", indent="  ", gap="   "), *_tables_of_parts(metrics)]
        notes = [
            f"{_form_among(name, shown)[0]}: {meaning(name, shown)}"
            for name in shown
            if name in MEANINGS and name not in _PLAIN
        ]
        if title == "unigram baseline" and baseline:
            notes.append(f"unigram baseline: {_BASELINE}")
        if "replaced_loss" in baseline:
            notes.insert(0, "validation loss, perplexity, token accuracy: the generator's")
            notes.append("baseline: of tokens, how often each occurs (unigram); of what is replaced, always 'original'")
        if self.select_by != "loss":
            notes.append(f"the best checkpoint is that of the best validation {self.select_by}")
        self.note("\n" + "\n\n".join([*tables, "\n".join(f"  {note}" for note in notes)]) + "\n")

    def draw(self, baseline: Optional[Mapping[str, float]] = None) -> None:
        """Draws curves.png of everything logged so far; baseline: as in `finish`."""
        from pretrainax.reporting import curves, expert_picture  # here: matplotlib takes long to import

        path = os.path.join(self.workdir, "curves.png")
        name = os.path.basename(os.path.abspath(self.workdir))
        lines = [_told(line, self.select_by) for line in read_metrics(self.path)]
        curves.draw(path, lines, name, self.model, baseline, self.select_by)
        self.note(f"curves: {named(path)}")
        if any("experts" in line for line in lines):
            path = os.path.join(self.workdir, "experts.png")
            expert_picture.draw(path, lines, name)
            self.note(f"balance of the experts: {named(path)}")

    def close(self) -> None:
        """Closes the file, the bar and the trackers."""
        if self.primary:
            self._close_files()
            self.trackers.close()

    def _close_files(self) -> None:
        self._file.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _progress(self, step: int, metrics: dict[str, Optional[float]]) -> None:
        now = time.perf_counter()
        self._first = self._first or (step, now)
        steps, elapsed = step - self._first[0], now - self._first[1]
        seconds = elapsed / steps if steps else metrics.get("step_seconds")
        parts = [f"loss {_show(metrics['loss'], '.3f')}"]
        if (distance := metrics.get("distillation_loss")) is not None:
            parts.append(f"distillation {distance:.3f}")
        if self.select_by != "loss" and self.select_by in metrics:
            label, form = _form_among(self.select_by, metrics)
            parts.append(f"{label} {_show(metrics[self.select_by], form)}")
        if (rate := metrics.get("learning_rate")) is not None:
            parts.append(f"lr {scientific(rate)}")
        if (speed := metrics.get("tokens_per_second")) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if (mfu := metrics.get("mfu")) is not None:
            parts.append(f"MFU {mfu:.1%}")
        if seconds is not None:
            parts.append(f"ETA {clock(seconds * (self.total_steps - step))}")
        self.note(_join(f"step {step}/{self.total_steps}", *parts))  # which stays, when the bar has gone
        if self._bar is not None:
            self._bar.set_description_str(parts[-1], refresh=False)
            self._bar.update(step - self._bar.n)


def _number(value: Optional[SupportsFloat]) -> Optional[float]:
    """Returns what JSON can hold, which has no NaN and no infinity, and knows no NumPy."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _bar(total: int, done: int) -> Any:
    import tqdm

    shape = "{percentage:3.0f}% {bar:24} {n_fmt}/{total_fmt} · {desc}"
    return tqdm.tqdm(
        total=total, initial=done, bar_format=shape, file=sys.stderr, dynamic_ncols=True, ascii=" ━", desc="starting"
    )


_FORMS = {  # of a validation, what people are shown first: the label and the format of each
    "loss": ("validation loss", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits_per_token": ("bits per token", ".4f"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "accuracy": ("token accuracy", ".2%"),
    "text_loss": ("loss of text", ".4f"),
    "text_accuracy": ("accuracy of text", ".2%"),
    "sequence_accuracy": ("sequence accuracy", ".2%"),
    "loss_tokens": ("target tokens", ",.0f"),
    "labels": ("labels", ",.0f"),
    "total_loss": ("total loss", ".4f"),
    "pair_loss": ("pair loss", ".4f"),
    "backward_loss": ("backward loss", ".4f"),
    "replaced_loss": ("replaced loss", ".4f"),
}
_PLAIN = ("loss", "perplexity", "bits_per_token", "loss_tokens", "labels")  # their labels say what they are
_IN_LINE = ("loss", "perplexity", "accuracy", "text_loss", "text_accuracy", "sequence_accuracy", "bits_per_byte")
_IN_LINE += ("replaced_loss", "replaced_accuracy", "pair_loss", "backward_loss")
_BASELINE = "knows how often each token occurs, and how targets are built: which sentinel is next, where a row ends"


def _form(name: str) -> tuple[str, str]:
    """Returns the label and the format of a figure; of a part, "validation loss of source=wiki"."""
    name, _, part = name.partition("/")
    is_share = name.endswith(("accuracy", "precision", "recall", "fraction", "unread"))
    label, form = _FORMS.get(name, (name.replace("_", " "), ".2%" if is_share else ".4f"))
    return (f"{label} of {part}" if part else label), form


def _form_among(name: str, names: Collection[str]) -> tuple[str, str]:
    """Returns the same of a figure among others, which tell whether tokens are predicted, or labels of a task."""
    label, form = _form(name)
    return ("accuracy" if name == "accuracy" and "labels" in names else label), form


def _told(metrics: Mapping[str, Optional[float]], select_by: str) -> dict[str, Optional[float]]:
    """Returns the figures that people are shown: those of text where not all targets are, or the run selects by one."""
    loss, of_text = metrics.get("loss"), metrics.get("text_loss")
    is_all_text = loss is not None and of_text is not None and math.isclose(loss, of_text, rel_tol=1e-6)
    repeated = ("text_loss", "text_accuracy") if is_all_text else ()
    return {name: x for name, x in metrics.items() if name.partition("/")[0] not in repeated or name == select_by}


def _validation(metrics: Mapping[str, Optional[float]], select_by: str) -> list[str]:
    shown = {name for name, value in _told(metrics, select_by).items() if value is not None}
    forms = {name: _form_among(name, shown) for name in dict.fromkeys((*_IN_LINE, select_by)) if name in shown}
    return [f"{label} {format(metrics[name], form)}" for name, (label, form) in forms.items()]


def _tables_of_parts(metrics: Mapping[str, Optional[float]]) -> list[str]:
    """Returns a table for each kind of part: a row for each source, a column for each figure."""
    parts, tables = parts_among(metrics), []
    for kind in dict.fromkeys(part.partition("=")[0] for part in parts):
        own = [part for part in parts if part.startswith(f"{kind}=")]
        names = list(dict.fromkeys(name.partition("/")[0] for name in metrics if name.partition("/")[2] in own))
        rows = [(f"by {kind}", *(_form(name)[0].removeprefix("validation ") for name in names))]
        for part in own:
            values = [(metrics.get(f"{name}/{part}"), _form(name)[1]) for name in names]
            cells = ("" if value is None else format(value, form) for value, form in values)
            rows.append((part.partition("=")[2], *cells))
        tables.append(text_table(rows, "<>", indent="  ", gap="   "))
    return tables


def _join(*parts: str) -> str:
    return " · ".join(parts)


def _show(value: Optional[float], form: str) -> str:
    return "not finite" if value is None else format(value, form)
