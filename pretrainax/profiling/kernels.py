"""Finds the module of the model and the kind of each kernel in a profiler trace, with the rules of a plan.

A plan counts the bytes and FLOPs of each kernel of a compiled step (`planning.hlo`). A trace contains the program of
the compiled step. Measured times (from the trace) and expected times (from the plan) are therefore of the same kernels,
with the same names.
"""

import collections
import dataclasses
from typing import Optional

from pretrainax.planning.hlo import Program, product_flops, traffic_of_kernels
from pretrainax.planning.roofline import ATTAINABLE
from pretrainax.profiling.trace import ProgramId, Trace
from pretrainax.runtime.chips import Chip

_PROGRAM = "jit_step"  # name of the program of an update (training.train_step)
UNKNOWN = "unknown"  # kind of a kernel whose program is not in the trace, or is not the step


@dataclasses.dataclass(frozen=True)
class Work:
    """The time of all kernels of one module and kind, per step and device."""

    module: str  # "decoder/blocks/mlp/up"; for programs other than the step, the name of the program
    kind: str  # one of `planning.hlo.memory_traffic.KINDS`, or UNKNOWN
    seconds: float  # measured time
    in_products: float  # the part of `seconds` in kernels with matrix products
    expected: Optional[float]  # seconds at the chip's rates; None without a chip, or if a kernel has no expected time


def step_program(trace: Trace) -> Optional[ProgramId]:
    """Returns the id of the program of the train step; None if the trace does not contain this program.

    A run with several row lengths has several programs of the step. The function returns the program with the most
    time.
    """
    seconds: dict[ProgramId, float] = collections.defaultdict(float)
    for op, spent in trace.busy.items():
        if op.program is not None and op.program in trace.programs and op.program.name == _PROGRAM:
            seconds[op.program] += spent
    return max(seconds, key=lambda called: seconds[called], default=None)


def kernel_work(trace: Trace, chip: Optional[Chip] = None) -> list[Work]:
    """Returns the measured and expected step time by module and kind, sorted by measured time, longest first.

    Args:
      chip: the chip of the devices; None leaves out the expected times.
    """
    step = step_program(trace)
    kernels = {} if step is None else _kernels(trace.programs[step], chip)
    parts: dict[tuple[str, str], list[Work]] = collections.defaultdict(list)
    for op, spent in trace.busy.items():
        work = Work("", UNKNOWN, spent, 0.0, None)
        if op.program == step and (kernel := kernels.get(op.name)):
            in_products = spent if kernel.in_products else 0.0
            work = dataclasses.replace(kernel, seconds=spent, in_products=in_products)
        elif op.program is not None and op.program != step:
            work = dataclasses.replace(work, module=op.program.name)
        parts[work.module, work.kind].append(work)
    return sorted(map(_joined, parts.values()), key=lambda work: -work.seconds)


def _joined(parts: list[Work]) -> Work:
    expected = [part.expected for part in parts]
    return dataclasses.replace(
        parts[0],
        seconds=sum(part.seconds for part in parts),
        in_products=sum(part.in_products for part in parts),
        expected=None if None in expected else sum(filter(None, expected)),
    )


def _kernels(program: Program, chip: Optional[Chip]) -> dict[str, Work]:
    """Returns the module, the kind and the expected seconds of each kernel of a step, {name of the kernel: Work}.

    `seconds` of the results is a placeholder, 1. The expected time of all runs of a kernel is the longer of two times:
    the time of its bytes at the chip's full memory rate, and the time of its products at the plan's share of the peak.
    Kernels with unknown FLOPs, and collectives, which the links limit, have no expected time.
    """
    work_by_kernel = {}
    for one in traffic_of_kernels(program):
        computation, made, whole = one.kernel
        (main_part, *_), runs, expected = one.parts, program.runs[computation], None
        flops = product_flops(program, computation, whole)
        if chip is not None and flops is not None and main_part.kind != "collectives":
            expected = runs * max(one.bytes / chip.memory_rate, flops / (ATTAINABLE[chip.platform] * chip.peak_flops))
        work_by_kernel[made.name] = Work(main_part.module, main_part.kind, 1.0, float(main_part.multiplies), expected)
    return work_by_kernel
