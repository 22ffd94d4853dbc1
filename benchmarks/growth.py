"""Measures and draws the cost to compile a step for 1 to 4,096 chips and 2 to 128 layers.

`python benchmarks/growth.py --to=docs/growth.png` compiles the real training step for TPUs without the hardware
(`pip install 'pretrainax[tpu]'`). Each point runs in a separate process without a cache. The model is a decoder of
width 1,024 with one row of 1,024 tokens per chip; parameters are sharded over up to 64 chips. The script skips points
that are in the JSON file next to the picture.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import matplotlib
from matplotlib import figure, ticker

from pretrainax.config import DataConfig, Experiment, MeshConfig, ModelConfig, RotaryPositions, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import TextFiles
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.planning.compiled import compile_step
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.curves import FAINT, LEFT, RIGHT, STYLE, TRAINING, VALIDATION

CHIPS = {  # one chip type, available in all of these sizes
    1: "v5p:1x1x1",
    4: "v5p:2x2x1",
    16: "v5p:2x2x4",
    64: "v5p:4x4x4",
    256: "v5p:4x8x8",
    1024: "v5p:8x8x16",
    4096: "v5p:16x16x16",
}
LAYERS = (2, 12, 24, 48, 96, 128)
DEPTH, AT = 12, 1  # number of layers in the chip series, number of chips in the layer series


def measure(chips: int, layers: int) -> dict[str, float]:
    """Returns CPU and wall seconds to trace and compile, bytes of host memory, and bytes per chip."""
    shape = dict(num_layers=layers, d_model=1024, d_ff=4096, num_heads=8, vocab_size=8192, position=RotaryPositions())
    experiment = Experiment(
        model=ModelConfig(family="decoder", norm="rms", use_bias=False, **shape),
        tokenizer=None,
        data=DataConfig(source=TextFiles(path="none is read"), sequence_length=1024),
        objective=CausalLM(),
        optimizer=AdamW(),
        schedule=WarmupCosine(warmup_steps=10),
        mesh=MeshConfig(data=-1, fsdp=min(chips, 64)),
        train=TrainConfig(global_batch_size=chips, dtype="bfloat16", remat="block", scan_unroll=1, loss_chunk=4096),
    )
    start = time.process_time()
    compiled = compile_step(experiment, Topology.parse(CHIPS[chips]))
    return {
        "chips": chips,
        "layers": layers,
        "cpu_seconds": time.process_time() - start,
        "seconds": compiled.seconds,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "chip_bytes": compiled.needed,
    }


def in_a_process(chips: int, layers: int) -> dict[str, Any]:
    """Measures a point in a separate process; returns the point, or its error message."""
    command = [sys.executable, __file__, f"--point={chips},{layers}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"chips": chips, "layers": layers, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def draw(path: str, points: list[dict[str, Any]]) -> None:
    """Draws compile time, host memory and bytes per chip against chips (left) and layers (right)."""
    good = [p for p in points if "error" not in p]
    rows = (("CPU time to compile, s", "cpu_seconds", 1), ("host memory, GB", "host_bytes", 1e9))
    rows += (("memory per chip, GB", "chip_bytes", 1e9),)
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, 8), dpi=150)
        grid = picture.add_gridspec(3, 2, left=LEFT, right=RIGHT, top=0.85, bottom=0.08, hspace=0.5, wspace=0.13)
        for column, (x, color, kept) in enumerate(
            (("chips", TRAINING, lambda p: p["layers"] == DEPTH), ("layers", VALIDATION, lambda p: p["chips"] == AT))
        ):
            chosen = sorted((p for p in good if kept(p)), key=lambda p: p[x])
            for row, (title, name, unit) in enumerate(rows):
                panel = picture.add_subplot(grid[row, column])
                panel.set_title(title)
                panel.plot([p[x] for p in chosen], [p[name] / unit for p in chosen], color=color, lw=2, marker="o")
                panel.set_xscale("log", base=2)
                panel.set_xticks([p[x] for p in chosen])
                panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
                panel.grid(axis="x", visible=False)
                panel.set_ylim(0, 1.15 * max((p[name] / unit for p in chosen), default=1))
            other = f"{DEPTH} layers" if x == "chips" else "one chip"
            panel.set_xlabel(f"{x}, with {other}")
        picture.text(LEFT, 0.95, "Cost to compile a step", fontsize=16, fontweight="bold", va="center")
        subtitle = "decoder of width 1,024, one row of 1,024 tokens per chip, for TPU v5p; nothing runs"
        picture.text(LEFT, 0.91, subtitle, color=FAINT, va="center")
        picture.savefig(path, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", metavar="PICTURE", default="docs/growth.png")
    parser.add_argument("--point", metavar="CHIPS,LAYERS", help="measure one point in this process and print it")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(*map(int, options.point.split(",")))))
        return
    kept = os.path.splitext(options.to)[0] + ".json"
    points = json.load(open(kept)) if os.path.exists(kept) else []
    wanted = dict.fromkeys([*((chips, DEPTH) for chips in CHIPS), *((AT, layers) for layers in LAYERS)])
    for chips, layers in wanted:
        if not any((p["chips"], p["layers"]) == (chips, layers) and "error" not in p for p in points):
            points = [p for p in points if (p["chips"], p["layers"]) != (chips, layers)]
            points.append(in_a_process(chips, layers))
            print(json.dumps(points[-1]), flush=True)
            with open(kept, "w") as f:
                json.dump(points, f, indent=1)
            draw(options.to, points)
    draw(options.to, points)


if __name__ == "__main__":
    main()
