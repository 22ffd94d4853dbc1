"""Analyzes the HLO text of a compiled train step: executions, memory traffic, collectives and the largest arrays.

The text comes from `compiled.as_text()` and describes one device after all compiler passes. All counts therefore
describe the compiled program, not the JAX program.

    program = Program(compiled.as_text())
    collectives_of(program, mesh), buffers_of(program), memory_traffic_of(program)
"""

from pretrainax.planning.hlo.buffers import Buffer, buffers_of
from pretrainax.planning.hlo.collectives import collectives_of
from pretrainax.planning.hlo.matrix_products import MatrixProduct, matrix_products_of, runtime_conditionals
from pretrainax.planning.hlo.memory_traffic import MemoryTraffic, memory_traffic_of, traffic_of_kernels
from pretrainax.planning.hlo.products import product_flops
from pretrainax.planning.hlo.program import Program

__all__ = [
    "Buffer",
    "MatrixProduct",
    "MemoryTraffic",
    "Program",
    "buffers_of",
    "collectives_of",
    "matrix_products_of",
    "memory_traffic_of",
    "product_flops",
    "runtime_conditionals",
    "traffic_of_kernels",
]
