"""The parts of gpu.py without a complete model: peak rates of the card, single kernels, determinism of a step.

python benchmarks/gpu_kernels.py environment|kernels|determinism|bits --out=DIR [--tiny]
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Optional

import gpu
import jax
import jax.numpy as jnp
import numpy as np

Record = Callable[..., None]


def seconds_of(call: Callable, *args, least: float = 0.1) -> float:
    """Returns the median seconds of a call over five groups of about `least` seconds; waits after each group."""
    jax.block_until_ready(call(*args))
    began = time.perf_counter()
    jax.block_until_ready(call(*args))
    count = max(round(least / max(time.perf_counter() - began, 1e-6)), 1)
    groups = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            made = call(*args)
        jax.block_until_ready(made)
        groups.append((time.perf_counter() - began) / count)
    return statistics.median(groups)


# --- the environment -------------------------------------------------------------------------------------------------


def environment(record: Record, tiny: bool) -> None:
    from pretrainax.layers.gpu_attention import cudnn_version

    device = jax.devices()[0]
    record(
        "software",
        device=device.device_kind,
        driver=_driver(),
        python=platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "flax", "optax", "torch", "transformers")},
        cudnn=cudnn_version(),
        nccl=_version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        flags=os.environ.get("XLA_FLAGS", ""),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
    )
    side = 256 if tiny else 8192
    for rows, inner, columns in ((side, side, side), (4 * side, 48 if tiny else 768, 192 if tiny else 3072)):
        # random numbers: with constant operands, a card draws less power and runs at a higher clock
        keys = jax.random.split(jax.random.key(0))
        x, y = map(functools.partial(jax.random.normal, dtype=jnp.bfloat16), keys, ((rows, inner), (inner, columns)))
        seconds = seconds_of(jax.jit(jnp.matmul), x, y)
        flops = 2 * rows * inner * columns
        record(
            "product",
            shape=f"[{rows}, {inner}] x [{inner}, {columns}]",
            ms=1e3 * seconds,
            tflops=flops / seconds / 1e12,
        )
    x = jnp.zeros(1 << (18 if tiny else 28), jnp.uint32)  # XLA loads 16 bytes at once, and 4 bytes of uint8
    seconds = seconds_of(jax.jit(lambda x: x ^ 1), x)  # XLA removes a plain copy
    record("copy", moved_bytes=2 * x.nbytes, ms=1e3 * seconds, gb_per_second=2 * x.nbytes / seconds / 1e9)


def _version(*names: str) -> Optional[str]:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _driver() -> Optional[str]:
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        return subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
    return None


# --- kernels ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """The shape and the options of an attention: rows, queries, keys, query heads, key heads, head size."""

    rows: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    causal: bool = False
    segments: str = ""  # "one": one document per row, then padding; "several": four documents per row; "": full rows
    bias: bool = False
    window: Optional[int] = None
    dropout: float = 0.0


CASES = {
    "causal": Case(16, 1024, 1024, 12, 12, 64, causal=True),
    "lengths": Case(16, 512, 512, 12, 12, 64, segments="one"),
    "segments": Case(16, 512, 512, 12, 12, 64, causal=True, segments="several"),
    "T5 bias, 512": Case(16, 512, 512, 12, 12, 64, bias=True),
    "T5 bias, 114": Case(16, 114, 114, 12, 12, 64, causal=True, bias=True),
    "grouped queries": Case(4, 2048, 2048, 32, 8, 64, causal=True),
    "head size 128": Case(4, 2048, 2048, 16, 8, 128, causal=True),
    "head size 256": Case(4, 2048, 2048, 4, 1, 256, causal=True),
    "two-sided window": Case(8, 1024, 1024, 12, 12, 64, window=128),
    "dropout": Case(16, 512, 512, 12, 12, 64, segments="one", dropout=0.1),
}


UNTUNED = {"xla_gpu_autotune_level": 0}  # XLA options of the float32 references, which are not timed


def kernels(record: Record, tiny: bool) -> None:
    with gpu.failures(record, "experts", case="grouped product"):
        record("experts", **expert_metrics(*((64, 4, 16, 32) if tiny else (16384, 8, 1024, 4096))))
    with gpu.failures(record, "loss", case="chunked loss"):
        record("loss", **loss_metrics(*((64, 16, 101) if tiny else (8192, 768, 50257))))
    for name, case in CASES.items():
        if tiny:
            case = case._replace(rows=2, queries=min(case.queries, 32), keys=min(case.keys, 32), size=8)
        with gpu.failures(record, "attention", case=name):
            record("attention", case=name, **attention_metrics(case))


def attention_metrics(case: Case) -> dict[str, object]:
    """Returns the time of an attention, and the errors of its values and gradients compared with float32."""
    from pretrainax.layers.attention import choose_backend
    from pretrainax.layers.attention_mask import Mask
    from pretrainax.layers.attention_spec import Weights, spec_of
    from pretrainax.layers.dropout import KeyedDropout
    from pretrainax.layers.hashed_keys import hashed_key
    from pretrainax.sharding.mesh import platform as platform_of

    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    q = normal(case.rows, case.queries, case.heads, case.size)
    k, v = (normal(case.rows, case.keys, case.kv_heads, case.size) for _ in range(2))
    bias = normal(1, case.heads, case.queries, case.keys) if case.bias else None
    ids = _segments(case) if case.segments else None
    mask = Mask(case.causal, ids, ids, window=case.window, single_segment=case.segments == "one")
    settings = dict(mask=mask, scale=case.size**-0.5)
    spec = spec_of(q, k, mask, bias, bias_by_row=False, logit_cap=None, dropout_rate=case.dropout)
    chosen, slower = choose_backend("auto", platform_of(), spec)
    drop = KeyedDropout(case.dropout, hashed_key(jax.random.key(1))) if case.dropout else None
    plain = functools.partial(_attention_of_arrays, weights=Weights(drop), **settings)
    run = functools.partial(plain, implementation=chosen)
    wanted = jnp.asarray(rng.standard_normal((case.rows, case.queries, case.heads, case.size)), jnp.float32)
    if ids is not None:
        wanted = wanted * (ids > 0)[:, :, None, None]  # outputs at padding have no meaning

    def both(function, options=None):
        def value(*given):
            made = function(*given).astype(jnp.float32)
            return (made * wanted).sum(), made

        places = (0, 1, 2, 3) if case.bias else (0, 1, 2)
        return jax.jit(jax.value_and_grad(value, places, has_aux=True), compiler_options=options)

    arrays = (q, k, v, bias)
    with jax.default_matmul_precision("highest"):
        exact = both(plain, UNTUNED)(*(None if x is None else x.astype(jnp.float32) for x in arrays))
    got, low = both(run)(*arrays), both(plain)
    seen = 1.0 if ids is None else (ids > 0)[:, :, None, None]
    return {
        "implementation": chosen,
        "slower because": (slower or "").partition("because ")[2],
        "ms": 1e3 * seconds_of(both(run), *arrays, least=0.05),
        "ms of xla": 1e3 * seconds_of(low, *arrays, least=0.05),
        "error": _apart(got[0][1] * seen, exact[0][1] * seen),
        "error of gradients": max(_apart(a, b) for a, b in zip(got[1], exact[1], strict=True)),
        "errors of xla": max(_apart(a, b) for a, b in zip(low(*arrays)[1], exact[1], strict=True)),
    }


def _attention_of_arrays(q, k, v, bias, **settings) -> jax.Array:
    from pretrainax.layers.attention import attention

    return attention(q, k, v, bias=bias, **settings)


def _segments(case: Case) -> jax.Array:
    """Returns segment ids [B, T]: one document that fills half to all of a row, or documents of length T / 4."""
    place = np.arange(case.queries)[None]
    if case.segments == "one":
        lengths = np.linspace(case.queries // 2, case.queries, case.rows).astype(int)
        return jnp.asarray((place < lengths[:, None]).astype(np.int32))
    return jnp.asarray(np.broadcast_to(place * 4 // case.queries + 1, (case.rows, case.queries)).astype(np.int32))


def _apart(x: jax.Array, y: jax.Array) -> float:
    """Returns the largest absolute difference, relative to the largest absolute value of y."""
    return float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())


def expert_metrics(rows: int, experts: int, inner: int, columns: int) -> dict[str, object]:
    from pretrainax.layers.feed_forward.products import Layout, expert_product

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, inner)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((experts, inner, columns)), jnp.float32)
    shares = rng.multinomial(rows, np.arange(1, experts + 1) / np.arange(1, experts + 1).sum())
    sizes = jnp.asarray(shares, jnp.int32)
    wanted = jnp.asarray(rng.standard_normal((rows, columns)), jnp.bfloat16)
    of_row = jnp.repeat(jnp.arange(experts), sizes, total_repeat_length=rows)

    def exact(x, kernel):
        rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
        made = jnp.zeros((rows, columns), jnp.float32)
        for one in range(experts):  # one matrix at a time: [S, D, F] would not fit on a card
            made += jnp.where((of_row == one)[:, None], x.astype(jnp.float32) @ rounded[one], 0)
        return made

    run = functools.partial(expert_product, Layout(None, 1))
    value = lambda function: lambda x, kernel: (function(x, kernel).astype(jnp.float32) * wanted).sum()  # noqa: E731
    ours = jax.jit(jax.value_and_grad(value(lambda x, kernel: run(x, kernel, sizes)), (0, 1)))
    with jax.default_matmul_precision("highest"):
        theirs = jax.jit(jax.grad(value(exact), (0, 1)), compiler_options=UNTUNED)(x, kernel)
        made = jax.jit(exact, compiler_options=UNTUNED)(x, kernel)
    seconds = seconds_of(ours, x, kernel, least=0.05)
    return {
        "rows": rows,
        "experts": experts,
        "ms": 1e3 * seconds,
        "tflops": 6 * rows * inner * columns / seconds / 1e12,
        "error": _apart(jax.jit(run)(x, kernel, sizes), made),
        "error of gradients": max(
            _apart(a, b.astype(jnp.float32)) for a, b in zip(ours(x, kernel)[1], theirs, strict=True)
        ),
    }


def loss_metrics(tokens: int, width: int, vocabulary: int) -> dict[str, object]:
    from pretrainax.models.heads.language_model import LanguageModelOutput
    from pretrainax.models.heads.vocabulary_loss import loss_sums

    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.standard_normal((8, tokens // 8, width)), jnp.bfloat16)
    matrix = jnp.asarray(rng.standard_normal((width, vocabulary)) * width**-0.5, jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocabulary, (8, tokens // 8)), jnp.int32)
    ones = jnp.ones(targets.shape, jnp.float32)

    def chunked(features, matrix):
        total, count = loss_sums(LanguageModelOutput(features, matrix), targets, ones)["objective"]
        return total / count

    def plain(features, matrix):
        logits = features.astype(jnp.float32) @ matrix.astype(features.dtype).astype(jnp.float32)
        target_logs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return -target_logs.mean()

    ours = jax.jit(jax.value_and_grad(chunked, (0, 1)))
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(jax.value_and_grad(plain, (0, 1)), compiler_options=UNTUNED)
        loss, gradients = reference(features, matrix)
    got = ours(features, matrix)
    return {
        "tokens": tokens,
        "columns": vocabulary,
        "ms": 1e3 * seconds_of(ours, features, matrix, least=0.05),
        "error": abs(float(got[0] - loss)) / float(loss),
        "error of gradients": max(_apart(a, b.astype(jnp.float32)) for a, b in zip(got[1], gradients, strict=True)),
    }


# --- determinism -----------------------------------------------------------------------------------------------------

MODES = {"deterministic": ["--deterministic"], "as it is": []}  # first the mode that must give equal bits


def determinism(record: Record, tiny: bool, out: str) -> None:
    """Trains two layers of GPT-2 for three steps, twice in each of two processes, in each mode."""
    for mode, words in MODES.items():
        digests: list[str] = []
        for process in (1, 2):
            command = [sys.executable, __file__, "bits", f"--out={out}", *words, *["--tiny"] * tiny]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # errors are in the log of the part
            if done.returncode:
                raise SystemExit(f"{mode}: a process ended with status {done.returncode}")
            found = json.loads(done.stdout.splitlines()[-1])
            digests += found["digests"]
            record(
                "process",
                mode=mode,
                process=process,
                equal=found["digests"][0] == found["digests"][1],
                seconds_to_compile=found["compiled"],
                seconds_a_step=found["seconds"],
                digests=" ".join(found["digests"]),
            )
        same = digests[0] == digests[1] and digests[2] == digests[3]
        record("bits", mode=mode, in_a_process=same, in_another_process=digests[0] == digests[2])


def bits(tiny: bool, kept_in: Optional[str]) -> None:
    """Trains three steps twice; prints a digest of the parameters each time, and the seconds of the last step.

    Args:
      kept_in: folder of a deterministic run; None: the run is not deterministic.
    """
    import gpu_steps

    with gpu_steps.opened("gpt2", tiny, layers=2, kept_in=kept_in) as (run, batch):
        digests = []
        began = time.perf_counter()
        program = run.step.lower(run.fresh_state(), batch).compile()
        compiled = time.perf_counter() - began
        for _ in range(2):
            state = jax.block_until_ready(run.fresh_state())
            for _ in range(3):
                began = time.perf_counter()
                state, _ = jax.block_until_ready(program(state, batch, None, run.step.arguments))
                seconds = time.perf_counter() - began
            leaves = jax.device_get(jax.tree.leaves(state.params))
            digests.append(hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest()[:16])
    print(json.dumps({"digests": digests, "seconds": seconds, "compiled": compiled}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("environment", "kernels", "determinism", "bits"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit of the part; gpu.py enforces it")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="for bits: set config.train.deterministic")
    args = parser.parse_args()
    record = functools.partial(gpu.write, args.out, args.part)
    if args.part == "bits":
        bits(args.tiny, os.path.join(args.out, "deterministic") if args.deterministic else None)
    elif args.part == "determinism":
        determinism(record, args.tiny, args.out)
    else:
        {"environment": environment, "kernels": kernels}[args.part](record, args.tiny)


if __name__ == "__main__":
    main()
