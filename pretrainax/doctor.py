"""Shows versions, devices, memory and what works on this machine: `python -m pretrainax.doctor [--json]`.

Attach the output to a bug report. It contains no secrets: neither the name of the user or the host, nor paths of the
home folder, nor environment variables other than those that control JAX and XLA.

The command compiles a matrix product, trains a tiny model for two steps, lists the attention kernels that support this
machine, and imports two optional packages. It takes about 20 seconds of processor time. The exit code is 1 if the
product or the training fails, otherwise 0.
"""

import functools
import getpass
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

import pretrainax
from pretrainax import cli
from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    LearnedPositions,
    ModelConfig,
    TrainConfig,
    UserError,
)
from pretrainax.files.extras import import_extra
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import byte_size, elapsed
from pretrainax.reporting.visible import visible
from pretrainax.trackers.secrets import masked

_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint grain numpy scipy ml_dtypes tensorstore tokenizers sentencepiece "
    "safetensors array-record libtpu jax-cuda12-plugin jax-cuda13-plugin nvidia-cudnn-cu12 nvidia-cudnn-cu13 "
    "torch datasets scikit-learn seqeval sacrebleu rouge-score tensorboardX huggingface_hub"
).split()
# Optional packages whose imports fail more often than others, because they depend on many packages, and their extras
_OPTIONAL = {"transformers": "parity", "tensorflow_datasets": "tfds"}
# Variables that control JAX and XLA; their values are flags and numbers.
_VARIABLES = (
    "JAX_PLATFORMS JAX_ENABLE_X64 JAX_DEFAULT_MATMUL_PRECISION JAX_DISABLE_JIT JAX_DEBUG_NANS JAX_NUM_CPU_DEVICES "
    "JAX_NUM_PROCESSES XLA_FLAGS XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_MEM_FRACTION "
    "XLA_PYTHON_CLIENT_PREALLOCATE XLA_PYTHON_CLIENT_ALLOCATOR LIBTPU_INIT_ARGS CUDA_VISIBLE_DEVICES TPU_VISIBLE_CHIPS"
).split()
_BACKEND_LOG = "jax._src.xla_bridge"  # JAX's log of plugins and backends
_SIDE = 512  # rows and columns of the matrix product


class Check(NamedTuple):
    """The result of a trial on this machine."""

    name: str
    works: bool
    detail: str  # the result, or the error in one line
    seconds: float
    required: bool = False  # whether PretrainAX cannot train without it


def main() -> int:
    """Prints the state of this machine. Returns the exit code."""
    sections = {
        "versions": _versions(),
        "backends": _backends(),
        "memory": _memory(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    checks = [
        _check("compiled product", _multiply, required=True),
        _check("training", _train, required=True),
        _check("attention", _attention),
        *(_check(f"import {name}", functools.partial(_import, name, extra)) for name, extra in _OPTIONAL.items()),
    ]
    if cli.prints_json():
        cli.print_json(_public({**sections, "checks": [check._asdict() for check in checks]}))
    else:
        print(visible(_public(_text(sections, checks))))
    return int(any(check.required and not check.works for check in checks))


def _text(sections: dict[str, dict[str, str]], checks: list[Check]) -> str:
    tables = [f"{title}\n{text_table(rows.items(), indent='  ')}" for title, rows in sections.items() if rows]
    marks = {check.name: "✓" if check.works else "✗" if check.required else "–" for check in checks}
    rows = [(marks[check.name], check.name, elapsed(check.seconds), check.detail) for check in checks]
    return "\n\n".join([*tables, f"checks\n{text_table(rows, indent='  ')}"])


def _versions() -> dict[str, str]:
    system = " ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())).strip()
    versions = {
        "pretrainax": pretrainax.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{system}, {os.cpu_count()} CPUs",
    }
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _backends() -> dict[str, str]:
    """Starts JAX's devices; returns the default backend, and the error of each backend or plugin that failed."""
    import jax  # local import: takes a second

    failures: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        try:
            message = " ".join(record.getMessage().split())
        except TypeError:  # JAX 0.10 logs "Plugin module %s could not be loaded" without the module
            message = record.msg
        if error or record.levelno > logging.INFO or message.startswith("Unable to initialize"):
            failures.append(f"{message}: {error}" if error else message)
        return False

    log = logging.getLogger(_BACKEND_LOG)
    level = log.level
    log.addFilter(collect)
    log.setLevel(logging.INFO)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as e:  # AssertionError: the plugin of the only platform failed
        return {"failed": "; ".join([*failures, str(e)])}
    finally:
        log.setLevel(level)
        log.removeFilter(collect)
    first = devices[0]
    found = {
        "default": jax.default_backend(),
        "devices": f"{len(devices)} × {first.device_kind}, {jax.process_count()} process(es)",
        "platform version": " ".join(first.client.platform_version.split()),
    }
    if first.platform == "gpu":
        from pretrainax.layers.gpu_attention import cudnn_version

        found["compute capability"] = first.compute_capability
        found["cuDNN in use"] = cudnn_version() or "none"
    return found | {f"not usable {i}": failure for i, failure in enumerate(failures, 1)}


def _memory() -> dict[str, str]:
    from pretrainax.sharding.device_memory import available_memory, device_memory

    disk = shutil.disk_usage(".")
    sizes = {"host, available": available_memory(), "device, usable": _or_none(device_memory)}
    rows = {name: "unknown" if size is None else byte_size(size) for name, size in sizes.items()}
    return rows | {"disk, current folder": f"{byte_size(disk.free)} of {byte_size(disk.total)} free"}


def _or_none(function: Callable[[], Optional[int]]) -> Optional[int]:
    """Calls a function that needs devices; returns None if JAX cannot start them, which `_backends` reports."""
    try:
        return function()
    except (RuntimeError, AssertionError):
        return None


def _check(name: str, function: Callable[[], str], required: bool = False) -> Check:
    """Runs a trial; any exception is its result, because a broken installation can raise exceptions of any type."""
    start = time.monotonic()
    try:
        works, detail = True, function()
    except UserError as e:
        works, detail = False, str(e)
    except Exception as e:
        works, detail = False, f"{type(e).__name__}: {cli.describe_error(e)}"
    return Check(name, works, detail, round(time.monotonic() - start, 3), required)


def _multiply() -> str:
    import jax
    import jax.numpy as jnp

    ones = jnp.ones((_SIDE, _SIDE), jnp.bfloat16)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))(ones)
    if not bool((product == _SIDE).all()):  # a sum of ones is exact in float32
        raise ArithmeticError(f"a product of {_SIDE} × {_SIDE} ones is not {_SIDE} everywhere")
    return f"{_SIDE} × {_SIDE}, bfloat16, exact"


