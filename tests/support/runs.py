"""The commands that the chaos scripts run, and what is left of one: all that must be equal between two runs."""

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
# What a clock decides; everything else in a line of metrics.jsonl is decided by the config.
TIMINGS = {"tokens_per_second", "padded_tokens_per_second", "step_seconds", "mfu", "mfu_executed", "data_wait_fraction"}
TIMINGS |= {"compile_seconds"}
TINY = "tests/support/tiny.py"
# Compiles in a fifth of the time; whoever compares two runs runs both with it. jax 0.11 has no other emitters.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jax") < "0.11":
    FAST += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PLATFORMS"] = "cpu"  # here too, where checkpoints are read
# What one command has compiled the next one takes, and so does a second run of the tests.
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
    """What is started from now on hears SIGHUP: nohup has it ignored, and so has libtpu, if a checkpoint was read."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


hear_hangups()


def start(args: list[str]) -> subprocess.Popen:
    hear_hangups()
    return subprocess.Popen(args, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_text(folder: pathlib.Path) -> pathlib.Path:
    """A folder of text: sentences over 300 made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioustrnlkm", k=rng.randint(2, 7))) for _ in range(300)]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        lines = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(300)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


class Whole:
    """A run that nothing disturbed, what it was prepared from, and its export; found in `folder` where it is there."""

    def __init__(self, config: str, folder: pathlib.Path):
        self.config, self.folder, self.text = config, folder, folder / "text"
        self.run, self.cache, self.export = (folder / name for name in ("run", "cache", "export"))
        self.seconds: dict[str, float] = {}  # that each command took
        write_text(self.text)
        for what, made in (("prepare", self.cache), ("train", self.run), ("export", self.export)):
            if not made.exists():
                started = time.perf_counter()
                done = run(self.command(what, folder))
                assert done.returncode == 0, done.stderr
                self.seconds[what] = time.perf_counter() - started

    def command(self, what: str, folder: pathlib.Path) -> list[str]:
        """The same of another folder; a training takes what has been prepared here."""
        if what == "prepare":
            return preparing(self.config, self.text, folder / "cache")
        return exporting(self.run, folder / "export") if what == "export" else self.training(folder / "run")

    def training(self, workdir: pathlib.Path, *flags: str) -> list[str]:
        return command(self.config, workdir, self.text, self.cache, SAVING, *flags)

    def ends_the_same(self, workdir: pathlib.Path, args: Optional[list[str]] = None, env=None) -> None:
        """The command ends, and leaves in `workdir` what this run has left."""
        done = run(args or self.training(workdir), env)
        assert done.returncode == 0, done.stderr
        assert_same_run(workdir, self.run)


# --- what is left ----------------------------------------------------------------------------------------------------


def lines(workdir: pathlib.Path, split: str = "") -> list[dict]:
    every = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in every if split in line["split"]]


def steps(workdir: pathlib.Path) -> list[int]:
    """Those that have a checkpoint."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())


def arrays(workdir: pathlib.Path) -> dict:
    """Parameters, moments and step of the last checkpoint, by path."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from pretrainax.checkpoints.paths import exact_path

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax: no shardings were given to restore into
        state = ocp.load_checkpointables(exact_path(str(workdir / "checkpoints" / str(steps(workdir)[-1]))))
    found = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def run_json(workdir: pathlib.Path) -> dict:
    """The newest run.json, without the bytes of metrics.jsonl, which has times in it."""
    found = json.loads((workdir / "checkpoints" / str(steps(workdir)[-1]) / "run.json").read_text())
    (found["extra"].get("metrics_file") or {}).pop("bytes", None)
    return found


def files(folder: pathlib.Path) -> dict[str, str]:
    """A digest of each file below a folder; of an archive of NumPy, of what is in it."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock"))
    return {str(p.relative_to(folder)): _digest(p) for p in found}


def _digest(path: pathlib.Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".npz":  # whose entries carry the time
        import numpy as np

        with np.load(path) as entries:
            content = b"".join(name.encode() + entries[name].tobytes() for name in sorted(entries))
    return hashlib.sha256(content).hexdigest()


def assert_same_run(got: pathlib.Path, whole: pathlib.Path) -> None:
    """The last state bit for bit, the steps that are kept and nothing beside them, what the loop remembers, every line
    but for its timings."""
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
    """The steps whose every file is what their manifest says."""
    from pretrainax.checkpoints import manifest

    folder = workdir / "checkpoints"
    return [step for step in steps(workdir) if not manifest.faults(str(folder / str(step)))]


def last_line(process: subprocess.CompletedProcess) -> str:
    """The line of an error; there must be no traceback."""
    assert "Traceback" not in process.stderr, process.stderr[-3000:]
    return process.stderr.strip().splitlines()[-1]


# --- for people ------------------------------------------------------------------------------------------------------


def parser(documentation: str) -> argparse.ArgumentParser:
    """The flags of a script that compares with a `Whole`."""
    made = argparse.ArgumentParser(description=documentation.splitlines()[0])
    made.add_argument("--config", default=f"{TINY}:gpt", help="one whose source has a path")
    made.add_argument("--whole", default="", help="folder that keeps the run to compare with")
    return made


@contextlib.contextmanager
def trials(documentation: str, names: Sequence[str]) -> Iterator[tuple[list[str], Whole, pathlib.Path]]:
    """Yields what --only names of all trials, the run to compare with, and an empty folder."""
    flags = parser(documentation)
    flags.add_argument("--only", default=",".join(names))
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        folder = pathlib.Path(scratch)
        yield given.only.split(","), Whole(given.config, pathlib.Path(given.whole or folder / "whole")), folder


class Report:
    """Prints a line for each thing tried, and counts them and what did not hold."""

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
        """Prints the counts; returns the exit code."""
        print(f"{self.tried} tried, {self.tried - self.failed} survived")
        return int(self.failed > 0)


class Skipped(Exception):
    """What this machine does not allow."""
