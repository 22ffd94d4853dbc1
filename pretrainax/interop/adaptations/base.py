"""The interface of adaptations, which convert a trained model to a model of a different family or shape.

An adaptation defines the model config before the conversion, and a rule for each parameter of the new model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, kinds


class Operation(NamedTuple):
    """A function that converts a parameter as part of an adaptation, with a description for messages."""

    description: str  # description for messages, for example "8 copies"
    function: Callable[[jax.Array], jax.Array]


class ParameterRule(NamedTuple):
    """The rule that creates a parameter of the new model: the source parameter, and the operations to apply to it."""

    source: Optional[str]  # parameter path before the conversion; None: the parameter is initialized
    operations: tuple[Operation, ...] = ()  # applied in order; (): the parameter is copied

    def after(self, earlier: Mapping[str, "ParameterRule"]) -> Optional["ParameterRule"]:
        """Composes this rule with the earlier rule that creates its source.

        Args:
          earlier: rules of the earlier adaptations, by parameter path.

        Returns:
          The rule that creates the parameter from the trained model, or None if `earlier` has no rule for the source.
        """
        if self.source is None:
            return self
        source_rule = earlier.get(self.source)
        return source_rule and ParameterRule(source_rule.source, source_rule.operations + self.operations)

    @property
    def description(self) -> str:
        """Returns a description of the operations for messages, or "" if there are none."""
        return ", then ".join(operation.description for operation in self.operations)

    def applied(self, x: jax.Array) -> jax.Array:
        """Applies the operations to the source parameter `x`; always returns a new array."""
        for operation in self.operations:
            x = operation.function(x)
        return jnp.copy(x)  # two rules may have the same source, but donated arrays must be separate


class Adaptation(kinds.Adaptation):
    """Base class of adaptations.

    In all methods, `ours` is the model config after the conversion. `theirs` is the model config of the trained model.
    """

    fields: ClassVar[tuple[str, ...]]  # fields of ModelConfig that the adaptation changes
    target_family: ClassVar[Optional[str]] = None  # family of the new model; None: the family is unchanged

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        """Returns the model config that this adaptation converts to `ours`."""
        raise NotImplementedError

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        """Yields a message for each reason that prevents the conversion of `theirs` to `ours`.

        Each message states the config field that causes the problem, its value, the allowed values, and the remedy.
        """
        yield from ()

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        """Returns the rule that creates the parameter at `path` in `ours`.

        Args:
          before: model config before the conversion, from the method `before`.
        """
        del before, ours
        return ParameterRule(path)

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        """Describes how the adaptation changes the outputs of the model, for messages.

        Args:
          before: model config before the conversion, from the method `before`.
        """
        raise NotImplementedError

    def problems(self, experiment: Experiment) -> Iterator[str]:
        checkpoint, model, name = experiment.checkpoint, experiment.model, f"config.checkpoint.adapt has {self}"
        if not checkpoint.init_from:
            yield f"{name}, which gives config.checkpoint.init_from another shape: set it to a run or a directory"
        if experiment.tuning is not None:
            yield f"{name}, and config.tuning keeps its start as it is: train a model of this shape, then tune that"
        if model.generator is not None:
            yield f"{name}, and config.model.generator makes two models: leave one of them out"
        if self.target_family not in (None, model.family):
            yield f"{name}, and config.model.family is {model.family!r}: set it to {self.target_family!r}"
        if sum(type(other) is type(self) for other in checkpoint.adapt) > 1:
            yield f"{name} and another of its kind: give one"
