"""Says where the time of a step goes, of a profile: `python -m pretrainax.profile --workdir=DIR [--step=10]`.

Prints the slowest kernels by module of the model, with their share; with --topology (h100:8, v5p:4x4x8: the devices of
the run) each beside what `python -m pretrainax.plan` expects. --picture draws the shares. What writes a profile, and
what else opens it: docs/profiling.md. No accelerator is needed.
"""

import os
import re
from typing import Optional

import jax
from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, UserError, load, phase_at, phases_of
from pretrainax.files.paths import define_path
from pretrainax.planning.topologies import Topology
from pretrainax.profiling import picture, report
from pretrainax.profiling.kernels import work_of
from pretrainax.profiling.trace import Trace, read_trace
from pretrainax.runtime.recorder import FOLDER, files_of
from pretrainax.storage.places import here, named


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    step = flags.DEFINE_integer("step", None, "First step of the profile; the newest where not given", lower_bound=1)
    process = flags.DEFINE_integer("process", 0, "Process that wrote it", lower_bound=0)
    devices = flags.DEFINE_string("topology", None, "Devices of the run, for what a plan expects: h100:8, v5p:4x4x8")
    drawn = define_path("picture", None, "File to draw the shares of the modules to, as shares.png")

    def run() -> int:
        jax.config.update("jax_platforms", "cpu")  # nothing runs here: an accelerator that is there is left alone
        cli.check_overrides([], "in a profile, which is of the run as it was")
        path = _path(_workdir(), step.value, process.value)
        trace = read_trace(path)
        topology = _topology(devices.value, trace)
        assert cli.CONFIG.value is not None  # that of _config
        experiment = phase_at(phases_of(cli.CONFIG.value), trace.steps[0] - 1).experiment
        print(f"{named(path)}\n\n{report.report(trace, experiment, topology)}", end="")
        if drawn.value:
            cli.folder("picture", os.path.dirname(drawn.value) or ".")
            picture.draw(drawn.value, trace, work_of(trace))
            print(f"\nwrote {drawn.value}")
        return 0

    cli.run(run, config=_config)


def _config() -> Experiment:
    path = os.path.join(_workdir(), "config.json")
    if not os.path.exists(path):
        raise UserError(f"--workdir={_workdir()} holds no run: there is no config.json in it")
    return load(path)


def _workdir() -> str:
    if not cli.WORKDIR.value:
        raise UserError("--workdir is missing: the folder of the run whose profile is read")
    return here(cli.WORKDIR.value)  # flags of stores are exchanged after the config is read


def _topology(given: Optional[str], trace: Trace) -> Optional[Topology]:
    if given is None:
        return None
    topology = Topology.parse(given)
    if topology.chip.platform != trace.platform:
        raise UserError(f"--topology={given}: the profile is of a {trace.platform.upper()}, leave the flag out")
    return topology


def _path(workdir: str, step: Optional[int], process: int) -> str:
    """Returns the path of the trace that is asked for; step: None stands for that which was written last."""
    folder = os.path.join(workdir, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    paths = {
        int(found[1]): path
        for name in names
        if (found := re.fullmatch(r"step_(\d+)", name))
        and os.path.exists(path := files_of(os.path.join(folder, name), process).trace)
    }
    if not paths:
        raise UserError(
            f"{folder} has no profile of process {process}: train with --config.train.profile_steps=10:13, or send the "
            "run SIGUSR1"
        )
    wanted = max(paths, key=lambda step: os.path.getmtime(paths[step])) if step is None else step
    if wanted not in paths:
        there = ", ".join(map(str, sorted(paths)))
        raise UserError(f"--step={step}: no profile of process {process} begins there; these do: {there}")
    return paths[wanted]


if __name__ == "__main__":
    main()
