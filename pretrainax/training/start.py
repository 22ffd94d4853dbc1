"""Defines the protocol through which a run gets its initial parameters, and its default: random parameters."""

from typing import TYPE_CHECKING, Optional, Protocol

from pretrainax.config import Experiment, TrainConfig, UserError
from pretrainax.models import AnyModel
from pretrainax.training.train_step import Params
from pretrainax.training.wrapped import trained_model

if TYPE_CHECKING:  # that module imports this module
    from pretrainax.training.run import Run

Row = tuple[str, str]  # name and value of a row in the header that a run prints


class Start(Protocol):
    """Provides the initial parameters of a new run, and the frozen parameters of each run, such as a teacher's."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        """Returns the model to train, with its training wrapper if it has one, without reading parameters.

        Args:
          train: the result of `layers.compute.resolve_auto`.

        Raises:
          UserError: a teacher is missing, or the model of the config cannot learn from this teacher.
        """
        ...

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Checks the source of the initial parameters without reading it; returns rows for the header of the run.

        The check needs no data and no device, so that errors are found before the data is prepared.

        Raises:
          UserError: the initial parameters or the teacher are missing, or do not fit the model.
        """
        ...

    def read_frozen(self, run: "Run", workdir: str, is_new: bool) -> None:
        """Loads the frozen parameters of a run and passes them to `Run.freeze`; `is_new`: there is no checkpoint.

        Raises:
          UserError: the parameters are missing or have changed.
        """
        ...

    def params(self, run: "Run", workdir: str) -> Optional[Params]:
        """Returns the initial values of a new run's trained parameters; None: the run initializes them randomly.

        Raises:
          UserError: as in `describe`.
        """
        ...


class Fresh(Start):
    """The start of runs with randomly initialized parameters and without frozen parameters."""

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
        if given := [name for name, value in settings.items() if value]:
            raise UserError(
                f"config.{given[0]} is set, but pretrainax.training supports fresh parameters only: train with "
                "pretrainax.runs.train, or do not set it"
            )


FRESH = Fresh()
