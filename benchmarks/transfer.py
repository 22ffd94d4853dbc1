"""Sweeps learning rates over widths and depths, with and without config.transfer, for three families.

    python benchmarks/transfer.py --workdir=DIR --books=FOLDER --families=gpt,bert,t5 --widths=64,128,256,512 \
        --depths=2,4,8,16 --steps=500 --out=docs/studies

Each width has the smallest depth, and each depth the smallest width, which are the base sizes of the transfer. Learning
rates are --factor to the powers --powers, times the middle rate of the family; standard sizes have --standard_powers,
because their best rates move further. Runs are in one process, and runs that differ in the learning rate share a
program. Each result is a line of DIR/results.jsonl; repeating the command trains only the missing runs. With --out, it
writes transfer.json and transfer.png. It prints the best rate of each size, its loss, and the loss at the rate that is
best for the base model.
"""

import argparse
import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import matplotlib
import runs as benchmark_runs
import sweep
from matplotlib import figure

from pretrainax.config import Experiment, Transfer, resized
from pretrainax.config.config_file import read_config_file
from pretrainax.config.overrides import set_field
from pretrainax.reporting.curves import FAINT, PART_COLORS, STYLE
from pretrainax.reporting.tables import text_table

COMMON = {
    **{"tokenizer.vocab_size": "1024", "model.vocab_size": "auto", "data.sequence_length": "64"},
    **{"train.global_batch_size": "32", "model.dropout_rate": "0.0", "model.attention_dropout_rate": "0.0"},
    **{"trackers": "()", "evaluate.batches": "20", "model.num_heads": "2"},
}


class Family(NamedTuple):
    """A config of the sweep."""

    config: str
    fields: dict[str, str]  # {path of a field: value}
    rate: float  # learning rate in the middle of the grid
    output_scale: float  # of Transfer: the best power of 2 for width 64, 2 layers and 500 steps at a rate of 0.004


FAMILIES = {
    "gpt": Family("gpt2:tiny", {"optimizer": "AdamW(b2=0.95, weight_decay=0.1)"}, 4e-3, 8.0),
    "bert": Family(
        "bert_base:tiny",
        {
            "optimizer": "AdamW(b2=0.95, weight_decay=0.1)",
            "model.position": "RotaryPositions()",
            "model.pair_head": "False",
            "objective": "MaskedLM(rate=0.3)",
        },
        8e-3,
        8.0,
    ),
    "t5": Family("t5_base:tiny", {"optimizer": "AdamW(b2=0.95, weight_decay=0.0)"}, 4e-3, 2.0),
}


class Trial(NamedTuple):
    """One run of the sweep."""

    family: str
    width: int
    depth: int
    transferred: bool  # False: the standard parametrization
    rate: float  # peak learning rate
    seed: int

    @property
    def name(self) -> str:
        kind = "transferred" if self.transferred else "standard"
        return f"{self.family}-{kind}-{self.width}-{self.depth}-{self.rate:.3g}-{self.seed}"


def trials(options) -> Iterator[Trial]:
    """Yields all runs, in an order in which neighbors share compiled programs."""
    width, depth = options.widths[0], options.depths[0]
    sizes = dict.fromkeys([(w, depth) for w in options.widths] + [(width, d) for d in options.depths])
    for family in options.families:
        for size in sizes:
            for transferred, powers in ((True, options.powers), (False, options.standard_powers)):
                for power in powers:
                    for seed in range(options.seeds):
                        rate = FAMILIES[family].rate * options.factor**power
                        yield Trial(family, *size, transferred, float(f"{rate:.4g}"), seed)


def experiment_of(trial: Trial, options) -> Experiment:
    """Returns the config of a run."""
    family = FAMILIES[trial.family]
    experiment = read_config_file(family.config)
    data = {"data.source": benchmark_runs.books(options.books), "data.cache_dir": os.path.join(options.workdir, "data")}
    for field, value in (COMMON | family.fields | data).items():
        set_field(experiment, f"config.{field}", value)
    model, base = experiment.model, (options.widths[0], options.depths[0])
    model.d_ff, model.num_layers = model.d_ff * base[0] // model.d_model, base[1]
    model.d_model = base[0]
    experiment.model = resized(model, trial.width, trial.depth)
    experiment.transfer = Transfer(*base, options.output_scale or family.output_scale) if trial.transferred else None
    experiment.optimizer.learning_rate, experiment.schedule.warmup_steps = trial.rate, options.steps // 10
    train, steps = experiment.train, options.steps
    train.steps, train.seed, train.log_every = steps, trial.seed, steps
    experiment.evaluate.every = experiment.checkpoint.every = steps
    return experiment


