"""The MLflow tracker, which writes to a database in the workdir or to a server."""

import dataclasses
import logging
import os
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Optional
from urllib.parse import urlsplit

from pretrainax.config import Experiment
from pretrainax.trackers.base import TrackedRun, Tracker, Writer, config_table
from pretrainax.trackers.progress import Progress

_MOST_PARAMS = 100  # maximum number of config fields per request
_MOST_CHARACTERS = 500  # maximum length of a config value, the limit of the oldest servers


@dataclasses.dataclass
class MLflow(Tracker):
    """Tracks the run in MLflow (extra `mlflow`).

    A resumed run continues the same MLflow run. MLflow cannot remove entries. After a rollback, a child run of the
    first MLflow run receives the entries, and a tag of the old MLflow run has its last valid step.
    """

    # http://HOST:5000 or sqlite:///FILE; None: the variable MLFLOW_TRACKING_URI or, without it, mlflow.db in the
    # workdir
    tracking_uri: Optional[str] = None
    experiment: str = "pretrainax"  # name of the MLflow experiment
    name: Optional[str] = None  # name of the MLflow run; None: the name of the workdir

    extra = "mlflow"
    packages = ("mlflow", "sqlalchemy", "alembic")

    def uri(self, workdir: str) -> str:
        """Returns the tracking URI: from the config, from MLFLOW_TRACKING_URI, or of the database in `workdir`."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_own(workdir)}/mlflow.db"

    def open(self, run: TrackedRun) -> "MLflowWriter":
        return MLflowWriter(self, run)

    def describe(self, workdir: str) -> str:
        uri = self.uri(workdir)
        return f"MLflow experiment {self.experiment}, {uri if '@' not in uri else uri.rpartition('@')[2]}"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.tracking_uri and urlsplit(self.tracking_uri).password:
            yield (
                "MLflow.tracking_uri of config.trackers has a password, which config.json would store: set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if not self.experiment:
            yield "MLflow.experiment of config.trackers is empty, it must name an experiment"


class MLflowWriter(Writer):
    """Writes the entries of one run with MLflow's client API, which has no global active run."""

    def __init__(self, tracker: MLflow, run: TrackedRun):
        from mlflow import MlflowClient, entities

        for name in ("alembic", "mlflow"):  # these packages log each database table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        self._entities, self._tracker, self._run = entities, tracker, run
        self._client = MlflowClient(tracker.uri(run.workdir))
        self._progress = Progress.load(run.workdir, "MLflow")
        if self._progress.run:
            self._client.update_run(self._progress.run, status="RUNNING")
        else:
            self._begin(tracker.name or run.name, {})

    def _begin(self, name: str, tags: dict[str, str]) -> None:
        experiment = self._client.get_experiment_by_name(self._tracker.experiment)
        number = experiment.experiment_id if experiment else self._new_experiment()
        made = self._client.create_run(number, tags=tags, run_name=name)
        self._progress.begin(made.info.run_id)
        found = [
            self._entities.Param(_name(key), str(value)[:_MOST_CHARACTERS]) for key, value in self._run.config.items()
        ]
        for first in range(0, len(found), _MOST_PARAMS):
            self._client.log_batch(self._id, params=found[first : first + _MOST_PARAMS])
        self._client.log_text(self._id, config_table(self._run.config), "config.md")

    def _new_experiment(self) -> str:
        """Creates the MLflow experiment and returns its id.

        If the database is in the workdir, the artifacts of the experiment are there too.
        """
        own = pathlib.Path(_own(self._run.workdir))
        is_own = self._tracker.uri(self._run.workdir) == f"sqlite:///{own}/mlflow.db"
        where = (own / "mlflow").as_uri() if is_own else None
        return self._client.create_experiment(self._tracker.experiment, where)

    @property
    def _id(self) -> str:
        return self._progress.run

    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        if self._progress.is_new(step, split):
            now = int(1000 * time.time())
            points = [self._entities.Metric(_name(f"{split}/{k}"), x, now, step) for k, x in values.items()]
            self._client.log_batch(self._id, metrics=points)
            self._progress.wrote(step, split)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step}.md")

    def rewind(self, step: int) -> None:
        before, first = self._id, self._progress.first
        self._client.set_tag(before, "pretrainax.counts_until_step", str(step))
        self._client.set_terminated(before, "KILLED")
        self._progress.rewind(step)
        tags = {"mlflow.parentRunId": first, "pretrainax.from_run": before, "pretrainax.from_step": str(step)}
        self._begin(f"{self._tracker.name or self._run.name}, rollback {self._progress.rollbacks}", tags)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write_metrics(step, "final", metrics)

    def close(self, done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if done else "KILLED")


def _own(workdir: str) -> str:
    return os.path.abspath(os.path.expanduser(workdir))


def _name(name: str) -> str:
    """Returns a name in which "_" replaces characters that MLflow rejects, such as "=" in "loss/source=wiki"."""
    return re.sub(r"[^\w\-. /]", "_", name)
