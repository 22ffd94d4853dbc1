"""The model of a run in training: that of its config, or one that wraps it, as a tuning or a teacher does."""

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

import jax

from pretrainax import models
from pretrainax.config import Experiment, ModelConfig, TrainConfig
from pretrainax.layers.compute import Compute, compute_for
from pretrainax.models import AnyModel
from pretrainax.sharding.param_paths import PyTree

if TYPE_CHECKING:  # which imports this module
    from pretrainax.training.run import Run

Frozen = Optional[dict[str, PyTree]]  # collections of parameters that no update changes; None: there are none


class Wrapped(AnyModel, abc.ABC):
    """Base of such models, which are used like the model inside. Its parameters may be other ones than the model's."""

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
        """Returns the parameters that are trained, at their start.

        Args:
          params: of the plain model.
          key: of those that are drawn.
        """

    @abc.abstractmethod
    def frozen(self, params: PyTree) -> Frozen:
        """Returns the collections that follow from the parameters of the plain model; arrays, or shapes."""

    @abc.abstractmethod
    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the model that is used after training and its parameters."""

    @abc.abstractmethod
    def counted(self, params: PyTree, frozen: Frozen) -> PyTree:
        """Returns the parameters that count as the model's own; arrays, or shapes."""

    @property
    def teacher_config(self) -> Optional[ModelConfig]:
        """Returns the config of a second model that computes in each step; None: there is no such model."""
        return None

    @abc.abstractmethod
    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        """Yields names and values of rows for the header of a run."""


def trained_model(experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig] = None) -> AnyModel:
    """Returns the model of a run in training: plain, under a tuning, or beside a teacher.

    Args:
      train: as `for_this_machine` returns it.
      teacher: the config of the model that `config.distill` names; None: there is none.
    """
    if experiment.wrapper is None:
        return models.build(experiment.model, compute_for(train))
    return experiment.wrapper.wrap(experiment, train, teacher)


def plain(model: AnyModel) -> AnyModel:
    """Returns the model of the config without what wraps it in training."""
    return model.plain if isinstance(model, Wrapped) else model


def merged(model: AnyModel, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
    """Returns the model that is used after training and its parameters."""
    return model.merged(params, frozen) if isinstance(model, Wrapped) else (model, params)


def counted(model: AnyModel, params: PyTree, frozen: Frozen) -> PyTree:
    """Returns the parameters that count as the model's own; arrays, or shapes."""
    return model.counted(params, frozen) if isinstance(model, Wrapped) else params


def teacher_config(model: AnyModel) -> Optional[ModelConfig]:
    """Returns the config of a second model that computes in each step; None: there is no such model."""
    return model.teacher_config if isinstance(model, Wrapped) else None
