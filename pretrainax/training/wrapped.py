"""Defines wrappers around a config's model for training: parameter-efficient fine-tuning and distillation."""

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
    """Base class of training wrappers, which have the wrapped model's interface but may train other parameters."""

    @property
    @abc.abstractmethod
    def plain(self) -> AnyModel:
        """Returns the wrapped model, which is the model of the config."""

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
          params: parameters of the wrapped model.
          key: random key for additional parameters.
        """

    @abc.abstractmethod
    def frozen(self, params: PyTree) -> Frozen:
        """Returns the frozen variables, given the wrapped model's parameters (arrays or shapes)."""

    @abc.abstractmethod
    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the model for use after training, without its wrapper, and the model's parameters."""

    @abc.abstractmethod
    def model_params(self, params: PyTree, frozen: Frozen) -> PyTree:
        """Returns the model's own parameters, trained and frozen (arrays or shapes), excluding a teacher's."""

    @property
    def teacher_config(self) -> Optional[ModelConfig]:
        """Returns the config of the teacher, which also runs in each step, or None if there is no teacher."""
        return None

    @abc.abstractmethod
    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        """Yields (name, value) rows for the run's header."""


def trained_model(experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig] = None) -> AnyModel:
    """Returns the model to train: the config's model, wrapped by `experiment.wrapper` if that is set.

    Args:
      train: the result of `layers.compute.resolve_auto`.
      teacher: the config of the teacher in `config.distill`, or None if there is no teacher.
    """
    if experiment.wrapper is None:
        return models.build(experiment.model, compute_for(train))
    return experiment.wrapper.wrap(experiment, train, teacher)


def plain(model: AnyModel) -> AnyModel:
    """Returns the model without its training wrapper, if it has one."""
    return model.plain if isinstance(model, Wrapped) else model


def merged(model: AnyModel, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
    """Returns the model for use after training, without its wrapper, and the model's parameters."""
    return model.merged(params, frozen) if isinstance(model, Wrapped) else (model, params)


def model_params(model: AnyModel, params: PyTree, frozen: Frozen) -> PyTree:
    """Returns the model's own parameters, trained and frozen (arrays or shapes), excluding a teacher's."""
    return model.model_params(params, frozen) if isinstance(model, Wrapped) else params


def teacher_config(model: AnyModel) -> Optional[ModelConfig]:
    """Returns the config of the teacher, which also runs in each step, or None if there is no teacher."""
    return model.teacher_config if isinstance(model, Wrapped) else None
