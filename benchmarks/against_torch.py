"""Compares training speed with transformers + torch: the same model, batch and device, in alternating rounds.

    python benchmarks/against_torch.py                                    # width 256, 4 layers, float32
    python benchmarks/against_torch.py --size=base --dtype=bfloat16       # GPT-2 124M, BERT-base, T5 1.0 base
    python benchmarks/against_torch.py --against=eager,compiled,autocast

The script prints tokens/s of both programs and their ratio. Each program runs in a separate process with the same
number of threads and the same malloc settings. Both run forward, backward, global-norm clipping and AdamW, without
dropout. In transformers, BERT's head reads all positions; here it reads the masked positions. Requires the extra
`parity`.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
from side import Side, serve

from pretrainax.config import LearnedPositions, ModelConfig, TrainConfig
from pretrainax.zoo.bert import bert
from pretrainax.zoo.gpt import gpt2
from pretrainax.zoo.t5 import t5

# rows, encoder tokens per row (None: no encoder), tokens per row of the stack with the language-model head
BATCHES = {
    "small": {"bert": (32, None, 128), "gpt2": (16, None, 256), "t5": (16, 256, 64)},
    "base": {"bert": (32, None, 512), "gpt2": (16, None, 1024), "t5": (32, 512, 114)},
    "gpu": {"bert": (32, None, 512), "gpt2": (32, None, 1024), "t5": (32, 512, 114)},  # base with the rows of gpu.py
}
MASKED = 0.15
# With glibc's defaults, both programs would map and unmap each block over 32 MB in each step.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def config_of(name: str, size: str) -> ModelConfig:
    config = {"bert": bert, "gpt2": gpt2, "t5": t5}[name]({"gpt2": "124m", "t5": "v1_0_base"}.get(name, "base"))
    if size == "small":
        config.num_layers, config.d_model, config.d_ff, config.num_heads, config.vocab_size = 4, 256, 1024, 4, 8192
        if isinstance(config.position, LearnedPositions):
            config.position = LearnedPositions(256)
    config.dropout_rate = config.attention_dropout_rate = 0.0
    config.pair_head = False  # only masked LM, like BertForMaskedLM
    return config


def batch_of(name: str, size: str, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens, with the field names of docs/batch.md."""
    rows, read, length = BATCHES[size][name]
    rng = np.random.default_rng(0)

    def text(length):
        return {
            "tokens": rng.integers(0, vocab_size, (rows, length), dtype=np.int32),
            "segment_ids": np.ones((rows, length), np.int32),
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        }

    batch = text(length)
    predicted = length
    if name == "bert":
        predicted = round(MASKED * length)
        order = np.argsort(rng.random((rows, length)), axis=1)[:, :predicted]
        batch |= {
            "masked_positions": np.sort(order, axis=1).astype(np.int32),
            "token_types": np.zeros_like(batch["tokens"]),
        }
    if name == "t5":
        batch |= {f"encoder_{key}": value for key, value in text(read).items()}
    batch["targets"] = rng.integers(0, vocab_size, (rows, predicted), dtype=np.int32)
    batch["loss_weights"] = np.ones((rows, predicted), np.float32)
    return batch


# --- the two programs: each returns a function, steps -> loss -------------------------------------------------------


def ours(name: str, size: str, dtype: str, unroll: int, stack: contextlib.ExitStack) -> Callable[[int], float]:
    import jax

    from pretrainax import models
    from pretrainax.config import MeshConfig
    from pretrainax.layers.compute import compute_for, resolve_auto
    from pretrainax.optim.optimizers import AdamW
    from pretrainax.optim.schedules import WarmupConstant
    from pretrainax.sharding.arrays import put_batch
    from pretrainax.sharding.mesh import make_mesh
    from pretrainax.training import train_step

    config = config_of(name, size)
    train = resolve_auto(TrainConfig(dtype=dtype, scan_unroll=unroll))
    mesh = make_mesh(MeshConfig())
    stack.enter_context(jax.set_mesh(mesh))
    model = models.build(config, compute_for(train))
    batch = batch_of(name, size, config.vocab_size)
    shapes = train_step.global_shapes(batch, len(batch["tokens"]))
    schedule = WarmupConstant(warmup_steps=0).build(1e-4, 1)
    optimizer = AdamW().build(schedule, train_step.abstract_params(model, shapes))
    state = train_step.make_init(model, optimizer, shapes, mesh)(0)
    step = train_step.make_train_step(model, optimizer, schedule, train, mesh)
    batch = put_batch(batch, mesh)

    def run(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, batch)
        total, count = metrics["sums"]["loss"]
        return float(total / count)

    return run


def torch_model(name: str, c: ModelConfig):
    """Returns the transformers model with the same sizes, without dropout."""
    import transformers

    shared = dict(vocab_size=c.vocab_size)
    if name == "bert":
        settings = transformers.BertConfig(
            hidden_size=c.d_model,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            intermediate_size=c.d_ff,
            max_position_embeddings=c.position.max_length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **shared,
        )
        return transformers.BertForMaskedLM(settings)
    if name == "gpt2":
        settings = transformers.GPT2Config(
            n_embd=c.d_model,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=c.d_ff,
            n_positions=c.position.max_length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            **shared,
        )
        return transformers.GPT2LMHeadModel(settings)
    settings = transformers.T5Config(
        d_model=c.d_model,
        d_kv=c.dim_per_head,
        d_ff=c.d_ff,
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        dropout_rate=0.0,
        use_cache=False,
        **shared,
    )
    return transformers.T5ForConditionalGeneration(settings)


