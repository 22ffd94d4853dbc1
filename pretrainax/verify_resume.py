"""Checks that a config resumes exactly: `python -m pretrainax.verify_resume --config=… [--steps=20 --kills=3]`.

Trains the first steps of the config three times in a temporary folder:

- without interruption;
- killed (SIGKILL) at random moments, and resumed each time;
- killed half-way, and resumed with a different number of processes.

The command then compares batches, losses and final parameters with the uninterrupted run. With the same number of
processes, all must be bit-identical. With a different number, the batches must be identical, and losses may differ by a
relative 2e-5, because sums over devices are added in a different order. The exit code is 0 if all checks pass,
otherwise 1.

The runs use the devices of this machine. Without an accelerator, or with JAX_PLATFORMS=cpu, they use CPU devices that
XLA simulates. Several processes cannot share an accelerator, so the third run needs CPU devices.
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
from pretrainax.config.overrides import BUDGET
from pretrainax.files.paths import define_path
from pretrainax.reporting.tables import text_table
from pretrainax.runs.resume_check import Trial, compare, record
from pretrainax.studies.arms import length_flags

_STEPS = flags.DEFINE_integer("steps", 20, "Number of steps of each run", lower_bound=2)
_KILLS = flags.DEFINE_integer("kills", 3, "Number of SIGKILLs at random moments", lower_bound=1)
_PROCESSES = flags.DEFINE_integer(
    "processes", 2, "Number of processes of the third run; 1: no third run", lower_bound=1
)
_RECORD = define_path(
    "record", None, "Only train, as pretrainax.main does, and write digests of the batches to this folder"
)


def main() -> int:
    """Trains a config with and without interruptions, and compares the runs. Returns the exit code.

    With --record, only trains one run and records digests of its batches.
    """
    if cli.WORKDIR.value and not _RECORD.value:
        raise UserError("--workdir is for --record; without it, the runs are in a temporary folder: leave it out")
    experiment = cli.experiment()
    if _RECORD.value:
        return record(experiment, cli.WORKDIR.value, _RECORD.value)
    devices = _devices(experiment.mesh, _PROCESSES.value)
    steps = min(_STEPS.value, experiment.train.steps or _STEPS.value)
    arguments = [*_config_arguments(sys.argv[1:]), *_overrides(experiment, steps)]
    with tempfile.TemporaryDirectory(prefix="verify_resume-") as folder:

        def trial(name: str) -> Trial:
            return Trial(os.path.join(folder, name), arguments, devices)

        uninterrupted = trial("whole")
        seconds = uninterrupted.finish()
        platform = uninterrupted.platform()
        print(
            f"undisturbed run: {steps} steps in {seconds:.0f} s on {platform['devices']} × {platform['kind']}",
            flush=True,
        )
        rows = []
        killed_trial = trial("killed")
        killed_trial.copy_programs(uninterrupted)
        kill_steps = sorted(random.sample(range(steps), min(_KILLS.value, steps)))
        killed_trial.kill_at(kill_steps, seconds / steps)
        name = f"killed {len(kill_steps)} times, near steps {', '.join(map(str, kill_steps))}"
        rows += compare(name, uninterrupted, killed_trial, same=True)
        if _PROCESSES.value > 1 and platform["name"] == "cpu":
            resharded_trial = trial("other")
            resharded_trial.kill_at([middle_step := steps // 2], 0.0, resume=False)
            resharded_trial.finish(_PROCESSES.value)
            name = f"killed at step {middle_step}, resumed by {_PROCESSES.value} processes"
            rows += compare(name, uninterrupted, resharded_trial, same=False)
        elif _PROCESSES.value > 1:
            print("other process counts are compared only with JAX_PLATFORMS=cpu; see --help")
    print("\ncompared with the undisturbed run (✗: a check that fails)\n")
    print(text_table([(row.run, row.what, row.found, "" if row.good else "✗") for row in rows]))
    all_pass = all(row.good for row in rows)
    print("all checks pass: the config resumes" if all_pass else "FAILED: the config does NOT resume as it should")
    return 0 if all_pass else 1


def _devices(mesh: MeshConfig, processes: int) -> int:
    """Returns the smallest number of CPU devices that fits the mesh and is divisible by `processes`.

    Raises:
      UserError: the mesh has a fixed number of devices, which is not divisible by `processes`.
    """
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
    """Returns, unchanged, the command-line arguments that set --config or override its fields, except the budget."""
    arguments = []
    for word, next_word in zip(words, [*words[1:], "-"], strict=True):
        name = word.lstrip("-").split("=")[0]
        is_config = name == "config" or name.removeprefix("no").startswith("config.")
        if word.startswith("-") and is_config and name != BUDGET:  # `_overrides` sets the number of steps
            arguments += [word] if "=" in word or next_word.startswith("-") else [word, next_word]
    return arguments


def _overrides(experiment: Experiment, steps: int) -> list[str]:
    """Returns the overrides for a run of `steps` steps that logs every step and saves five checkpoints.

    The schedule keeps its shape: the last steps of a schedule, such as `anneal_steps`, would otherwise exceed the run.
    """
    save_interval = max(steps // 5, 1)
    changes = {
        "train.log_every": 1,
        "train.deterministic": True,
        "evaluate.every": steps,
        "evaluate.batches": 1,
        "checkpoint.every": save_interval,
    }
    if experiment.phases:  # each phase has the same fraction of the short run as of the full run
        phases = phases_of(experiment)
        fractions = [{"share": phase.steps / experiment.train.steps} for phase in phases[:-1]] + [{"share": None}]
        phases_and_fractions = zip(experiment.phases, fractions, strict=True)
        changes["phases"] = format_value(
            tuple(dataclasses.replace(p, steps=None, tokens=None, **s) for p, s in phases_and_fractions)
        )
    if experiment.checkpoint.keep_at:
        changes["checkpoint.keep_at"] = "()"
    if experiment.train.on_spike == "rollback":
        changes["checkpoint.keep"] = 1 + math.ceil(experiment.train.rollback_steps / save_interval)
    return [*length_flags(experiment, steps), *(f"--config.{name}={value}" for name, value in changes.items())]


if __name__ == "__main__":
    cli.run(main)
