"""Shows where the time of a training step goes: `python -m pretrainax.profile --workdir=DIR [--step=10]`.

Reads a profile of the run in --workdir and prints the slowest kernels by module of the model, with their fraction of
the time. --topology (the devices of the run: h100:8, v5p:4x4x8) adds the time that `python -m pretrainax.plan`
estimates. --picture plots the fractions. docs/how-to/profile.md explains how to write a profile and which other
programs open it. No accelerator is needed.
"""

import os
import re
from typing import TYPE_CHECKING, Optional

from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, UserError, load, phase_at, phases_of
from pretrainax.files.outputs import output_file
from pretrainax.files.paths import define_path
from pretrainax.storage.places import local_path, with_urls

if TYPE_CHECKING:  # the functions import the rest, because JAX takes seconds, for which --help must not wait
    from pretrainax.planning.topologies import Topology
    from pretrainax.profiling.trace import Trace


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    step = flags.DEFINE_integer("step", None, "First step of the profile; by default the newest profile", lower_bound=1)
    process = flags.DEFINE_integer("process", 0, "Process that wrote the profile", lower_bound=0)
    devices = flags.DEFINE_string("topology", None, "Devices of the run, to add expected times: h100:8, v5p:4x4x8")
    picture_path = define_path("picture", None, "Image file for a plot of the shares, such as shares.png")

    def run() -> int:
        import jax

        from pretrainax.profiling import picture, report
        from pretrainax.profiling.kernels import kernel_work
        from pretrainax.profiling.trace import read_trace

        jax.config.update("jax_platforms", "cpu")  # nothing runs on a device, so accelerators stay free
        cli.check_overrides([], "in a profile, which has the config of its run")
        path = _trace_path(_workdir(), step.value, process.value)
        trace = read_trace(path)
        topology = _parse_topology(devices.value, trace)
        assert cli.CONFIG.value is not None  # set by _load_config
        experiment = phase_at(phases_of(cli.CONFIG.value), trace.steps[0] - 1).experiment
        print(f"{with_urls(path)}\n\n{report.report(trace, experiment, topology)}", end="")
        if picture_path.value:
            output_file("picture", picture_path.value)
            picture.draw(picture_path.value, trace, kernel_work(trace))
            print(f"\nwrote {picture_path.value}")
        return 0

    cli.run(run, config=_load_config, run_flags=("workdir",))


def _load_config() -> Experiment:
    path = os.path.join(_workdir(), "config.json")
    if not os.path.exists(path):
        raise UserError(f"--workdir={_workdir()} holds no run: it has no config.json")
    return load(path)


def _workdir() -> str:
    if not cli.WORKDIR.value:
        raise UserError("--workdir is missing: set it to the folder of the run with the profile")
    return local_path(cli.WORKDIR.value)  # _load_config runs before cli replaces URLs in flags


def _parse_topology(spec: Optional[str], trace: "Trace") -> Optional["Topology"]:
    if spec is None:
        return None
    from pretrainax.planning.topologies import Topology

    topology = Topology.parse(spec)
    if topology.chip.platform != trace.platform:
        raise UserError(f"--topology={spec}: the profile is of a {trace.platform.upper()}; leave the flag out")
    return topology


def _trace_path(workdir: str, step: Optional[int], process: int) -> str:
    """Returns the path of a process's trace in the profile whose first step is `step`.

    Args:
      step: the profile's first step. If None, selects the profile that was written last.

    Raises:
      UserError: the process has no such profile.
    """
    from pretrainax.runtime.recorder import FOLDER, files_of

    folder = os.path.join(workdir, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    paths = {
        int(match[1]): path
        for name in names
        if (match := re.fullmatch(r"step_(\d+)", name))
        and os.path.exists(path := files_of(os.path.join(folder, name), process).trace)
    }
    if not paths:
        raise UserError(
            f"{folder} has no profile of process {process}: train with --config.train.profile_steps=10:13, or send the "
            "run SIGUSR1"
        )
    first_step = max(paths, key=lambda step: os.path.getmtime(paths[step])) if step is None else step
    if first_step not in paths:
        available = ", ".join(map(str, sorted(paths)))
        raise UserError(f"--step={step}: no profile of process {process} begins there; these do: {available}")
    return paths[first_step]


if __name__ == "__main__":
    main()
