"""Defines the protocol that provides a run's initial parameters, and its default implementation: random parameters."""

from typing import TYPE_CHECKING, Optional, Protocol

from pretrainax.config import Experiment, TrainConfig, UserError
from pretrainax.models import AnyModel
from pretrainax.training.train_step import Params
from pretrainax.training.wrapped import trained_model

if TYPE_CHECKING:  # that module imports this module
    from pretrainax.training.run import Run

Row = tuple[str, str]  # name and value of a row in the header that a run prints


class Start(Protocol):
    """Provides a new run's initial parameters, and any run's frozen parameters, such as those of a teacher."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        """Builds the model to train, in a training wrapper if the config selects one, without reading parameters.

        Args:
          train: the result of `layers.compute.resolve_auto`.

        Raises:
          UserError: the teacher is missing, or the config's model cannot learn from this teacher.
        """
        ...

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Checks that the initial parameters are available without reading them; returns rows for the run's header.

        The check needs neither data nor devices, so that errors surface before the data is prepared.

        Raises:
          UserError: the initial parameters or the teacher are missing, or do not fit the model.
        """
        ...

    def read_frozen(self, run: "Run", workdir: str, is_new: bool) -> None:
        """Passes a run's frozen parameters to `Run.freeze`; `is_new` is True if the run has no checkpoint yet.

        Raises:
          UserError: the parameters are missing or have changed.
        """
        ...

    def params(self, run: "Run", workdir: str) -> Optional[Params]:
        """Returns the initial values of a new run's trained parameters, or None to initialize them randomly.

        Raises:
          UserError: as in `describe`.
        """
        ...


class Fresh(Start):
    """Starts runs with randomly initialized parameters and without frozen parameters."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        self._check(experiment)
        return trained_model(experiment, train)

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        self._check(experiment)
        return []

    def read_frozen(self, run: "Run", workdir: str, is_new: bool) -> None:
        self._check(run.experiment)

    def params(self, run: "Run", workdir: str) -> Optional[Params]:
        self._check(run.experiment)
        return None

    @staticmethod
    def _check(experiment: Experiment) -> None:
        settings = {"checkpoint.init_from": experiment.checkpoint.init_from, "distill": experiment.distill}
        if unsupported := [name for name, value in settings.items() if value]:
            raise UserError(
                f"config.{unsupported[0]} is set, but pretrainax.training supports fresh parameters only: train with "
                "pretrainax.runs.train, or do not set it"
            )


FRESH = Fresh()
