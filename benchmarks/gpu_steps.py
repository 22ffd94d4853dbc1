"""The parts of gpu.py that train: complete steps of five models compared with the plan, and torch with equal sizes.

python benchmarks/gpu_steps.py gpt2|bert|bert_attention_dropout|t5|llama|modernbert|peers --out=DIR [--tiny]
"""

import argparse
import contextlib
import functools
import glob
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

import gpu
import jax
from random_data import random_data

from pretrainax.config import UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.config.validation import complete, validate
from pretrainax.layers.attention import choose_backend
from pretrainax.planning import memory
from pretrainax.planning.current_devices import current_topology
from pretrainax.planning.estimated_traffic import memory_bytes_between_products
from pretrainax.planning.hlo import Program, memory_traffic_of
from pretrainax.profiling.report import estimate_compiled
from pretrainax.profiling.trace import read_trace
from pretrainax.runtime import host
from pretrainax.runtime.recorder import STEP
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import mesh_sizes, platform
from pretrainax.training.run import Run, open_run
from pretrainax.zoo import preset

GROUPS, STEPS, TRACED, KERNELS = 5, 4, 3, 10
TUNING = {"off": {"xla_gpu_autotune_level": 0}, "on": {}}  # XLA options of the two programs of a case


class Case(NamedTuple):
    """A config and the size of its timed batch."""

    config: str
    rows: int
    length: int
    model: str = ""  # a preset that replaces the model of the config
    attention_dropout: bool = False


CASES = {
    "gpt2": Case("gpt2:124m", 32, 1024),
    "bert": Case("bert_base", 32, 512),
    "bert_attention_dropout": Case("bert_base", 32, 512, attention_dropout=True),
    "t5": Case("t5_base", 32, 512),
    "llama": Case("llama:3_1_8b", 4, 2048, model="llama3_2_1b"),
    "modernbert": Case("modernbert_base", 16, 1024),
}


@contextlib.contextmanager
def opened(
    name: str, tiny: bool, layers: int = 0, kept_in: Optional[str] = None
) -> Iterator[tuple[Run, dict[str, jax.Array]]]:
    """Opens a run of a case on random tokens; yields the run and a batch.

    Args:
      name: key of CASES.
      tiny: use small sizes.
      layers: number of layers; 0 selects all layers of the model.
      kept_in: folder of a deterministic run; None: the run is not deterministic, without a compilation cache.
    """
    case = CASES[name]
    experiment = read_config_file(case.config, None)
    model = experiment.model = preset(case.model) if case.model else experiment.model
    experiment.phases, experiment.train.accumulate = (), 1
    experiment.train.global_batch_size, experiment.data.sequence_length = case.rows, case.length
    if not case.attention_dropout:
        model.attention_dropout_rate = 0.0
    if tiny:
        experiment.train.global_batch_size, experiment.data.sequence_length = 8, 64
        model.num_layers, model.d_model, model.d_ff, model.num_heads = 2, 32, 64, 4
        model.num_kv_heads, model.head_dim, model.vocab_size = None, None, 512
        if model.family == "encoder_decoder":
            model.num_decoder_layers = 2
    if layers:
        model.num_layers = layers
    with tempfile.TemporaryDirectory() as folder:
        experiment.data.cache_dir = folder
        complete(experiment)
        validate(experiment, files=False)
        host.start_jax(experiment)
        experiment.train.deterministic = kept_in is not None
        jax.config.update("jax_enable_compilation_cache", kept_in is not None)  # a cache would hide compile times
        with open_run(experiment, functools.partial(random_data, folder), workdir=kept_in) as run:
            yield run, put_batch(run.train_batches[0], run.mesh)


