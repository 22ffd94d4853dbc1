"""Counts the FLOPs of matrix products in compiled HLO: two FLOPs per multiply-add.

A product is a `dot`, a `convolution` (the TPU compiler's form of a product), or a call of cuBLAS or oneDNN, whose
configuration in the HLO text has the contracting axes. The HLO text of attention kernels does not have their FLOPs.
"""

import json
import math
import re
from typing import Optional

import numpy as np

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.kernels import fused_by, multiplies, opcodes_of
from pretrainax.planning.hlo.program import Program

_Dims = tuple[int, ...]


def product_flops(program: Program, computation: str, made: Instruction) -> Optional[float]:
    """Returns the FLOPs of matrix products in one run of a kernel.

    The result is 0 for a kernel without products, and None if the HLO text does not determine the FLOPs.
    """
    if made.opcode == "fusion":
        inside = fused_by(made)
        flops = [product_flops(program, inside, x) for x in program.computations[inside].values()]
        return None if None in flops else sum(filter(None, flops))
    if not multiplies(made, opcodes_of(program, made)):
        return 0.0
    left, right = (program.computations[computation][x].shapes[0].dims for x in made.operands[:2])
    pairs = _PAIRS[made.opcode](made, left, right) if made.opcode in _PAIRS else None
    return None if pairs is None else 2.0 * pairs


def _dot(made: Instruction, left: _Dims, right: _Dims) -> int:
    axes = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", made.attributes)
    return made.shapes[0].elements * _size(left, axes[1].split(",") if axes else [])


def _library(made: Instruction, left: _Dims, right: _Dims) -> Optional[int]:
    axes = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', made.attributes)
    return made.shapes[0].elements * _size(left, json.loads(axes[1])) if axes else None


def _size(dims: _Dims, axes: list) -> int:
    return math.prod(dims[int(axis)] for axis in axes)


def _convolution(made: Instruction, left: _Dims, right: _Dims) -> Optional[int]:
    """Returns the number of multiply-adds of a convolution; None if the instruction has no dim_labels.

    Multiply-adds with padding, or with the zeros of a dilated input, do not count.

    Args:
      left, right: dimensions of the input and of the kernel.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", made.attributes)
    if labels is None:
        return None
    input_sizes, kernel_sizes, output_sizes = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), (left, right, made.shapes[0].dims), strict=True)
    )
    pairs = output_sizes["b"] * output_sizes["f"] * kernel_sizes["i"]
    for place in filter(str.isdecimal, kernel_sizes):
        stride, input_dilation, kernel_dilation = (
            _window_attribute(made, name, int(place), "1") for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(_window_attribute(made, "pad", int(place), "0_0").split("_")[0])
        positions = (
            np.arange(output_sizes[place])[:, None] * int(stride)
            + np.arange(kernel_sizes[place]) * int(kernel_dilation)
            - before
        )
        pairs *= int(
            (
                (positions >= 0)
                & (positions <= (input_sizes[place] - 1) * int(input_dilation))
                & (positions % int(input_dilation) == 0)
            ).sum()
        )
    return pairs


def _window_attribute(made: Instruction, name: str, place: int, default: str) -> str:
    """Returns the value of a window attribute for one axis: "3_3" for `pad=0_0x3_3` and place 1.

    Args:
      place: index of the spatial axis.
      default: the result if the window does not have the attribute.
    """
    match = re.search(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)", made.attributes)
    return match[1].split("x")[place] if match else default


_PAIRS = {"dot": _dot, "convolution": _convolution, "custom-call": _library}
