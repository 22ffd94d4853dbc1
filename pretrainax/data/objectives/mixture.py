"""Defines a mixture of objectives, each of which gets a fixed fraction of a run's rows."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, with_field_path


class _CommonFamilies:
    """Descriptor for a mixture's `families`: those that all of its objectives support, or () on the class itself."""

    def __get__(self, mixture, owner):
        if mixture is None or not mixture.objectives:
            return ()
        first, *others = mixture.objectives
        return tuple(f for f in first.families if all(f in objective.families for objective in others))


@dataclasses.dataclass
class ObjectiveMixture(Objective):
    """Assigns one of several objectives to each row, in exact proportion to their weights, evenly spread.

    With `objectives` (SpanCorruption(), SpanCorruption(0.5)) and `weights` (3, 1), the 8 rows of a batch use

        0 0 1 0 0 0 1 0

    The `components` of the mixture make the examples. Nested mixtures are flattened. Rows have room for the longest
    example of any objective; shorter examples are padded.
    """

    objectives: tuple[Objective, ...] = ()  # each row uses one of these objectives
    weights: tuple[float, ...] = ()  # one per objective, proportional to its number of rows; 0 disables the objective

    families = _CommonFamilies()

    @property
    def unit(self) -> str:
        return self.objectives[0].unit

    @property
    def select_by(self) -> str:
        """Returns the `select_by` metric shared by all active objectives, or the base class default if they differ."""
        metrics = {objective.select_by for objective in self._active_objectives}
        return metrics.pop() if len(metrics) == 1 else super().select_by

    @property
    def is_likelihood(self) -> bool:
        return all(objective.is_likelihood for objective in self._active_objectives)

    @property
    def head_metrics(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(metric for objective in self._active_objectives for metric in objective.head_metrics)
        )

    def components(self, pairs=False):
        weighted = []
        for weight, objective in zip(self.weights, self.objectives, strict=False):
            subcomponents = objective.components(pairs)
            total = sum(subweight for subweight, _ in subcomponents)
            weighted += [
                (weight * subweight / total, component) for subweight, component in subcomponents if weight * subweight
            ]
        return weighted

    def bind(self, tokenizer):
        return dataclasses.replace(self, objectives=tuple(o.bind(tokenizer) for o in self.objectives))

    def lengths(self, sequence_length):
        return _elementwise_max(objective.lengths(sequence_length) for objective in self._active_objectives)

    def measure(self, raw):
        return _elementwise_max(objective.measure(raw) for objective in self._active_objectives)

    @property
    def _active_objectives(self) -> list[Objective]:
        """Returns the objectives whose weight is not 0."""
        return [objective for weight, objective in zip(self.weights, self.objectives, strict=False) if weight]

    def check_vocabulary(self, vocabulary, sequence_length):
        for objective in self._active_objectives:
            objective.check_vocabulary(vocabulary, sequence_length)

    def problems(self, experiment):
        field_errors = list(self.field_problems())
        if field_errors or experiment.model.family not in self.families:
            yield from field_errors or super().problems(experiment)
            return
        for i, objective in enumerate(self.objectives):
            yield from with_field_path(f"objectives[{i}]", objective.problems(experiment))

    def field_problems(self):
        count, weights = len(self.objectives), self.weights
        if not count:
            yield "config.objective.objectives is (), it must have at least one"
        elif len(weights) != count:
            yield f"config.objective.weights has {len(weights)} numbers, it must have {count}: one per objective"
        elif not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            yield f"config.objective.weights is {weights}, they must be finite and not negative"
        elif not any(weights):
            yield f"config.objective.weights is {weights}, at least one must be greater than 0"
        if count:
            units = sorted({objective.unit for objective in self.objectives})
            if len(units) > 1:
                yield f"config.objective.objectives are made of {' and of '.join(units)}: all must read the same unit"
            elif not self.families:
                names = ", ".join(type(objective).__name__ for objective in self.objectives)
                yield f"config.objective.objectives {names} train no config.model.family in common"
        for i, objective in enumerate(self.objectives):
            yield from with_field_path(f"objectives[{i}]", objective.field_problems())


def _elementwise_max(lengths: Iterator[Lengths]) -> Lengths:
    """Returns the maximum of each field over several `Lengths`."""
    return Lengths(*np.max(list(lengths), axis=0).tolist())
