"""Several objectives in one run, each for its share of the rows."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, of_field


class _CommonFamilies:
    """`families` of a mixture: what all its objectives can train. Of the class, none."""

    def __get__(self, mixture, owner):
        if mixture is None or not mixture.objectives:
            return ()
        first, *others = mixture.objectives
        return tuple(f for f in first.families if all(f in objective.families for objective in others))


@dataclasses.dataclass
class ObjectiveMixture(Objective):
    """Objectives by weight: each row of a run is of one of them, in exact proportion and evenly spread.

    With `objectives` (SpanCorruption(), SpanCorruption(0.5)) and `weights` (3, 1), the rows of a batch of 8 are of

        0 0 1 0 0 0 1 0

    A mixture makes no example itself: its `components` do, among which are those of mixtures in it. Rows have room for
    the longest of them, and the others are padded.
    """

    objectives: tuple[Objective, ...] = ()  # of which each row has one
    weights: tuple[float, ...] = ()  # one each, in proportion to the rows; 0 leaves an objective out

    families = _CommonFamilies()

    @property
    def unit(self) -> str:
        return self.objectives[0].unit

    @property
    def select_by(self) -> str:
        """Names the figure that all of them are kept for, if it is the same."""
        figures = {objective.select_by for objective in self._used}
        return figures.pop() if len(figures) == 1 else super().select_by

    @property
    def is_likelihood(self) -> bool:
        return all(objective.is_likelihood for objective in self._used)

    @property
    def head_figures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(figure for objective in self._used for figure in objective.head_figures))

    def components(self, pairs=False):
        found = []
        for weight, objective in zip(self.weights, self.objectives, strict=False):
            inner = objective.components(pairs)
            total = sum(share for share, _ in inner)
            found += [(weight * share / total, component) for share, component in inner if weight * share]
        return found

    def bind(self, tokenizer):
        return dataclasses.replace(self, objectives=tuple(o.bind(tokenizer) for o in self.objectives))

    def lengths(self, sequence_length):
        return _longest(objective.lengths(sequence_length) for objective in self._used)

    def measure(self, raw):
        return _longest(objective.measure(raw) for objective in self._used)

    @property
    def _used(self) -> list[Objective]:
        return [objective for weight, objective in zip(self.weights, self.objectives, strict=False) if weight]

    def check_vocabulary(self, vocabulary, sequence_length):
        for objective in self._used:
            objective.check_vocabulary(vocabulary, sequence_length)

    def problems(self, experiment):
        wrong = list(self.field_problems())
        if wrong or experiment.model.family not in self.families:
            yield from wrong or super().problems(experiment)
            return
        for i, objective in enumerate(self.objectives):
            yield from of_field(f"objectives[{i}]", objective.problems(experiment))

    def field_problems(self):
        count, weights = len(self.objectives), self.weights
        if not count:
            yield "config.objective.objectives is (), it must have at least one"
        elif len(weights) != count:
            yield f"config.objective.weights has {len(weights)} numbers, it must have {count}: one an objective"
        elif not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            yield f"config.objective.weights is {weights}, they must be finite and not negative"
        elif not any(weights):
            yield f"config.objective.weights is {weights}, at least one must be greater than 0"
        if count:
            units = sorted({objective.unit for objective in self.objectives})
            if len(units) > 1:
                yield f"config.objective.objectives are made of {' and of '.join(units)}: mix those of the same"
            elif not self.families:
                names = ", ".join(type(objective).__name__ for objective in self.objectives)
                yield f"config.objective.objectives {names} train no config.model.family in common"
        for i, objective in enumerate(self.objectives):
            yield from of_field(f"objectives[{i}]", objective.field_problems())


def _longest(lengths: Iterator[Lengths]) -> Lengths:
    return Lengths(*np.max(list(lengths), axis=0).tolist())
