"""Assigns the kernels in a profiler trace to modules of the model and to kinds, by the rules that a plan uses.

A plan (an estimate made before the run) counts the bytes and FLOPs of each kernel of a compiled step (`planning.hlo`).
A trace contains the compiled program of the step. The times measured in the trace and the times expected by the plan
therefore describe the same kernels, with the same names.
"""

import collections
import dataclasses
from typing import Optional

from pretrainax.planning.hlo import Program, product_flops, traffic_of_kernels
from pretrainax.planning.roofline import ATTAINABLE
from pretrainax.profiling.trace import ProgramId, Trace
from pretrainax.runtime.chips import Chip

_PROGRAM = "jit_step"  # name of the compiled train step (training.train_step)
UNKNOWN = "unknown"  # kind of a kernel whose program is not in the trace, or is not the step


@dataclasses.dataclass(frozen=True)
class Work:
    """The total time of the kernels of one module and kind, per step and device."""

    module: str  # "decoder/blocks/mlp/up"; for programs other than the step, the name of the program
    kind: str  # one of `planning.hlo.memory_traffic.KINDS`, or UNKNOWN
    seconds: float  # measured seconds
    in_products: float  # measured seconds of those kernels that compute matrix multiplications
    expected: Optional[float]  # seconds at the chip's rates; None without a chip, or if a kernel has no expected time


def step_program(trace: Trace) -> Optional[ProgramId]:
    """Returns the id of the compiled train step, or None if the trace does not contain its program.

    A run with several sequence lengths compiles the step once per length. In this case, the result is the program that
    takes the most time.
    """
    seconds: dict[ProgramId, float] = collections.defaultdict(float)
    for op, op_seconds in trace.busy.items():
        if op.program is not None and op.program in trace.programs and op.program.name == _PROGRAM:
            seconds[op.program] += op_seconds
    return max(seconds, key=lambda program: seconds[program], default=None)


def kernel_work(trace: Trace, chip: Optional[Chip] = None) -> list[Work]:
    """Computes the measured and expected step time by module and kind, sorted by measured time, longest first.

    Args:
      chip: the devices' chip. If None, the expected times are omitted.
    """
    step = step_program(trace)
    kernels = {} if step is None else _work_by_kernel(trace.programs[step], chip)
    groups: dict[tuple[str, str], list[Work]] = collections.defaultdict(list)
    for op, op_seconds in trace.busy.items():
        work = Work("", UNKNOWN, op_seconds, 0.0, None)
        if op.program == step and (kernel := kernels.get(op.name)):
            in_products = op_seconds if kernel.in_products else 0.0
            work = dataclasses.replace(kernel, seconds=op_seconds, in_products=in_products)
        elif op.program is not None and op.program != step:
            work = dataclasses.replace(work, module=op.program.name)
        groups[work.module, work.kind].append(work)
    return sorted(map(_sum_work, groups.values()), key=lambda work: -work.seconds)


def _sum_work(works: list[Work]) -> Work:
    """Sums the times of several kernels of the same module and kind; `expected` is None if any of them is None."""
    expected = [work.expected for work in works]
    return dataclasses.replace(
        works[0],
        seconds=sum(work.seconds for work in works),
        in_products=sum(work.in_products for work in works),
        expected=None if None in expected else sum(filter(None, expected)),
    )


def _work_by_kernel(program: Program, chip: Optional[Chip]) -> dict[str, Work]:
    """Returns the module, the kind and the expected seconds of each kernel of a step, by kernel name.

    The field `seconds` is set to 1 as a placeholder. The expected time covers all executions of the kernel in a step.
    It is the time to move the kernel's bytes at the chip's full memory rate or the time of its matmuls at the fraction
    of the peak FLOP/s that the plan assumes, whichever is longer. Kernels with unknown FLOPs have no expected time, and
    neither have collectives, which are limited by the links.
    """
    work_by_kernel = {}
    for traffic in traffic_of_kernels(program):
        computation, instruction, merged = traffic.kernel
        (main_part, *_), runs, expected = traffic.parts, program.runs[computation], None
        if chip is not None and main_part.kind != "collectives":
            flops = product_flops(program, computation, merged, chip.speedup)
            if flops is not None:
                rate = ATTAINABLE[chip.platform] * chip.peak_flops
                expected = runs * max(traffic.bytes / chip.memory_rate, flops / rate)
        work_by_kernel[instruction.name] = Work(
            main_part.module, main_part.kind, 1.0, float(main_part.multiplies), expected
        )
    return work_by_kernel
