"""The order of things without a table of it: permutations, shares of several streams, random numbers by index.

All are pure functions of a seed and an index, so nothing has to be saved to go on at any row of a run.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

_ROUNDS = 6
_CYCLE = 1 << 12, 1 << 18  # least and most rows in which streams have exactly their shares


def _mix(x: int) -> int:
    """A 64-bit hash (the finaliser of SplitMix64: Steele, Lea and Flood 2014, figure 15)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where `index` goes in a pseudo-random order of range(size), without a table of that order.

    A Feistel network permutes the numbers of as many bits; one that lands outside range(size) is permuted again until
    it is inside, which keeps the whole one-to-one (Black and Rogaway 2002, section 5). `keys` are an even number of
    64-bit integers.
    """
    bits = max(6, (size - 1).bit_length())  # with fewer, some orders come visibly more often than others
    while True:
        low, high = bits // 2, bits - bits // 2
        left, right = index >> high, index & (1 << high) - 1
        for key in keys:
            left, right = right, left ^ _mix(right + key & 0xFFFFFFFFFFFFFFFF) & (1 << low) - 1
            low, high = high, low
        index = left << high | right
        if index < size:
            return index


@functools.lru_cache(maxsize=256)
def epoch_draws(seed: int, stream: int, epoch: int, offsets: int) -> tuple[int, tuple[int, ...]]:
    """Where the first window of an epoch starts, in range(offsets), and the keys of its permutation."""
    rng = np.random.default_rng([seed, 1, epoch, stream])
    return int(rng.integers(offsets)), tuple(rng.integers(2**64, size=_ROUNDS, dtype=np.uint64).tolist())


class Draws:
    """Random numbers by place: `at(stream, index)` is the generator of (seed, stream, index), ready to draw.

    The counter of Philox is set (Salmon et al. 2011), which takes a tenth of the time that a new generator takes. It
    is one object: what it gave before is over when the next is asked for.
    """

    def __init__(self, seed: int):
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state
        self._key, self._counter = self._state["state"]["key"], self._state["state"]["counter"]
        self._key[0] = seed

    def at(self, stream: int, index: int) -> np.random.Generator:
        self._key[1], self._counter[2] = stream, index  # the lower words of the counter count the draws
        self._bits.state = self._state
        return self._generator


class Shares:
    """Which of several streams row i is of, and how many rows of that stream come before it.

    A cycle of rows holds each stream in proportion to its weight, spread evenly; a weight of a stage of the training
    counts from that stage's first row on. A stream with a weight has a row in each cycle, however small it is.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[float]]]):
        """stages: (first row, weight of each stream), the first from row 0 on."""
        self._stages = []
        used = np.zeros(len(stages[0][1]), np.int64)  # rows of each stream before the stage
        for i, (first, weights) in enumerate(stages):
            stage = _Stage(first, np.asarray(weights, float), used)
            self._stages.append(stage)
            if i + 1 < len(stages):
                used = stage.before(stages[i + 1][0])

    def __getitem__(self, row: int) -> tuple[int, int]:
        stage = next(s for s in reversed(self._stages) if row >= s.first)
        stream = int(stage.streams[(row - stage.first) % len(stage.streams)])
        return stream, int(stage.before(row)[stream])


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
        """Rows of each stream before `row`, int64 [streams]."""
        cycles, rest = divmod(row - self.first, len(self.streams))
        return self._used + cycles * self._quota + self._counts[rest]
