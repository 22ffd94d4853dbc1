"""Reads thousands of damaged files: `python -m tests.fuzz --count=10000 [--only=NAME,…] [--first=SEED]`.

Each file must be read, or raise a one-line UserError. Failures are other exceptions, a dead process (also in a native
library), more than ten seconds, memory beyond a small multiple of the file size, and code execution. A separate process
reads the inputs; a new one continues after an input that killed it. NAME and seed reproduce an input:
`--only=NAME --first=SEED --count=1 --keep=FOLDER`.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 10  # CPU time per input; wall-clock time is limited to twenty times this
# Memory per input: a few copies of the file, and allocations at a library's first use.
MEMORY, MEMORY_PER_BYTE = 64 << 20, 50
ADDRESS_SPACE = 3 << 30  # on top of the size at start: a huge allocation fails instead of swapping
_RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")
_REACHES_OUT = ("socket.connect", "urllib.Request")


def fuzz(only: list[str], count: int, first: int = 0, keep: str = "") -> tuple[dict[str, int], list[str]]:
    """Returns the number of inputs tried per format, and a line for each failure."""
    counts, faults = {}, []
    for i, name in enumerate(only):
        share = count // len(only) + (i < count % len(only))
        print(name, flush=True)
        counts[name], seed, stop = 0, first, first + share
        while seed < stop:
            done, lines = _child(name, seed, stop, keep)
            faults += lines
            print("\n".join(lines), end="\n" * bool(lines), flush=True)
            counts[name] += done - seed
            seed = done
    return counts, faults


def _child(name: str, seed: int, stop: int, keep: str) -> tuple[int, list[str]]:
    """Reads inputs in a child process until `stop` or its death; returns the next seed, and the failures."""
    command = [sys.executable, "-m", "tests.fuzz", f"--child={name}", f"--first={seed}", f"--count={stop - seed}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    env |= {"PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*command, f"--keep={keep}"], cwd=ROOT, env=env, capture_output=True, text=True)
    lines, begun = [], seed - 1
    for line in process.stdout.splitlines():
        if line.startswith("begin "):
            begun = int(line.split()[1])
        elif line.startswith("fault "):
            lines.append(f"{name} {line.removeprefix('fault ')}")
    if process.returncode == 0:
        return stop, lines
    if begun < seed:
        raise RuntimeError(f"{name}: cannot read the undamaged file:\n{process.stderr[-3000:]}")
    died = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit code {process.returncode}"
    died = f"not finished after {SECONDS} s" if died in ("SIGPROF", "SIGALRM") else f"died of {died}"
    return begun + 1, [*lines, f"{name} {begun}: {died}: {process.stderr[-1500:]}"]


# --- the process that reads ------------------------------------------------------------------------------------------


def read_all(name: str, first: int, count: int, keep: str) -> None:
    import resource

    from absl import flags

    from pretrainax import cli
    from pretrainax.config import UserError
    from tests.fuzz.formats import formats

    flags.FLAGS.mark_as_parsed()
    form = formats()[name]
    with tempfile.TemporaryDirectory(prefix="fuzz") as scratch:
        good, bad = pathlib.Path(scratch) / "good", pathlib.Path(scratch) / "bad"
        good.mkdir()
        form.make(good)
        for _ in range(2):  # loads libraries and fills their caches
            shutil.copytree(good, bad, dirs_exist_ok=True)
            form.read(bad)
        guard = _Guard(scratch)
        sys.addaudithook(guard)
        limit = _status("VmSize") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for seed in range(first, first + count):
            rng = random.Random(f"{name}:{seed}")
            shutil.rmtree(bad)
            shutil.copytree(good, bad)
            file = rng.choice(sorted(form.damage))
            content = form.damage[file]((good / file).read_bytes(), rng)
            (bad / file).write_bytes(content)
            if keep:
                shutil.copytree(bad, pathlib.Path(keep) / f"{name}-{seed}", dirs_exist_ok=True)
            print("begin", seed, flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(20 * SECONDS)
            before, guard.seen = _reset_peak(), []
            fault = ""
            try:
                form.read(bad)
            except UserError as e:
                fault = _unclear(cli.describe_error(e))
            except BaseException as e:  # noqa: B036 a Rust panic is not an Exception
                where = traceback.extract_tb(e.__traceback__)
                ours = [f for f in where if "pretrainax" in f.filename] or where
                place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} {ours[-1].name}"
                fault = f"{type(e).__name__} at {place}: {str(e)[:200]!r}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            grown = _status("VmHWM") - before
            if not fault and grown > MEMORY + MEMORY_PER_BYTE * len(content):
                fault = f"{grown >> 20} MB of memory for a file of {len(content)} bytes"
            if guard.seen:
                fault = f"{fault} did {guard.seen}"
            if fault:
                print(f"fault {seed}: {file}: {fault}", flush=True)


class _Guard:
    """Records events that reading a file must never cause: programs, connections, execution of its code."""

    def __init__(self, folder: str):
        self.folder, self.seen = folder, []

    def __call__(self, event: str, arguments: tuple) -> None:
        if event in _RUNS_CODE or event in _REACHES_OUT:
            self.seen.append(event)
        elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(self.folder):
            self.seen.append(event)
        elif event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/etc", "/dev/zero")):
            self.seen.append(f"open {arguments[0]}")


def _unclear(line: str) -> str:
    return "" if line.strip() and line.isprintable() and len(line) < 5000 else f"an unclear error: {line[:200]!r}"


def _status(field: str) -> int:
    """Returns a memory value of this process from Linux, in bytes."""
    for line in open("/proc/self/status"):
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def _reset_peak() -> int:
    """Resets VmHWM to the current memory; returns it in bytes."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return _status("VmRSS")


def main() -> int:
    from tests.fuzz.formats import formats

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help=f"formats: {', '.join(formats())}")
    parser.add_argument("--keep", default="", help="folder for the damaged files")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        read_all(given.child, given.first, given.count, given.keep)
        return 0
    started = time.perf_counter()
    counts, faults = fuzz(
        [*filter(None, given.only.split(","))] or list(formats()), given.count, given.first, given.keep
    )
    print(json.dumps(counts))
    print(f"{sum(counts.values()):,} inputs, {len(faults)} faults, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
