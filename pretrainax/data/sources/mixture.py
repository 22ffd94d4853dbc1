"""Several corpora, by weight."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Optional

from pretrainax.config import Experiment
from pretrainax.data.sources.base import Source, WeightStages


@dataclasses.dataclass
class SourceMixture(Source):
    """Examples of several sources, each prepared, held out and shuffled by itself, in proportion to weights.

    What a weight counts: of a source of pairs each pair, though several share a row; of one of texts each row.
    Without `weights`, a source counts as many as it has examples, at most `limit`, to the power of 1 / `temperature`
    (Raffel et al. 2020, section 3.5.2): examples-proportional mixing at a temperature of 1, the more equal the higher
    it is (multilingual BERT: 1 / 0.7, mT5: 1 / 0.3). All weights equal: equal mixing.

    Other weights from some share of the training on, as for its end on the best data:

        SourceMixture(
            sources=(Parquet(path="web"), JsonLines(path="books")),
            weights=(0.9, 0.1),
            stages=((0.8, (0.2, 0.8)),),
        )

    gives 1 example in 10 of books until 80 % of the steps are done, then 8 in 10.
    """

    sources: tuple[Source, ...]  # each with a corpus of its own
    weights: Optional[tuple[float, ...]] = None  # of each source; None: by the number of its examples
    temperature: float = 1.0  # numbers count to the power of 1 / this; without weights only
    limit: Optional[int] = None  # examples that a source counts at most; without weights only
    stages: tuple[tuple[float, tuple[float, ...]], ...] = ()  # (from this share of the training on, weights)

    @property
    def pairs(self) -> bool:
        return any(isinstance(source, Source) and source.pairs for source in self.sources)

    def components(self) -> tuple[Source, ...]:
        return tuple(part for i in range(len(self.sources)) for part in self._placed(i).components())

    def weight_stages(self, sizes: Sequence[int]) -> WeightStages:
        """Returns the weights of the components; sizes: documents of each. A mixture within divides its own weight."""
        sizes, parts, inner = list(sizes), [], []
        for source in self.sources:
            count = len(source.components())
            parts.append(sizes[:count])
            inner.append(source.weight_stages(sizes[:count]))
            del sizes[:count]
        outer = [(0.0, self.weights or self._proportional(list(map(sum, parts)))), *self.stages]
        starts = sorted({start for stages in (outer, *inner) for start, _ in stages})
        return [
            (start, tuple(_products(_at(outer, start), [_at(stages, start) for stages in inner]))) for start in starts
        ]

    def _proportional(self, sizes: list[int]) -> tuple[float, ...]:
        counts = [min(size, self.limit or size) for size in sizes]
        most = max(counts)  # of which 1 / temperature as an exponent cannot be too large
        return tuple((count / most) ** (1 / self.temperature) for count in counts)

    def problems(self, experiment: Experiment) -> Iterator[str]:
        path = self.config_path
        if not self.sources:
            yield f"{path}.sources is empty: give at least one"
        if not self.temperature > 0:
            yield f"{path}.temperature is {self.temperature}, it must be greater than 0"
        if self.limit is not None and self.limit < 1:
            yield f"{path}.limit is {self.limit}, it must be at least 1"
        if self.weights is not None and (self.temperature != 1 or self.limit is not None):
            yield f"{path}.weights are given, so that {path}.temperature and limit would do nothing: leave them out"
        given = [] if self.weights is None else [(f"{path}.weights", self.weights)]
        given += [(f"{path}.stages[{i}][1]", weights) for i, (_, weights) in enumerate(self.stages)]
        for name, weights in given:
            if len(weights) != len(self.sources):
                yield f"{name} has {len(weights)} weights, {path}.sources has {len(self.sources)} sources"
            elif not all(0 <= weight < math.inf for weight in weights) or not any(weights):
                yield f"{name} is {weights}: they must not be negative, and not all 0"
        starts = [0.0, *(start for start, _ in self.stages), 1.0]
        if any(not a < b for a, b in zip(starts, starts[1:], strict=False)):
            yield f"{path}.stages start at {starts[1:-1]}: they must increase, and be between 0 and 1"
        for i, source in enumerate(self.sources):
            if isinstance(source, Source):
                yield from self._placed(i).problems(experiment)
            else:
                yield f"{path}.sources[{i}] is {type(source).__name__}, it must be of kind Source"

    def _placed(self, i: int) -> Source:
        """Returns source i, whose error lines name its own fields."""
        source = copy.copy(self.sources[i])
        source.config_path = f"{self.config_path}.sources[{i}]"
        return source


def _at(stages: WeightStages, progress: float) -> tuple[float, ...]:
    """Returns the weights that are in force, with a sum of 1."""
    weights = [weights for start, weights in stages if start <= progress][-1]
    return tuple(weight / sum(weights) for weight in weights)


def _products(outer: tuple[float, ...], inner: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(weight * w for weight, weights in zip(outer, inner, strict=True) for w in weights)
