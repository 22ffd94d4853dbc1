"""Lists the matrix multiplications of a compiled step with their operand types, sizes and FLOPs."""

import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

from pretrainax.planning.hlo.instructions import Instruction, Shape
from pretrainax.planning.hlo.kernels import ATTENTION, multiplies
from pretrainax.planning.hlo.modules import Modules
from pretrainax.planning.hlo.products import product_flops
from pretrainax.planning.hlo.program import Program

_FLOAT = re.compile(r"b?f\d")  # dtypes such as f32, bf16 and f8e4m3fn
_RECOMPUTED = "rematted_computation"  # component of the op_name of recomputed instructions


class MatrixProduct(NamedTuple):
    """One matrix multiplication of a compiled step, or one fused attention kernel.

    The sizes follow from the FLOPs and the elements of operands and result, so array axes that the product treats alike
    count as one: rows × contracted times contracted × columns, apart from batch axes. They are 0 for unknown FLOPs.
    """

    module: str  # path of the module of the model, such as "decoder/blocks/mlp/up"
    dtypes: tuple[str, ...]  # of the two operands; of a fused attention kernel its first float operand
    times: float  # executions per step
    flops: Optional[float]  # of all executions; None if the HLO text does not determine the FLOPs
    rows: int
    columns: int
    contracted: int
    is_recomputed: bool  # whether rematerialization computes the product again
    is_attention: bool  # products of queries and keys, and of attention weights and values
    is_fused_attention: bool  # kernels that keep the attention weights out of main memory

    def is_aligned(self, multiple: int) -> bool:
        """Checks whether rows, columns and contracted length are multiples of `multiple`."""
        return not any(size % multiple for size in (self.rows, self.columns, self.contracted))

    def __str__(self) -> str:
        return f"{self.module or '(no name)'}: {self.rows:,} × {self.contracted:,} × {self.columns:,}"


def matrix_products_of(program: Program) -> list[MatrixProduct]:
    """Returns all matrix multiplications that a step executes, inside and outside fusions, in program order."""
    return list(_products(program))


def runtime_conditionals(program: Program) -> float:
    """Counts the conditionals that a step executes, whose branch depends on values at run time."""
    return sum(
        times * sum(x.opcode == "conditional" for x in program.computations[name].values())
        for name, times in program.runs.items()
    )


def _products(program: Program) -> Iterator[MatrixProduct]:
    modules = Modules(program)
    for name, times in program.runs.items():
        for instruction in program.computations[name].values():
            if instruction.opcode not in ("dot", "convolution", "custom-call"):
                continue
            module = modules.module_path(name, instruction.name)
            is_attention = module.split("/")[-1].endswith("attention")
            is_kernel = instruction.opcode == "custom-call" and _is_attention_kernel(
                program, name, instruction, is_attention
            )
            if is_kernel or multiplies(instruction, {instruction.opcode}):
                yield _product(program, name, instruction, times, (module, is_attention or is_kernel, is_kernel))


def _product(
    program: Program, computation: str, instruction: Instruction, times: float, place: tuple[str, bool, bool]
) -> MatrixProduct:
    """Describes one matrix multiplication; `place` is (module, is_attention, is_fused_attention)."""
    module, is_attention, is_kernel = place
    operands = _operands(program, computation, instruction)
    flops = None if is_kernel else product_flops(program, computation, instruction)
    rows = columns = contracted = 0
    if flops:
        multiply_adds = round(flops / 2)
        columns, rows = (multiply_adds // shape.elements for shape in operands[:2])
        contracted = multiply_adds // instruction.shapes[0].elements
    floats = [shape.dtype for shape in operands if _FLOAT.match(shape.dtype)]
    return MatrixProduct(
        module=module,
        dtypes=tuple(floats[:1]) if is_kernel else tuple(shape.dtype for shape in operands[:2]),
        times=times,
        flops=None if flops is None else flops * times,
        rows=rows,
        columns=columns,
        contracted=contracted,
        is_recomputed=_RECOMPUTED in instruction.op_name,
        is_attention=is_attention,
        is_fused_attention=is_kernel,
    )


def _operands(program: Program, computation: str, instruction: Instruction) -> list[Shape]:
    values = program.computations[computation]
    return [shape for name in instruction.operands if name in values for shape in values[name].shapes]


def _is_attention_kernel(program: Program, computation: str, call: Instruction, in_attention: bool) -> bool:
    """Checks whether a custom call computes attention: by its name, or by its module and its operands.

    A kernel of the module of attention reads queries, keys and values: at least three float arrays of three or more
    axes. Other calls in this module, such as the generator of dropout, do not.
    """
    if ATTENTION.search(f"{call.target} {call.name}"):
        return True
    arrays = [
        shape for shape in _operands(program, computation, call) if _FLOAT.match(shape.dtype) and len(shape.dims) >= 3
    ]
    return in_attention and len(arrays) >= 3
