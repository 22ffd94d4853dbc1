"""How often the steps of a run are traced: each trace is a compilation, which for a large model takes minutes."""

import chex
import jax

from pretrainax.training import train_step


class _LimitedJax:
    """`jax`, whose `jit` refuses to trace a function more than `limit` times."""

    def __init__(self, limit: int):
        self._limit = limit

    def __getattr__(self, name):
        return getattr(jax, name)

    def jit(self, function, **options):
        return jax.jit(chex.assert_max_traces(function, n=self._limit), **options)


def limit_traces(monkeypatch, limit: int = 1) -> None:
    """Lets each function that `train_step` jits be traced `limit` times from now on, in all runs of a test together."""
    chex.clear_trace_counter()
    monkeypatch.setattr(train_step, "jax", _LimitedJax(limit))
