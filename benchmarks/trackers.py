"""Measures the time of each tracker per step, compared with a run that writes only metrics.jsonl.

    python benchmarks/trackers.py --workdir=runs/trackers --books=books

The same small run alternates between the trackers. It logs every step, which gives an upper bound of the cost. On a CPU
the same cores train and write, so the thread of a tracker slows the step. On an accelerator it would not. The last row
uses a server that does not respond. Requires the extras `wandb` and `mlflow`.
"""

import argparse
import os
import shutil
import statistics

import runs

from pretrainax.reporting.tables import markdown

TRACKERS = {
    "none": "()",
    "TensorBoard": "(TensorBoard(),)",
    "Weights & Biases, offline": "(WandB(project='cost', mode='offline'),)",
    "MLflow, its own file": "(MLflow(),)",
    "all three": "(TensorBoard(), WandB(project='cost', mode='offline'), MLflow())",
    "MLflow, no server": "(MLflow(tracking_uri='http://127.0.0.1:9'),)",
}


def step_seconds(options: argparse.Namespace, name: str) -> float:
    """Trains from the start with a tracker; returns the median seconds per step of the second half."""
    workdir = os.path.join(options.workdir, name.replace(" ", "_").replace(",", ""))
    shutil.rmtree(workdir, ignore_errors=True)
    fields = {
        "data.source": runs.books(options.books),
        "data.sequence_length": 128,
        "train.steps": options.steps,
        "train.log_every": 1,
        "trackers": TRACKERS[name],
    }
    lines = runs.train(workdir, ["--config=configs/gpt2.py:tiny", *runs.PRETRAINING], fields)
    steps = [line for line in lines if line["split"] == "train" and line["step"] > options.steps // 2]
    return statistics.median(line["step_seconds"] for line in steps)


def main() -> None:
    parser = runs.parser(__doc__, "books")
    parser.add_argument("--steps", type=int, default=100, help="steps per run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in TRACKERS}
    for _ in range(options.rounds):
        for name, seconds in found.items():
            seconds.append(step_seconds(options, name))
    rows = []
    for name, seconds in found.items():
        ratios = [one / none for one, none in zip(seconds, found["none"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append([name, f"{1e3 * statistics.median(seconds):.1f}", spread])
    print(markdown(["tracker", "ms per step", "ratio to no tracker (range)"], rows))


if __name__ == "__main__":
    main()
