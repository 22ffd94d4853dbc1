"""The interface of adaptations, which convert the parameters of a model to a model of a different shape.

An adaptation defines the model config before the conversion, and a rule for each parameter of the new model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, kinds


class Operation(NamedTuple):
    """One operation in the conversion of a parameter."""

    how: str  # description for messages: "8 copies"
    function: Callable[[jax.Array], jax.Array]


class ParameterRule(NamedTuple):
    """The rule that creates a parameter of the new model: its source, and the operations on the source."""

    source: Optional[str]  # path in the model before the conversion; None: the parameter is initialized
    operations: tuple[Operation, ...] = ()  # applied in this order; (): the parameter is copied

    def after(self, earlier: Mapping[str, "ParameterRule"]) -> Optional["ParameterRule"]:
        """Returns the composition of this rule with an earlier rule that creates its source.

        Args:
          earlier: rules of the earlier adaptations, by path.

        Returns:
          The rule from the first model to this parameter; None if `earlier` has no rule for the source.
        """
        if self.source is None:
            return self
        first = earlier.get(self.source)
        return first and ParameterRule(first.source, first.operations + self.operations)

    @property
    def how(self) -> str:
        """Returns a description of the operations for messages; "" if there are no operations."""
        return ", then ".join(making.how for making in self.operations)

    def applied(self, x: jax.Array) -> jax.Array:
        """Returns the parameter that this rule creates from its source `x`; always a new array."""
        for making in self.operations:
            x = making.function(x)
        return jnp.copy(x)  # two rules may have the same source, but donated arrays must be separate


class Adaptation(kinds.Adaptation):
    """Base class of adaptations.

    In all methods, `ours` is the model config that the adaptation creates. `theirs` is the model config of the trained
    model whose parameters are converted.
    """

    fields: ClassVar[tuple[str, ...]]  # fields of ModelConfig that the adaptation changes
    makes: ClassVar[Optional[str]] = None  # family of the created model; None: the family is unchanged

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        """Returns the config of the model that this adaptation converts to `ours`."""
        raise NotImplementedError

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        """Yields a message for each reason that prevents the conversion of `theirs` to `ours`.

        A message has the value of a field, the allowed values and the field to set.
        """
        yield from ()

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        """Returns the rule that creates the parameter `path` of `ours`.

        Args:
          before: the result of the method `before`.
        """
        del before, ours
        return ParameterRule(path)

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        """Returns a description of how the adaptation changes the function of the model, for messages.

        Args:
          before: the result of the method `before`.
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
        if self.makes not in (None, model.family):
            yield f"{name}, and config.model.family is {model.family!r}: set it to {self.makes!r}"
        if sum(type(other) is type(self) for other in checkpoint.adapt) > 1:
            yield f"{name} and another of its kind: give one"
