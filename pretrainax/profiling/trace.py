"""Reads out of a trace when each kernel ran, on a CPU, a GPU or a TPU; what ran at once shares the time.

    CPU  a plane of the host; each thunk of XLA is an event of the thread that ran it, with the statistic `hlo_op`
    GPU  a plane a device, "/device:GPU:0", a line a stream; kernels have `hlo_op` too, copies and the like have not
    TPU  a plane a device, "/device:TPU:0"; of its lines "XLA Ops" has the kernels, each named by its text, and
         "XLA Modules" the programs, "jit_step(7)"

Loops, conditionals and calls have events around those of what they run, and are left out.
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
_MOST_BYTES = 2**31  # of a trace, as of any message of protocol buffers


class Called(NamedTuple):
    """Names a program as the events do that are of it."""

    name: str  # "jit_step"
    number: int


class Op(NamedTuple):
    """An instruction of a program; of what no program has asked for, the name of the event."""

    program: Optional[Called]
    name: str


class Run(NamedTuple):
    """One run of an instruction on a device."""

    op: Op
    start: float  # nanoseconds, as is the next
    end: float


class Trace(NamedTuple):
    """Holds what a trace says of the steps in it."""

    platform: str  # "cpu", "gpu" or "tpu"
    devices: int
    steps: list[int]  # that were made in it
    seconds: float  # of a step: from the first kernel's beginning to the last one's end, by the steps
    busy: dict[Op, float]  # seconds of a step and device that an instruction has to itself, all that runs at once alike
    programs: dict[Called, Program]


def read_trace(path: str) -> Trace:
    """Reads an xplane.pb; UserError where it is none, or where no step with kernels is in it."""
    content = read_bytes(path, _MOST_BYTES)
    try:
        data = ProfileData.from_serialized_xspace(content)
    except RuntimeError as e:
        raise UserError(f"{path} is no trace of a profiler (xplane.pb)") from e
    programs = programs_of(content)
    steps = sorted({int(dict(e.stats)["step_num"]) for e in _events(data, _HOST) if e.name == STEP})
    platform, runs = _runs(data)
    called = _found({run.op for device in runs.values() for run in device}, programs)
    runs = {device: _without_loops(found, called) for device, found in runs.items()}
    if not steps or not any(runs.values()):
        what = f"step of a run ({STEP})" if not steps else "kernel"
        raise UserError(f"{path} has no {what}: it is no profile that pretrainax has written")
    every = [run for device in runs.values() for run in device]
    window = max(run.end for run in every) - min(run.start for run in every)
    busy: dict[Op, float] = collections.defaultdict(float)
    for device in runs.values():
        for op, nanoseconds in shared(device).items():
            busy[op] += nanoseconds * 1e-9 / len(steps) / len(runs)
    return Trace(platform, len(runs), steps, window * 1e-9 / len(steps), dict(busy), called)


def shared(runs: Iterable[Run]) -> dict[Op, float]:
    """Returns the nanoseconds of each instruction; of a time in which several run, each has the same part.

    So the sum is the time in which the device did anything.
    """
    runs = list(runs)
    changes = sorted((time, is_end, i) for i, run in enumerate(runs) for time, is_end in _ends(run))
    found: dict[Op, float] = collections.defaultdict(float)
    active: set[int] = set()
    since = 0.0
    for time, is_end, i in changes:
        for j in active:
            found[runs[j].op] += (time - since) / len(active)
        since = time
        active.discard(i) if is_end else active.add(i)
    return dict(found)


def _ends(run: Run) -> Iterator[tuple[float, bool]]:
    yield run.start, False
    yield run.end, True


def _events(data: Data, plane: str) -> Iterator[Event]:
    for found in data.planes:
        if found.name == plane:
            for line in found.lines:
                yield from line.events


def _found(ops: set[Op], programs: dict[int, Compiled]) -> dict[Called, Program]:
    """Finds the programs that events are of: by name, and by how many of their instructions are there.

    Numbers alone do not tell: a program that was read from a compilation cache has another one in the trace's list.
    """
    names: dict[Called, set[str]] = collections.defaultdict(set)
    for op in ops:
        if op.program is not None:
            names[op.program].add(op.name)
    found = {}
    for called, asked in names.items():
        alike = {number: one.program for number, one in programs.items() if one.name == called.name}
        if alike:
            best = max(alike, key=lambda number: (_shared(alike[number], asked), number == called.number))
            found[called] = alike[best]
    return found


def _shared(program: Program, names: set[str]) -> int:
    return len(names & {name for values in program.computations.values() for name in values})


def _runs(data: Data) -> tuple[str, dict[str, list[Run]]]:
    """Returns the platform, and the runs of each device."""
    runs: dict[str, list[Run]] = {}
    platform = "cpu"
    for plane in data.planes:
        if device := _DEVICE.fullmatch(plane.name):
            platform = device[1].lower()
            runs[plane.name] = list(_OF_PLANE[platform](plane))
    if not runs:
        for event in _events(data, _HOST):
            if "hlo_op" in (stats := dict(event.stats)):
                runs.setdefault(f"cpu:{stats.get('device_ordinal', 0)}", []).append(_run(event, stats))
    return platform, runs


def _without_loops(runs: list[Run], programs: dict[Called, Program]) -> list[Run]:
    """Returns the runs but for those of what runs other instructions."""
    around = {
        (called, made.name)
        for called, program in programs.items()
        for values in program.computations.values()
        for made in values.values()
        if made.opcode in VIEWS
    }
    return [run for run in runs if run.op not in around]


def _of_gpu(plane: Plane) -> Iterator[Run]:
    for line in plane.lines:
        if line.name.startswith("Stream"):
            yield from (_run(event, dict(event.stats)) for event in line.events)


def _of_tpu(plane: Plane) -> Iterator[Run]:
    lines = {line.name: list(line.events) for line in plane.lines}
    modules = sorted((event.start_ns, event.name) for event in lines.get("XLA Modules", ()))
    starts = [start for start, _ in modules]
    for event in lines.get("XLA Ops", ()):
        stats = {}
        place = bisect.bisect(starts, event.start_ns) - 1
        if place >= 0 and (module := re.fullmatch(r"(.*)\((\d+)\)", modules[place][1])):
            stats = {"hlo_module": module[1], "program_id": module[2]}
        text = re.match(r"%([\w.\-]+) = ", event.name)
        yield _run(event, {"hlo_op": text[1] if text else event.name, **stats})


_OF_PLANE = {"gpu": _of_gpu, "tpu": _of_tpu}


def _run(event: Event, stats: dict) -> Run:
    """Makes a run of an event and its statistics."""
    called = Called(str(stats["hlo_module"]), int(stats.get("program_id", -1))) if "hlo_module" in stats else None
    op = Op(called, str(stats.get("hlo_op") or event.name))
    return Run(op, event.start_ns, event.start_ns + event.duration_ns)
