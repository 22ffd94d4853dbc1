"""Measures the training speed of a config on this machine: random tokens with the real objective, loader and update.

    python benchmarks/train_step.py --config=configs/gpt2.py:124m --config.train.global_batch_size=16
    python benchmarks/train_step.py --config=configs/quickstart.py --timed_steps=50 --cold --json=quickstart.json

Step time is the median over groups of steps. The script waits at the end of each group, as training does at each log
line. For a config with phases, the script times the config itself, which often equals the last phase.
"""

import time

STARTED = time.perf_counter()  # before the import of JAX, which is part of the time to the first step

import dataclasses  # noqa: E402
import functools  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402

from absl import flags  # noqa: E402
from random_data import random_data  # noqa: E402

from pretrainax import cli  # noqa: E402
from pretrainax.config import Experiment  # noqa: E402
from pretrainax.files.paths import define_path  # noqa: E402
from pretrainax.reporting.tables import text_table  # noqa: E402
from pretrainax.runs.description import describe  # noqa: E402

STEPS = flags.DEFINE_integer(
    "timed_steps", 20, "Timed steps, in 5 groups; an equal number of warmup steps (at most 5) runs first", lower_bound=5
)
COLD = flags.DEFINE_bool("cold", False, "Compile with an empty compilation cache")
JSON = define_path("json", None, "File to write the results to")
GROUPS = 5


def measure(experiment: Experiment, directory: str) -> dict:
    import jax

    from pretrainax.data.batch import check_batch
    from pretrainax.data.pipeline import iterate
    from pretrainax.runs.train import open_run
    from pretrainax.runtime import host
    from pretrainax.training.loop import to_device

    host.tune_malloc()
    host.start_jax(experiment)
    warm_up, group = min(STEPS.value, 5), STEPS.value // GROUPS
    with open_run(experiment, functools.partial(random_data, directory)) as run:
        check_batch(
            run.train_batches[0],
            experiment.model,
            run.work.lengths,
            experiment.train.global_batch_size // jax.process_count(),
        )
        steps = warm_up + group * GROUPS
        if importlib.util.find_spec("grain"):
            batches = iterate(run.train_batches, 0, steps, experiment.data.workers or 0)
        else:
            print("grain is not installed: each step waits for its batch, without prefetching", file=sys.stderr)
            batches = map(run.train_batches.__getitem__, range(steps))
        batches = to_device(batches, run.mesh)
        state = jax.block_until_ready(run.fresh_state())
        batch = next(batches)

        started = time.perf_counter()
        program = run.step.lower(state, batch).compile()
        compile_seconds = time.perf_counter() - started
        step = lambda state, batch: program(state, batch, None, run.step.arguments)  # noqa: E731
        state, metrics = jax.block_until_ready(step(state, batch))
        first_step_seconds = time.perf_counter() - STARTED
        for _ in range(warm_up - 1):
            state, metrics = step(state, next(batches))
        jax.block_until_ready(state)

        seconds = []
        for _ in range(GROUPS):
            started = time.perf_counter()
            for _ in range(group):
                state, metrics = step(state, next(batches))
            jax.block_until_ready(state)
            seconds.append((time.perf_counter() - started) / group)
        if not metrics["finite"]:
            raise SystemExit("the loss is not finite")
        return measured(run, seconds, compile_seconds, first_step_seconds)


def measured(run, seconds: list[float], compile_seconds: float, first_step_seconds: float) -> dict:
    """Returns the results for the table and the JSON file; `seconds` has the step time of each group."""
    import jax

    step_seconds = statistics.median(seconds)
    # JAX has no memory statistics for a CPU. There the peak is the largest resident set size of the process.
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "config": cli.config_name(),
        "device": f"{run.mesh.size} × {jax.devices()[0].device_kind}",
        "compute": dict(describe(run))["compute"],
        "parameters": run.parameters,
        "batch_size": run.experiment.train.global_batch_size,
        "tokens_per_step": run.work.tokens_per_step,
        "padded_tokens_per_second": run.work.tokens_per_step / step_seconds,
        "step_seconds": step_seconds,
        "step_seconds_range": [min(seconds), max(seconds)],
        "mfu": run.work.mfu(run.work.flops_per_step, step_seconds),
        "mfu_executed": run.work.mfu(run.work.flops_done_per_step, step_seconds),
        "flops_per_second": run.work.flops_per_step / step_seconds,
        "peak_memory_bytes": memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compile_seconds": compile_seconds,
        "first_step_seconds": first_step_seconds,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: dict) -> str:
    low, high = results["step_seconds_range"]
    mfu = (
        ""
        if results["mfu"] is None
        else f", MFU {results['mfu']:.1%} ({results['mfu_executed']:.1%} of executed FLOPs)"
    )
    rows = {
        "config": results["config"],
        "device": f"{results['device']}, {results['compute']}",
        "parameters": f"{results['parameters'] / 1e6:,.1f} M",
        "batch": f"{results['batch_size']:,} examples, {results['tokens_per_step']:,} tokens",
        "rate": f"{results['padded_tokens_per_second']:,.0f} tokens/s, padding included",
        "step": f"{results['step_seconds'] * 1e3:,.1f} ms ({low * 1e3:,.1f} to {high * 1e3:,.1f})",
        "model FLOPs": f"{results['flops_per_second'] / 1e12:,.3g} TFLOP/s{mfu}",
        "peak memory": f"{results['peak_memory_bytes'] / 1e9:.2f} GB",
        "compile": f"{results['compile_seconds']:.1f} s",
        "first step": f"{results['first_step_seconds']:.1f} s after the start",
    }
    return text_table(rows.items())


def main() -> int:
    experiment = dataclasses.replace(cli.experiment(files=False), phases=())
    with tempfile.TemporaryDirectory() as empty:
        if COLD.value:
            experiment.data.cache_dir = empty
        results = measure(experiment, empty)
    print(table(results))
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=2)
    return 0


if __name__ == "__main__":
    cli.run(main)
