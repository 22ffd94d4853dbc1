"""Implements a weighted mixture of data sources."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Optional

from pretrainax.config import Experiment
from pretrainax.data.sources.base import Source, WeightStages


@dataclasses.dataclass
class SourceMixture(Source):
    """Mixes examples of several sources in proportion to weights; each source is prepared and shuffled separately.

    Each source has its own validation data. For sources of pairs, the weights determine the share of the pairs,
    although a row may contain several of them. For sources of documents, the weights determine the share of the rows.

    Without `weights`, the weight of a source is min(number of examples, `limit`) ^ (1 / `temperature`) (Raffel et al.
    2020, section 3.5.2). Temperature 1 is examples-proportional mixing, and higher temperatures make the weights more
    equal (multilingual BERT: 1 / 0.7, mT5: 1 / 0.3). Equal `weights` result in equal mixing.

    `stages` changes the weights during training, for example to use the best data at the end:

        SourceMixture(
            sources=(Parquet(path="web"), JsonLines(path="books")),
            weights=(0.9, 0.1),
            stages=((0.8, (0.2, 0.8)),),
        )

    In the first 80 % of the steps, 1 of 10 examples comes from the books; after that, 8 of 10.
    """

    sources: tuple[Source, ...]  # each source has a separate corpus
    weights: Optional[tuple[float, ...]] = None  # one per source; None: weights from the numbers of examples
    temperature: float = 1.0  # numbers of examples are raised to the power of 1 / temperature; only without weights
    limit: Optional[int] = None  # upper bound on the number of examples in the weight of a source; only without weights
    stages: tuple[tuple[float, tuple[float, ...]], ...] = ()  # (start, as training progress from 0 to 1; weights)

    @property
    def pairs(self) -> bool:
        return any(isinstance(source, Source) and source.pairs for source in self.sources)

    def components(self) -> tuple[Source, ...]:
        return tuple(component for i in range(len(self.sources)) for component in self._with_path(i).components())

    def weight_stages(self, sizes: Sequence[int]) -> WeightStages:
        """Returns the mixture weights of all components for each training stage.

        A nested mixture divides its weight among its sources.

        Args:
          sizes: number of examples of each component.
        """
        sizes, sizes_by_source, inner = list(sizes), [], []
        for source in self.sources:
            count = len(source.components())
            sizes_by_source.append(sizes[:count])
            inner.append(source.weight_stages(sizes[:count]))
            del sizes[:count]
        outer = [(0.0, self.weights or self._weights_of_sizes(list(map(sum, sizes_by_source)))), *self.stages]
        starts = sorted({start for stages in (outer, *inner) for start, _ in stages})
        return [
            (start, tuple(_nested_weights(_weights_at(outer, start), [_weights_at(stages, start) for stages in inner])))
            for start in starts
        ]

    def _weights_of_sizes(self, sizes: list[int]) -> tuple[float, ...]:
        """Returns the weights of sources with `sizes` examples, as defined in the class docstring."""
        counts = [min(size, self.limit or size) for size in sizes]
        largest = max(counts)  # counts / largest is at most 1, so the power cannot overflow
        return tuple((count / largest) ** (1 / self.temperature) for count in counts)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        path = self.config_path
        if not self.sources:
            yield f"{path}.sources is empty: give at least one"
        if not self.temperature > 0:
            yield f"{path}.temperature is {self.temperature}, it must be greater than 0"
        if self.limit is not None and self.limit < 1:
            yield f"{path}.limit is {self.limit}, it must be at least 1"
        if self.weights is not None and (self.temperature != 1 or self.limit is not None):
            yield f"{path}.weights are set, so that {path}.temperature and limit have no effect: remove them"
        named_weights = [] if self.weights is None else [(f"{path}.weights", self.weights)]
        named_weights += [(f"{path}.stages[{i}][1]", weights) for i, (_, weights) in enumerate(self.stages)]
        for name, weights in named_weights:
            if len(weights) != len(self.sources):
                yield f"{name} has {len(weights)} weights, {path}.sources has {len(self.sources)} sources"
            elif not all(0 <= weight < math.inf for weight in weights) or not any(weights):
                yield f"{name} is {weights}: they must not be negative, and not all 0"
        starts = [0.0, *(start for start, _ in self.stages), 1.0]
        if any(not a < b for a, b in zip(starts, starts[1:], strict=False)):
            yield f"{path}.stages start at {starts[1:-1]}: they must increase, and be between 0 and 1"
        for i, source in enumerate(self.sources):
            if isinstance(source, Source):
                yield from self._with_path(i).problems(experiment)
            else:
                yield f"{path}.sources[{i}] is {type(source).__name__}, it must be a Source"

    def _with_path(self, i: int) -> Source:
        """Returns a copy of source `i` with its own config path, for error messages."""
        source = copy.copy(self.sources[i])
        source.config_path = f"{self.config_path}.sources[{i}]"
        return source


def _weights_at(stages: WeightStages, progress: float) -> tuple[float, ...]:
    """Returns the mixture weights, normalized to sum to 1, at the given training progress (0 to 1)."""
    weights = [weights for start, weights in stages if start <= progress][-1]
    return tuple(weight / sum(weights) for weight in weights)


def _nested_weights(outer: tuple[float, ...], inner: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(weight * w for weight, weights in zip(outer, inner, strict=True) for w in weights)
