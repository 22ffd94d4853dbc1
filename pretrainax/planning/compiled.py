"""Compiles the real train step of a config for devices that this machine need not have."""

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
    """Device memory in bytes that a compiled step uses on one device, excluding TPU VMEM.

    The compiler reports these numbers. They include the padding that the compiler adds to array layouts.
    """

    arguments: int  # parameters, optimizer moments, batch
    outputs: int  # including metrics
    donated: int  # bytes of arguments whose memory the outputs reuse
    temporaries: int
    code: int  # the compiled program
    peak: Optional[int]  # largest total at any time; None on a GPU, or if the compiler reports no peak

    @property
    def total(self) -> int:
        """Returns the main memory in bytes that one device needs for the step.

        On a TPU, the step needs its peak memory, which is usually less than the sum of all fields: temporaries reuse
        the memory of arguments that are no longer needed. For a small step the peak exceeds the sum, because the peak
        includes VMEM; the result is then the sum. A GPU allocates all temporaries for the whole step, so the result is
        the sum.
        """
        total_bytes = self.arguments + self.outputs - self.donated + self.temporaries + self.code
        return total_bytes if self.peak is None else min(total_bytes, self.peak)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Memory, communication and memory traffic of a compiled train step, per device."""

    fits: bool  # whether needed <= available
    needed: int  # bytes of main memory that the step needs
    available: int  # bytes of main memory that the device has
    memory: Optional[Usage]  # None if compilation failed, for example on a TPU for a step that does not fit
    collectives: list[Collective]  # of one step; [] if compilation failed
    buffers: list[Buffer]  # the largest arrays of the step, largest first; [] if compilation failed
    traffic: Optional[MemoryTraffic]  # bytes read and written in one step; None if compilation failed
    seconds: float  # duration of tracing and compiling
    program: Optional[Program] = dataclasses.field(default=None, repr=False)  # None if compilation failed


def compile_step(experiment: Experiment, topology: Topology) -> Compiled:
    """Compiles the train step of `experiment` for `topology`, with the dtype and attention kernel of its platform.

    Raises:
      UserError: no compiler for the chip is installed, or the batch or the model is not divisible by the mesh.
    """
    return compile_for(experiment, topology.devices(), topology.chip.memory_bytes)


def compile_for(experiment: Experiment, devices: Sequence[jax.Device], available: int) -> Compiled:
    """Compiles the train step of `experiment` for the given devices, each with `available` bytes of memory.

    If the compiler runs out of device memory, the result has `fits=False` and no analyses. Other compiler errors
    propagate.
    """
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
    program = Program(compiled.as_text())
    fits = memory.total <= available
    analyses = collectives_of(program, mesh), buffers_of(program), memory_traffic_of(program)
    return Compiled(fits, memory.total, available, memory, *analyses, seconds, program)


def usage(compiled: jax.stages.Compiled, is_tpu: bool) -> Usage:
    """Returns the compiler's memory analysis of a compiled step.

    Args:
      is_tpu: whether to report peak memory, which the TPU compiler keeps within a limit; if False, `peak` is None.
    """
    analysis = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "donated": "alias", "temporaries": "temp"}
    sizes = {name: getattr(analysis, f"{kind}_size_in_bytes") for name, kind in names.items()}
    peak = getattr(analysis, "peak_memory_in_bytes", None) if is_tpu else None
    return Usage(**sizes, code=analysis.generated_code_size_in_bytes, peak=peak)


def argument_bytes(arguments: PyTree) -> int:
    """Sums the sizes in bytes of one device's shards of all arrays in `arguments`, without the padding to TPU tiles."""
    leaves = jax.tree.leaves(arguments)
    return sum(part_bytes(x, x.sharding) for x in leaves)


def exhausted_bytes(message: str, arguments: int) -> Optional[int]:
    """Parses the compiler's out-of-memory error and returns the bytes that the step needs.

    Returns None for any other error. Some messages contain the total. Other messages contain only the size of the
    temporaries, to which the function adds the size of the arguments.

    Args:
      message: the compiler's error message.
      arguments: size in bytes of the step's arguments.
    """
    match = re.search(r"(Used|HLO temporaries \()\s*([\d.]+)([KMGT]?)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    size = round(float(match[2]) * _UNITS[match[3]])
    return size if match[1] == "Used" else size + arguments
