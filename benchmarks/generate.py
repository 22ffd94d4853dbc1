"""Compares generation with transformers + torch on the same device: prefill and steps, in alternating rounds.

    python benchmarks/generate.py                             # GPT-2 124M, T5-base, a GPT-2 of 3 M; 1 and 8 prompts
    python benchmarks/generate.py --models=gpt2 --batches=1 --rounds=9

Both programs generate complete texts with a loaded model, as in normal use: greedy, random weights, float32, prompts of
64 tokens, 64 new tokens, without an end token. The time of a text with one token is the prefill. The additional time
for the other tokens gives the time per step. Each program runs in a separate process with the same number of threads,
one program at a time. Requires the extra `parity`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

from side import Side, serve

from pretrainax.config import LearnedPositions, ModelConfig
from pretrainax.zoo.gpt import gpt2
from pretrainax.zoo.t5 import t5

PROMPT, NEW = 64, 64
MODELS = ("gpt2", "t5", "small")
SIDES = ("pretrainax", "transformers")


def config_of(name: str) -> ModelConfig:
    """Returns GPT-2 124M, T5 1.0 base, or a GPT-2 of 3.2 M parameters."""
    if name == "t5":
        return t5("v1_0_base")
    config = gpt2("124m")
    if name == "small":
        sizes = dict(vocab_size=2048, num_layers=6, d_model=192, d_ff=768, num_heads=6)
        config = dataclasses.replace(config, **sizes, position=LearnedPositions(256))
    return config


# --- the two programs: each returns a function, (prompts, new tokens) -> seconds --------------------------------------


def ours(name: str) -> Callable[[int, int], float]:
    import jax
    import tokenizers

    from pretrainax import models
    from pretrainax.config import MeshConfig
    from pretrainax.inference.decoding import generate
    from pretrainax.inference.loaded import LoadedModel
    from pretrainax.inference.request import Sampling
    from pretrainax.interop.directories import evaluation_of
    from pretrainax.layers.compute import Compute
    from pretrainax.sharding.mesh import make_mesh
    from pretrainax.tokenization.huggingface import read_tokenizer

    with tempfile.TemporaryDirectory() as folder:  # one token per letter
        pieces = {piece: i for i, piece in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
        tokenizer.save(f"{folder}/tokenizer.json")
        named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = read_tokenizer(folder)
    config, mesh = config_of(name), make_mesh(MeshConfig())
    model = models.build(config, Compute())
    shapes = {"tokens": (1, 2), "positions": (1, 2), "segment_ids": (1, 2)}
    batch = {key: jax.numpy.zeros(shape, "int32") for key, shape in shapes.items()}
    batch |= {f"encoder_{key}": x for key, x in batch.items()}
    params = jax.jit(lambda: model.init(jax.random.key(0), batch, deterministic=True)["params"])()
    experiment = evaluation_of(config, tokenizer.vocabulary, "")
    loaded = LoadedModel(experiment, model, params, tokenizer, mesh, origin="random weights")
    spare = 1 if name == "t5" else 0  # T5's encoder also reads an end token

    def run(prompts: int, new: int) -> float:
        request = Sampling(max_new_tokens=new, banned_tokens=(tokenizer.vocabulary.eos,))
        started = time.perf_counter()
        output = generate(loaded, ["a" * (PROMPT - spare)] * prompts, request)
        seconds = time.perf_counter() - started
        assert [len(text.ids) for text in output] == [new] * prompts
        return seconds

    return run


def theirs(name: str) -> Callable[[int, int], float]:
    import torch
    import transformers

    c = config_of(name)
    torch.manual_seed(0)
    if name == "t5":
        sizes = dict(d_model=c.d_model, d_kv=c.dim_per_head, d_ff=c.d_ff, num_layers=c.num_layers)
        settings = transformers.T5Config(**sizes, num_heads=c.num_heads, vocab_size=c.vocab_size)
        model = transformers.T5ForConditionalGeneration(settings)
    else:
        sizes = dict(n_embd=c.d_model, n_layer=c.num_layers, n_head=c.num_heads, n_inner=c.d_ff)
        settings = transformers.GPT2Config(**sizes, vocab_size=c.vocab_size, n_positions=c.position.max_length)
        model = transformers.GPT2LMHeadModel(settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None  # generation never stops early
    model.generation_config.pad_token_id = 0
    model.generation_config.decoder_start_token_id = 0

    def run(prompts: int, new: int) -> float:
        tokens = torch.full((prompts, PROMPT), 5, device=device)
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False)
        seconds = time.perf_counter() - started
        assert output.shape[1] == new + (1 if name == "t5" else PROMPT)
        return seconds

    return run


# --- alternating rounds -----------------------------------------------------------------------------------------------


def turn(side: Side, prompts: int) -> tuple[float, float]:
    """Returns the seconds of the prefill and of one step."""
    prefill = side.ask(prompts, 1)
    return prefill, (side.ask(prompts, NEW) - prefill) / (NEW - 1)


def compare(name: str, prompts: int, rounds: int) -> list[dict]:
    """Returns one row for the prefill and one row for the steps."""
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(contextlib.closing(Side(__file__, [side, "--models", name], {}))) for side in SIDES
        ]
        for side in sides * 2:  # compiles
            turn(side, prompts)
        turns = [[turn(side, prompts) for side in sides] for _ in range(rounds)]
    rows = []
    for i, part in enumerate(("prefill", "step")):
        here, there = ([1000 * turn[side][i] for turn in turns] for side in range(2))
        ratios = [b / a for a, b in zip(here, there, strict=True)]
        medians = {"ours_ms": statistics.median(here), "theirs_ms": statistics.median(there)}
        row = {"model": name, "prompts": prompts, "part": part, **medians}
        rows.append(row | {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8", help="numbers of prompts per batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve({"pretrainax": ours, "transformers": theirs}[args.serve](args.models))
    rows = []
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}\n")
    print("| model | prompts | part | ms here | ms transformers | ratio (range) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.models.split(","):
        for prompts in map(int, args.batches.split(",")):
            for row in compare(name, prompts, args.rounds):
                rows.append(row)
                low, high = row["ratio_range"]
                print(
                    f"| {name} | {prompts} | {row['part']} | {row['ours_ms']:.1f} | {row['theirs_ms']:.1f} "
                    f"| {row['ratio']:.2f} ({low:.2f} to {high:.2f}) |",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=2)


if __name__ == "__main__":
    main()
