"""Measures how many new tokens repeated text is worth, with two ladders that differ only in their text.

    python benchmarks/repeated.py part --books=FOLDER --every=71
    python benchmarks/repeated.py worth --new=LADDER --repeated=LADDER --out=docs/studies

The first command writes FOLDER/part.jsonl.gz with one of 71 records of the training text. The second one reads the
folders of two finished ladders with the same sizes, amounts and seeds. The repeated tokens of a run are worth the
number of new tokens at which the same trunk of the other ladder has the same loss, interpolated in the logarithm. It
prints this number by epochs, and R*, the constant of Muennighoff et al. 2023 that fits all of them, with an interval
over trunks.
"""

import argparse
import glob
import gzip
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from pretrainax.reporting.tables import text_table
from pretrainax.scaling.power_laws import Run, effective_tokens

RESAMPLES = 2000  # of the trunks, for the interval of R*
MOST = 1e3  # largest R*, which counts repeated text as new


def write_part(books: str, every: int) -> None:
    """Writes one of `every` records of train*.jsonl.gz to part.jsonl.gz."""
    paths = sorted(glob.glob(os.path.join(books, "train*.jsonl.gz")))
    lines = [line for path in paths for line in gzip.open(path, "rt", encoding="utf-8")]
    with gzip.open(os.path.join(books, "part.jsonl.gz"), "wt", encoding="utf-8") as f:
        f.writelines(lines[::every])


def runs_by_trunk(ladder: str) -> dict[str, list[Run]]:
    """Reads a ladder's law.json; returns {trunk: its runs, the shortest first}."""
    with open(os.path.join(ladder, "law.json")) as f:
        law = json.load(f)
    found: dict[str, list[Run]] = {}
    for run in sorted((Run(**x) for x in [*law["runs"], *law.get("too_small", [])]), key=lambda run: run.tokens):
        found.setdefault(run.trunk, []).append(run)
    return found


def worth(new: Sequence[Run], loss: float) -> float:
    """Returns the number of new tokens at which a trunk has a loss; NaN outside of its losses."""
    losses, amounts = [-run.loss for run in new], np.log([run.tokens for run in new])
    return float(np.exp(np.interp(-loss, losses, amounts, left=np.nan, right=np.nan)))


def fitted_repetition(repeated: Sequence[Run], worths: Sequence[float]) -> float:
    """Returns the R* with the smallest mean squared error of the logarithm of the worths."""
    tokens, epochs = (np.array([getattr(run, name) for run in repeated]) for name in ("tokens", "epochs"))

    def error(log_repetition: float) -> float:
        return float(np.mean((np.log(effective_tokens(tokens, epochs, np.exp(log_repetition))) - np.log(worths)) ** 2))

    return float(np.exp(optimize.minimize_scalar(error, bounds=(np.log(1e-2), np.log(MOST)), method="bounded").x))


def interval(pairs: Mapping[str, list[tuple[Run, float]]]) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of R* over trunks."""
    rng, trunks = np.random.default_rng(0), list(pairs)
    drawn = [
        [pair for i in rng.integers(len(trunks), size=len(trunks)) for pair in pairs[trunks[i]]]
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile([fitted_repetition(*zip(*sample, strict=True)) for sample in drawn], (0.025, 0.975))
    return float(low), float(high)


def compare(new: str, repeated: str) -> dict:
    """Returns the worth of each repeated run, and R* with its interval."""
    theirs, pairs, rows = runs_by_trunk(new), {}, []
    for trunk, runs in runs_by_trunk(repeated).items():
        for run, same in zip(runs, theirs[trunk], strict=True):
            tokens = worth(theirs[trunk], run.loss)
            rows.append({**run._asdict(), "loss_of_new_text": same.loss, "worth": tokens})
            if np.isfinite(tokens):
                pairs.setdefault(trunk, []).append((run, tokens))
    every = [pair for trunk in pairs.values() for pair in trunk]
    low, high = interval(pairs)
    return {"repetition": fitted_repetition(*zip(*every, strict=True)), "low": low, "high": high, "runs": rows}


def table(result: Mapping) -> str:
    """Formats the difference of the losses and the worth by epochs, as means over trunks with their standard errors."""

    def mean(values: Sequence[float], digits: int) -> str:
        return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"

    law = f"worth with R* = {result['repetition']:.1f}"
    rows = [("epochs", "tokens", "loss - loss of new text", "worth, M new tokens", law)]
    for epochs in sorted({round(run["epochs"]) for run in result["runs"]}):
        runs = [run for run in result["runs"] if round(run["epochs"]) == epochs]
        difference = mean([run["loss"] - run["loss_of_new_text"] for run in runs], 3)
        worths = [run["worth"] / 1e6 for run in runs]
        by_law = np.mean([effective_tokens(run["tokens"], run["epochs"], result["repetition"]) for run in runs]) / 1e6
        found = mean(worths, 2) if np.isfinite(worths).all() else "not known"  # less than the least new text
        rows.append((str(epochs), f"{runs[0]['tokens'] / 1e6:.0f} M", difference, found, f"{by_law:.2f}"))
    return text_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("part")
    part.add_argument("--books", required=True, help="folder with train*.jsonl.gz")
    part.add_argument("--every", type=int, required=True)
    worths = commands.add_parser("worth")
    worths.add_argument("--new", required=True, help="folder of a ladder with less than one epoch")
    worths.add_argument("--repeated", required=True, help="folder of the same ladder with repeated text")
    worths.add_argument("--out", help="folder for repeated.json")
    options = parser.parse_args()
    if options.command == "part":
        return write_part(options.books, options.every)
    result = compare(options.new, options.repeated)
    print(table(result))
    print(f"R* = {result['repetition']:.1f} (95 %: {result['low']:.1f} to {result['high']:.1f})")
    if options.out:
        with open(os.path.join(options.out, "repeated.json"), "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
