"""Trains and scores the runs of a record, and writes its result.

    python records/run.py records/NAME --text=DIR --workdir=DIR

The runs have the seeds 0, 1, … The same command continues after an interruption: it skips finished seeds, and resumes a
run from its checkpoint. `--seeds=0,1` trains some of the seeds, for example on several machines that mount the same
folder. When all seeds are finished, the command writes the result. `--variant=short` uses a budget of seconds, as a
test.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Sequence

import jax
import reference
import rules
import text
from result import FIELDS, Result, SeedResult, metrics_path, read_lines, write_result

import pretrainax
from pretrainax.config import Experiment, UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.studies.outcomes import MeasureContext
from pretrainax.training.callbacks import Callback

_SCORE = "seed.json"  # in the folder of a run: its `SeedResult` as JSON, when it is finished
_SAVED = "core_seconds.json"  # in the folder of a run: {step of a checkpoint: core-seconds until then}


@dataclasses.dataclass
class CoreSeconds(Callback):
    """Logs the core-seconds of a run (the time that all threads of its processes compute) and of the reference.

    The clock starts after the first update of each process, which compiles, and it waits for the devices before each
    log line and checkpoint. The reference computation, once for each log line, does not count. A resumed run continues
    with the value of its checkpoint. This checkpoint may lie between two log lines if a signal caused it.
    """

    workdir: str = ""
    stop_at: int = 0  # step after which the run ends; 0: the last step

    def on_start(self, loop, state, metrics):
        path = os.path.join(self.workdir, _SAVED)
        self._saved = read_object(path) if os.path.exists(path) else {}
        self._before = self._saved[str(loop.step)] if loop.step else 0.0
        self._started, self._time_reference = None, reference.timer()

    def on_step(self, loop, state, metrics):
        if self._started is None:
            jax.block_until_ready(state)
            self._started = time.process_time()
        if loop.step == self.stop_at:
            loop.stop("a replay of the first log line")

    def log_metrics(self, loop, state):
        used, stopped = self._used(state), time.process_time()
        times = {"core_seconds": used, "reference_seconds": self._time_reference()}
        if self._started is not None:
            self._started += time.process_time() - stopped
        return times

    def on_save(self, loop, state, metrics):
        self._saved[str(loop.step)] = self._used(state)
        write_atomically(os.path.join(self.workdir, _SAVED), json.dumps(self._saved))

    def _used(self, state) -> float:
        jax.block_until_ready(state)
        return self._before + (0.0 if self._started is None else time.process_time() - self._started)


def experiment_of(record: str, variant: str) -> Experiment:
    """Reads the config of a record; the variant "full" is the config's own default."""
    name = f":{variant}" * (variant != "full")
    return read_config_file(os.path.join(record, "config.py") + name)


def train_seed(experiment: Experiment, folder: str, seed: int, texts: str) -> int:
    """Trains and scores one run, unless it is finished already; returns the exit code of the training."""
    path = os.path.join(folder, _SCORE)
    if os.path.exists(path):
        return 0
    code = pretrainax.train(rules.prepared(experiment, texts, seed), folder, callbacks=[CoreSeconds(folder)])
    if code:
        return code
    outcome = rules.measure(texts).outcomes(folder, experiment, MeasureContext())[0]
    lines = read_lines(os.path.join(folder, "metrics.jsonl"))
    kept = [json.dumps({name: line[name] for name in FIELDS if name in line}) + "\n" for line in lines]
    write_atomically(metrics_path(folder, seed), "".join(kept))
    digest = text.sha256(metrics_path(folder, seed))
    write_atomically(path, json.dumps(SeedResult(seed, outcome.value, outcome.changes.tolist(), digest)))
    return 0


def collect(record: str, to: str, folders: Sequence[str], track: str, variant: str) -> bool:
    """Writes result.json, the config and the logs to the folder `to` if all runs are finished; returns True if so."""
    if not all(os.path.exists(os.path.join(folder, _SCORE)) for folder in folders):
        return False
    seeds = []
    for folder in folders:
        with open(os.path.join(folder, _SCORE)) as file:
            seeds.append(SeedResult(*json.load(file)))
        with open(metrics_path(folder, seeds[-1].seed)) as file:
            write_atomically(metrics_path(to, seeds[-1].seed), file.read())
    versions = {"pretrainax": pretrainax.__version__, "jax": jax.__version__, "python": platform.python_version()}
    with open(os.path.join(record, "config.py")) as file:
        write_atomically(os.path.join(to, "config.py"), file.read())
    config = text.sha256(os.path.join(to, "config.py"))
    write_result(to, Result(track, variant, config, dict(rules.TEXT), seeds, versions, platform.machine()))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", help="folder with config.py")
    parser.add_argument("--text", required=True, help="folder of the text, from records/text.py")
    parser.add_argument("--workdir", required=True, help="folder of the runs")
    parser.add_argument("--count", type=int, default=rules.SEEDS, help="number of seeds of the record")
    parser.add_argument("--seeds", help="seeds to train in this process, such as 0,1; without it all")
    parser.add_argument("--variant", choices=sorted(rules.BUDGETS), default="full")
    parser.add_argument("--to", help="folder of the result; without it the record, or the workdir of a short variant")
    given = parser.parse_args()
    try:
        experiment = experiment_of(given.record, given.variant)
        track = next((name for name, family in rules.TRACKS.items() if family == experiment.model.family), "")
        if found := [*text.problems(given.text), *rules.config_problems(experiment, track)]:
            raise UserError("; ".join(found))
        folders = [os.path.join(given.workdir, f"seed-{seed}") for seed in range(given.count)]
        for seed in range(given.count) if given.seeds is None else map(int, given.seeds.split(",")):
            if code := train_seed(experiment, folders[seed], seed, given.text):
                return code
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    to = given.to or (given.record if rules.BUDGETS[given.variant].counts else given.workdir)
    print(f"{to}: " + ("written" if collect(given.record, to, folders, track, given.variant) else "seeds are missing"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
