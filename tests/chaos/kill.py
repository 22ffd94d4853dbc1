"""Kills commands with SIGKILL at random moments; the same command must then give the bits of an undisturbed run.

    python -m tests.chaos.kill --times=50 --config=tests/support/tiny.py:gpt [--what=train,prepare,export] [--seed=0]

A training run is killed up to three times: half of the kills come at any time after the first import, the other half
after a step or a save. A save follows every other step. A preparation starts with an empty cache.
"""

import pathlib
import random
import shutil
import sys
import tempfile
import time

from tests.support import runs


def killed(args: list[str], wait: float, begun=lambda: True) -> bool:
    """Starts the command and kills it `wait` seconds after `begun`; returns False if it ended before."""
    process = runs.start(args)
    while process.poll() is None and not begun():
        time.sleep(0.002)
    deadline = time.perf_counter() + wait
    while process.poll() is None and time.perf_counter() < deadline:
        time.sleep(0.002)
    process.kill()
    return process.wait() != 0


def kill_training(whole: runs.Whole, folder: pathlib.Path, rng: random.Random, times: int) -> int:
    args, metrics, count = whole.command("train", folder), folder / "run" / "metrics.jsonl", 0
    for _ in range(times):
        size = metrics.stat().st_size if metrics.exists() else 0
        if rng.random() < 0.5:
            count += killed(args, rng.uniform(0, whole.seconds.get("train", 15)))
        else:  # a new line of metrics: it trains
            grown = lambda size=size: metrics.exists() and metrics.stat().st_size > size  # noqa: E731
            count += killed(args, rng.uniform(0, 1.0), grown)
    whole.ends_the_same(folder / "run")
    return count


def kill_preparing(whole: runs.Whole, folder: pathlib.Path, rng: random.Random, times: int) -> int:
    args = whole.command("prepare", folder)
    count = sum(killed(args, rng.uniform(0, whole.seconds.get("prepare", 5))) for _ in range(times))
    done = runs.run(args)
    assert done.returncode == 0, done.stderr
    for part in ("tokenizers", "corpora"):
        assert runs.files(folder / "cache" / part) == runs.files(whole.cache / part)
    return count


def kill_exporting(whole: runs.Whole, folder: pathlib.Path, rng: random.Random, times: int) -> int:
    args, count = whole.command("export", folder), 0
    for _ in range(times):
        count += killed(args, rng.uniform(0, whole.seconds.get("export", 8)))
        if (folder / "export").exists():  # killed after the export was complete
            break
    else:
        done = runs.run(args)
        assert done.returncode == 0, done.stderr
    assert runs.files(folder / "export") == runs.files(whole.export)
    return count


KILL = {"train": kill_training, "prepare": kill_preparing, "export": kill_exporting}
WEIGHTS = {"train": 4, "prepare": 1, "export": 1}


def main() -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--what", default=",".join(KILL))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, report, kills = random.Random(given.seed), runs.Report(), dict.fromkeys(given.what.split(","), 0)
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        whole = runs.Whole(given.config, pathlib.Path(given.whole or f"{scratch}/whole"))
        while sum(kills.values()) < given.times:
            what = rng.choices(list(kills), [WEIGHTS[name] for name in kills])[0]
            folder, count = pathlib.Path(scratch) / "killed", rng.randint(1, 3)
            with report.trying(f"{what}, killed {count} times"):
                kills[what] += KILL[what](whole, folder, rng, count)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(kills.values())} kills ({kills}), {report.failed} runs with a different result")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
