"""Pretrain a model: `python -m pretrainax.main --config=t5_base:large --workdir=DIR`.

The config is one that is installed, by its name and variant, or a Python file of your own. Any field of it can be
overridden: `--config.train.steps=1000`. The same command on the same workdir resumes. A resumed run may have other
fields that are no mathematics (mesh, logging, how often it saves) or answer a fault
(`--config.train.on_nonfinite=skip`, `--config.train.on_spike=rollback` and the fields after it); others are refused. A
run, finished or not, goes on past its end with more config.train.steps. Where a learning rate (or a mixture of texts)
that depends on them would have been another one until now, `--extend` says that it may change on the way.

--seeds=5 makes five runs, each in a folder below --workdir, and --sweep="optimizer.learning_rate=1e-5,3e-5,1e-4" one
for each value of a field; both together, one for each pair. The same command goes on where it was ended. At the end
stand a table and runs.json: the best checkpoint of each by the figure that the run selects by, medians and spreads.

--config.train.profile_steps=10:13 writes a profile of these steps, SIGUSR1 one of the next steps: docs/profiling.md.

Exit codes: 0 done, 1 failed, 2 bad config or input, 75 preempted after saving (run the same command again).
"""

import os
import sys
import time

from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, RunFailed, UserError, grid
from pretrainax.files.paths import is_url
from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.runtime.signals import PARENT, PREEMPTED, end_with_parent

_EXTEND = flags.DEFINE_bool("extend", False, "Go on past the planned end with another learning rate than until there")
_SEEDS = flags.DEFINE_integer("seeds", None, "So many runs, with seeds from config.train.seed on", lower_bound=1)
_SWEEP = flags.DEFINE_multi_string("sweep", [], "A run for each value: optimizer.learning_rate=1e-5,3e-5,1e-4")


def main() -> int:
    end_with_parent()
    request = ProfileRequest().listen()  # before anything that takes long: unheard, SIGUSR1 ends a process
    experiment = cli.experiment()
    workdir = cli.WORKDIR.value or os.path.join("runs", f"{cli.config_name()}-{time.strftime('%Y%m%d-%H%M%S')}")

    # after the flags are known to be good; loader workers must not import JAX
    if _SEEDS.value is not None or _SWEEP.value:
        return _train_grid(experiment, workdir, request)
    from pretrainax.planning import here
    from pretrainax.profiling import report
    from pretrainax.runs import header, next_steps
    from pretrainax.runs.train import train
    from pretrainax.runtime import cluster, folders, goodput, host
    from pretrainax.training import profiles

    if not cli.WORKDIR.value and cluster.is_one_of_many():
        raise UserError("--workdir is missing: all processes of a run need the same one")
    host.tune_malloc()
    host.start_jax(experiment)
    is_first = cluster.distributed_state().process_id == 0
    with folders.at_work(workdir, experiment.checkpoint.local_dir) as folder:
        code = train(
            experiment,
            folder,
            goodput.process_age(),
            paper=header.Paper(cli.papers_source(), cli.deviations()),
            extend=_EXTEND.value,
            callbacks=[here.SettledHere(), profiles.Profiles(request, report.of_run)],
        )
        told = next_steps.after_training(workdir, sys.argv[1:], folder) if code == 0 and is_first else ""
    if code == 0 and is_first:
        print(told, file=sys.stderr)
    elif code == PREEMPTED and not cluster.is_one_of_many() and PARENT not in os.environ:  # which says how itself
        print(f"to resume: {next_steps.to_resume(workdir, sys.argv[1:])}", file=sys.stderr)
    return code


def _train_grid(experiment: Experiment, workdir: str, request: ProfileRequest) -> int:
    """Makes the runs that --seeds and --sweep ask for."""
    from pretrainax.runtime import cluster

    if is_url(workdir):
        raise UserError(
            f"--workdir={workdir}: --seeds and --sweep are for a folder of this machine; start single runs there"
        )
    if cluster.is_one_of_many():
        raise UserError("--seeds and --sweep are for one process: start the runs of several processes one by one")
    from pretrainax.runs import grid_runs, next_steps

    words = flags.FLAGS.read_flags_from_files(sys.argv)[1:]  # with what a --flagfile has
    runs = grid.grid_of(experiment, _SEEDS.value, _SWEEP.value)
    if _SEEDS.value is not None:
        print(f"pretrainax: {grid.what_differs(experiment)}", file=sys.stderr)
    own = next_steps.without(words, ["workdir", "seeds", "sweep"], ["extend"])
    code = grid_runs.train_grid(runs, workdir, own, _EXTEND.value, request)
    if code in (PREEMPTED, RunFailed.exit_code):
        print(f"to resume: {next_steps.to_resume(workdir, sys.argv[1:])}", file=sys.stderr)
    return code


if __name__ == "__main__":
    cli.run(main, trains=True)
