"""Checks that a config resumes exactly: `python -m pretrainax.verify_resume --config=… [--steps=20 --kills=3]`.

Runs the first steps of the config in a temporary folder three times: once without interruption; once killed (SIGKILL)
at random moments and resumed each time; once killed half-way and resumed with a different number of processes. Then it
compares the batches, losses and final parameters with those of the uninterrupted run. With the same number of
processes, all must be bit-identical. With a different number, the batches must be identical, and losses may differ by a
relative 2e-5, because sums over devices have a different order. Exit code 0 if the checks pass, 1 if not.

It runs on the devices of the machine. Without an accelerator, or with JAX_PLATFORMS=cpu, it runs on CPU devices that
XLA simulates. Several processes cannot share an accelerator, so a different number of processes is compared only on CPU
devices.
"""

import dataclasses
import math
import os
import random
import sys
import tempfile

from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, MeshConfig, UserError, phases_of
from pretrainax.config.choice import format_value
from pretrainax.files.paths import define_path
from pretrainax.reporting.tables import text_table
from pretrainax.runs.resume_check import Trial, compare, record

_STEPS = flags.DEFINE_integer("steps", 20, "Number of steps of each run", lower_bound=2)
_KILLS = flags.DEFINE_integer("kills", 3, "Number of SIGKILLs at random moments", lower_bound=1)
_PROCESSES = flags.DEFINE_integer(
    "processes", 2, "Number of processes of the third run; 1: no third run", lower_bound=1
)
_RECORD = define_path(
    "record", None, "Only train, as pretrainax.main does, and write digests of the batches to this folder"
)


def main() -> int:
    experiment = cli.experiment()
    if _RECORD.value:
        return record(experiment, cli.WORKDIR.value, _RECORD.value)
    devices = _devices(experiment.mesh, _PROCESSES.value)
    steps = min(_STEPS.value, experiment.train.steps)
    arguments = [*_config_arguments(sys.argv[1:]), *_overrides(experiment, steps)]
    with tempfile.TemporaryDirectory(prefix="verify_resume-") as folder:

        def trial(name: str) -> Trial:
            return Trial(os.path.join(folder, name), arguments, devices)

        whole = trial("whole")
        seconds = whole.finish()
        platform = whole.platform()
        print(
            f"undisturbed run: {steps} steps in {seconds:.0f} s on {platform['devices']} × {platform['kind']}",
            flush=True,
        )
        rows = []
        killed = trial("killed")
        moments = sorted(random.sample(range(steps), min(_KILLS.value, steps)))
        killed.kill_at(moments, seconds / steps)
        name = f"killed {len(moments)} times, near steps {', '.join(map(str, moments))}"
        rows += compare(name, whole, killed, same=True)
        if _PROCESSES.value > 1 and platform["name"] == "cpu":
            other = trial("other")
            other.kill_at([half := steps // 2], 0.0, resume=False)
            other.finish(_PROCESSES.value)
            name = f"killed at step {half}, resumed by {_PROCESSES.value} processes"
            rows += compare(name, whole, other, same=False)
        elif _PROCESSES.value > 1:
            print("other process counts are compared only with JAX_PLATFORMS=cpu; see --help")
    print("\ncompared with the undisturbed run (✗: a check that fails)\n")
    print(text_table([(row.run, row.what, row.found, "" if row.good else "✗") for row in rows]))
    good = all(row.good for row in rows)
    print("all checks pass: the config resumes" if good else "FAILED: the config does NOT resume as it should")
    return 0 if good else 1


def _devices(mesh: MeshConfig, processes: int) -> int:
    """Returns the smallest number of CPU devices that fits the mesh and that the processes can share equally."""
    from pretrainax.sharding.axes import AXES, DATA_AXIS  # local import, because it imports JAX

    sizes = {axis: getattr(mesh, axis) for axis in AXES}  # without `slices`, which divide DATA_AXIS
    smallest = {axis: size if size != -1 else 1 for axis, size in sizes.items()}
    if sizes[DATA_AXIS] == -1:
        smallest[DATA_AXIS] = mesh.slices
    devices = math.prod(smallest.values())
    if -1 in sizes.values():
        devices = math.lcm(devices, processes)
    if devices % processes:
        raise UserError(
            f"--processes={processes} does not divide the {devices} devices of config.mesh: set another number"
        )
    return devices


def _config_arguments(words: list[str]) -> list[str]:
    """Returns the command-line arguments of --config and of overrides, unchanged."""
    arguments = []
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        name = word.lstrip("-").split("=")[0]
        if word.startswith("-") and (name == "config" or name.removeprefix("no").startswith("config.")):
            arguments += [word] if "=" in word or after.startswith("-") else [word, after]
    return arguments


def _overrides(experiment: Experiment, steps: int) -> list[str]:
    """Returns the overrides for a short run of the config, which logs each step and saves five times."""
    every = max(steps // 5, 1)
    changes = {
        "train.steps": steps,
        "train.log_every": 1,
        "train.deterministic": True,
        "evaluate.every": steps,
        "evaluate.batches": 1,
        "checkpoint.every": every,
    }
    if experiment.phases:  # each phase has the same share of the short run as of the whole run
        phases = phases_of(experiment)
        shares = [{"share": phase.steps / experiment.train.steps} for phase in phases[:-1]] + [{"share": None}]
        short = zip(experiment.phases, shares, strict=True)
        changes["phases"] = format_value(tuple(dataclasses.replace(p, steps=None, tokens=None, **s) for p, s in short))
    if experiment.checkpoint.keep_at:
        changes["checkpoint.keep_at"] = "()"
    if experiment.train.on_spike == "rollback":
        changes["checkpoint.keep"] = 1 + math.ceil(experiment.train.rollback_steps / every)
    return [f"--config.{name}={value}" for name, value in changes.items()]


if __name__ == "__main__":
    cli.run(main)
