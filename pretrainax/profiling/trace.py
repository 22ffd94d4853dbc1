"""Reads the time of each kernel from a profiler trace of a CPU, a GPU or a TPU.

A trace consists of planes, each plane consists of lines, and each line consists of events:

    CPU  one plane for the host; each XLA thunk is an event in the line of its thread, with the statistic `hlo_op`
    GPU  one plane per device, "/device:GPU:0", with one line per stream; kernels have `hlo_op`, copies do not. For the
         kernels of a CUDA graph (statistic `cuda_graph_id`), it names the graph ("command_buffer_3"); XLA names these
         kernels after their instructions
    TPU  one plane per device, "/device:TPU:0"; its line "XLA Ops" has the kernels, with their HLO text as names, and
         its line "XLA Modules" has the programs, "jit_step(7)"

The events of loops, conditionals and calls enclose the events of kernels, so this module excludes them. Time during
which several kernels run concurrently is divided equally among them.
"""

import bisect
import collections
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional, TypeAlias

import jax
from jax.profiler import ProfileData

from pretrainax.config import UserError
from pretrainax.files.regular_files import read_bytes
from pretrainax.planning.hlo import Program
from pretrainax.planning.hlo.instructions import VIEWS
from pretrainax.profiling.programs import Compiled, programs_of
from pretrainax.runtime.recorder import STEP

Data: TypeAlias = ProfileData  # pyright: ignore[reportInvalidTypeForm]  # jax types it as a variable
Event: TypeAlias = jax.profiler.ProfileEvent  # pyright: ignore[reportInvalidTypeForm]
Plane: TypeAlias = jax.profiler.ProfilePlane  # pyright: ignore[reportInvalidTypeForm]
_DEVICE = re.compile(r"/device:(GPU|TPU):(\d+)")
_HOST = "/host:CPU"
_MAX_BYTES = 2**31  # the maximum size of a protocol buffer message


class ProgramId(NamedTuple):
    """The name and id by which trace events refer to a program."""

    name: str  # "jit_step"
    number: int


class Op(NamedTuple):
    """An instruction of a program, or an event without a program, such as a copy on a GPU."""

    program: Optional[ProgramId]  # None for an event without a program
    name: str  # name of the instruction or of the event


class Run(NamedTuple):
    """One execution of an instruction on a device, from a trace event."""

    op: Op
    start: float  # nanoseconds
    end: float  # nanoseconds


class Trace(NamedTuple):
    """The content of a trace: its steps, the time of each instruction, and the compiled programs."""

    platform: str  # "cpu", "gpu" or "tpu"
    devices: int  # number of devices in the trace
    steps: list[int]  # numbers of the steps in the trace
    seconds: (
        float  # per step: from the start of the first kernel to the end of the last one, divided by the number of steps
    )
    # seconds of each instruction, per step and device; concurrent instructions share their time equally
    busy: dict[Op, float]
    programs: dict[ProgramId, Program]


def read_trace(path: str) -> Trace:
    """Reads a run's trace file and computes the time of each instruction.

    Args:
      path: path of the file, an xplane.pb.

    Raises:
      UserError: the file is not an xplane.pb, or the trace has no steps or no kernels.
    """
    content = read_bytes(path, _MAX_BYTES)
    try:
        data = ProfileData.from_serialized_xspace(content)
    except RuntimeError as e:
        raise UserError(f"{path} is not a profiler trace (xplane.pb)") from e
    programs = programs_of(content)
    steps = sorted({int(dict(e.stats)["step_num"]) for e in _events(data, _HOST) if e.name == STEP})
    platform, runs = _runs(data)
    programs_by_id = _match_programs({run.op for device in runs.values() for run in device}, programs)
    runs = {device: _runs_of_instructions(device_runs, programs_by_id) for device, device_runs in runs.items()}
    if not steps or not any(runs.values()):
        missing = f"step of a run ({STEP})" if not steps else "kernel"
        raise UserError(f"{path} has no {missing}: it is not a profile of a pretrainax run")
    all_runs = [run for device in runs.values() for run in device]
    window = max(run.end for run in all_runs) - min(run.start for run in all_runs)
    busy: dict[Op, float] = collections.defaultdict(float)
    for device in runs.values():
        for op, nanoseconds in exclusive_times(device).items():
            busy[op] += nanoseconds * 1e-9 / len(steps) / len(runs)
    return Trace(platform, len(runs), steps, window * 1e-9 / len(steps), dict(busy), programs_by_id)


def exclusive_times(runs: Iterable[Run]) -> dict[Op, float]:
    """Computes the time of each instruction on one device, in nanoseconds.

    Concurrent instructions share their time equally, so the sum over all instructions is the time during which the
    device was busy.

    Args:
      runs: the executions of instructions on the device.
    """
    runs = list(runs)
    boundaries = sorted((time, is_end, i) for i, run in enumerate(runs) for time, is_end in _boundaries(run))
    busy: dict[Op, float] = collections.defaultdict(float)
    active: set[int] = set()
    last_change = 0.0
    for time, is_end, i in boundaries:
        for j in active:
            busy[runs[j].op] += (time - last_change) / len(active)
        last_change = time
        active.discard(i) if is_end else active.add(i)
    return dict(busy)


