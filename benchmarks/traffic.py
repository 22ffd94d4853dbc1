"""Counts the memory traffic of a config's compiled step, compared with a calculated lower bound.

    python benchmarks/traffic.py --config=gpt2:124m --config.train.global_batch_size=32 --topology=h100:1
    python benchmarks/traffic.py --config=t5_base --topology=v5e:1x1 --config.train.scan_unroll=12 --json=t5.json

The script needs no accelerator: it compiles the step for other devices (extras `cuda`, `tpu`) and reads the program.
`--config.train.deterministic=True` compiles it with XLA's flag for equal bits.
pretrainax/planning/hlo/kernels.py and memory_traffic.py define the counts and the kinds. All values are for one device
and one update. For a config with phases, the script compiles the config itself, which often equals the last phase.
"""

import dataclasses
import json
import sys
import time
from typing import Any

import jax
from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, UserError, resolve_auto
from pretrainax.files.paths import define_path
from pretrainax.planning import memory
from pretrainax.planning.compiled import compile_step
from pretrainax.planning.estimated_traffic import least_bytes, memory_bytes_between_products
from pretrainax.planning.search import resolve_remat
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import byte_size, short_time
from pretrainax.runtime import determinism
from pretrainax.sharding.mesh import mesh_sizes

MODULES = 20  # rows of the table by module


def measure(experiment: Experiment, topology: Topology) -> dict[str, Any]:
    """Compiles the step and returns the results for the table and the JSON file."""
    resolve_remat(experiment, topology)
    compiled = compile_step(experiment, topology)
    if compiled.traffic is None or compiled.memory is None:
        needed, there = byte_size(compiled.needed), byte_size(compiled.available)
        raise UserError(f"the step needs {needed}; the device has {there}. Reduce config.train.global_batch_size.")
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    estimate = memory.estimate(experiment, sizes, topology.chip)
    platform = topology.chip.platform
    floor = least_bytes(experiment, sizes, platform, estimate)
    moved = compiled.traffic
    return {
        "config": cli.config_name(),
        "topology": str(topology),
        "batch_size": experiment.train.global_batch_size,
        "bytes": moved.total,
        "seconds_at_full_rate": moved.total / topology.chip.memory_rate,
        "bytes_besides_products": moved.bytes_outside_matmuls,
        "estimated_besides_products": memory_bytes_between_products(experiment, sizes, platform, estimate),
        "kinds": moved.sum_by("kind"),
        "modules": moved.sum_by("module"),
        "kernels": moved.kernels,
        "temporaries": compiled.memory.temporaries,
        "fits": compiled.fits,
        "compile_seconds": compiled.seconds,
        "floor": floor,
        "floor_bytes": sum(floor.values()),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: dict[str, Any]) -> str:
    total, floor = results["bytes"], results["floor_bytes"]
    rows = {
        "config": f"{results['config']}, {results['batch_size']:,} examples, on {results['topology']}",
        "moved": f"{byte_size(total)}, {short_time(results['seconds_at_full_rate'])} at the chip's full rate",
        "outside products": byte_size(results["bytes_besides_products"]),
        "  without a compiler": f"{byte_size(results['estimated_besides_products'])}, the estimate of plan",
        "floor": f"{byte_size(floor)}; the step moves {total / floor:.2f} times this",
        "temporaries": byte_size(results["temporaries"]) + ("" if results["fits"] else ", DOES NOT FIT"),
        "kernels": f"{results['kernels']:,}",
        "compile": f"{results['compile_seconds']:.1f} s",
    }
    modules = dict(list(results["modules"].items())[:MODULES])
    blocks = [("by kind", results["kinds"]), ("by module", modules), ("floor", results["floor"])]
    parts = [f"{title}\n{_sizes(sizes, total)}" for title, sizes in blocks]
    return "\n\n".join([text_table(rows.items()), *parts])


def _sizes(sizes: dict[str, int], total: int) -> str:
    cells = [(name or "(no name)", byte_size(size), f"{size / total:.1%}") for name, size in sizes.items()]
    return text_table(cells, align="<>", indent="  ")


def main() -> None:
    name = flags.DEFINE_string("topology", None, "Devices: h100:1, v5e:1x1, h100:4x8 (hosts x devices)")
    file = define_path("json", None, "File to write the results to")

    def run() -> int:
        jax.config.update("jax_platforms", "cpu")  # only compiles; does not occupy a local accelerator
        experiment = dataclasses.replace(cli.experiment(files=False), phases=())
        if experiment.train.deterministic:
            determinism.set_deterministic_flag()
        resolve_auto(experiment, experiment.tokenizer.size if experiment.tokenizer.path is None else None)
        if name.value is None:
            raise UserError("--topology is missing. Set the devices to compile for, such as h100:1 or v5e:1x1.")
        topology = Topology.parse(name.value)
        print(f"compiling for {topology} ...", file=sys.stderr, flush=True)
        results = measure(experiment, topology)
        print(table(results))
        if file.value:
            with open(file.value, "w", encoding="utf-8") as f:
                json.dump(results, f, indent=2)
        return 0

    cli.run(run)


if __name__ == "__main__":
    main()
