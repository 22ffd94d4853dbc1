"""Measures the memory to import and export a model: a LLaMA with random bfloat16 weights.

    python benchmarks/huggingface_memory.py --billions=1.1 --folder=/tmp/huggingface_memory

The script creates the model. It needs about 8 bytes of disk per parameter while it runs. It samples the memory of the
import or export process every 20 ms. "anonymous" is memory without file pages; "resident" includes pages of mapped
files, which the system can reclaim at any time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers

from pretrainax import models
from pretrainax.interop.safetensors_files import Writer
from pretrainax.zoo.convert import rows_of, tensor_locations, their_shape
from pretrainax.zoo.llama import FAMILIES, llama


def config_of(billions: float):
    """Returns a LLaMA 2 with the number of layers closest to the parameter count."""
    config = llama("2_7b")
    config.d_model, config.d_ff, config.num_heads, config.num_kv_heads = 2048, 5632, 32, 4
    layer = 2048 * (2 * 2048 + 2 * 4 * 64 + 3 * 5632)
    config.num_layers = max(1, round((billions * 1e9 - 2 * 32_000 * 2048) / layer))
    return config


def make_directory(directory: Path, config) -> dict[str, float]:
    """Writes the model in files of 1 GB; returns sizes in bytes."""
    directory.mkdir(parents=True)
    huggingface = FAMILIES[0].huggingface
    tensors = {
        name: (np.dtype(ml_dtypes.bfloat16), their_shape(row, shape if layer is None else shape[1:]))
        for row, shape in rows_of(huggingface.names(config), models.abstract_params(config)).values()
        for name, layer in tensor_locations(row, shape)
    }
    files, rng = Writer(str(directory), tensors, shard_bytes=10**9), np.random.default_rng(0)
    for name, (_, shape) in tensors.items():
        files[name][...] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    (directory / "config.json").write_text(json.dumps(huggingface.write_config(config)))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, "<unk>"))
    tokenizer.save(str(directory / "tokenizer.json"))
    sizes = [2 * np.prod(shape) for _, shape in tensors.values()]
    return {"model": float(sum(sizes)), "largest tensor": float(max(sizes))}


def measured(*words: str) -> dict[str, float]:
    """Runs `python -m pretrainax.huggingface …`; returns seconds, and peak anonymous and resident bytes."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pretrainax.huggingface", *words]
    process = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True)
    peaks = {"RssAnon": 0.0, "VmRSS": 0.0}
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        for line in status.splitlines():
            name, _, value = line.partition(":")
            if name in peaks:
                peaks[name] = max(peaks[name], float(value.split()[0]) * 1024)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    print(process.stdout.read().strip())
    return {"seconds": time.perf_counter() - started, "anonymous": peaks["RssAnon"], "resident": peaks["VmRSS"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=1.1, help="parameters")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/huggingface_memory"), help="created and removed")
    args = parser.parse_args()
    needed, free = 9e9 * args.billions, shutil.disk_usage(args.folder.parent).free
    if needed > free:
        raise SystemExit(f"{args.folder} needs {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free")
    source, workdir, out = (str(args.folder / name) for name in ("source", "run", "out"))
    try:
        sizes = make_directory(Path(source), config_of(args.billions))
        rows = {
            "import": measured("import", f"--from={source}", f"--workdir={workdir}"),
            "export": measured("export", f"--workdir={workdir}", f"--to={out}"),
        }
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    megabytes = {name: f"{size / 1e6:,.0f} MB" for name, size in sizes.items()}
    print(f"model {megabytes['model']} in bfloat16, largest tensor {megabytes['largest tensor']}\n")
    print("| | seconds | anonymous | resident |\n| --- | --- | --- | --- |")
    for name, row in rows.items():
        print(f"| {name} | {row['seconds']:.1f} | {row['anonymous'] / 1e6:,.0f} MB | {row['resident'] / 1e6:,.0f} MB |")


if __name__ == "__main__":
    main()