def _boundaries(run: Run) -> Iterator[tuple[float, bool]]:
    """Yields (time, is_end) for the start and the end of an execution."""
    yield run.start, False
    yield run.end, True


def _events(data: Data, plane: str) -> Iterator[Event]:
    """Yields all events of the planes named `plane`."""
    for candidate in data.planes:
        if candidate.name == plane:
            for line in candidate.lines:
                yield from line.events


def _match_programs(ops: set[Op], programs: dict[int, Compiled]) -> dict[ProgramId, Program]:
    """Finds the compiled program for each program id in the events.

    This is the program of the same name that contains the largest number of the instructions in the events. The id
    alone is not sufficient: a program from a compilation cache has a different id in the trace's list of programs.

    Args:
      ops: all instructions in the events.
      programs: the trace's list of programs, by id.
    """
    names: dict[ProgramId, set[str]] = collections.defaultdict(set)
    for op in ops:
        if op.program is not None:
            names[op.program].add(op.name)
    matches = {}
    for program_id, op_names in names.items():
        candidates = {
            number: compiled.program for number, compiled in programs.items() if compiled.name == program_id.name
        }
        if candidates:
            best = max(
                candidates,
                key=lambda number: (_count_shared(candidates[number], op_names), number == program_id.number),
            )
            matches[program_id] = candidates[best]
    return matches


def _count_shared(program: Program, names: set[str]) -> int:
    """Counts the names of instructions of the program, and of kernels named after them, in `names`."""
    instructions = {_kernel_name(name) for values in program.computations.values() for name in values}
    return len({_kernel_name(name) for name in names} & instructions)


def _kernel_name(instruction: str) -> str:
    """Returns XLA's name of the kernel of an instruction, for example loop_fusion_2 for loop_fusion.2."""
    return re.sub(r"\W", "_", instruction)


def _runs(data: Data) -> tuple[str, dict[str, list[Run]]]:
    """Returns the platform, and each device's instruction executions by device name."""
    runs: dict[str, list[Run]] = {}
    platform = "cpu"
    for plane in data.planes:
        if device := _DEVICE.fullmatch(plane.name):
            platform = device[1].lower()
            runs[plane.name] = list(_RUNS_OF_PLANE[platform](plane))
    if not runs:
        for event in _events(data, _HOST):
            if "hlo_op" in (stats := dict(event.stats)):
                runs.setdefault(f"cpu:{stats.get('device_ordinal', 0)}", []).append(_run(event, stats))
    return platform, runs


def _runs_of_instructions(runs: list[Run], programs: dict[ProgramId, Program]) -> list[Run]:
    """Assigns the kernels of CUDA graphs to their instructions, and removes executions that enclose other executions.

    Loops, conditionals and calls enclose other executions. A kernel of a library has its own name and no instruction.
    """
    instructions = {
        Op(program_id, instruction.name): instruction
        for program_id, program in programs.items()
        for values in program.computations.values()
        for instruction in values.values()
    }
    kernels = {op._replace(name=_kernel_name(op.name)): op for op in instructions}
    runs = [run if run.op in instructions else run._replace(op=kernels.get(run.op, run.op)) for run in runs]
    return [run for run in runs if run.op not in instructions or instructions[run.op].opcode not in VIEWS]


def _runs_of_gpu(plane: Plane) -> Iterator[Run]:
    """Yields the executions in a GPU's plane, from all of its streams."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                stats = dict(event.stats)
                yield _run(event, stats | {"hlo_op": event.name} if "cuda_graph_id" in stats else stats)


def _runs_of_tpu(plane: Plane) -> Iterator[Run]:
    """Yields the executions in a TPU's plane, assigning each event to the last program that started before it."""
    lines = {line.name: list(line.events) for line in plane.lines}
    modules = sorted((event.start_ns, event.name) for event in lines.get("XLA Modules", ()))
    module_starts = [start for start, _ in modules]
    for event in lines.get("XLA Ops", ()):
        stats = {}
        module_index = bisect.bisect(module_starts, event.start_ns) - 1
        if module_index >= 0 and (module := re.fullmatch(r"(.*)\((\d+)\)", modules[module_index][1])):
            stats = {"hlo_module": module[1], "program_id": module[2]}
        text = re.match(r"%([\w.\-]+) = ", event.name)
        yield _run(event, {"hlo_op": text[1] if text else event.name, **stats})


_RUNS_OF_PLANE = {"gpu": _runs_of_gpu, "tpu": _runs_of_tpu}


def _run(event: Event, stats: dict) -> Run:
    """Converts a trace event to an execution.

    Args:
      stats: the statistics of the event; `hlo_module` and `hlo_op` name the program and the instruction.
    """
    program_id = (
        ProgramId(str(stats["hlo_module"]), int(stats.get("program_id", -1))) if "hlo_module" in stats else None
    )
    op = Op(program_id, str(stats.get("hlo_op") or event.name))
    return Run(op, event.start_ns, event.start_ns + event.duration_ns)
