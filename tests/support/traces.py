"""Limits the number of traces of a step: each trace is a compilation, which takes minutes for a large model."""

import chex
import jax

from pretrainax.training import train_step


class _LimitedJax:
    """A replacement of `jax` whose `jit` raises if a function is traced more than `limit` times."""

    def __init__(self, limit: int):
        self._limit = limit

    def __getattr__(self, name):
        return getattr(jax, name)

    def jit(self, function, **options):
        return jax.jit(chex.assert_max_traces(function, n=self._limit), **options)


def limit_traces(monkeypatch, limit: int = 1) -> None:
    """Limits the traces of each function that `train_step` jits to `limit`, over all further runs of a test."""
    chex.clear_trace_counter()
    monkeypatch.setattr(train_step, "jax", _LimitedJax(limit))
