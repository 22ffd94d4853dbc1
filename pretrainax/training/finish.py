"""The end of a run that is trained and saved: its last figures beside a baseline, its picture, a few samples.

Nothing here can lose the run. What fails is said in a line, and what comes after it is done all the same; a signal
leaves out what takes long.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Optional

import jax
import numpy as np

from pretrainax.checkpoints.params import load_steps
from pretrainax.checkpoints.steps import last_steps, list_steps
from pretrainax.config import RunFailed
from pretrainax.data.baseline import target_counts, unigram_baseline
from pretrainax.data.pipeline import batches_of
from pretrainax.runtime.signals import PreemptionHandler
from pretrainax.sharding.param_paths import PyTree
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.samples import show_samples
from pretrainax.training.setup import Run

_BATCHES, _TARGETS = 50, 1_000_000  # at most, that the baseline takes the form of targets from; scored on as many


def finish(
    run: Run,
    params: PyTree,
    writer: MetricsWriter,
    preemption: PreemptionHandler,
    metrics: Optional[dict[str, float]] = None,
) -> None:
    """Shows the validation metrics beside a baseline, the picture, and samples.

    Args:
      metrics: of the validation of `params`; None: it is made here, and the run fails where that does.

    Raises:
      RunFailed: no validation; or in one of several processes anything else: the others would wait for it.
    """
    run.peers.beat(None)
    preemption.answer = "the run is done and saved, leaving out what is left of its tables and samples"
    if metrics is None:
        with _or_failing("validation"):
            metrics = run.validate(params)
    baseline = _always_original(metrics)
    with _or_without("the baseline", writer):
        baseline |= (_baseline(run, preemption) or {}) if run.task is None else {}
    writer.trackers.finish(metrics)
    with _or_without("the table", writer):
        writer.finish(metrics, baseline)
    with _or_without("the mean of the last checkpoints", writer):
        if not run.peers.agree(preemption.requested):
            _validate_average(run, writer, metrics)
    with _or_without("curves.png", writer):
        writer.draw(baseline)
    with _or_without("samples", writer):
        shown: list[str] = []

        def show(line: str) -> None:
            writer.note(line)
            shown.append(line)

        show_samples(run, params, show, lambda: preemption.requested)
        writer.trackers.text("samples", "\n".join(shown))


def _validate_average(run: Run, writer: MetricsWriter, alone: dict[str, float]) -> None:
    """Says how good the mean of the last `evaluate.average` checkpoints is.

    alone: the metrics of the run as it is.
    """
    wanted, directory = run.experiment.evaluate.average, os.path.join(writer.workdir, "checkpoints")
    steps = last_steps(list_steps(directory), run.experiment.checkpoint)[-wanted:] if wanted else []
    if len(steps) < wanted:
        writer.note(f"config.evaluate.average is {wanted}, and {len(steps)} of the last checkpoints can be averaged")
    if steps:
        folders, figure = [os.path.join(directory, str(step)) for step in steps], run.experiment.select_by
        value = run.validate(load_steps(folders, run.abstract_state.params)).get(figure, math.nan)
        writer.note(
            f"mean of the parameters of steps {', '.join(f'{step:,}' for step in steps)}: validation {figure} "
            f"{value:.4f}, without it {alone.get(figure, math.nan):.4f}; to evaluate or export it: "
            f"{writer.workdir}@average{len(steps)}"
        )


def _baseline(run: Run, preemption: PreemptionHandler) -> Optional[dict[str, float]]:
    """Returns the scores of token frequencies in all text, and of the form of what validation asks in as many batches
    of the text of the training as say enough; None where a signal came."""
    prepared, asking = run.prepared, dataclasses.replace(run.experiment, objective=run.experiment.validation_objective)
    train, valid = (batches_of(asking, prepared, split) for split in ("train", "valid"))  # of all processes
    enough = max(_TARGETS // (asking.train.global_batch_size * valid.lengths.targets), 1)

    def until_a_signal(parts):
        for part in parts:
            if preemption.requested:
                raise _Leaving
            yield part

    seen = until_a_signal(train[i] for i in range(min(enough, _BATCHES, asking.train.steps)))
    asked = until_a_signal(itertools.islice(run.validation_batches(valid), enough))
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


@contextlib.contextmanager
def _or_failing(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RunFailed(f"the run is done and saved, but its {what} failed: {_said(error)}") from error


@contextlib.contextmanager
def _or_without(what: str, writer: MetricsWriter) -> Iterator[None]:
    """Says in a line what went wrong inside, and goes on: the run is saved."""
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            raise RunFailed(f"the run is done and saved, but {what} failed: {_said(error)}") from error
        writer.note(f"the run is done and saved, but without {what}: {_said(error)}")


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
