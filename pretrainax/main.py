"""Pretrain a model: `python -m pretrainax.main --config=t5_base:large --workdir=DIR`.

The config is one that is installed, by its name and variant, or a Python file of your own. Any field of it can be
overridden: `--config.train.steps=1000`. The same command on the same workdir resumes. A resumed run may have other
fields that are no mathematics (mesh, logging, how often it saves) or answer a fault
(`--config.train.on_nonfinite=skip`, `--config.train.on_spike=rollback` and the fields after it); others are refused. A
run, finished or not, goes on past its end with more config.train.steps. Where a learning rate (or a mixture of texts)
that depends on them would have been another one until now, `--extend` says that it may change on the way.
Exit codes: 0 done, 1 failed, 2 bad config or input, 75 preempted after saving (run the same command again).
"""

import os
import sys
import time

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError

_EXTEND = flags.DEFINE_bool("extend", False, "Go on past the planned end with another learning rate than until there")


def main() -> int:
    experiment = cli.experiment()
    workdir = cli.WORKDIR.value or os.path.join("runs", f"{cli.config_name()}-{time.strftime('%Y%m%d-%H%M%S')}")

    # after the flags are known to be good; loader workers must not import JAX
    from pretrainax.runtime import cluster, goodput, host
    from pretrainax.runtime.signals import PREEMPTED
    from pretrainax.training import header, loop, next_steps

    if not cli.WORKDIR.value and cluster.is_one_of_many():
        raise UserError("--workdir is missing: all processes of a run need the same one")
    host.tune_malloc()
    host.start_jax(experiment)
    code = loop.train(
        experiment,
        workdir,
        goodput.process_age(),
        paper=header.Paper(cli.papers_source(), cli.deviations()),
        extend=_EXTEND.value,
    )
    if code == 0 and cluster.distributed_state().process_id == 0:
        print(next_steps.after_training(workdir, sys.argv[1:]), file=sys.stderr)
    elif code == PREEMPTED and not cluster.is_one_of_many():
        print(f"to resume: {next_steps.to_resume(workdir, sys.argv[1:])}", file=sys.stderr)
    return code


if __name__ == "__main__":
    cli.run(main)
