"""Saves and restores a small state."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pretrainax.checkpoints.checkpoints import Checkpoints


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState


def make_state(step: int, devices: int = 8, width: int = 8) -> State:
    """Returns random parameters, sharded over `devices`, with random moments of AdamW; the values depend on `step`."""
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    rng = np.random.default_rng(step)
    params = {
        "blocks": {"kernel": jax.device_put(rng.standard_normal((16, width), np.float32), split)},
        "scale": jax.device_put(rng.standard_normal(3, np.float32), whole),
    }
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    moments = [
        rng.standard_normal(x.shape, np.float32) if x.ndim else np.int32(step) for x in jax.tree.leaves(opt_state)
    ]
    shardings = [split if x.ndim == 2 else whole for x in jax.tree.leaves(opt_state)]
    opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), jax.device_put(moments, shardings))
    return State(step=jax.device_put(jnp.int32(step), whole), params=params, opt_state=opt_state)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save_all(directory, steps, keep=10, losses=None, **options):
    checkpoints = Checkpoints(str(directory), keep=keep, **options)
    for step in steps:
        metrics = {"loss": losses[step]} if losses else None
        checkpoints.save(step, make_state(step), {"note": f"from {step}"}, metrics)
    checkpoints.close()


def restore(directory, devices=8):
    checkpoints = Checkpoints(str(directory), keep=10)
    restored = checkpoints.restore_newest(abstract(make_state(0, devices)))
    checkpoints.close()
    return restored, checkpoints.warnings
