"""Compiled HLO text: how often each instruction runs, what a step moves through memory, what devices send each other,
which buffers are large.

The text is that of `compiled.as_text()`, after all passes and as one device runs it, so that what is counted is what
was made of the program, not what was asked for.

    program = Program(compiled.as_text())
    collectives_of(program, mesh), buffers_of(program), memory_traffic_of(program)
"""

from pretrainax.planning.hlo.buffers import Buffer, buffers_of
from pretrainax.planning.hlo.collectives import collectives_of
from pretrainax.planning.hlo.memory_traffic import MemoryTraffic, memory_traffic_of, traffic_of_kernels
from pretrainax.planning.hlo.products import product_flops
from pretrainax.planning.hlo.program import Program

__all__ = [
    "Buffer",
    "MemoryTraffic",
    "Program",
    "buffers_of",
    "collectives_of",
    "memory_traffic_of",
    "product_flops",
    "traffic_of_kernels",
]
