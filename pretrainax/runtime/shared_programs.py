"""Shares traced and compiled programs among the runs of one process."""

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Programs(Generic[T]):
    """Programs by key; drops the least recently used ones, so that memory does not grow with the number of runs."""

    def __init__(self, size: int = 16):
        self._size, self._built = size, dict[Hashable, T]()  # from the least to the most recently used

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns the program of a key, which `build` builds if it is missing."""
        built = self._built.pop(key) if key in self._built else build()
        self._built[key] = built
        while len(self._built) > self._size:
            del self._built[next(iter(self._built))]
        return built


_CURRENT: contextvars.ContextVar[Programs] = contextvars.ContextVar("programs")


@contextlib.contextmanager
def sharing(programs: Programs) -> Iterator[None]:
    """Makes `current_programs` return `programs` inside the context."""
    token = _CURRENT.set(programs)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_programs() -> Programs:
    """Returns the programs that the runs in this context share, or new ones."""
    return _CURRENT.get(Programs())
