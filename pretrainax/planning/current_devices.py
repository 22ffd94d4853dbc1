"""Plans a run for the devices of the current process."""

from typing import Optional

import jax

from pretrainax.config import Experiment
from pretrainax.planning.search import resolve_remat
from pretrainax.planning.topologies import Topology
from pretrainax.runtime.chips import chip_of
from pretrainax.training.callbacks import Callback


def current_topology() -> Optional[Topology]:
    """Returns the topology of the current run's devices, or None if the planner does not support their chip."""
    devices = jax.devices()
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return None
    if not chip.is_tpu:
        return Topology(chip, (jax.process_count(), jax.local_device_count()))
    slices = {getattr(device, "slice_index", 0) for device in devices}
    coords = [device.coords for device in devices]
    shape = tuple(max(positions) - min(positions) + 1 for positions in zip(*coords, strict=True))
    return Topology(chip, shape[: chip.torus], len(slices))


class ResolveRemat(Callback):
    """Callback that replaces `train.remat="auto"` with the fastest policy that fits in the current devices' memory.

    If the planner does not support the devices' chip, the value stays "auto".
    """

    part = "starting"

    def resolve_fields(self, experiment: Experiment) -> None:
        if (topology := current_topology()) is None:
            return
        topology.chip.product_flops(experiment.train.products)  # raises UserError if the chip has no units for them
        if experiment.train.remat == "auto":
            resolve_remat(experiment, topology)