def step(name: str, record, tiny: bool) -> None:
    """Records compile time, step time, memory and kernels of a case, and the values of the plan.

    The case is measured without autotuning first: on a new card, autotuning may not end within the part's time limit.
    """
    with opened(name, tiny) as (run, batch):
        lowered = run.step.lower(run.fresh_state(), batch)
        compile_seconds = {}
        for tuning, options in TUNING.items():
            began = time.perf_counter()
            program = lowered.compile(compiler_options=options)
            compile_seconds[tuning] = time.perf_counter() - began
            seconds, state = timed(program, run, jax.block_until_ready(run.fresh_state()), batch)
            recorded = functools.partial(record, autotuning=tuning)
            peak = measured(run, seconds, compile_seconds[tuning], recorded)
            with gpu.failures(recorded, "plan"):
                planned(run, Program(program.as_text()), seconds[0], peak, recorded)
            with gpu.failures(recorded, "trace"):
                traced(run, program, state, batch, recorded)
            del state  # otherwise a trace that failed would leave two states in memory for the next program
        record("compiling", **compile_seconds, autotuning=compile_seconds["on"] - compile_seconds["off"])


def measured(run: Run, seconds: tuple[float, float, float], compile_seconds: float, record) -> Optional[float]:
    """Records the speed of a step; returns the peak memory of the device in GB, of all programs so far."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    record(
        "step",
        ms=1e3 * seconds[0],
        range=f"{1e3 * seconds[1]:.2f} to {1e3 * seconds[2]:.2f}",
        tokens_per_second=run.work.tokens_per_step / seconds[0],
        mfu=run.work.mfu(run.work.flops_per_step, seconds[0]),
        mfu_executed=run.work.mfu(run.work.flops_done_per_step, seconds[0]),
        peak_gb=peak and peak / 1e9,
        compile_seconds=compile_seconds,
        attention=", ".join(sorted({choose_backend("auto", platform(), spec)[0] for spec in run.work.attention_specs})),
    )
    return peak and peak / 1e9


def timed(program, run: Run, state, batch) -> tuple[tuple[float, float, float], object]:
    """Returns the median, smallest and largest step time over groups of steps, and the final state."""
    for _ in range(3):
        state, metrics = program(state, batch, None, run.step.arguments)
    jax.block_until_ready(state)
    groups = []
    for _ in range(GROUPS):
        began = time.perf_counter()
        for _ in range(STEPS):
            state, metrics = program(state, batch, None, run.step.arguments)
        jax.block_until_ready(state)
        groups.append((time.perf_counter() - began) / STEPS)
    if not metrics["finite"]:
        raise SystemExit("the loss is not finite")
    return (statistics.median(groups), min(groups), max(groups)), state


def planned(run: Run, program: Program, seconds: float, peak_gb: Optional[float], record) -> None:
    """Records the memory traffic of the compiled step, and the plan's time, bytes and memory next to the measured ones.

    The plan's bytes are those outside products, estimated without a compiler.
    """
    moved = memory_traffic_of(program)
    record("compiled", moved_gb=moved.total / 1e9, besides_products_gb=moved.bytes_outside_matmuls / 1e9)
    if (topology := current_topology()) is None:
        record("no plan", why=f"the plan has no rates for {jax.devices()[0].device_kind}")
        return
    sizes = mesh_sizes(run.trained.mesh, topology.num_devices, processes=1)
    needed = memory.estimate(run.trained, sizes, topology.chip)
    expected = estimate_compiled(program, run.trained, topology)
    besides_products = memory_bytes_between_products(run.trained, sizes, topology.chip.platform, needed)
    record(
        "plan",
        ms=1e3 * expected.seconds,
        range=" to ".join(f"{1e3 * limit:.1f}" for limit in expected.range),
        measured_ms=1e3 * seconds,
        products_ms=1e3 * expected.compute,
        memory_ms=1e3 * expected.memory,
        besides_products_gb=besides_products / 1e9,
        compiled_besides_products_gb=moved.bytes_outside_matmuls / 1e9,
        memory_gb=needed.total / 1e9,
        measured_peak_gb=peak_gb,
    )


def traced(run: Run, program, state, batch, record) -> None:
    """Records the slowest kernels of three traced steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 1
        jax.profiler.start_trace(folder, profiler_options=options)
        for number in range(TRACED):
            with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
                state, _ = program(state, batch, None, run.step.arguments)
            jax.block_until_ready(state)
        jax.profiler.stop_trace()
        (path,) = glob.glob(os.path.join(folder, "plugins", "profile", "*", "*.xplane.pb"))
        trace = read_trace(path)
    for op, spent in sorted(trace.busy.items(), key=lambda item: -item[1])[:KERNELS]:
        record("kernel", kernel=op.name, ms_a_step=1e3 * spent, share=spent / trace.seconds)


