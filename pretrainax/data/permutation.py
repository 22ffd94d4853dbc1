"""Permutes the rows of an epoch without storing the permutation."""

import functools

import numpy as np

_ROUNDS = 6  # of the Feistel network


def _mix(x: int) -> int:
    """Returns a 64-bit hash of an integer (the finalizer of SplitMix64: Steele, Lea and Flood 2014, figure 15)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Returns the position of `index` in a pseudo-random order of range(size), without storing the order.

    A Feistel network permutes all numbers with as many bits as `size` needs (at least 6). A result outside range(size)
    is permuted again until it is inside, so the mapping stays one-to-one (Black and Rogaway 2002, section 5). `keys`
    has an even number of 64-bit integers.
    """
    bits = max(6, (size - 1).bit_length())  # with fewer bits, some orders are noticeably more frequent
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
    """Draws an epoch's first window offset, in range(offsets), and the keys of its permutation."""
    rng = np.random.default_rng([seed, 1, epoch, stream])
    return int(rng.integers(offsets)), tuple(rng.integers(2**64, size=_ROUNDS, dtype=np.uint64).tolist())
