"""Measures kernels, determinism and training steps on one GPU, within minutes and without a network.

    python benchmarks/gpu.py --out=gpu_results --minutes=8 [--only=kernels,gpt2] [--packages=DIR] [--tiny]

Each part runs in a separate process with a time limit:

- environment: versions, and the peak rates of the card
- kernels: compared with a float32 reference
- determinism: whether a step gives the same bits twice
- training steps, compared with the plan
- torch on the same batches

A part writes a JSON line to results.jsonl for each measurement. The script writes table.md after each part, so an
interrupted command leaves all results so far. A failed part does not stop the next part. `--tiny` runs all parts with
small sizes, also on a CPU. benchmarks/README.md lists the packages that a bare machine needs in --packages.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

HERE = pathlib.Path(__file__).resolve().parent
# Seconds of each part in a run of 8 minutes. Later parts share the time that an early part does not use.
PARTS = {
    "environment": 20,
    "kernels": 70,
    "determinism": 60,
    "gpt2": 45,
    "bert": 40,
    "bert_attention_dropout": 40,
    "t5": 45,
    "llama": 45,
    "modernbert": 45,
    "peers": 70,
}
LEAST = 60.0  # seconds; with less time no part would finish
STEPS = ("gpt2", "bert", "bert_attention_dropout", "t5", "llama", "modernbert")


def environment(packages: str) -> dict[str, str]:
    """Returns the variables of a part: this project and the packages come first on the path; no network; one GPU."""
    paths = [str(HERE.parent), str(HERE), *([os.path.abspath(packages)] if packages else [])]
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    defaults = {} if os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") else {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
    }
    return defaults | os.environ | own


def run_part(name: str, seconds: float, args: argparse.Namespace) -> None:
    """Runs a part for at most `seconds` and writes a result line with its exit status and duration."""
    module = "gpu_steps.py" if name in (*STEPS, "peers") else "gpu_kernels.py"
    command = [sys.executable, str(HERE / module), name, f"--out={args.out}", f"--seconds={seconds:.0f}"]
    command += ["--tiny"] * args.tiny
    began, log = time.monotonic(), os.path.join(args.out, f"{name}.log")
    with open(log, "w", encoding="utf-8") as f:
        process = subprocess.Popen(
            command, env=environment(args.packages), stdout=f, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            ended = "done" if code == 0 else f"failed with status {code}: {_reason(log)}"
        except subprocess.TimeoutExpired:
            ended = f"timed out after {seconds:.0f} s"
        finally:
            _kill(process)
    write(args.out, name, "end", ended=ended, part_seconds=time.monotonic() - began)


def _kill(process: subprocess.Popen) -> None:
    """Ends a part and its own processes, which would keep the memory of the GPU; waits until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(50):  # 5 s; without an init process, as in some containers, a dead child remains
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.1)


def _reason(path: str) -> str:
    """Returns the last exception in a log, or its last line. JAX's tracebacks end with a note on hidden frames."""
    with open(path, encoding="utf-8", errors="replace") as f:
        text = f.read()
    lines = exceptions(text) or [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def exceptions(text: str) -> list[str]:
    """Returns the lines of a log that name an exception and its message."""
    return re.findall(r"^[\w.]+(?:Error|Exception): .+", text, re.MULTILINE)


@contextlib.contextmanager
def failures(record: Callable[..., None], what: str, **case: str) -> Iterator[None]:
    """Records an error instead of metrics, so that the rest of the part is still measured."""
    try:
        yield
    except Exception as e:
        record(f"{what} failed", **case, error=" ".join(f"{type(e).__name__}: {e}".split())[:300])


def write(out: str, part: str, what: str, **metrics: object) -> None:
    """Appends a line to results.jsonl immediately."""
    with open(os.path.join(out, "results.jsonl"), "a", encoding="utf-8") as f:
        f.write(json.dumps({"part": part, "what": what, **metrics}) + "\n")


def read(out: str) -> list[dict]:
    with open(os.path.join(out, "results.jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in f]


# --- the table -------------------------------------------------------------------------------------------------------


def table(lines: list[dict]) -> str:
    """Returns all results as Markdown: one section per part, one table per set of lines with the same metrics."""
    shown = [f"# One GPU, {time.strftime('%Y-%m-%d')}\n"]
    for part in dict.fromkeys(line["part"] for line in lines):
        shown.append(f"## {part}\n")
        of_part = [line for line in lines if line["part"] == part]
        rows = [line for line in of_part if line["what"] != "end"]
        for what, *columns in dict.fromkeys((row["what"], *tuple(row)[2:]) for row in rows):
            shown.append(f"{what}\n\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
            alike = [row for row in rows if row["what"] == what and list(row)[2:] == columns]
            shown += ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in alike]
            shown.append("")
        shown += [f"{line['ended']}, {line['part_seconds']:.0f} s\n" for line in of_part if line["what"] == "end"]
    return "\n".join(shown)


def _cell(value: object) -> str:
    text = f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else value
    text = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1e4 else text
    return str(text).replace("|", "/").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, in this order")
    parser.add_argument("--packages", default="", help="folder with packages, from pip install --target")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any device")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        return _complain(f"--only={unknown[0]}: unknown part. The parts are {', '.join(PARTS)}.")
    if args.minutes * 60 < LEAST:
        return _complain(f"--minutes={args.minutes} is too short. Set at least {LEAST / 60:.0f} for the small parts.")
    if args.packages and not os.path.isdir(args.packages):
        return _complain(
            f"--packages={args.packages} is not a folder. Install the wheels there: "
            f"pip install --no-index --no-deps --target={args.packages} *.whl"
        )
    if why := _missing(args.packages, args.tiny):
        return _complain(why)
    os.makedirs(args.out, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current part, too
    until = time.monotonic() + 60 * args.minutes
    for place, name in enumerate(wanted):
        share = PARTS[name] / sum(PARTS[other] for other in wanted[place:])
        run_part(name, max(share * (until - time.monotonic()), 1.0), args)
        with open(os.path.join(args.out, "table.md"), "w", encoding="utf-8") as f:
            f.write(table(lines := read(args.out)))
        print(f"{name}: {lines[-1]['ended']}, {lines[-1]['part_seconds']:.0f} s", flush=True)
    print(f"wrote {os.path.join(args.out, 'table.md')} and results.jsonl")
    return 0


def _missing(packages: str, tiny: bool) -> str:
    """Returns an error message if packages or the GPU are missing, otherwise ""."""
    probe = "import flax, optax, orbax.checkpoint, absl, chex, jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", probe], env=environment(packages), capture_output=True, text=True)
    if done.returncode:
        return f"{done.stderr.strip().splitlines()[-1]}: benchmarks/README.md lists the wheels for --packages"
    if not tiny and done.stdout.strip() != "gpu":
        why = "".join(f"; {error}" for error in exceptions(done.stderr)[-1:])
        return (
            f"JAX finds no GPU (its backend is {done.stdout.strip()!r}{why}). Set --tiny, or use a machine with a GPU."
        )
    return ""


def _complain(line: str) -> int:
    print(f"gpu.py: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
