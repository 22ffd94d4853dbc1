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

_MAX_PARAMS = 100  # maximum number of config fields per request
_MAX_CHARACTERS = 500  # maximum length of a config value, the limit of the oldest servers


@dataclasses.dataclass
class MLflow(Tracker):
    """Tracks the run in MLflow (extra `mlflow`).

    A resumed run continues the same MLflow run. Because MLflow cannot remove entries, a rollback begins a child run of
    the first MLflow run, which receives all later entries. A tag of the previous MLflow run stores its last valid step.
    """

    # http://HOST:5000 or sqlite:///FILE; None: the variable MLFLOW_TRACKING_URI or, without it, mlflow.db in the
    # workdir
    tracking_uri: Optional[str] = None
    experiment: str = "pretrainax"  # name of the MLflow experiment
    name: Optional[str] = None  # name of the MLflow run; None: the name of the workdir

    extra = "mlflow"
    packages = ("mlflow", "sqlalchemy", "alembic")

    def uri(self, workdir: str) -> str:
        """Returns the tracking URI from the config, else from MLFLOW_TRACKING_URI, else that of a file in `workdir`."""
        return (
            self.tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{_absolute_path(workdir)}/mlflow.db"
        )

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
        """Creates an MLflow run, stores its id in the tracker's progress file, and writes the config to the run.

        Args:
          name: name of the MLflow run.
        """
        experiment = self._client.get_experiment_by_name(self._tracker.experiment)
        experiment_id = experiment.experiment_id if experiment else self._new_experiment()
        mlflow_run = self._client.create_run(experiment_id, tags=tags, run_name=name)
        self._progress.begin(mlflow_run.info.run_id)
        params = [
            self._entities.Param(_valid_name(key), str(value)[:_MAX_CHARACTERS])
            for key, value in self._run.config.items()
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])
        self._client.log_text(self._id, config_table(self._run.config), "config.md")

    def _new_experiment(self) -> str:
        """Creates the MLflow experiment and returns its id.

        If the database is in the workdir, the experiment's artifacts are stored there as well.
        """
        workdir = pathlib.Path(_absolute_path(self._run.workdir))
        is_local = self._tracker.uri(self._run.workdir) == f"sqlite:///{workdir}/mlflow.db"
        artifact_uri = (workdir / "mlflow").as_uri() if is_local else None
        return self._client.create_experiment(self._tracker.experiment, artifact_uri)

    @property
    def _id(self) -> str:
        return self._progress.run

    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        if self._progress.is_new(step, split):
            now = int(1000 * time.time())
            points = [self._entities.Metric(_valid_name(f"{split}/{k}"), x, now, step) for k, x in values.items()]
            self._client.log_batch(self._id, metrics=points)
            self._progress.record(step, split)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step}.md")

    def rewind(self, step: int) -> None:
        previous_run, parent_run = self._id, self._progress.first
        self._client.set_tag(previous_run, "pretrainax.counts_until_step", str(step))
        self._client.set_terminated(previous_run, "KILLED")
        self._progress.rewind(step)
        tags = {
            "mlflow.parentRunId": parent_run,
            "pretrainax.from_run": previous_run,
            "pretrainax.from_step": str(step),
        }
        self._begin(f"{self._tracker.name or self._run.name}, rollback {self._progress.rollbacks}", tags)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write_metrics(step, "final", metrics)

    def close(self, done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if done else "KILLED")


def _absolute_path(workdir: str) -> str:
    """Returns the absolute path of a workdir, with "~" expanded."""
    return os.path.abspath(os.path.expanduser(workdir))


def _valid_name(name: str) -> str:
    """Replaces characters that MLflow rejects in names, such as "=" in "loss/source=wiki", with "_"."""
    return re.sub(r"[^\w\-. /]", "_", name)