def losses_by_rate(results: dict[Trial, Optional[float]]) -> dict[tuple, dict[float, float]]:
    """Returns {(family, transferred, width, depth): {rate: mean loss over seeds}} without runs that diverged."""
    found: dict[tuple, dict[float, list]] = {}
    for trial, loss in results.items():
        key = trial.family, trial.transferred, trial.width, trial.depth
        found.setdefault(key, {}).setdefault(trial.rate, []).append(loss)
    means = {
        key: {rate: sum(x) / len(x) for rate, x in sorted(rates.items()) if None not in x}
        for key, rates in found.items()
    }
    return {key: rates for key, rates in means.items() if rates}


def table(results: dict[Trial, Optional[float]], options) -> str:
    """Formats the best rate and loss of each size, and the loss at the best rate of the base model."""
    losses = losses_by_rate(results)
    rows = [("family", "parametrization", "width", "depth", "best rate", "loss", "loss at the base's best rate")]
    for (family, transferred, width, depth), rates in sorted(losses.items()):
        best = min(rates, key=rates.__getitem__)
        base = losses.get((family, transferred, options.widths[0], options.depths[0]), rates)
        at_base = rates.get(min(base, key=base.__getitem__))
        kind = "transferred" if transferred else "standard"
        other = "diverged" if at_base is None else f"{at_base:.3f} ({at_base - rates[best]:+.3f})"
        rows.append((family, kind, str(width), str(depth), f"{best:.2g}", f"{rates[best]:.3f}", other))
    return text_table(rows)


def draw(path: str, results: dict[Trial, Optional[float]], options) -> None:
    """Draws the loss by learning rate: a row of panels per family; standard and transferred, over widths and depths."""
    losses, families = losses_by_rate(results), options.families
    columns = [(over, transferred) for over in ("width", "depth") for transferred in (False, True)]
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(14, 3.6 * len(families)), dpi=130)
        panels = picture.subplots(len(families), len(columns), sharey="row", squeeze=False)
        for row, family in zip(panels, families, strict=True):
            for panel, (over, transferred) in zip(row, columns, strict=True):
                panel.set_title(f"{family}, {'transferred' if transferred else 'standard'}, by {over}")
                base = options.widths[0], options.depths[0]
                sizes = options.widths if over == "width" else options.depths
                for color, size in zip(PART_COLORS, sizes, strict=False):
                    shape = (size, base[1]) if over == "width" else (base[0], size)
                    rates = losses.get((family, transferred, *shape), {})
                    if rates:
                        panel.plot(list(rates), list(rates.values()), "o-", color=color, markersize=3, label=str(size))
                panel.set_xscale("log", base=2)
                panel.set_xlabel("peak learning rate", color=FAINT)
                if any(losses.get((family, transferred, *base), {})):
                    panel.legend(frameon=False, fontsize=8)
            row[0].set_ylabel("validation loss, nats per target")
        picture.tight_layout()
        picture.savefig(path, facecolor="white")


def parse(words: Optional[Sequence[str]] = None):
    """Parses the flags."""

    def numbers(text: str) -> list[int]:
        return sorted(map(int, text.split(",")))

    made = benchmark_runs.parser(__doc__, "books")
    made.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    made.add_argument("--widths", type=numbers, default=[64, 128, 256, 512])
    made.add_argument("--depths", type=numbers, default=[2, 4, 8, 16])
    made.add_argument("--steps", type=int, default=500)
    made.add_argument("--factor", type=float, default=2.0, help="between neighboring learning rates")
    made.add_argument("--powers", type=numbers, default=list(range(-4, 4)), help="of --factor, times the middle rate")
    made.add_argument("--standard_powers", type=numbers, default=list(range(-4, 4)), help="--powers of standard sizes")
    made.add_argument("--output_scale", type=float, help="of Transfer; without it, the tuned value of the family")
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--out", help="folder for transfer.json and transfer.png")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    return made.parse_args(words)


def main() -> None:
    options = parse()
    make = functools.partial(experiment_of, options=options)
    results = sweep.train_all(trials(options), make, options.workdir)
    print(table(results, options))
    if options.out:
        with open(os.path.join(options.out, "transfer.json"), "w") as f:
            json.dump([{**trial._asdict(), "loss": loss} for trial, loss in results.items()], f, indent=1)
        draw(os.path.join(options.out, "transfer.png"), results, options)


if __name__ == "__main__":
    main()
