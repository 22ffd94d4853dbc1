"""Counts the bytes of main memory that a compiled step reads and writes, by module and by kind of kernel.

The kinds of kernels:

- `collectives`: communication between devices
- `loss`, `optimizer`: all kernels in the scope of the loss or of the optimizer
- `fills`: kernels that write one number into all elements of an array
- `attention`: kernels of attention, without its projections
- `products`: matrix multiplications
- `copies`: kernels that only move elements or change their layout or dtype
- `elementwise`: all other kernels, including reductions
- `residuals`: reads and writes, by any kernel, of the stacked residuals that a scan over layers saves for its backward
  pass, and kernels that only copy into or out of the stacked residuals
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
    """The number of bytes that the kernels of one kind and module read and write."""

    module: str  # "decoder/blocks/mlp/up"; "" if the compiler does not report a module
    kind: str  # one of KINDS
    multiplies: bool  # whether the kernels compute matmuls, including attention
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryTraffic:
    """The main-memory traffic of one device per step, in bytes, by module and kind of kernel."""

    traffic: list[KernelBytes]  # largest first
    kernels: int  # number of kernel executions

    @property
    def total(self) -> int:
        """Returns the bytes that all kernels read and write per step."""
        return sum(entry.bytes for entry in self.traffic)

    @property
    def bytes_outside_matmuls(self) -> int:
        """Returns the bytes that kernels without matrix multiplications read and write per step."""
        return sum(entry.bytes for entry in self.traffic if not entry.multiplies)

    def sum_by(self, field: str) -> dict[str, int]:
        """Sums the bytes by kind or by module, largest first.

        Args:
          field: "kind" or "module".
        """
        bytes_by_value: collections.Counter = collections.Counter()
        for entry in self.traffic:
            bytes_by_value[getattr(entry, field)] += entry.bytes
        return dict(bytes_by_value.most_common())


@dataclasses.dataclass(frozen=True)
class KernelTraffic:
    """A kernel, and the bytes that one execution of the kernel reads and writes."""

    kernel: Kernel
    parts: list[KernelBytes]  # first of the kernel's own kind, possibly 0 bytes; then of residuals

    @property
    def bytes(self) -> int:
        """Returns the bytes that one execution reads and writes in total."""
        return sum(part.bytes for part in self.parts)


def memory_traffic_of(program: Program) -> MemoryTraffic:
    """Computes the bytes that the kernels of a compiled step read and write, by module and kind.

    The body of a loop counts once per iteration. For a conditional, the result is the mean over its branches.
    """
    bytes_by_group: collections.Counter = collections.Counter()
    kernels = 0.0
    for kernel_traffic in traffic_of_kernels(program):
        runs = program.runs[kernel_traffic.kernel.computation]
        kernels += runs
        for entry in kernel_traffic.parts:
            bytes_by_group[entry.module, entry.kind, entry.multiplies] += entry.bytes * runs
    moved = [KernelBytes(*group, round(size)) for group, size in bytes_by_group.most_common() if size]
    return MemoryTraffic(moved, round(kernels))


def traffic_of_kernels(program: Program) -> Iterator[KernelTraffic]:
    """Yields each kernel of a program with the bytes that one execution reads and writes, by module and kind."""
    modules, stacks = Modules(program), Stacks(program)
    for kernel in kernels_of(program):
        yield KernelTraffic(kernel, _kernel_bytes(program, modules, stacks, kernel))


def _kernel_bytes(program: Program, modules: Modules, stacks: Stacks, kernel: Kernel) -> list[KernelBytes]:
    """Returns the bytes that one execution of a kernel reads and writes, with stacked residuals listed separately."""
    computation, name = kernel.computation, kernel.instruction.name
    bytes_read, bytes_written = reads(program, kernel), writes(program, kernel)
    sources = {x: update for x in bytes_read if (update := stacks.written_by(computation, x))}
    residual_bytes = sum(bytes_read[x] for x in sources)
    residual_bytes += sum(
        size for i, size in enumerate(bytes_written) if Result(computation, name, i) in stacks.written
    )
    module, size = modules.module_path(computation, name), sum(bytes_read.values()) + sum(bytes_written)
    opcodes = opcodes_of(program, kernel.merged)
    is_product = multiplies(kernel.merged, opcodes)
    kind = _kind(program, kernel, module, opcodes, is_product)
    if kind == "copies" and residual_bytes:
        if len(sources) == 1:  # a slice only has the module of the loop, but the update of the stack has a full module
            module = modules.module_path(*next(iter(sources.values())))
        return [KernelBytes(module, "residuals", is_product, size)]
    residuals = [KernelBytes(module, "residuals", is_product, residual_bytes)] * bool(residual_bytes)
    return [KernelBytes(module, kind, is_product, size - residual_bytes), *residuals]


def _kind(program: Program, kernel: Kernel, module: str, opcodes: set[str], is_product: bool) -> str:
    """Classifies a kernel; returns one of KINDS.

    Args:
      module: the kernel's module path.
      opcodes: the opcodes in the kernel, from `opcodes_of`.
      is_product: whether the kernel computes matrix multiplications.
    """
    merged, values = kernel.merged, program.computations[kernel.computation]
    scope = module.split("/")[0]
    if any(opcode.removesuffix("-start") in COLLECTIVES for opcode in opcodes) and not is_product:
        return "collectives"
    if scope in ("loss", "optimizer"):
        return scope
    if opcodes <= _FILLS and all(values[x].elements <= 1 for x in merged.operands if x in values):
        return "fills"
    if module.endswith("attention") or ATTENTION.search(f"{module} {merged.target} {merged.name}"):
        return "attention"
    if is_product:
        return "products"
    return "copies" if opcodes <= _COPIES else "elementwise"
