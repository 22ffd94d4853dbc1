"""Trains a model: `python -m pretrainax.main --config=t5_base:large --workdir=DIR`.

--config takes the name and variant of an installed config, or your own Python file. Flags override fields of the
config: `--config.train.steps=1000`.

The same command on the same --workdir resumes the run from its newest checkpoint. A resumed run may change fields that
do not affect the mathematics (mesh, logging, checkpoint interval) and fields that control how faults are handled
(`--config.train.on_nonfinite=skip`, `--config.train.on_spike=rollback` and their settings). Other changes are errors. A
larger config.train.steps extends a run, finished or not. The extension needs `--extend` if it changes the learning rate
(or the mixture of datasets) of steps that are already done.

--seeds=5 trains five runs, each in a subfolder of --workdir. --sweep="optimizer.learning_rate=1e-5,3e-5,1e-4" trains
one run per value of a field. Both flags together train one run per combination. The same command continues after an
interruption. At the end, the command prints tables and writes runs.json. Both list each run's best checkpoint, the mean
of each setting over seeds, and paired differences with 95 % intervals. A setting is named the best only if it is
distinguishable from all others. A sweep selects on one half of the validation and reports the other half.

A run whose estimated memory exceeds the memory of a device (on CPUs: the memory that is available) ends with the
cheapest change that makes it fit; `--nocheck_memory` starts it anyway.

--config.train.profile_steps=10:13 profiles steps 10 to 13. On the signal SIGUSR1, the run profiles its next steps. See
docs/how-to/profile.md.

Exit codes: 0 done, 1 failed, 2 invalid config or input, 75 preempted after saving (run the same command again).
"""

import gc
import os
import sys
import time

from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, RunFailed, UserError, grid
from pretrainax.files.paths import is_url
from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.runtime.signals import PARENT, PREEMPTED, end_with_parent

_EXTEND = flags.DEFINE_bool(
    "extend", False, "Allow a longer run to change the learning rate (or mixture) that its plan had so far"
)
_CHECK_MEMORY = flags.DEFINE_bool(
    "check_memory", True, "Refuse a run whose estimated memory exceeds the memory of a device; --nocheck_memory warns"
)
_SEEDS = flags.DEFINE_integer(
    "seeds", None, "Number of runs to train, with consecutive seeds from config.train.seed", lower_bound=1
)
_SWEEP = flags.DEFINE_multi_string(
    "sweep",
    [],
    "Field and values, a run for each: optimizer.learning_rate=1e-5,3e-5,1e-4. Joint fields: a,b=(1,2),(3,4)",
)
_SHARE_PROCESS = flags.DEFINE_bool(
    "share_process", True, "Train all runs of --seeds and --sweep in one process; --noshare_process starts one for each"
)


def main() -> int:
    """Trains a single run, or the grid of runs that --seeds and --sweep define. Returns the exit code."""
    end_with_parent()
    request = ProfileRequest().listen()  # first, because SIGUSR1 kills a process that has no handler
    experiment = cli.experiment()
    workdir = cli.WORKDIR.value or os.path.join("runs", f"{cli.config_name()}-{time.strftime('%Y%m%d-%H%M%S')}")

    # Imported after the flags are validated; loader workers must not import JAX.
    if _SEEDS.value is not None or _SWEEP.value:
        return _train_grid(experiment, workdir, request)
    from pretrainax.runs.grid_runs import next_arguments
    from pretrainax.runtime import goodput, shared_programs

    with shared_programs.sharing(shared_programs.Programs()):
        code = _train_run(experiment, workdir, request, goodput.process_age())
        while code == 0 and (arguments := next_arguments()) is not None:  # the next run of a grid
            gc.collect()  # frees the arrays of the finished run
            cli.parse_again(arguments)
            code = _train_run(cli.experiment(), cli.WORKDIR.value or workdir, request, 0.0)
    return code


def _train_run(experiment: Experiment, workdir: str, request: ProfileRequest, process_age: float) -> int:
    """Trains a single run. Returns the exit code.

    process_age: seconds since this process started to prepare the run.
    """
    from pretrainax.planning import current_devices, memory_check
    from pretrainax.profiling import report
    from pretrainax.runs import header, next_steps
    from pretrainax.runs.train import train
    from pretrainax.runtime import cluster, folders, host
    from pretrainax.training import profiles

    if not cli.WORKDIR.value and cluster.is_multi_process():
        raise UserError("--workdir is missing: all processes of a run need the same --workdir")
    host.tune_malloc()
    host.start_jax(experiment)
    is_first = cluster.distributed_state().process_id == 0
    with folders.local_folder(workdir, experiment.checkpoint.local_dir) as folder:
        code = train(
            experiment,
            folder,
            process_age,
            paper=header.Paper(cli.paper_source(), cli.deviations(), cli.recipe_counts()),
            extend=_EXTEND.value,
            callbacks=[
                current_devices.ResolveRemat(),
                memory_check.MemoryCheck(_CHECK_MEMORY.value),
                profiles.Profiles(request, report.run_report),
            ],
        )
        message = next_steps.after_training(workdir, sys.argv[1:], folder) if code == 0 and is_first else ""
    if code == 0 and is_first:
        print(message, file=sys.stderr)
    elif code == PREEMPTED and not cluster.is_multi_process() and PARENT not in os.environ:  # or the parent prints it
        print(f"to resume: {next_steps.resume_command(workdir, sys.argv[1:])}", file=sys.stderr)
    return code


def _train_grid(experiment: Experiment, workdir: str, request: ProfileRequest) -> int:
    """Trains the grid of runs that --seeds and --sweep define. Returns the exit code."""
    from pretrainax.runtime import cluster

    if is_url(workdir):
        raise UserError(
            f"--workdir={workdir}: --seeds and --sweep need a local folder; start single runs for an object store"
        )
    if cluster.is_multi_process():
        raise UserError("--seeds and --sweep run in one process: start runs with several processes one by one")
    from pretrainax.runs import grid_runs, next_steps

    arguments = flags.FLAGS.read_flags_from_files(sys.argv)[1:]  # includes the flags of a --flagfile
    runs = grid.grid_of(experiment, _SEEDS.value, _SWEEP.value)
    if _SEEDS.value is not None:
        print(f"pretrainax: {grid.describe_seeds(experiment)}", file=sys.stderr)
    run_arguments = next_steps.remove_flags(arguments, ["workdir", "seeds", "sweep"], ["extend", "share_process"])
    shares = _SHARE_PROCESS.value
    code = grid_runs.train_grid(runs, workdir, run_arguments, _EXTEND.value, request, cli.VERBOSE.value, shares)
    if code in (PREEMPTED, RunFailed.exit_code):
        print(f"to resume: {next_steps.resume_command(workdir, sys.argv[1:])}", file=sys.stderr)
    return code


if __name__ == "__main__":
    cli.run(main, trains=True)