def theirs(name: str, size: str, kind: str) -> Callable[[int], float]:
    """Returns a function that runs a number of torch steps and returns the loss.

    Args:
      kind: eager, compiled, autocast (bfloat16) or compiled_autocast.
    """
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, like JAX's default
    c = config_of(name, size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch_model(name, c).to(device).train()
    batch = {key: torch.from_numpy(np.array(v)).to(device) for key, v in batch_of(name, size, c.vocab_size).items()}
    tokens, targets = batch["tokens"].long(), batch["targets"].long()
    if name == "bert":
        labels = torch.full_like(tokens, -100).scatter(1, batch["masked_positions"].long(), targets)
        inputs = {"input_ids": tokens, "labels": labels}
    elif name == "gpt2":
        inputs = {"input_ids": tokens, "labels": tokens}  # the model shifts the labels
    else:
        inputs = {"input_ids": batch["encoder_tokens"].long(), "decoder_input_ids": tokens, "labels": targets}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if kind.startswith("compiled") else model

    def run(steps: int) -> float:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=kind.endswith("autocast")):
                loss = forward(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return run


def timed(side: str, name: str, size: str, unroll: int, stack: contextlib.ExitStack) -> Callable[[int], dict]:
    """Returns a function that runs a number of steps and returns seconds, loss and peak memory."""
    if side.startswith("torch "):
        run = theirs(name, size, side.removeprefix("torch "))
    else:
        run = ours(name, size, side.removeprefix("pretrainax "), unroll, stack)

    def take(steps: int) -> dict:
        started = time.perf_counter()
        loss = run(steps)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "loss": loss, "memory_bytes": peak_memory(side)}

    return take


def peak_memory(side: str) -> int:
    """Returns the peak bytes on the device of a program; on a CPU, without such a counter, of its process."""
    if side.startswith("torch "):
        import torch

        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
    else:
        import jax

        if found := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
            return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- alternating rounds ---------------------------------------------------------------------------------------------


class Trainer(Side):
    """The process of one training program."""

    def __init__(self, side: str, name: str, size: str, unroll: int):
        super().__init__(__file__, [side, "--models", name, "--size", size, "--unroll", str(unroll)], MALLOC)
        self.rates, self.memory_bytes = [], 0
        rows, read, length = BATCHES[size][name]
        self.tokens = rows * ((read or 0) + length)
        self.first_loss = self.ask(1)["loss"]  # compiles
        self.ask(2)

    def turn(self, steps: int) -> float:
        """Runs a number of steps, records the rate, and returns seconds per step."""
        answer = self.ask(steps)
        self.rates.append(self.tokens * steps / answer["seconds"])
        self.memory_bytes = answer["memory_bytes"]
        return answer["seconds"] / steps


def compare(name: str, args: argparse.Namespace) -> list[dict]:
    """Returns one row for each kind of torch program."""
    names = [f"pretrainax {args.dtype}", *(f"torch {kind}" for kind in args.against.split(","))]
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(contextlib.closing(Trainer(n, name, args.size, args.unroll))) for n in names]
        steps = [max(round(args.seconds / side.turn(2)), 2) for side in sides]
        for side in sides:
            side.rates.clear()
        for _ in range(args.rounds):
            for side, count in zip(sides, steps, strict=True):
                side.turn(count)
        here = sides[0]
        rows = []
        for n, side in zip(names[1:], sides[1:], strict=True):
            ratios = [a / b for a, b in zip(here.rates, side.rates, strict=True)]
            rows.append(
                {
                    "model": name,
                    "batch": BATCHES[args.size][name],
                    "ours": names[0],
                    "theirs": n,
                    "our_tokens_per_second": statistics.median(here.rates),
                    "their_tokens_per_second": statistics.median(side.rates),
                    "ratio": statistics.median(here.rates) / statistics.median(side.rates),
                    "ratio_range": [min(ratios), max(ratios)],
                    "our_memory_bytes": here.memory_bytes,
                    "their_memory_bytes": side.memory_bytes,
                    "our_first_loss": here.first_loss,
                    "their_first_loss": side.first_loss,
                }
            )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert,gpt2,t5")
    parser.add_argument("--size", choices=BATCHES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of our activations")
    parser.add_argument("--against", default="eager", help="eager,compiled,autocast,compiled_autocast")
    parser.add_argument("--unroll", type=int, default=0, help="config.train.scan_unroll; 0 selects the default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each program in each round")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with contextlib.ExitStack() as stack:
            return serve(timed(args.serve, args.models, args.size, args.unroll, stack))

    rows = []
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}\n")
    print("| model | batch | tokens/s here | tokens/s torch | ratio (range) | memory here / torch |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.models.split(","):
        for row in compare(name, args):
            rows.append(row)
            count, read, length = row["batch"]
            shape = f"{count} × ({read} + {length})" if read else f"{count} × {length}"
            low, high = row["ratio_range"]
            print(
                f"| {name} {args.size} | {shape} | {row['our_tokens_per_second']:,.0f} ({row['ours'].split()[1]}) "
                f"| {row['their_tokens_per_second']:,.0f} ({row['theirs'].split()[1]}) "
                f"| {row['ratio']:.2f} ({low:.2f} to {high:.2f}) "
                f"| {row['our_memory_bytes'] / 1e9:.1f} / {row['their_memory_bytes'] / 1e9:.1f} GB |",
                flush=True,
            )
            if args.json:  # after each row, so that an interrupted script leaves the measured rows
                with open(args.json, "w", encoding="utf-8") as f:
                    json.dump(rows, f, indent=2)


if __name__ == "__main__":
    main()
