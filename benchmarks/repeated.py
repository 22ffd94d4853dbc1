"""Measures how many new tokens repeated text is worth, with two ladders that differ only in their text.

    python benchmarks/repeated.py part --books=FOLDER --every=71
    python benchmarks/repeated.py worth --new=LADDER --repeated=LADDER --out=docs/studies

The first command writes FOLDER/part.jsonl.gz with one of 71 records of the training text. The second one reads the
folders of two finished ladders with the same sizes, amounts and seeds. The repeated tokens of a run are worth the
number of new tokens at which the same trunk of the other ladder has the same loss, interpolated in the logarithm. It
prints this number by epochs, and the law of Muennighoff et al. 2023 that fits all of them: its constant R*, with an
interval over trunks.
"""

import argparse
import glob
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from typing import Optional

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


def worth(new: Sequence[Run], loss: float) -> Optional[float]:
    """Returns the number of new tokens at which a trunk has a loss; None outside of its losses."""
    losses, amounts = [-run.loss for run in new], np.log([run.tokens for run in new])
    found = np.exp(np.interp(-loss, losses, amounts, left=np.nan, right=np.nan))
    return float(found) if np.isfinite(found) else None


def fitted_law(pairs: Sequence[tuple[Run, float]], free_share: bool) -> tuple[float, float]:
    """Returns (share, R*) with the smallest mean squared error of the logarithm of the worths.

    Args:
      pairs: runs and their worths.
      free_share: a token of the first epoch may be worth `share` tokens of new text, because a part of the records is
        less diverse than rows of all records. If False, it is worth 1.
    """
    runs, worths = zip(*pairs, strict=True)
    tokens, epochs = (np.array([getattr(run, name) for run in runs]) for name in ("tokens", "epochs"))

    def difference(log_repetition: float) -> np.ndarray:
        return np.log(worths) - np.log(effective_tokens(tokens, epochs, np.exp(log_repetition)))

    def error(log_repetition: float) -> float:
        return float(np.var(found := difference(log_repetition)) + (0 if free_share else np.mean(found) ** 2))

    best = optimize.minimize_scalar(error, bounds=(np.log(1e-2), np.log(MOST)), method="bounded").x
    return float(np.exp(np.mean(difference(best)))) if free_share else 1.0, float(np.exp(best))


def fit(pairs: Mapping[str, list[tuple[Run, float]]], free_share: bool) -> dict:
    """Fits the law to the pairs of all trunks; returns its share, and R* with a 95 % bootstrap interval over trunks."""
    rng, trunks = np.random.default_rng(0), list(pairs.values())

    def drawn() -> list[tuple[Run, float]]:
        return [pair for i in rng.integers(len(trunks), size=len(trunks)) for pair in trunks[i]]

    low, high = np.quantile([fitted_law(drawn(), free_share)[1] for _ in range(RESAMPLES)], (0.025, 0.975))
    share, repetition = fitted_law([pair for trunk in trunks for pair in trunk], free_share)
    return {"share": share, "repetition": repetition, "low": float(low), "high": float(high)}


def compare(new: str, repeated: str) -> dict:
    """Returns the worth of each repeated run, and the fits with a share of 1 and with a free share."""
    theirs, pairs, rows = runs_by_trunk(new), {}, []
    for trunk, runs in runs_by_trunk(repeated).items():
        for run, same in zip(runs, theirs[trunk], strict=True):
            tokens = worth(theirs[trunk], run.loss)
            rows.append({**run._asdict(), "loss_of_new_text": same.loss, "worth": tokens})
            if tokens is not None:
                pairs.setdefault(trunk, []).append((run, tokens))
    return {"fits": [fit(pairs, free_share) for free_share in (False, True)], "runs": rows}


def table(result: Mapping) -> str:
    """Formats the difference of the losses and the worth by epochs, as means over trunks with their standard errors."""

    def mean(values: Sequence[float], digits: int) -> str:
        return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"

    rows = [("epochs", "tokens", "loss - loss of new text", "worth, M new tokens", "law", "law with a share")]
    for epochs in sorted({round(run["epochs"]) for run in result["runs"]}):
        runs = [run for run in result["runs"] if round(run["epochs"]) == epochs]
        difference = mean([run["loss"] - run["loss_of_new_text"] for run in runs], 3)
        worths = [run["worth"] / 1e6 for run in runs if run["worth"] is not None]
        found = mean(worths, 2) if len(worths) == len(runs) else "not known"  # less than the least new text
        tokens, passes = runs[0]["tokens"] / 1e6, runs[0]["epochs"]
        laws = [f"{law['share'] * effective_tokens(tokens, passes, law['repetition']):.2f}" for law in result["fits"]]
        rows.append((str(epochs), f"{tokens:.0f} M", difference, found, *laws))
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
    for law in result["fits"]:
        interval = f"{law['low']:.1f} to {law['high']:.1f}"
        print(f"share {law['share']:.2f}: R* = {law['repetition']:.1f} (95 %: {interval})")
    if options.out:
        with open(os.path.join(options.out, "repeated.json"), "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
