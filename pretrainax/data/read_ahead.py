"""Prefetches the text of upcoming batches from an object store, in a thread, while earlier batches are built.

Which text a batch needs depends only on its step, so the text of the next steps can be read early. A single call to the
store reads the text of a group of steps. Each group has twice as many steps as the previous group, up to
MAX_GROUP_STEPS steps and about MAX_GROUP_BYTES of text. The first batch therefore waits only for its own text. Later
groups have many rows, and those that lie close together are read as one range (`Store.read_ranges`). Two groups are
held in memory: the current one and the next.
"""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Optional, TypeAlias

import numpy as np

from pretrainax.data.corpus import Corpus, Piece, Window

MAX_GROUP_BYTES = 16 << 20  # bytes of text in a group
MAX_GROUP_STEPS = 256  # steps in a group
Windows: TypeAlias = Iterable[tuple[Corpus, Window]]
Read: TypeAlias = Mapping[Corpus, Mapping[Piece, np.ndarray]]


class _Group(NamedTuple):
    """A group of steps, and a future for the text of their batches, which a thread reads."""

    steps: Sequence[int]
    read: "concurrent.futures.Future[Read]"


class ReadAhead:
    """Reads the text of batches ahead of time: `prefetch(step, …)` makes the text of a step's batch available.

    Steps may be strided, for example in one of several loader workers; the next group uses the stride between the last
    two steps. An instance is pickled without its text. Several threads may call `prefetch`; the calls run one at a
    time.
    """

    def __init__(self):
        self._lock, self._last_step = threading.Lock(), -1
        self._current: Optional[_Group] = None  # the group of the current batches
        self._next: Optional[_Group] = None

    def __reduce__(self):
        return ReadAhead, ()

    def prefetch(self, step: int, stop: int, windows_of: Callable[[int], Windows]) -> None:
        """Waits until `Corpus.prefetched` has the text of a step's batch, and starts reading the next group.

        Args:
          stop: the step at which to stop prefetching (exclusive).
          windows_of: returns the windows that a step's batch reads.
        """
        with self._lock:
            stride, self._last_step = step - self._last_step, step
            if self._current is None or step not in self._current.steps:
                is_next = self._next is not None and step in self._next.steps
                self._current = self._next if is_next else _start_group([step], windows_of)
                assert self._current is not None
                first, count = self._current.steps[-1], self._next_group_size(self._current)
                stride = stride if 0 < stride <= MAX_GROUP_STEPS else 1
                next_steps = range(first + stride, min(first + stride * count + 1, stop), stride)
                self._next = _start_group(next_steps, windows_of) if next_steps else None
            for corpus, tokens_by_piece in self._current.read.result().items():
                corpus.prefetched = tokens_by_piece

    def _next_group_size(self, group: _Group) -> int:
        """Returns the number of steps in the group after `group`; waits until the text of `group` has been read."""
        size = sum(
            tokens.nbytes for tokens_by_piece in group.read.result().values() for tokens in tokens_by_piece.values()
        )
        steps = len(group.steps)
        return min(2 * steps, max(MAX_GROUP_BYTES * steps // max(size, 1), 1), MAX_GROUP_STEPS)


def _start_group(steps: Sequence[int], windows_of: Callable[[int], Windows]) -> _Group:
    """Starts reading the text of the batches of `steps` in a thread, and returns their group."""
    future: concurrent.futures.Future[Read] = concurrent.futures.Future()

    def read() -> None:
        try:
            windows: dict[Corpus, list[Window]] = collections.defaultdict(list)
            for step in steps:
                for corpus, window in windows_of(step):
                    windows[corpus].append(window)
            future.set_result({corpus: corpus.read(corpus_windows) for corpus, corpus_windows in windows.items()})
        except BaseException as e:  # `prefetch` raises it in the step that needs the text
            future.set_exception(e)

    threading.Thread(target=read, name="read-ahead", daemon=True).start()
    return _Group(steps, future)
