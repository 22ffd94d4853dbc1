"""Counts the bytes of main memory that a compiled step reads and writes, by module and by kind of kernel.

The kinds of kernels:

- `collectives`: communication between devices
- `loss`, `optimizer`: all kernels in the scope of the loss or of the optimizer
- `fills`: kernels that write one number into all elements of an array
- `attention`: kernels of attention, without its projections
- `products`: matrix products
- `copies`: kernels that only change the position, the layout or the dtype of elements
- `elementwise`: all other kernels, including reductions
- `residuals`: reads and writes of the stacks that a scan over layers saves for its backward pass, by any kernel, and
  kernels that only copy into or out of these stacks
"""

import collections
import dataclasses
from collections.abc import Iterator

from pretrainax.planning.hlo.collectives import KINDS as COLLECTIVES
from pretrainax.planning.hlo.kernels import ATTENTION, Kernel, kernels_of, multiplies, opcodes_of, reads, writes
from pretrainax.planning.hlo.modules import Modules
from pretrainax.planning.hlo.program import Program
from pretrainax.planning.hlo.stacks import Result, Stacks

KINDS = tuple("products attention elementwise residuals loss optimizer copies fills collectives".split())

_FILLS = frozenset("broadcast constant iota copy bitcast reshape tuple".split())
_COPIES = frozenset(
    "copy convert bitcast reshape transpose slice dynamic-slice dynamic-update-slice concatenate pad parameter "
    "constant tuple get-tuple-element".split()
)


@dataclasses.dataclass(frozen=True)
class KernelBytes:
    """Bytes that the kernels of one kind and module read and write."""

    module: str  # "decoder/blocks/mlp/up"; "" if the compiler does not report a module
    kind: str  # one of KINDS
    multiplies: bool  # True: kernels with matrix products, including attention; False: all other kernels
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryTraffic:
    """Bytes of main memory that a device reads and writes per step, by module and kind of kernel."""

    moved: list[KernelBytes]  # largest first
    kernels: int  # number of kernel runs

    @property
    def total(self) -> int:
        return sum(one.bytes for one in self.moved)

    @property
    def besides_products(self) -> int:
        """Returns the bytes that kernels without matrix products read and write per step."""
        return sum(one.bytes for one in self.moved if not one.multiplies)

    def sum_by(self, field: str) -> dict[str, int]:
        """Returns the bytes per kind or per module, largest first.

        Args:
          field: "kind" or "module".
        """
        sums: collections.Counter = collections.Counter()
        for one in self.moved:
            sums[getattr(one, field)] += one.bytes
        return dict(sums.most_common())


@dataclasses.dataclass(frozen=True)
class KernelTraffic:
    """A kernel, and the bytes that one run of the kernel reads and writes."""

    kernel: Kernel
    parts: list[KernelBytes]  # first the kernel's own kind, possibly with 0 bytes; then its residuals

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def memory_traffic_of(program: Program) -> MemoryTraffic:
    """Returns the bytes that the kernels of a compiled step read and write.

    The body of a loop counts once per iteration. For a conditional, the result is the mean over its branches.
    """
    sums: collections.Counter = collections.Counter()
    kernels = 0.0
    for one in traffic_of_kernels(program):
        runs = program.runs[one.kernel.computation]
        kernels += runs
        for part in one.parts:
            sums[part.module, part.kind, part.multiplies] += part.bytes * runs
    moved = [KernelBytes(*place, round(size)) for place, size in sums.most_common() if size]
    return MemoryTraffic(moved, round(kernels))


def traffic_of_kernels(program: Program) -> Iterator[KernelTraffic]:
    """Yields each kernel of a program with the bytes that one run reads and writes, by module and kind."""
    modules, stacks = Modules(program), Stacks(program)
    for kernel in kernels_of(program):
        yield KernelTraffic(kernel, _moved(program, modules, stacks, kernel))


def _moved(program: Program, modules: Modules, stacks: Stacks, kernel: Kernel) -> list[KernelBytes]:
    """Returns the bytes that one run of a kernel reads and writes: of its own kind, and of residuals if it has any."""
    computation, name = kernel.computation, kernel.instruction.name
    read, written = reads(program, kernel), writes(program, kernel)
    sources = {x: made for x in read if (made := stacks.written_by(computation, x))}
    stacked = sum(read[x] for x in sources)
    stacked += sum(size for i, size in enumerate(written) if Result(computation, name, i) in stacks.written)
    module, size = modules.module_path(computation, name), sum(read.values()) + sum(written)
    parts = opcodes_of(program, kernel.merged)
    is_product = multiplies(kernel.merged, parts)
    kind = _kind(program, kernel, module, parts, is_product)
    if kind == "copies" and stacked:
        if len(sources) == 1:  # a slice has the module of the loop; the stack was written in a module
            module = modules.module_path(*next(iter(sources.values())))
        return [KernelBytes(module, "residuals", is_product, size)]
    residuals = [KernelBytes(module, "residuals", is_product, stacked)] * bool(stacked)
    return [KernelBytes(module, kind, is_product, size - stacked), *residuals]


def _kind(program: Program, kernel: Kernel, module: str, parts: set[str], is_product: bool) -> str:
    made, values = kernel.merged, program.computations[kernel.computation]
    scope = module.split("/")[0]
    if any(opcode.removesuffix("-start") in COLLECTIVES for opcode in parts) and not is_product:
        return "collectives"
    if scope in ("loss", "optimizer"):
        return scope
    if parts <= _FILLS and all(values[x].elements <= 1 for x in made.operands if x in values):
        return "fills"
    if module.endswith("attention") or ATTENTION.search(f"{module} {made.target} {made.name}"):
        return "attention"
    if is_product:
        return "products"
    return "copies" if parts <= _COPIES else "elementwise"
