"""Counts the FLOPs of matrix products in compiled HLO: two for each pair of numbers that is multiplied and added.

A product stands there as a `dot`; as a `convolution`, in which a TPU's compiler writes it; or as a call of cuBLAS or
oneDNN, whose configuration names the axes that are summed over. Kernels of attention do not say how much they multiply.
"""

import json
import math
import re
from typing import Optional

import numpy as np

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.kernels import fused_by, multiplies, parts_of
from pretrainax.planning.hlo.program import Program

_Dims = tuple[int, ...]


def product_flops(program: Program, computation: str, made: Instruction) -> Optional[float]:
    """Counts the FLOPs of one run of a kernel's products; 0 where it has none, None where it does not say."""
    if made.opcode == "fusion":
        inside = fused_by(made)
        found = [product_flops(program, inside, x) for x in program.computations[inside].values()]
        return None if None in found else sum(filter(None, found))
    if not multiplies(made, parts_of(program, made)):
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
    """Counts the pairs within the array: as a window that is padded or spread out, an axis meets mostly zeros."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", made.attributes)
    if labels is None:
        return None
    read, kernel, written = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), (left, right, made.shapes[0].dims), strict=True)
    )
    pairs = written["b"] * written["f"] * kernel["i"]
    for place in filter(str.isdecimal, kernel):
        stride, spread, apart = (
            _of_window(made, name, int(place), "1") for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(_of_window(made, "pad", int(place), "0_0").split("_")[0])
        at = np.arange(written[place])[:, None] * int(stride) + np.arange(kernel[place]) * int(apart) - before
        pairs *= int(((at >= 0) & (at <= (read[place] - 1) * int(spread)) & (at % int(spread) == 0)).sum())
    return pairs


def _of_window(made: Instruction, name: str, place: int, default: str) -> str:
    """Returns what a window has for one axis: of `pad=0_0x3_3` "3_3" for the second."""
    found = re.search(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)", made.attributes)
    return found[1].split("x")[place] if found else default


_PAIRS = {"dot": _dot, "convolution": _convolution, "custom-call": _library}
