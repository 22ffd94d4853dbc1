"""The report at the end of a run: its last metrics beside a baseline, the mean of its last checkpoints, its picture."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.checkpoints.params import load_steps
from pretrainax.checkpoints.steps import last_steps, list_steps
from pretrainax.config.metric import METRICS
from pretrainax.data.baseline import target_counts, unigram_baseline
from pretrainax.data.pipeline import batches_of
from pretrainax.reporting import curves
from pretrainax.reporting.tables import text_table
from pretrainax.storage.places import named
from pretrainax.training.callbacks import Callback
from pretrainax.training.finish import or_without
from pretrainax.training.loop import Loop
from pretrainax.training.metric_labels import FORMS, form_among, form_of, shown_as, told
from pretrainax.training.metrics import meaning, of_loss, parts_among, read_metrics

_BATCHES, _TARGETS = 50, 1_000_000  # at most, that the baseline takes the form of targets from; scored on as many
_PLAIN = ("loss", "perplexity", "bits_per_token", "loss_tokens", "labels")  # their labels say what they are
_BASELINE = "knows how often each token occurs, and how targets are built: which sentinel is next, where a row ends"


class FinalReport(Callback):
    """Shows the last validation of a run; a signal leaves out what takes long."""

    part = "finishing"

    def on_end(self, loop, state, metrics):
        run, select_by = loop.run, loop.run.experiment.select_by
        baseline = _always_original(metrics)
        if run.experiment.validation_objective.unit != "records":
            with or_without("the baseline", loop):
                baseline |= _baseline(loop) or {}
        lines = read_metrics(loop.writer.path) if run.is_primary else []
        with or_without("the table", loop):
            loop.note(final_table(lines, metrics, baseline, select_by))
        with or_without("the mean of the last checkpoints", loop):
            if not run.peers.agree(loop.is_leaving):
                _validate_average(loop, metrics)
        with or_without("curves.png", loop):
            if run.is_primary:
                draw_curves(loop.workdir, loop.writer.model, baseline, select_by)
                loop.note(f"curves: {named(os.path.join(loop.workdir, 'curves.png'))}")


def draw_curves(workdir: str, model: str, baseline: Optional[Mapping[str, float]], select_by: str) -> None:
    """Draws curves.png of everything logged so far; model: a line for the picture; baseline: as of `final_table`."""
    lines = [told(line, select_by) for line in read_metrics(os.path.join(workdir, "metrics.jsonl"))]
    name = os.path.basename(os.path.abspath(workdir))
    curves.draw(os.path.join(workdir, "curves.png"), lines, name, model, baseline, select_by)


def final_table(
    lines: Sequence[Mapping], metrics: Mapping[str, Optional[float]], baseline: Mapping[str, float], select_by: str
) -> str:
    """Returns all figures of the last validation beside a baseline, and below those of its parts.

    Args:
      lines: of metrics.jsonl.
      metrics: "loss" (nats a target), "perplexity", "accuracy" (fraction) and so on; "loss/source=wiki" of a part.
      baseline: those of models that know nothing of the text around a target; empty where they are not known.
    """
    title = "baseline" if "replaced_loss" in baseline else "unigram baseline"
    rows: list[tuple[str, ...]] = [("", "model", title) if baseline else ("", "model")]
    if "loss" in baseline:
        baseline = {**baseline, **of_loss(baseline["loss"])}
    trained = [line for line in lines if line["split"] == "train"]
    for name in dict.fromkeys(("loss", select_by)) if trained else ():
        if name in trained[-1]:
            label, form = form_among(name, metrics)
            label = f"training {label.removeprefix('validation ')}, last line"
            rows.append((label, shown_as(trained[-1][name], form)))
    metrics = told(metrics, select_by)
    whole = [name for name, value in metrics.items() if value is not None and "/" not in name]
    shown = sorted(whole, key=lambda name: [*FORMS, *whole].index(name))
    for name in shown:
        label, form = form_among(name, shown)
        of_baseline = [format(baseline[name], form)] if name in baseline else []
        rows.append((label, format(metrics[name], form), *of_baseline))
    tables = [text_table(rows, "<>", indent="  ", gap="   "), *_tables_of_parts(metrics)]
    notes = [
        f"{form_among(name, shown)[0]}: {meaning(name, shown)}"
        for name in shown
        if name in METRICS and name not in _PLAIN
    ]
    if title == "unigram baseline" and baseline:
        notes.append(f"unigram baseline: {_BASELINE}")
    if "replaced_loss" in baseline:
        notes.insert(0, "validation loss, perplexity, token accuracy: the generator's")
        notes.append("baseline: of tokens, how often each occurs (unigram); of what is replaced, always 'original'")
    if select_by != "loss":
        notes.append(f"the best checkpoint is that of the best validation {select_by}")
    return "\n" + "\n\n".join([*tables, "\n".join(f"  {note}" for note in notes)]) + "\n"


def _tables_of_parts(metrics: Mapping[str, Optional[float]]) -> list[str]:
    """Returns a table for each kind of part: a row for each source, a column for each figure."""
    parts, tables = parts_among(metrics), []
    for kind in dict.fromkeys(part.partition("=")[0] for part in parts):
        own = [part for part in parts if part.startswith(f"{kind}=")]
        names = list(dict.fromkeys(name.partition("/")[0] for name in metrics if name.partition("/")[2] in own))
        rows = [(f"by {kind}", *(form_of(name)[0].removeprefix("validation ") for name in names))]
        for part in own:
            values = [(metrics.get(f"{name}/{part}"), form_of(name)[1]) for name in names]
            cells = ("" if value is None else format(value, form) for value, form in values)
            rows.append((part.partition("=")[2], *cells))
        tables.append(text_table(rows, "<>", indent="  ", gap="   "))
    return tables


def _validate_average(loop: Loop, alone: Mapping[str, float]) -> None:
    """Says how good the mean of the last `evaluate.average` checkpoints is.

    alone: the metrics of the run as it is.
    """
    run = loop.run
    wanted, directory = run.experiment.evaluate.average, os.path.join(loop.workdir, "checkpoints")
    steps = last_steps(list_steps(directory), run.experiment.checkpoint)[-wanted:] if wanted else []
    if len(steps) < wanted:
        loop.note(f"config.evaluate.average is {wanted}, and {len(steps)} of the last checkpoints can be averaged")
    if steps:
        folders, figure = [os.path.join(directory, str(step)) for step in steps], run.experiment.select_by
        value = run.validate(load_steps(folders, run.abstract_state.params)).get(figure, math.nan)
        loop.note(
            f"mean of the parameters of steps {', '.join(f'{step:,}' for step in steps)}: validation {figure} "
            f"{value:.4f}, without it {alone.get(figure, math.nan):.4f}; to evaluate or export it: "
            f"{loop.workdir}@average{len(steps)}"
        )


def _baseline(loop: Loop) -> Optional[dict[str, float]]:
    """Returns the scores of token frequencies in all text, and of the form of what validation asks in as many batches
    of the text of the training as say enough; None where a signal came."""
    run = loop.run
    prepared, asking = run.prepared, dataclasses.replace(run.experiment, objective=run.experiment.validation_objective)
    train, valid = (batches_of(asking, prepared, split) for split in ("train", "valid"))  # of all processes
    enough = max(_TARGETS // (asking.train.global_batch_size * valid.lengths.targets), 1)

    def until_a_signal(parts):
        for part in parts:
            if loop.is_leaving:
                raise _Leaving
            yield part

    seen = until_a_signal(train[i] for i in range(min(enough, _BATCHES, asking.train.steps)))
    asked = until_a_signal(itertools.islice(run.validation.batches(valid), enough))
    with contextlib.suppress(_Leaving):
        vocabulary = prepared.tokenizer.vocabulary
        counts = np.zeros(vocabulary.size)
        for part, corpora in zip(run.parts, prepared.phases or (prepared.train,), strict=True):
            for times, corpus in zip(part.train_batches.epochs, corpora, strict=True):
                for some in until_a_signal(target_counts(corpus)):
                    counts += times * some
        return unigram_baseline(counts, seen, asked, vocabulary)
    return None


def _always_original(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores of saying of each token that it is original, as surely as tokens are; of others, none."""
    if (replaced := metrics.get("replaced_fraction")) is None:
        return {}
    original = 1.0 - replaced
    entropy = -sum(p * math.log(p) for p in (replaced, original) if p > 0)
    return {"replaced_loss": entropy, "replaced_accuracy": original, "replaced_recall": 0.0}


class _Leaving(Exception):
    """Says that a signal came."""
