"""Counts the FLOPs of matrix multiplications in compiled HLO: two FLOPs per multiply-add.

A matrix multiplication is a `dot`, a `convolution` (to which the TPU compiler converts matmuls), or a call to cuBLAS or
oneDNN, whose configuration in the HLO text names the contracting axes. The FLOPs of attention kernels cannot be
determined from the HLO text.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Optional

import numpy as np

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.kernels import ATTENTION, fused_by, multiplies, opcodes_of
from pretrainax.planning.hlo.program import Program

_Dims = tuple[int, ...]


def product_flops(
    program: Program, computation: str, made: Instruction, speedup: Callable[[str], float] = lambda dtype: 1.0
) -> Optional[float]:
    """Computes the FLOPs of the matrix multiplications in one execution of a kernel.

    Returns 0 for a kernel without matrix multiplications, and None if the HLO text does not determine the FLOPs.

    Args:
      speedup: divides the FLOPs of a matrix multiplication, as a function of the HLO dtype of its operands.
    """
    if made.opcode == "fusion":
        fused_computation = fused_by(made)
        instructions = program.computations[fused_computation].values()
        flops = [product_flops(program, fused_computation, x, speedup) for x in instructions]
        return None if None in flops else sum(filter(None, flops))
    if not multiplies(made, opcodes_of(program, made)):
        return 0.0
    left, right = (program.computations[computation][x].shapes[0] for x in made.operands[:2])
    multiply_adds = _MULTIPLY_ADDS[made.opcode](made, left.dims, right.dims) if made.opcode in _MULTIPLY_ADDS else None
    return None if multiply_adds is None else 2.0 * multiply_adds / speedup(left.dtype)


def _dot(instruction: Instruction, lhs: _Dims, rhs: _Dims) -> int:
    axes = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", instruction.attributes)
    return instruction.shapes[0].elements * _size(lhs, axes[1].split(",") if axes else [])


def _library(instruction: Instruction, lhs: _Dims, rhs: _Dims) -> Optional[int]:
    if ATTENTION.search(instruction.target):  # several products
        return None
    axes = re.search(r'"lhs_contracting_dimensions":\s*(\[[^\]]*\])', instruction.attributes)
    return instruction.shapes[0].elements * _size(lhs, json.loads(axes[1])) if axes else None


def _size(dims: _Dims, axes: list) -> int:
    return math.prod(dims[int(axis)] for axis in axes)


def _convolution(instruction: Instruction, lhs: _Dims, rhs: _Dims) -> Optional[int]:
    """Computes the number of multiply-adds of a convolution; returns None if the instruction has no dim_labels.

    Multiply-adds that involve padding, or the zeros of a dilated input, do not count.

    Args:
      lhs, rhs: dimensions of the input and of the kernel.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return None
    input_sizes, kernel_sizes, output_sizes = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), (lhs, rhs, instruction.shapes[0].dims), strict=True)
    )
    multiply_adds = output_sizes["b"] * output_sizes["f"] * kernel_sizes["i"]
    for axis in filter(str.isdecimal, kernel_sizes):
        stride, input_dilation, kernel_dilation = (
            _window_attribute(instruction, name, int(axis), "1") for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        padding = int(_window_attribute(instruction, "pad", int(axis), "0_0").split("_")[0])
        positions = (
            np.arange(output_sizes[axis])[:, None] * int(stride)
            + np.arange(kernel_sizes[axis]) * int(kernel_dilation)
            - padding
        )
        multiply_adds *= int(
            (
                (positions >= 0)
                & (positions <= (input_sizes[axis] - 1) * int(input_dilation))
                & (positions % int(input_dilation) == 0)
            ).sum()
        )
    return multiply_adds


def _window_attribute(instruction: Instruction, name: str, axis: int, default: str) -> str:
    """Parses the value of a window attribute for one spatial axis: "3_3" for `pad=0_0x3_3` and axis 1.

    Args:
      axis: index of the spatial axis.
      default: value to return if the window does not have the attribute.
    """
    match = re.search(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)", instruction.attributes)
    return match[1].split("x")[axis] if match else default


_MULTIPLY_ADDS = {"dot": _dot, "convolution": _convolution, "custom-call": _library}
