"""A study whose runs take no time: `python -m tests.studies.fake_study WORKDIR`, the queue of `pretrainax study`."""

import dataclasses
import fcntl
import functools
import json
import math
import os
import sys
import time

from pretrainax.config import RunFailed
from pretrainax.files.atomic_files import write_atomically
from pretrainax.runtime import workdir_lock
from pretrainax.studies import queue, worker
from pretrainax.studies.budgets import Length
from pretrainax.studies.command import findings_json
from pretrainax.studies.findings import findings_of
from pretrainax.studies.jobs import Results
from pretrainax.studies.outcomes import Outcome
from pretrainax.studies.plan import Plan, read_plan
from pretrainax.studies.stop_at import StopAt
from pretrainax.studies.study import Arm, Budget, Contrast, Final, Measure, Study, Tuning
from tests.support.runs import TINY

RATE, ADAM = "optimizer.learning_rate", "optimizer.adam_learning_rate"
REVERSED = "PRETRAINAX_TEST_REVERSED"  # environment variable: the queue runs the last of the available jobs first
# environment variable: part of a folder name; runs in such folders end their process
CRASHING = "PRETRAINAX_TEST_CRASH"
MACHINE = "PRETRAINAX_TEST_MACHINE"  # environment variable: name of a machine that shares files, but no file locks


@dataclasses.dataclass
class LastLoss(Measure):
    """A measure that returns the loss of the last line; it chooses a number for each arm."""

    chooses = True

    @property
    def larger_is_better(self):
        return False

    @property
    def unit(self):
        return "nats"

    def problems(self, experiment):
        yield from ()

    def choose(self, folder, experiment, context):
        return {"of": experiment.train.init_seed}

    def outcomes(self, folder, experiment, context):
        with open(os.path.join(folder, "metrics.jsonl")) as f:
            loss = json.loads(f.readlines()[-1])["loss"]
        return [Outcome(loss + seed / 8 + context.choice.get("of", 0)) for seed in context.downstream_seeds]


def train(experiment, folder):
    """Writes the metrics of a run; the loss depends only on the rates and the seeds."""
    if (crashing := os.environ.get(CRASHING)) and crashing in folder:
        os._exit(9)
    optimizer, seed = experiment.optimizer, experiment.train.seed_of("init")
    rates = optimizer.learning_rate / 3e-3, getattr(optimizer, "adam_learning_rate", 3e-4) / 3e-4
    if rates[0] > 50:
        return RunFailed.exit_code
    loss = 3 + sum(math.log(rate) ** 2 for rate in rates) + (seed * 37 % 11) / 100
    stop = next((c.step for c in experiment.callbacks if isinstance(c, StopAt)), experiment.train.steps)
    # The delay lets another machine see a free job, which takes up to a second.
    time.sleep(1.0 if os.environ.get(MACHINE) else 0.02)
    line = {"step": stop, "loss": loss, "flops": 2.0 * stop, "tokens_per_second": time.time()}
    os.makedirs(folder, exist_ok=True)
    write_atomically(
        os.path.join(folder, "metrics.jsonl"),
        "".join(json.dumps(line | {"split": split}) + "\n" for split in ("train", "valid")),
    )
    return 0


def plan(arms=("adamw", "muon"), **changes) -> Plan:
    """Returns a study of two arms with three final seeds each."""
    optimizers = {"adamw": "AdamW(learning_rate=3e-3)", "muon": "Muon(learning_rate=3e-3)", "lion": "Lion()"}
    study = Study(
        "Which optimizer?",
        tuple(Arm(name, f"{TINY}:gpt", (f"--config.optimizer={optimizers[name]}",)) for name in arms),
        Budget(flops=80.0),
        (LastLoss("loss"),),
        Contrast("loss", "adamw", "muon"),
        Tuning({RATE: (0.3, 1.0, 3.0), ADAM: (0.3, 1.0, 3.0)}, stop_share=0.25),
        Final(seeds=3, downstream_seeds=2),
    )
    length = Length(40, 80.0, 1.0, 1.0, 0.1, "fingerprint", 400)
    return Plan(dataclasses.replace(study, **changes), dict.fromkeys(arms, length))


class Reversed(Results):
    """A queue that runs the arms and the trials in reverse order."""

    def next_jobs(self, seeds):
        return super().next_jobs(seeds)[::-1]


def main(workdir: str) -> int:
    """Runs the study in a workdir that contains a plan; returns the exit code."""
    if machine := os.environ.get(MACHINE):
        workdir_lock._machine, fcntl.flock = lambda: machine, lambda *_: None
    results = (Reversed if os.environ.get(REVERSED) else Results)(read_plan(workdir), workdir)
    final = results.plan.study.final
    seeds = range(final.seed, final.seed + final.seeds)
    with queue.Worker(workdir) as child:
        if code := queue.run_jobs(functools.partial(results.next_jobs, seeds), workdir, child):
            return code
    write_atomically(os.path.join(workdir, "findings.json"), findings_json(findings_of(results, seeds)))
    return 0


if __name__ == "__main__":
    from tests.studies import fake_study  # plan.json refers to `LastLoss` in this module.

    if sys.argv[1] == "--worker":
        del sys.argv[1]
        worker.main(fake_study.train)
    else:
        queue._PROGRAM = (sys.executable, "-m", "tests.studies.fake_study", "--worker")
        sys.exit(fake_study.main(sys.argv[1]))
