"""Compares small runs, one process each, with the same runs in one process (`studies.trainer.Trainer`).

    python benchmarks/small_runs.py --workdir=DIR --books=FOLDER --runs=8
    python benchmarks/small_runs.py --workdir=DIR --books=FOLDER --code=OTHER_CHECKOUT

Each run has its own seed and learning rate. The two sides alternate run by run, each with its own empty compilation
cache; the data is prepared before. The tables have seconds, CPU seconds and the share of steps (goodput) per run.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import runs as benchmark_runs
import side

from pretrainax.config.config_file import read_config_file
from pretrainax.config.overrides import set_field

FAMILIES = ("gpt2", "bert_base", "t5_base")
FIELDS = {  # about 0.1 million parameters
    **{"tokenizer.vocab_size": "1024", "model.vocab_size": "auto", "model.d_model": "64"},
    **{"train.global_batch_size": "8", "data.sequence_length": "64", "train.log_every": "20"},
}


def fields(number: int, options) -> dict[str, str]:
    """Returns the config fields of run `number`: two learning rates per seed."""
    rate = {"optimizer.learning_rate": ("1e-3", "3e-3")[number % 2], "train.seed": str(number // 2)}
    data = {"data.source": benchmark_runs.books(options.books), "train.steps": str(options.steps)}
    return FIELDS | data | rate | {"data.cache_dir": os.path.join(options.workdir, "data")}


def serve(family: str, options) -> None:
    """Trains the run of each line of stdin in this process."""
    from pretrainax.studies.trainer import Trainer

    trainer = Trainer()

    def train(number: int) -> float:
        experiment = read_config_file(f"{family}:tiny")
        for field, value in fields(number, options).items():
            set_field(experiment, f"config.{field}", value)
        before = time.process_time()
        if trainer.train(experiment, folder(options, family, "trainer", number)):
            sys.exit("the run failed")
        return time.process_time() - before

    side.serve(train)


def folder(options, family: str, name: str, number: int) -> str:
    return os.path.join(options.workdir, family, name, str(number))


def command(family: str, number: int, options) -> float:
    """Trains a run with the command of a checkout; returns its CPU seconds."""
    flags = [f"--config.{field}={value}" for field, value in fields(number, options).items()]
    words = [sys.executable, "-m", "pretrainax.main", f"--config={family}:tiny", *flags]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": os.path.join(options.workdir, family, "command-xla")}
    env |= {"PYTHONPATH": options.code} if options.code else {}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    workdir = f"--workdir={folder(options, family, 'command', number)}"
    subprocess.run([*words, workdir], check=True, stderr=subprocess.DEVNULL, cwd=options.code or None, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def share_of_steps(workdir: str) -> float:
    with open(os.path.join(workdir, "goodput.json")) as file:
        seconds = json.load(file)[-1]["seconds"]
    return seconds["steps"] / sum(seconds.values())


def table(family: str, rows: Sequence[Sequence[float]]) -> None:
    """Prints the medians of (seconds, CPU seconds, share of steps) of the commands and of the trainer."""
    old, new = ([statistics.median(column) for column in zip(*rows[i::2], strict=True)] for i in (0, 1))
    for name, (seconds, cpu, share) in (("command", old), ("trainer", new)):
        print(f"{family:10} {name:8} {seconds:6.1f} s, {cpu:5.1f} CPU s, {share:4.0%} in steps")
    print(f"{family:10} throughput x {old[0] / new[0]:.1f}, CPU x {old[1] / new[1]:.1f}", flush=True)


def main() -> None:
    parser = benchmark_runs.parser(__doc__, "books")
    parser.add_argument("--code", help="checkout whose command trains the runs of one process each; default: this one")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--serve", help="family of the runs that this process trains")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    same = [f"--workdir={options.workdir}", f"--books={options.books}", f"--steps={options.steps}"]
    for family in options.families:
        flags = [f"--config.{field}={value}" for field, value in fields(0, options).items()]
        prepare = [sys.executable, "-m", "pretrainax.prepare", f"--config={family}:tiny", *flags]
        subprocess.run(prepare, check=True, stderr=subprocess.DEVNULL)
        cache = {"JAX_COMPILATION_CACHE_DIR": os.path.join(options.workdir, family, "trainer-xla")}
        trainer, rows = side.Side(__file__, [family, *same], cache), []
        for number in range(options.runs):
            for name in ("command", "trainer"):
                start = time.perf_counter()
                cpu = command(family, number, options) if name == "command" else trainer.ask(number)
                seconds = time.perf_counter() - start
                rows.append((seconds, cpu, share_of_steps(folder(options, family, name, number))))
                print(family, number, name, *(f"{x:.2f}" for x in rows[-1]), file=sys.stderr, flush=True)
        trainer.close()
        table(family, rows)


if __name__ == "__main__":
    main()
