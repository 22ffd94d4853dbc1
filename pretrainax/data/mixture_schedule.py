"""Assigns the rows of a run to several streams in proportion to their weights, with index arithmetic."""

import math
from collections.abc import Sequence

import numpy as np

_CYCLE = 1 << 12, 1 << 18  # minimum and maximum number of rows per cycle


class MixtureSchedule:
    """Maps row i to its stream and to the number of earlier rows of that stream.

    Rows are assigned in cycles. Each cycle has rows of each stream in proportion to its weight, spread evenly. The
    weights of a training stage apply from the first row of the stage. A stream with a positive weight has at least one
    row per cycle.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[float]]]):
        """Computes the cycle of each stage.

        stages: (first row, weight of each stream) of each stage. The first stage starts at row 0.
        """
        self._stages = []
        self._is_alone = len(stages[0][1]) == 1  # the only stream has all rows
        used = np.zeros(len(stages[0][1]), np.int64)  # rows of each stream before the stage
        for i, (first, weights) in enumerate(stages):
            stage = _Stage(first, np.asarray(weights, float), used)
            self._stages.append(stage)
            if i + 1 < len(stages):
                used = stage.before(stages[i + 1][0])

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Returns the index of the stream of a row, and the number of earlier rows of this stream."""
        if self._is_alone:
            return 0, row
        stage = self._stage(row)
        stream = int(stage.streams[(row - stage.first) % len(stage.streams)])
        return stream, int(stage.before(row)[stream])

    def before(self, row: int) -> np.ndarray:
        """Returns the number of rows of each stream before row `row` of the run, int64 [streams]."""
        return self._stage(row).before(row)

    def _stage(self, row: int) -> "_Stage":
        return next(stage for stage in reversed(self._stages) if row >= stage.first)


class _Stage:
    def __init__(self, first: int, weights: np.ndarray, used: np.ndarray):
        self.first, self._used = first, used
        num_positive = np.count_nonzero(weights)
        smallest = weights[weights > 0].min() / weights.sum()
        # The smallest stream has about 16 rows per cycle, so that rounding to whole rows causes only small errors.
        cycle = 1 if num_positive == 1 else min(max(1 << math.ceil(math.log2(16 / smallest)), _CYCLE[0]), _CYCLE[1])
        exact = weights / weights.sum() * cycle
        self._quota = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
        for stream in np.argsort(self._quota - exact, kind="stable")[: max(cycle - self._quota.sum(), 0)]:
            self._quota[stream] += 1  # largest remainders
        # The n-th of k rows of a stream is at (n + 1/2) / k of the cycle.
        fractions = [(np.arange(k) + 0.5) / k for k in self._quota]
        order = np.argsort(np.concatenate(fractions), kind="stable")
        self.streams = np.repeat(np.arange(len(weights)), self._quota)[order]
        self._counts = np.zeros((len(order) + 1, len(weights)), np.int32)  # rows of each stream before each row
        np.cumsum(self.streams[:, None] == np.arange(len(weights)), axis=0, out=self._counts[1:])

    def before(self, row: int) -> np.ndarray:
        """Returns the number of rows of each stream before row `row` of the run, int64 [streams]."""
        cycles, rest = divmod(row - self.first, len(self.streams))
        return self._used + cycles * self._quota + self._counts[rest]
