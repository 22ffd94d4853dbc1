"""Mixes several streams of rows by their weights, as index arithmetic."""

import math
from collections.abc import Sequence

import numpy as np

_CYCLE = 1 << 12, 1 << 18  # least and most rows in which streams have exactly their shares


class MixtureSchedule:
    """Tells which of several streams row i is of, and how many rows of that stream come before it.

    A cycle of rows holds each stream in proportion to its weight, spread evenly; a weight of a stage of the training
    counts from that stage's first row on. A stream with a weight has a row in each cycle, however small it is.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[float]]]):
        """stages: (first row, weight of each stream), the first from row 0 on."""
        self._stages = []
        self._is_alone = len(stages[0][1]) == 1  # the first stream, whose rows are all
        used = np.zeros(len(stages[0][1]), np.int64)  # rows of each stream before the stage
        for i, (first, weights) in enumerate(stages):
            stage = _Stage(first, np.asarray(weights, float), used)
            self._stages.append(stage)
            if i + 1 < len(stages):
                used = stage.before(stages[i + 1][0])

    def __getitem__(self, row: int) -> tuple[int, int]:
        if self._is_alone:
            return 0, row
        stage = self._stage(row)
        stream = int(stage.streams[(row - stage.first) % len(stage.streams)])
        return stream, int(stage.before(row)[stream])

    def before(self, row: int) -> np.ndarray:
        """Counts the rows of each stream before `row`, int64 [streams]."""
        return self._stage(row).before(row)

    def _stage(self, row: int) -> "_Stage":
        return next(stage for stage in reversed(self._stages) if row >= stage.first)


class _Stage:
    def __init__(self, first: int, weights: np.ndarray, used: np.ndarray):
        self.first, self._used = first, used
        positive = np.count_nonzero(weights)
        smallest = weights[weights > 0].min() / weights.sum()
        # 16 rows of the smallest in a cycle, so that rounding to whole rows is small for it too
        cycle = 1 if positive == 1 else min(max(1 << math.ceil(math.log2(16 / smallest)), _CYCLE[0]), _CYCLE[1])
        wanted = weights / weights.sum() * cycle
        self._quota = np.maximum(np.floor(wanted), weights > 0).astype(np.int64)
        for stream in np.argsort(self._quota - wanted, kind="stable")[: max(cycle - self._quota.sum(), 0)]:
            self._quota[stream] += 1  # the largest remainders
        # The n-th of k rows of a stream belongs at (n + 1/2) / k of the cycle.
        places = [(np.arange(k) + 0.5) / k for k in self._quota]
        order = np.argsort(np.concatenate(places), kind="stable")
        self.streams = np.repeat(np.arange(len(weights)), self._quota)[order]
        self._counts = np.zeros((len(order) + 1, len(weights)), np.int32)  # rows of each in the first rows of a cycle
        np.cumsum(self.streams[:, None] == np.arange(len(weights)), axis=0, out=self._counts[1:])

    def before(self, row: int) -> np.ndarray:
        """Counts the rows of each stream before `row`, int64 [streams]."""
        cycles, rest = divmod(row - self.first, len(self.streams))
        return self._used + cycles * self._quota + self._counts[rest]
