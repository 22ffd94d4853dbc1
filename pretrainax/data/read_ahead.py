"""Reads the text of batches to come from a store, in a thread, while those before them are made.

Which text a batch has follows from its step, so that of the next steps is known. It is asked for in groups of steps,
each twice as large as the one before it, up to MOST_BYTES: the first batch waits for its own text alone, and later
groups have many rows, of which some lie near each other (`Store.read_ranges`). Two groups are held: that which batches
are made of, and the next one.
"""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Optional, TypeAlias

import numpy as np

from pretrainax.data.corpus import Corpus, Piece, Window

MOST_BYTES = 16 << 20  # of the text of a group
MOST_STEPS = 256  # of a group

Windows: TypeAlias = Iterable[tuple[Corpus, Window]]
Read: TypeAlias = Mapping[Corpus, Mapping[Piece, np.ndarray]]


class _Group(NamedTuple):
    steps: Sequence[int]
    read: "concurrent.futures.Future[Read]"


class ReadAhead:
    """`hold(step, …)` has the text of a batch here. Steps that are asked for may lie some way apart, as those of one
    loader worker of several do: those to come are as far apart as the last two.

    Pickles as one that has read nothing. May be asked by several threads, of which each waits for the others.
    """

    def __init__(self):
        self._lock, self._last = threading.Lock(), -1
        self._now: Optional[_Group] = None  # what batches are made of
        self._next: Optional[_Group] = None

    def __reduce__(self):
        return ReadAhead, ()

    def hold(self, step: int, stop: int, windows_of: Callable[[int], Windows]) -> None:
        """Returns once `Corpus.held` has what a batch reads, while what the next ones do is on its way.

        Args:
          stop: none of this step or later ones is read ahead.
          windows_of: what the batch of a step reads.
        """
        with self._lock:
            apart, self._last = step - self._last, step
            if self._now is None or step not in self._now.steps:
                is_next = self._next is not None and step in self._next.steps
                self._now = self._next if is_next else _begin([step], windows_of)
                assert self._now is not None
                first, count = self._now.steps[-1], self._count(self._now)
                apart = apart if 0 < apart <= MOST_STEPS else 1
                coming = range(first + apart, min(first + apart * count + 1, stop), apart)
                self._next = _begin(coming, windows_of) if coming else None
            for corpus, held in self._now.read.result().items():
                corpus.held = held

    def _count(self, group: _Group) -> int:
        """Returns how many steps the group after another one has."""
        size = sum(part.nbytes for held in group.read.result().values() for part in held.values())
        steps = len(group.steps)
        return min(2 * steps, max(MOST_BYTES * steps // max(size, 1), 1), MOST_STEPS)


def _begin(steps: Sequence[int], windows_of: Callable[[int], Windows]) -> _Group:
    """Begins to read the text of some steps."""
    found: concurrent.futures.Future[Read] = concurrent.futures.Future()

    def read() -> None:
        try:
            windows: dict[Corpus, list[Window]] = collections.defaultdict(list)
            for step in steps:
                for corpus, window in windows_of(step):
                    windows[corpus].append(window)
            found.set_result({corpus: corpus.read(asked) for corpus, asked in windows.items()})
        except BaseException as e:  # of the step that needs it
            found.set_exception(e)

    threading.Thread(target=read, name="read-ahead", daemon=True).start()
    return _Group(steps, found)
