"""Compares all optimizers on three families with 1 to 2 M parameters: validation loss after equal numbers of steps.

    python benchmarks/optimizers.py --workdir=runs/optimizers --source="JsonLines(path='books/train-*.jsonl.gz')"

Each optimizer has the same small tuning budget: its default learning rate times each of --factors with seed 0, and the
best of them with the other seeds. All runs clip at 1 and use a cosine schedule, except the schedule-free optimizer. The
script skips finished runs and includes them in the table.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from typing import NamedTuple

from runs import last_loss, parser, train

from pretrainax.optim import (
    SM3,
    Adafactor,
    AdamW,
    AdEMAMix,
    Lamb,
    Lion,
    Muon,
    Optimizer,
    ScheduleFreeAdamW,
    Sophia,
    StableAdamW,
)
from pretrainax.reporting.tables import markdown


class Family(NamedTuple):
    flags: list[str]
    steps: int  # with 8 rows of 128 tokens each


# 1.1, 1.1 and 1.4 M parameters. The metric is the loss of the family. Fewer targets per row require more steps.
FAMILIES = {
    "decoder": Family(["--config=configs/gpt2.py:tiny", "--config.model.num_layers=3"], 300),
    "encoder": Family(
        [
            "--config=configs/bert_base.py:tiny",
            "--config.model.num_layers=3",
            "--config.model.pair_head=False",
            "--config.objective=MaskedLM()",
        ],
        1000,
    ),
    "encoder-decoder": Family(["--config=configs/t5_base.py:tiny"], 600),
}
KINDS = (AdamW, StableAdamW, AdEMAMix, Lamb, Lion, Adafactor, SM3, Muon, Sophia, ScheduleFreeAdamW)
OPTIMIZERS = {kind.__name__: kind() for kind in KINDS}
OPTIMIZERS["AdamW-relative"] = AdamW(learning_rate=2e-2, scale_by_parameter_rms=True)  # from nanoT5


def optimizer_of(name: str, factor: float, steps: int) -> Optimizer:
    """Returns an optimizer with `factor` times its default learning rate; Muon has two learning rates."""
    default = OPTIMIZERS[name]
    rates = {field: getattr(default, field, None) for field in ("learning_rate", "adam_learning_rate")}
    chosen = dataclasses.replace(default, clip_norm=1.0, **{k: v * factor for k, v in rates.items() if v is not None})
    return dataclasses.replace(chosen, alpha_warmup_steps=steps) if isinstance(chosen, AdEMAMix) else chosen


def run(options: argparse.Namespace, family: str, name: str, factor: float, seed: int) -> float:
    """Trains unless the run is finished; returns the last validation loss."""
    (flags, steps), workdir = FAMILIES[family], os.path.join(options.workdir, f"{family}-{name}-{factor:g}-{seed}")
    schedule = "WarmupConstant" if name == "ScheduleFreeAdamW" else "WarmupCosine"
    fields = {
        "data.source": options.source,
        "tokenizer.vocab_size": 4096,
        "optimizer": optimizer_of(name, factor, steps),
        "schedule": f"{schedule}(warmup_steps={steps // 10})",
        "train.steps": steps,
        "train.global_batch_size": 8,
        "train.seed": seed,
        "train.attention": "xla",
        "train.on_nonfinite": "skip",
        "evaluate.every": steps,
        "evaluate.batches": 80,
        "checkpoint.every": steps,
    }
    return last_loss(train(workdir, flags, fields))


def compare(options: argparse.Namespace, family: str) -> list[list[str]]:
    """Returns the table rows of a family, sorted by loss."""
    found = []
    for name in options.optimizers:
        tried = {factor: run(options, family, name, factor, 0) for factor in options.factors}
        best = min(tried, key=lambda factor: tried[factor])
        losses = [run(options, family, name, best, seed) for seed in range(options.seeds)]
        rate = f"{optimizer_of(name, best, FAMILIES[family].steps).learning_rate:.2g}"
        if len(tried) > 1 and best in (min(tried), max(tried)):
            rate += " (edge of the range tried)"
        found.append((statistics.mean(losses), losses, name, rate))
        print(f"{family} {name} {rate}: {losses}", file=sys.stderr, flush=True)
    return [
        [family, name, rate, f"{mean:.3f} ({min(losses):.3f} to {max(losses):.3f})"]
        for mean, losses, name, rate in sorted(found)
    ]


def main() -> None:
    flags = parser(__doc__, "source")
    flags.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    flags.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    flags.add_argument("--factors", nargs="+", type=float, default=[0.3, 1.0, 3.0], help="of the default learning rate")
    flags.add_argument("--seeds", type=int, default=3)
    options = flags.parse_args()
    rows = [row for family in options.families for row in compare(options, family)]
    print(markdown(["family", "optimizer", "rate", "validation loss, mean (range)"], rows))


if __name__ == "__main__":
    main()
