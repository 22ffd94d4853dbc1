"""Assigns the rows of a run to streams in proportion to their weights, by index arithmetic."""

import math
from collections.abc import Sequence

import numpy as np

_CYCLE_ROWS = 1 << 12, 1 << 18  # minimum and maximum number of rows per cycle


class MixtureSchedule:
    """Maps row i of a run to its stream, and to the number of rows that this stream has supplied before.

    Rows are assigned in cycles. In each cycle, a stream gets a number of rows in proportion to its weight, evenly
    spread. A stream with a positive weight has at least one row per cycle. The weights of a training stage apply from
    the first row of the stage.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[float]]]):
        """Computes the cycle of each stage.

        stages: (first row, weight of each stream) for each stage; the first stage starts at row 0.
        """
        self._stages = []
        self._has_one_stream = len(stages[0][1]) == 1  # a single stream has all rows
        rows_before = np.zeros(len(stages[0][1]), np.int64)  # rows of each stream before the stage
        for i, (first, weights) in enumerate(stages):
            stage = _Stage(first, np.asarray(weights, float), rows_before)
            self._stages.append(stage)
            if i + 1 < len(stages):
                rows_before = stage.before(stages[i + 1][0])

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Returns the index of a row's stream, and the number of earlier rows from this stream."""
        if self._has_one_stream:
            return 0, row
        stage = self._stage(row)
        stream = int(stage.streams[(row - stage.first) % len(stage.streams)])
        return stream, int(stage.before(row)[stream])

    def before(self, row: int) -> np.ndarray:
        """Returns how many rows each stream has before row `row` of the run, int64 [streams]."""
        return self._stage(row).before(row)

    def _stage(self, row: int) -> "_Stage":
        """Returns the stage that contains row `row` of the run."""
        return next(stage for stage in reversed(self._stages) if row >= stage.first)


class _Stage:
    """One training stage, with the cycle in which its weights assign rows to streams."""

    def __init__(self, first: int, weights: np.ndarray, rows_before: np.ndarray):
        self.first, self._rows_before = first, rows_before
        num_positive = np.count_nonzero(weights)
        smallest_weight = weights[weights > 0].min() / weights.sum()
        # The smallest weight gets about 16 rows per cycle, so that rounding to whole rows causes only small errors.
        cycle = (
            1
            if num_positive == 1
            else min(max(1 << math.ceil(math.log2(16 / smallest_weight)), _CYCLE_ROWS[0]), _CYCLE_ROWS[1])
        )
        exact_quota = weights / weights.sum() * cycle
        self._quota = np.maximum(np.floor(exact_quota), weights > 0).astype(np.int64)
        for stream in np.argsort(self._quota - exact_quota, kind="stable")[: max(cycle - self._quota.sum(), 0)]:
            self._quota[stream] += 1  # largest remainders
        # The n-th of k rows of a stream is at (n + 1/2) / k of the cycle.
        fractions = [(np.arange(k) + 0.5) / k for k in self._quota]
        order = np.argsort(np.concatenate(fractions), kind="stable")
        self.streams = np.repeat(np.arange(len(weights)), self._quota)[order]
        self._counts = np.zeros((len(order) + 1, len(weights)), np.int32)  # rows of each stream before each row
        np.cumsum(self.streams[:, None] == np.arange(len(weights)), axis=0, out=self._counts[1:])

    def before(self, row: int) -> np.ndarray:
        """Returns how many rows each stream has before row `row` of the run, int64 [streams]."""
        cycles, position = divmod(row - self.first, len(self.streams))
        return self._rows_before + cycles * self._quota + self._counts[position]
