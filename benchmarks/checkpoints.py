"""Measures checkpoints on disk and in an object store: step delay, write, upload and restore.

    python benchmarks/checkpoints.py --workdir=/tmp/run --workdir=gs://bucket/run [--megabytes=300] [--processes=2]

`python -m tests.support.fake_gcs` serves gs://bucket on this machine. Each process represents a host: it has a CPU
device with its share of the state and, for a store, a separate local folder. "same hosts" is a restart on the same
hosts; "new hosts" is a restart on hosts without local files. Times start when all processes start and end when all are
done. The first save is not timed, because it creates objects that later saves reuse. Values are medians over
`--rounds`.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pretrainax.checkpoints.hosts import open_checkpoints
from pretrainax.files.paths import is_url
from pretrainax.runtime import folders
from pretrainax.storage import places

ARRAYS = 12  # arrays in the state


@flax.struct.dataclass
class State:
    params: dict
    step: jax.Array


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", action="append", required=True)
    parser.add_argument("--megabytes", type=int, default=300, help="size of the state")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if "JAX_PROCESS_ID" in os.environ:
        return measure(options)
    with socket.socket() as s, tempfile.TemporaryDirectory(prefix="checkpoints") as hosts:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        group = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(options.processes)}
        started = []
        for i in range(options.processes):
            own = {"JAX_PROCESS_ID": str(i), "XDG_CACHE_HOME": f"{hosts}/{i}", "JAX_PLATFORMS": "cpu"}
            started.append(subprocess.Popen([sys.executable, *sys.argv], env=os.environ | group | own))
        sys.exit(max(process.wait() for process in started))


def measure(options: argparse.Namespace) -> None:
    """Prints one row per workdir, in process 0."""
    count, index = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, index)
    names = ("step delay", "written", "sent", "restored, same hosts", "restored, new hosts")
    if index == 0:
        print(f"| {options.megabytes} MB, {count} processes | {' | '.join(names)} |\n|{' --- |' * 6}", flush=True)
    for workdir in options.workdir:
        rounds = [list(times(workdir, options.megabytes, i)) for i in range(options.rounds)]
        seconds = [statistics.median(each) for each in zip(*rounds, strict=True)]
        cells = [f"{t:.2f} s" + f", {options.megabytes / t:.0f} MB/s" * (i > 0) for i, t in enumerate(seconds)]
        if not is_url(workdir):
            cells[2] = cells[4] = ""
        if index == 0:
            print(f"| {workdir} | {' | '.join(cells)} |", flush=True)


def times(workdir: str, megabytes: int, number: int) -> Iterator[float]:
    """Runs one round in a new workdir and yields the seconds of each column."""
    workdir, state = f"{workdir}-{number}", make_state(megabytes)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with folders.local_folder(workdir) as folder:
        checkpoints = open_checkpoints(os.path.join(folder, "checkpoints"), 1, "loss", lambda step: False)
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        start = together()
        checkpoints.save(2, state, {})
        yield together() - start
        checkpoints.wait()
        yield together() - start
        checkpoints.share()
        if jax.process_index() == 0:
            places.synchronize(folder)
        yield together() - start
        checkpoints.close()
    for is_new in (False, True):
        if is_new and is_url(workdir):
            shutil.rmtree(os.environ["XDG_CACHE_HOME"])
            places._mirrors.clear()
        start = together()
        with folders.local_folder(workdir) as folder:
            checkpoints = open_checkpoints(os.path.join(folder, "checkpoints"), 1, "loss", lambda step: False)
            restored = checkpoints.restore_newest(abstract)
            assert restored is not None and restored[0] == 2
            jax.block_until_ready(restored[1])
            yield together() - start
            checkpoints.close()


def make_state(megabytes: int) -> State:
    """Returns a state of random arrays, each sharded over all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("hosts",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("hosts")), NamedSharding(mesh, PartitionSpec())
    shape = (1024, megabytes * 10**6 // 4 // 1024 // ARRAYS)
    make = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=split)
    params = {f"{i:02d}": make(jax.random.key(i)) for i in range(ARRAYS)}
    step = jax.jit(lambda: jnp.int32(megabytes), out_shardings=whole)()
    return State(params, step)


def together() -> float:
    """Waits for all processes and returns the time."""
    multihost_utils.sync_global_devices("together")
    return time.perf_counter()


if __name__ == "__main__":
    main()