# --- torch -----------------------------------------------------------------------------------------------------------


def peers(record, tiny: bool) -> None:
    """Records the step time of torch with the same batches: compiled, with bfloat16 autocast; eager if that fails."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("torch is not installed")
    jax.config.update("jax_platforms", "cpu")  # on a GPU, JAX would take the memory that torch needs
    import against_torch

    size = "small" if tiny else "gpu"
    sides = {}
    if importlib.util.find_spec("nanogpt"):
        sides["nanoGPT"] = "gpt2", functools.partial(nanogpt, size)
    else:
        record("left out", side="nanoGPT", why="--packages does not contain its model.py as nanogpt.py")
    if importlib.util.find_spec("transformers"):
        for name in ("gpt2", "bert"):
            sides[f"transformers {name}"] = name, functools.partial(against_torch.theirs, name, size)
    else:
        record("left out", side="transformers", why="not installed")
    for side, (name, make) in sides.items():
        rows, _, length = against_torch.BATCHES[size][name]
        for kind in ("autocast",) if tiny else ("compiled_autocast", "autocast"):  # tests have no C++ compiler
            with gpu.failures(record, "peer", side=side, kind=kind):
                metrics = peer_metrics(functools.partial(make, kind), tiny)
                rate = 1e3 * rows * length / metrics["ms"]
                record("peer", side=side, kind=kind, batch=f"{rows} x {length}", tokens_per_second=rate, **metrics)
                break


def peer_metrics(make: Callable[[], Callable[[int], float]], tiny: bool) -> dict[str, Optional[float]]:
    """Returns the step time and the peak memory of a torch program; `make` returns a function of a number of steps."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run = make()
    run(1 if tiny else 3)
    compiled = time.perf_counter() - began
    groups, steps = [], 1 if tiny else STEPS
    for _ in range(2 if tiny else GROUPS):
        began = time.perf_counter()
        run(steps)
        groups.append((time.perf_counter() - began) / steps)
    return {
        "ms": 1e3 * statistics.median(groups),
        "first_steps_seconds": compiled,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    }


def nanogpt(size: str, kind: str) -> Callable[[int], float]:
    """Returns a function that runs a number of steps of nanoGPT's GPT-2 and returns the loss.

    size, kind: as in against_torch.py.
    """
    import against_torch
    import nanogpt as published
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, _, length = against_torch.BATCHES[size]["gpt2"]
    vocab_size = against_torch.config_of("gpt2", size).vocab_size
    sizes = dict(n_layer=2, n_head=4, n_embd=64) if size == "small" else {}
    config = published.GPTConfig(block_size=length, vocab_size=vocab_size, dropout=0.0, **sizes)
    model = published.GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if kind.startswith("compiled") else model
    tokens = torch.randint(vocab_size, (rows, length + 1), device=device)

    def run(steps: int) -> float:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16):
                _, loss = forward(tokens[:, :-1], tokens[:, 1:].contiguous())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*CASES, "peers"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit of the part; gpu.py enforces it")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    record = functools.partial(gpu.write, args.out, args.part)
    try:
        peers(record, args.tiny) if args.part == "peers" else step(args.part, record, args.tiny)
    except UserError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
