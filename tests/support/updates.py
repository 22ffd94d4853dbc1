"""Computes three updates of a tiny model, by our training step and by torch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax import models
from pretrainax.config import MeshConfig, TrainConfig
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupConstant
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import train_step
from tests.golden.case import Case, batch, weights

STEPS = 3
LEARNING_RATE = 1e-3
ADAMW = {"b1": 0.9, "b2": 0.95, "epsilon": 1e-6, "weight_decay": 0.1}
CLIP = 1.0


def updated(case: Case, copies: int = 1, accumulate: int = 1, **sizes: int) -> Any:
    """Returns our parameters after three updates of the real training step.

    Args:
      copies: number of copies of the rows in the batch, one after the other.
      accumulate: number of micro-batches of a gradient.
      sizes: axes of the mesh; without sizes: one device.
    """
    mesh = make_mesh(MeshConfig(**{"data": 1} | sizes), jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))])
    config = dataclasses.replace(case.config, dropout_rate=0.0, attention_dropout_rate=0.0)
    model = models.build(config, Compute())
    arrays = {name: np.concatenate([x] * copies) for name, x in batch(case).items()}
    schedule = WarmupConstant(warmup_steps=1).build(LEARNING_RATE, STEPS)
    with jax.set_mesh(mesh):
        params = jax.device_put(weights(config), tree_shardings(mesh, weights(config)))
        optimizer = AdamW(learning_rate=LEARNING_RATE, clip_norm=CLIP, **ADAMW).build(schedule, params)
        state = train_step.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        train = resolve_auto(TrainConfig(steps=STEPS, global_batch_size=3 * copies, accumulate=accumulate))
        step = train_step.make_train_step(model, optimizer, schedule, train, mesh)
        for _ in range(STEPS):
            state, metrics = step(state, put_batch(arrays, mesh))
            assert metrics["finite"]
    return jax.device_get(state.params)


def update_torch(named: Mapping[str, Any], decayed: Mapping[str, bool], loss: Callable[[], Any]) -> None:
    """Updates torch's parameters three times, in place; parameters that are not in `decayed` stay unchanged."""
    import torch

    groups = [[p for n, p in named.items() if decayed.get(n) is d] for d in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["epsilon"],
        weight_decay=ADAMW["weight_decay"],
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_([*groups[0], *groups[1]], CLIP)
        optimizer.step()


def assert_updates_land_at(theirs: Mapping[str, np.ndarray], case: Case, **changes: int) -> None:
    """Asserts that three updates move our parameters to the same values as torch's, by path.

    Args:
      changes: arguments of `updated`: the same rows on another mesh, or in micro-batches.
    """
    start = weights(case.config)
    names = parameter_names(start)
    ours = dict(zip(names, jax.tree.leaves(updated(case, **changes)), strict=True))
    # Three steps change a parameter by up to 3e-3. An epsilon of 1e-6 keeps Adam from amplifying gradients that are
    # only rounding errors.
    chex.assert_trees_all_close(ours, dict(theirs), atol=1e-4, rtol=0)
    moved = [np.abs(theirs[name] - x).max() for name, x in zip(names, jax.tree.leaves(start), strict=True)]
    assert max(moved) > STEPS * LEARNING_RATE / 2
