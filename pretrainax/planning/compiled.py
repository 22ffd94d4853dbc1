"""The real train step of a config, compiled for devices that are not there."""

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Optional

import jax

from pretrainax.config import Experiment
from pretrainax.interop.run_start import TrainedStart
from pretrainax.planning.hlo import Buffer, MemoryTraffic, Program, buffers_of, collectives_of, memory_traffic_of
from pretrainax.planning.memory import part_bytes
from pretrainax.planning.shapes import batch_shapes
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.sharding.arrays import batch_sharding
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import PyTree
from pretrainax.training.run import build_steps

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes of a device's main memory, as the compiler laid it out; a TPU's VMEM is not in it."""

    arguments: int  # parameters, moments, batch
    outputs: int  # metrics too
    donated: int  # of the arguments, what outputs take the place of
    temporaries: int
    code: int
    peak: Optional[int]  # at the worst moment, all in all; None where the compiler does not say

    @property
    def total(self) -> int:
        """Returns the bytes that the device has to have.

        The compiler of a TPU refuses what it finds to be too much at the worst moment, which is less than the sum of
        all parts: temporaries take the place of arguments that are done with. (Of a small step it is more: VMEM counts
        in it.) A GPU holds all temporaries from the first to the last: there it is the sum.
        """
        parts = self.arguments + self.outputs - self.donated + self.temporaries + self.code
        return parts if self.peak is None else min(parts, self.peak)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step by its compiler, for each device."""

    fits: bool
    needed: int  # bytes of main memory
    available: int
    memory: Optional[Usage]  # None where the compiler gave up, as that of a TPU does on a step that does not fit
    collectives: list[Collective]  # of one step; empty where it gave up
    buffers: list[Buffer]  # the largest first
    moved: Optional[MemoryTraffic]  # through main memory in one step; None where it gave up
    seconds: float  # it took to trace and to compile


def compile_step(experiment: Experiment, topology: Topology) -> Compiled:
    """Compiles the step that `experiment` would run on `topology`, in its dtype and with its attention kernel.

    Raises:
      UserError: no compiler for the chip is installed, or the config does not suit so many devices.
    """
    return compile_for(experiment, topology.devices(), topology.chip.memory_bytes)


def compile_for(experiment: Experiment, devices: Sequence[jax.Device], available: int) -> Compiled:
    """Compiles the step for any devices, of `available` bytes each."""
    start = time.perf_counter()
    mesh = make_mesh(experiment.mesh, devices)
    with jax.set_mesh(mesh):
        shapes = batch_shapes(experiment)
        steps = build_steps(experiment, shapes, mesh, make_model=TrainedStart().model)
        batch = {name: x.update(sharding=batch_sharding(mesh, x.shape)) for name, x in shapes.items()}
        lowered = steps.step.lower(steps.abstract_state, batch, steps.abstract_frozen)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            needed = exhausted_bytes(str(e), argument_bytes((steps.abstract_state, batch, steps.abstract_frozen)))
            if needed is None:
                raise
            return Compiled(False, needed, available, None, [], [], None, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    memory = usage(compiled, devices[0].platform == "tpu")
    hlo = Program(compiled.as_text())
    fits = memory.total <= available
    read = collectives_of(hlo, mesh), buffers_of(hlo), memory_traffic_of(hlo)
    return Compiled(fits, memory.total, available, memory, *read, seconds)


def usage(compiled: jax.stages.Compiled, is_tpu: bool) -> Usage:
    """Reads what the compiler says about memory; the peak only of a TPU, whose compiler means it as a limit."""
    found = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "donated": "alias", "temporaries": "temp"}
    sizes = {name: getattr(found, f"{kind}_size_in_bytes") for name, kind in names.items()}
    peak = getattr(found, "peak_memory_in_bytes", None) if is_tpu else None
    return Usage(**sizes, code=found.generated_code_size_in_bytes, peak=peak)


def argument_bytes(arguments: PyTree) -> int:
    """Counts the bytes of a device's shards of sharded arrays; without the padding of a TPU's tiles."""
    leaves = jax.tree.leaves(arguments)
    return sum(part_bytes(x, x.sharding) for x in leaves)


def exhausted_bytes(message: str, arguments: int) -> Optional[int]:
    """Reads the bytes that a step needs from the compiler's error; None where it is another error.

    It names either all that is used, or the temporaries alone, which stand beside the arguments.
    """
    found = re.search(r"(Used|HLO temporaries \()\s*([\d.]+)([KMGT]?)", message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        return None
    size = round(float(found[2]) * _UNITS[found[3]])
    return size if found[1] == "Used" else size + arguments
