"""The model of a run in training: the model of its config, or a wrapper around it, for a tuning or a teacher."""

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

import jax

from pretrainax import models
from pretrainax.config import Experiment, ModelConfig, TrainConfig
from pretrainax.layers.compute import Compute, compute_for
from pretrainax.models import AnyModel
from pretrainax.sharding.param_paths import PyTree

if TYPE_CHECKING:  # that module imports this module
    from pretrainax.training.run import Run

Frozen = Optional[dict[str, PyTree]]  # variable collections of frozen parameters, or None


class Wrapped(AnyModel, abc.ABC):
    """Base class of wrappers, used like the wrapped model. The parameters may differ from the model's parameters."""

    @property
    @abc.abstractmethod
    def plain(self) -> AnyModel:
        """Returns the model of the config."""

    @property
    def config(self) -> ModelConfig:
        return self.plain.config

    @property
    def compute(self) -> Compute:
        return self.plain.compute

    @abc.abstractmethod
    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        """Returns the initial values of the trained parameters.

        Args:
          params: parameters of the plain model.
          key: random key for new parameters.
        """

    @abc.abstractmethod
    def frozen(self, params: PyTree) -> Frozen:
        """Returns the frozen collections for parameters of the plain model; arrays, or shapes."""

    @abc.abstractmethod
    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the model for use after training, and its parameters."""

    @abc.abstractmethod
    def counted(self, params: PyTree, frozen: Frozen) -> PyTree:
        """Returns the parameters that count as the model's own; arrays, or shapes."""

    @property
    def teacher_config(self) -> Optional[ModelConfig]:
        """Returns the config of the teacher, which also computes in each step, or None."""
        return None

    @abc.abstractmethod
    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        """Yields names and values of rows for the header of a run."""


def trained_model(experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig] = None) -> AnyModel:
    """Returns the model of a run in training: plain, or wrapped for a tuning or a teacher.

    Args:
      train: the result of `for_this_machine`.
      teacher: the config of the model that `config.distill` names, or None.
    """
    if experiment.wrapper is None:
        return models.build(experiment.model, compute_for(train))
    return experiment.wrapper.wrap(experiment, train, teacher)


def plain(model: AnyModel) -> AnyModel:
    """Returns the model of the config without its training wrapper."""
    return model.plain if isinstance(model, Wrapped) else model


def merged(model: AnyModel, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
    """Returns the model for use after training, and its parameters."""
    return model.merged(params, frozen) if isinstance(model, Wrapped) else (model, params)


def counted(model: AnyModel, params: PyTree, frozen: Frozen) -> PyTree:
    """Returns the parameters that count as the model's own; arrays, or shapes."""
    return model.counted(params, frozen) if isinstance(model, Wrapped) else params


def teacher_config(model: AnyModel) -> Optional[ModelConfig]:
    """Returns the config of the teacher, which also computes in each step, or None."""
    return model.teacher_config if isinstance(model, Wrapped) else None
