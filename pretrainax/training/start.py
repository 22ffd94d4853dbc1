"""The start of a run: the protocol for initial parameters from other packages, and the start from fresh parameters."""

from typing import TYPE_CHECKING, Optional, Protocol

from pretrainax.config import Experiment, TrainConfig, UserError
from pretrainax.models import AnyModel
from pretrainax.training.train_step import Params
from pretrainax.training.wrapped import trained_model

if TYPE_CHECKING:  # that module imports this module
    from pretrainax.training.run import Run

Row = tuple[str, str]  # name and value in the header of a run


class Start(Protocol):
    """Provides pretrained initial parameters for a new run, and frozen parameters for any run."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        """Returns the model in training, without reading parameters.

        Args:
          train: the result of `for_this_machine`.

        Raises:
          UserError: a teacher is missing, or the model of the config cannot learn from it.
        """
        ...

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Checks the start of a new run without reading parameters; returns rows for the header.

        The check needs no data and no device, so that mistakes show before the data is prepared.

        Raises:
          UserError: the start or the teacher is missing, or belongs to another model.
        """
        ...

    def read_frozen(self, run: "Run", workdir: str, is_new: bool) -> None:
        """Loads the frozen parameters of a run and passes them to `Run.freeze`.

        Raises:
          UserError: the parameters are missing or have changed.
        """
        ...

    def params(self, run: "Run", workdir: str) -> Optional[Params]:
        """Returns the initial values of a new run's trained parameters; None: the run draws them.

        Raises:
          UserError: as in `describe`.
        """
        ...


class Fresh(Start):
    """Starts from randomly drawn parameters."""

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
