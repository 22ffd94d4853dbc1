"""The start of a run: a protocol for what packages above training hand in, and the start of fresh parameters."""

from typing import TYPE_CHECKING, Optional, Protocol

from pretrainax.config import Experiment, TrainConfig, UserError
from pretrainax.models import AnyModel
from pretrainax.training.train_step import Params
from pretrainax.training.wrapped import trained_model

if TYPE_CHECKING:  # which imports this module
    from pretrainax.training.run import Run

Row = tuple[str, str]  # name and value in the header of a run


class Start(Protocol):
    """Gives a new run parameters that others have trained, and any run those that it reads and does not train."""

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        """Returns the model in training, of which no number is read; train: as `for_this_machine` returns it.

        Raises:
          UserError: a teacher is not there, or the model of the config cannot learn from it.
        """
        ...

    def describe(self, experiment: Experiment, workdir: str) -> list[Row]:
        """Checks the start of a new run without reading a number of it; returns rows for the header.

        It takes no data and no device, so that a mistake shows before the text is prepared.

        Raises:
          UserError: the start or the teacher is not there, or of another model.
        """
        ...

    def read_frozen(self, run: "Run", workdir: str, is_new: bool) -> None:
        """Gives a run the parameters that it reads and does not train (`Run.freeze`), as far as they are known.

        Raises:
          UserError: they are not there any more, or other ones.
        """
        ...

    def params(self, run: "Run", workdir: str) -> Optional[Params]:
        """Returns the trained parameters of a new run at its start; None: they are drawn.

        Raises:
          UserError: as `describe`.
        """
        ...


class Fresh(Start):
    """Starts from parameters that are drawn, and nothing else."""

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
        asked = {"checkpoint.init_from": experiment.checkpoint.init_from, "distill": experiment.distill}
        if given := [name for name, value in asked.items() if value]:
            raise UserError(
                f"config.{given[0]} is set, and pretrainax.training alone starts from fresh parameters: train by "
                "pretrainax.runs.train, or leave it out"
            )


FRESH = Fresh()
