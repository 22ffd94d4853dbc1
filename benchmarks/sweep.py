"""Trains the runs of a sweep in one process. Each loss is a line of WORKDIR/results.jsonl."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Optional, TypeVar

from pretrainax.config import Experiment, RunFailed
from pretrainax.studies.arms import fingerprint
from pretrainax.studies.trainer import Trainer
from pretrainax.training.metrics import read_metrics

T = TypeVar("T", bound=tuple)  # a NamedTuple with the field `name`, the settings of a run


def train_all(trials: Iterable[T], experiment_of: Callable[[T], Experiment], workdir: str) -> dict[T, Optional[float]]:
    """Trains the runs whose loss is not stored; returns the last validation loss of each run, or None if it diverged.

    Stored losses of other configs, such as those of another budget or text, do not count.

    Args:
      experiment_of: returns the config of a run.
      workdir: folder of results.jsonl; a run's own folder is removed at its end.
    """
    os.makedirs(workdir, exist_ok=True)
    path, trainer, losses = os.path.join(workdir, "results.jsonl"), Trainer(), {}
    lines = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    stored = {line["config"]: line["loss"] for line in lines if "config" in line}
    for trial in trials:
        experiment = experiment_of(trial)
        key = fingerprint(experiment)
        if key not in stored:
            stored[key] = _train(trial.name, experiment, workdir, trainer)
            with open(path, "a") as f:
                f.write(json.dumps({"trial": trial._asdict(), "config": key, "loss": stored[key]}) + "\n")
        losses[trial] = stored[key]
    return losses


def _train(name: str, experiment: Experiment, workdir: str, trainer: Trainer) -> Optional[float]:
    folder = os.path.join(workdir, name)
    try:
        if trainer.train(experiment, folder):
            sys.exit(75)  # a signal
    except RunFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        loss = None
    else:
        loss = [x["loss"] for x in read_metrics(f"{folder}/metrics.jsonl") if x["split"] == "valid"][-1]
    shutil.rmtree(folder, ignore_errors=True)
    return loss
