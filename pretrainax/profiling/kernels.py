"""Says what each kernel of a trace is for: the module of the model and the kind that a plan gives it.

A plan counts what a compiled step moves and multiplies, kernel by kernel (`planning.hlo`). A trace has that step with
it, so what is measured and what is expected are of the same kernels, by the same names.
"""

import collections
import dataclasses
from typing import Optional

from pretrainax.planning.hlo import Program, product_flops, traffic_of_kernels
from pretrainax.planning.roofline import ATTAINABLE
from pretrainax.profiling.trace import Called, Trace
from pretrainax.runtime.chips import Chip

_PROGRAM = "jit_step"  # that of an update (training.train_step)
UNKNOWN = "not said"  # kind of what is no kernel of a program that is there


@dataclasses.dataclass(frozen=True)
class Work:
    """All runs of the kernels of one module and kind in a step of one device."""

    module: str  # "decoder/blocks/mlp/up"; of other programs than the step their names
    kind: str  # one of `planning.hlo.memory_traffic.KINDS`, or UNKNOWN
    seconds: float
    in_products: float  # those of them in kernels that multiply matrices, as a plan sees it
    expected: Optional[float]  # seconds by the chip's rates; None: no chip, or nothing says how long it should take


def step_program(trace: Trace) -> Optional[Called]:
    """Returns the program of the step, of several (as there are of rows of several lengths) that with most of the time;
    None where none is known."""
    seconds: dict[Called, float] = collections.defaultdict(float)
    for op, spent in trace.busy.items():
        if op.program is not None and op.program in trace.programs and op.program.name == _PROGRAM:
            seconds[op.program] += spent
    return max(seconds, key=lambda called: seconds[called], default=None)


def work_of(trace: Trace, chip: Optional[Chip] = None) -> list[Work]:
    """Returns what a step does, the longest first; chip: that it ran on, for what is expected."""
    step = step_program(trace)
    kernels = {} if step is None else _kernels(trace.programs[step], chip)
    found: dict[tuple[str, str], list[Work]] = collections.defaultdict(list)
    for op, spent in trace.busy.items():
        work = Work("", UNKNOWN, spent, 0.0, None)
        if op.program == step and (kernel := kernels.get(op.name)):
            in_products = spent if kernel.in_products else 0.0
            work = dataclasses.replace(kernel, seconds=spent, in_products=in_products)
        elif op.program is not None and op.program != step:
            work = dataclasses.replace(work, module=op.program.name)
        found[work.module, work.kind].append(work)
    return sorted(map(_joined, found.values()), key=lambda work: -work.seconds)


def _joined(parts: list[Work]) -> Work:
    expected = [part.expected for part in parts]
    return dataclasses.replace(
        parts[0],
        seconds=sum(part.seconds for part in parts),
        in_products=sum(part.in_products for part in parts),
        expected=None if None in expected else sum(filter(None, expected)),
    )


def _kernels(program: Program, chip: Optional[Chip]) -> dict[str, Work]:
    """Returns what each kernel of a step is for, and the seconds that all its runs take at least: of what it moves at
    the chip's full rate, of its products at the share of the peak that a plan counts on. What it took is 1, not known.

    Of collectives, which links limit, and of kernels that do not say what they multiply, nothing is expected here.
    """
    found = {}
    for one in traffic_of_kernels(program):
        computation, made, whole = one.kernel
        (what, *_), runs, least = one.parts, program.runs[computation], None
        flops = product_flops(program, computation, whole)
        if chip is not None and flops is not None and what.kind != "collectives":
            least = runs * max(one.bytes / chip.memory_rate, flops / (ATTAINABLE[chip.platform] * chip.peak_flops))
        found[made.name] = Work(what.module, what.kind, 1.0, float(what.multiplies), least)
    return found
