"""Compares a dense decoder with a decoder of 8 experts, 2 per token, at equal active FLOPs: loss, speed, balance.

    python benchmarks/experts.py --workdir=runs/experts --books=books

Both models have 4 blocks of width 128. The dense feed-forward is as wide as two experts, so the FLOPs per token are
equal except for the router. The script trains each model on `books` (JSON lines with a text) with several seeds and
skips finished runs. It prints validation losses with their standard deviation, paired differences per seed, tokens per
second and balance. Each run draws its balance to experts.png in its folder.
"""

import argparse
import os
import statistics

import numpy as np
import runs

from pretrainax.reporting.tables import markdown

SIZES = ["--config=configs/gpt2.py:tiny", "--config.model.num_layers=4", "--config.model.d_model=128"]
SIZES += ["--config.model.num_heads=4", "--config.model.activation=silu", "--config.model.gated=True"]
MODELS = {
    "dense": ["--config.model.d_ff=512"],
    "8 experts, 2 a token": [
        "--config.model.d_ff=256",
        "--config.model.experts=MixtureOfExperts(num_experts=8, top_k=2, balance_weight=0.01, z_weight=0.001)",
    ],
}


def train(options: argparse.Namespace, model: str, seed: int) -> list[dict]:
    """Trains a model unless its run is finished; returns the lines of metrics.jsonl."""
    steps = options.steps
    fields = {
        "data.source": runs.books(options.books),
        "data.sequence_length": 128,
        "tokenizer.vocab_size": 2048,  # a larger output matrix would be most of such a small model
        "train.global_batch_size": 16,
        "schedule.warmup_steps": steps // 20,
        "train.steps": steps,
        "train.seed": seed,
        "evaluate.every": steps // 10,
        "checkpoint.every": steps // 2,
    }
    name = model.replace(" ", "_").replace(",", "")
    return runs.train(
        os.path.join(options.workdir, f"{name}-{seed}"), [*SIZES, *MODELS[model], *runs.PRETRAINING], fields
    )


def row(model: str, of_seeds: list[list[dict]]) -> list[str]:
    """Returns the table row of a model over all seeds: median loss, standard deviation, median speed, balance."""
    losses = [runs.last_loss(lines) for lines in of_seeds]
    trained = [[line for line in lines if line["split"] == "train"] for lines in of_seeds]
    speed = statistics.median(line["tokens_per_second"] for lines in trained for line in lines[1:])
    balance = [lines[-1].get("expert_imbalance") for lines in trained]
    shown = "" if None in balance else f"{statistics.median(balance):.2f}"
    return [model, f"{statistics.median(losses):.4f} ± {statistics.stdev(losses):.4f}", f"{speed:,.0f}", shown]


def main() -> None:
    parser = runs.parser(__doc__, "books")
    parser.add_argument("--steps", type=int, default=2_000, help="steps with 16 rows of 128 tokens")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    # alternate the models for each seed, so that other work on the machine affects both
    found: dict[str, list[list[dict]]] = {model: [] for model in MODELS}
    for seed in range(options.seeds):
        for model, lines in found.items():
            lines.append(train(options, model, seed))
    print(markdown(["model", "validation loss", "tokens/s", "busiest expert"], [row(*one) for one in found.items()]))
    dense, experts = (np.array([runs.last_loss(lines) for lines in of]) for of in found.values())
    print(f"experts - dense, per seed: {runs.gain(experts, dense)}")


if __name__ == "__main__":
    main()
