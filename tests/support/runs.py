"""The commands that the chaos scripts run, and the outputs that must be equal between two runs."""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Optional

ROOT = pathlib.Path(__file__).parents[2]
# Metrics that depend on a clock. The config determines everything else in a line of metrics.jsonl.
TIMINGS = {"tokens_per_second", "padded_tokens_per_second", "step_seconds", "mfu", "mfu_executed", "data_wait_fraction"}
TIMINGS |= {"compile_seconds"}
TINY = "tests/support/tiny.py"
# Compiles in a fifth of the time. A comparison of two runs uses these flags for both runs. jax 0.11 has only the fusion
# emitters.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jax") < "0.11":
    FAST += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PLATFORMS"] = "cpu"  # also in this process, which reads checkpoints
# A later command, or a second run of the tests, reuses compiled programs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "xla"))
ENV = os.environ | {"XLA_FLAGS": FAST}
SAVING = "--config.checkpoint.every=2"


def command(config: str, workdir, text, cache, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "pretrainax.main", f"--config={config}", f"--workdir={workdir}"),
        *(f"--config.data.source.path={text}", f"--config.data.cache_dir={cache}", *flags),
    ]


def preparing(config: str, text, cache, *flags: str) -> list[str]:
    program, _, _, *rest = command(config, "", text, cache, *flags)
    return [program, "-m", "pretrainax.prepare", *(flag for flag in rest if not flag.startswith("--workdir"))]


def exporting(workdir, to) -> list[str]:
    module = [sys.executable, "-m", "pretrainax.huggingface"]
    return [*module, "export", f"--workdir={workdir}", f"--to={to}", "--noverify"]


def run(args: list[str], env=None, timeout: float = 300, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        args, cwd=ROOT, env=ENV if env is None else env, capture_output=True, text=True, timeout=timeout, **kwargs
    )


def hear_hangups() -> None:
    """Makes child processes react to SIGHUP; nohup disables it, and so does libtpu after a checkpoint was read."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


hear_hangups()


def start(args: list[str]) -> subprocess.Popen:
    hear_hangups()
    return subprocess.Popen(args, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_text(folder: pathlib.Path) -> pathlib.Path:
    """Writes a folder of text: sentences of 300 made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioustrnlkm", k=rng.randint(2, 7))) for _ in range(300)]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        lines = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(300)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


class Whole:
    """An undisturbed run, its prepared data, and its export; existing results in `folder` are reused."""

    def __init__(self, config: str, folder: pathlib.Path):
        self.config, self.folder, self.text = config, folder, folder / "text"
        self.run, self.cache, self.export = (folder / name for name in ("run", "cache", "export"))
        self.seconds: dict[str, float] = {}  # duration of each command
        write_text(self.text)
        for what, made in (("prepare", self.cache), ("train", self.run), ("export", self.export)):
            if not made.exists():
                started = time.perf_counter()
                done = run(self.command(what, folder))
                assert done.returncode == 0, done.stderr
                self.seconds[what] = time.perf_counter() - started

    def command(self, what: str, folder: pathlib.Path) -> list[str]:
        """Returns the same command for another folder; training reads the data that was prepared here."""
        if what == "prepare":
            return preparing(self.config, self.text, folder / "cache")
        return exporting(self.run, folder / "export") if what == "export" else self.training(folder / "run")

    def training(self, workdir: pathlib.Path, *flags: str) -> list[str]:
        return command(self.config, workdir, self.text, self.cache, SAVING, *flags)

    def ends_the_same(self, workdir: pathlib.Path, args: Optional[list[str]] = None, env=None) -> None:
        """Asserts that the command succeeds, and that its run in `workdir` equals this run."""
        done = run(args or self.training(workdir), env)
        assert done.returncode == 0, done.stderr
        assert_same_run(workdir, self.run)


# --- results of a run ------------------------------------------------------------------------------------------------


def lines(workdir: pathlib.Path, split: str = "") -> list[dict]:
    every = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in every if split in line["split"]]


def steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps that have a checkpoint."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())


def arrays(workdir: pathlib.Path) -> dict:
    """Returns parameters, moments and step of the last checkpoint, by path."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from pretrainax.checkpoints.paths import exact_path

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax: no shardings were given for the restored arrays
        state = ocp.load_checkpointables(exact_path(str(workdir / "checkpoints" / str(steps(workdir)[-1]))))
    found = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def run_json(workdir: pathlib.Path) -> dict:
    """Returns the newest run.json, without the size of metrics.jsonl, because its timings vary."""
    found = json.loads((workdir / "checkpoints" / str(steps(workdir)[-1]) / "run.json").read_text())
    (found["extra"].get("metrics_file") or {}).pop("bytes", None)
    return found


def files(folder: pathlib.Path) -> dict[str, str]:
    """Returns a digest of each file below a folder; for a NumPy archive, a digest of its entries."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock"))
    return {str(p.relative_to(folder)): _digest(p) for p in found}


def _digest(path: pathlib.Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".npz":  # its entries contain the time
        import numpy as np

        with np.load(path) as entries:
            content = b"".join(name.encode() + entries[name].tobytes() for name in sorted(entries))
    return hashlib.sha256(content).hexdigest()


def assert_same_run(got: pathlib.Path, whole: pathlib.Path) -> None:
    """Asserts that two runs are equal.

    The last state is equal bit by bit. Both runs have the same checkpoints and no other files, the same state of the
    loop, and the same metrics except for timings.
    """
    import numpy as np

    assert lines(got) == lines(whole)
    assert sorted(os.listdir(got / "checkpoints")) == sorted(map(str, steps(whole))) and run_json(got) == run_json(
        whole
    )
    expected, found = arrays(whole), arrays(got)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert files(got / "tokenizer") == files(whole / "tokenizer")


def valid_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps whose files all match their manifest."""
    from pretrainax.checkpoints import manifest

    folder = workdir / "checkpoints"
    return [step for step in steps(workdir) if not manifest.faults(str(folder / str(step)))]


def last_line(process: subprocess.CompletedProcess) -> str:
    """Returns the last line of an error message, and asserts that there is no traceback."""
    assert "Traceback" not in process.stderr, process.stderr[-3000:]
    return process.stderr.strip().splitlines()[-1]


# --- for people ------------------------------------------------------------------------------------------------------


def parser(documentation: str) -> argparse.ArgumentParser:
    """Returns the parser of a script that compares with a `Whole`."""
    made = argparse.ArgumentParser(description=documentation.splitlines()[0])
    made.add_argument("--config", default=f"{TINY}:gpt", help="one whose source has a path")
    made.add_argument("--whole", default="", help="folder that keeps the run to compare with")
    return made


@contextlib.contextmanager
def trials(documentation: str, names: Sequence[str]) -> Iterator[tuple[list[str], Whole, pathlib.Path]]:
    """Yields the trials of --only (default: all), the run to compare with, and an empty folder."""
    flags = parser(documentation)
    flags.add_argument("--only", default=",".join(names))
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        folder = pathlib.Path(scratch)
        yield given.only.split(","), Whole(given.config, pathlib.Path(given.whole or folder / "whole")), folder


class Report:
    """Prints a line for each trial, and counts the trials and the failures."""

    def __init__(self) -> None:
        self.tried, self.failed = 0, 0

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        try:
            yield
        except Skipped as e:
            print(f"skip  {what}: {e}", flush=True)
        except Exception as e:
            self.failed += 1
            print(f"FAIL  {what}: {' '.join(f'{type(e).__name__}: {e}'.split())[-1500:]}", flush=True)
            self.tried += 1
        else:
            print(f"ok    {what}", flush=True)
            self.tried += 1

    def sum_up(self) -> int:
        """Prints the counts, and returns the exit code."""
        print(f"{self.tried} tried, {self.tried - self.failed} survived")
        return int(self.failed > 0)


class Skipped(Exception):
    """Raised if this machine does not allow a trial."""
