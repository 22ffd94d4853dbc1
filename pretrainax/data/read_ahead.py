"""Prefetches the text of upcoming batches from an object store, in a thread, while earlier batches are made.

The step of a batch determines its text, so the text of the next steps can be read early. One read fetches the text of a
group of steps. Each group has twice as many steps as the previous group, up to MAX_GROUP_STEPS steps and about
MAX_GROUP_BYTES of text. The first batch therefore waits only for its own text, and later groups have many rows, some of
which are close together (`Store.read_ranges`). Memory holds two groups: the group of the current batches, and the next
group.
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
    steps: Sequence[int]
    read: "concurrent.futures.Future[Read]"


class ReadAhead:
    """Reads the text of batches ahead of their steps: `prefetch(step, …)` provides the text of the batch of a step.

    The steps may have a stride, for example in one of several loader workers. The next group has the stride of the last
    two steps. An instance is pickled without its text. Several threads may call `prefetch`; the calls run one at a
    time.
    """

    def __init__(self):
        self._lock, self._last = threading.Lock(), -1
        self._now: Optional[_Group] = None  # the group of the current batches
        self._next: Optional[_Group] = None

    def __reduce__(self):
        return ReadAhead, ()

    def prefetch(self, step: int, stop: int, windows_of: Callable[[int], Windows]) -> None:
        """Waits until `Corpus.held` has the text of the batch of `step`, and starts to read the next group.

        Args:
          stop: the first step that is not prefetched.
          windows_of: returns the windows that the batch of a step reads.
        """
        with self._lock:
            stride, self._last = step - self._last, step
            if self._now is None or step not in self._now.steps:
                is_next = self._next is not None and step in self._next.steps
                self._now = self._next if is_next else _start_group([step], windows_of)
                assert self._now is not None
                first, count = self._now.steps[-1], self._count(self._now)
                stride = stride if 0 < stride <= MAX_GROUP_STEPS else 1
                next_steps = range(first + stride, min(first + stride * count + 1, stop), stride)
                self._next = _start_group(next_steps, windows_of) if next_steps else None
            for corpus, held in self._now.read.result().items():
                corpus.held = held

    def _count(self, group: _Group) -> int:
        """Returns the number of steps for the group after `group`; waits until the text of `group` has been read."""
        size = sum(part.nbytes for held in group.read.result().values() for part in held.values())
        steps = len(group.steps)
        return min(2 * steps, max(MAX_GROUP_BYTES * steps // max(size, 1), 1), MAX_GROUP_STEPS)


def _start_group(steps: Sequence[int], windows_of: Callable[[int], Windows]) -> _Group:
    """Starts a thread that reads the text of the batches of `steps`, and returns their group."""
    future: concurrent.futures.Future[Read] = concurrent.futures.Future()

    def read() -> None:
        try:
            windows: dict[Corpus, list[Window]] = collections.defaultdict(list)
            for step in steps:
                for corpus, window in windows_of(step):
                    windows[corpus].append(window)
            future.set_result({corpus: corpus.read(corpus_windows) for corpus, corpus_windows in windows.items()})
        except BaseException as e:  # raised by the step that needs the text
            future.set_exception(e)

    threading.Thread(target=read, name="read-ahead", daemon=True).start()
    return _Group(steps, future)
