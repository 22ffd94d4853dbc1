"""Computes the number of steps of a run whose `config.train.budget` is in FLOPs or time, before the run begins.

The schedule needs this number at the first step, so a trial run, whose parameters are discarded, measures the time of a
step. config.json stores the number, so that a resumed run is bit-identical.
"""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from pretrainax.config import Experiment
from pretrainax.config.budget import RunBudget
from pretrainax.config.validation import validate
from pretrainax.files.errors import counted
from pretrainax.reporting.streams import print_progress
from pretrainax.reporting.units import short_time
from pretrainax.sharding.arrays import put_batch
from pretrainax.training.run import Run

_TIMED_STEPS = 10  # steps whose time is measured
_TRIAL_STEPS = 1000  # steps of the trial run, whose mean FLOPs are computed if rows have different lengths


def resolve_budget(experiment: Experiment, build: Callable[[Experiment], Run]) -> None:
    """Replaces a `train.budget` in FLOPs or time by `train.steps`, and sets the warmup and intervals that follow.

    `evaluate.every` and `checkpoint.every` 0 become a tenth of the steps, and so does the warmup "auto". A time is that
    of the updates, without compilation, validation and checkpoints. All processes must call this function.
    `build` builds a run from a config, as `build_run` does. Raises UserError if one step exceeds the budget.
    """
    text, train, schedule = experiment.train.budget, experiment.train, experiment.schedule
    if text is None:
        return
    budget, trial = RunBudget.parse(text), copy.deepcopy(experiment)
    trial.train.steps, trial.train.budget = _TRIAL_STEPS, None
    run = build(trial)
    cost = _flops_per_step(run) if budget.unit == "flops" else _seconds_per_step(run)
    cost_text = f"{cost:.4g} FLOPs" if budget.unit == "flops" else f"{short_time(cost)}, measured after compilation"
    train.steps, train.budget = budget.steps(cost, text), None
    for section in (experiment.evaluate, experiment.checkpoint):
        section.every = section.every or max(train.steps // 10, 1)
    schedule.warmup_steps = schedule.resolved_warmup(train.steps)
    validate(experiment, files=False)
    if run.is_primary:
        print_progress(f"config.train.budget {text}: {counted(train.steps, 'step')} of {cost_text} each")


def _flops_per_step(run: Run) -> float:
    """Computes the mean FLOPs of an update, whose rows have different lengths in different buckets."""
    if len(run.train_batches.streams[0].lengths) == 1:
        return run.work.flops_per_step
    return float(np.mean([run.work.flops_of(step) for step in range(_TRIAL_STEPS)]))


def _seconds_per_step(run: Run) -> float:
    """Measures the mean seconds of an update, including the time to wait for its batch; equal in all processes.

    The first pass over the batches compiles a program for each length of rows; the second pass is timed.
    """
    state, started = run.fresh_state(), 0.0
    frozen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), run.abstract_frozen)

    def fetch(step: int) -> dict[str, jax.Array]:
        return put_batch(run.train_batches[step % _TIMED_STEPS], run.mesh)

    with ThreadPoolExecutor(1, "batches") as loader:
        fetched = loader.submit(fetch, 0)
        for step in range(2 * _TIMED_STEPS):
            batch, fetched = fetched.result(), loader.submit(fetch, step + 1)
            if step == _TIMED_STEPS:
                jax.block_until_ready(state)
                started = time.perf_counter()
            state, _ = run.step(state, batch, frozen)
        jax.block_until_ready(state)
    seconds = (time.perf_counter() - started) / _TIMED_STEPS
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