def _train() -> str:
    """Trains a tiny decoder for two steps in a temporary folder, and returns the losses."""
    from pretrainax.runtime.cluster import is_multi_process

    if is_multi_process():
        raise UserError("this process is one of several (SLURM, MPI or JAX_NUM_PROCESSES): start doctor alone")
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        run, losses = pretrainax.open(_experiment(folder)), []
        state = run.init()
        for _, batch in run.batches():
            state, metrics = run.step(state, batch)
            losses.append(run.host_metrics(metrics)["loss"])
    if not losses[1] < losses[0]:
        raise ArithmeticError(f"the loss does not fall: {losses[0]:.4f}, {losses[1]:.4f}")
    return f"2 steps on the same rows, loss {losses[0]:.4f}, then {losses[1]:.4f}"


def _experiment(folder: str) -> Experiment:
    """Returns a config that trains on one sentence, repeated, so that the loss of the second step is lower."""
    from pretrainax.data.objectives import CausalLM
    from pretrainax.data.sources import TextFiles
    from pretrainax.optim import AdamW, WarmupCosine
    from pretrainax.tokenization import Characters

    for name in ("train", "valid"):
        with open(os.path.join(folder, f"{name}.txt"), "w", encoding="utf-8") as f:
            f.write("The quick brown fox jumps over the lazy dog. " * 100)
    paths = (os.path.join(folder, f"{name}.txt") for name in ("train", "valid"))
    return Experiment(
        model=ModelConfig(
            vocab_size=128, num_layers=1, d_model=32, d_ff=64, num_heads=2, position=LearnedPositions(32)
        ),
        tokenizer=Characters(),
        data=DataConfig(TextFiles(*paths), sequence_length=32, prepare_workers=1, cache_dir=os.path.join(folder, "c")),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=1e-2),
        schedule=WarmupCosine(warmup_steps=1),
        train=TrainConfig(steps=2, global_batch_size=8),
        checkpoint=CheckpointConfig(every=2),
        trackers=(),
    )


def _attention() -> str:
    """Returns the attention backend that `auto` selects here for BERT-base and for GPT-2, both in bfloat16."""
    import jax

    from pretrainax.layers.attention import choose_backend
    from pretrainax.layers.attention_spec import AttentionSpec

    def lines() -> Iterator[str]:
        for name, length, causal in (("BERT-base", 512, False), ("GPT-2", 1024, True)):
            spec = AttentionSpec(64, length, length, "bfloat16", causal, "none", None, False, False, None, 1)
            backend, warning = choose_backend("auto", jax.default_backend(), spec)
            yield f"{name}: {warning or backend}"

    return ", ".join(lines())


def _import(name: str, extra: str) -> str:
    module = import_extra(name, extra, "this optional check")
    return str(getattr(module, "__version__", "imported"))


def _public(value: JsonObject | str | list) -> JsonObject | str | list:
    """Replaces secrets, the home folder, and the names of the user and the host in all strings of a JSON value."""
    if isinstance(value, dict):
        return {name: _public(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    if not isinstance(value, str):
        return value
    text = masked(value)
    for word, replacement in _private_words():
        text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", replacement, text)
    return text


def _private_words() -> Iterator[tuple[str, str]]:
    """Yields words that identify the user or the machine, and their replacements."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        yield home, "~"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = ""
    host = socket.gethostname()
    names = ((user, "<user>"), (host, "<host>"), (host.partition(".")[0], "<host>"))
    # Names such as "root" and "localhost" identify nobody, and single letters occur in any text.
    yield from ((name, mark) for name, mark in names if len(name) > 2 and name not in ("root", "localhost"))


if __name__ == "__main__":
    cli.run(main, has_json=True, run_flags=())
