"""Plans for the devices of this program."""

from typing import Optional

import jax

from pretrainax.config import Experiment
from pretrainax.planning.search import settle_remat
from pretrainax.planning.topologies import Topology
from pretrainax.runtime.chips import chip_of
from pretrainax.training.callbacks import Callback


def topology_here() -> Optional[Topology]:
    """Returns the devices of this program; None where there is no plan for their like."""
    devices = jax.devices()
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return None
    if not chip.is_tpu:
        return Topology(chip, (jax.process_count(), jax.local_device_count()))
    slices = {getattr(device, "slice_index", 0) for device in devices}
    coords = [device.coords for device in devices]
    shape = tuple(max(of_axis) - min(of_axis) + 1 for of_axis in zip(*coords, strict=True))
    return Topology(chip, shape[: chip.torus], len(slices))


class SettledHere(Callback):
    """Sets a `train.remat` of "auto" by what the devices of this program have room for, if a plan knows these."""

    part = "starting"

    def settle(self, experiment: Experiment) -> None:
        if experiment.train.remat == "auto" and (topology := topology_here()) is not None:
            settle_remat(experiment, topology)
