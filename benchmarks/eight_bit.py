"""Tests whether 8-bit products train as well as bfloat16 products: tiny GPT-2, BERT and T5, several paired seeds.

    python benchmarks/eight_bit.py --products=fp8,int8

The models train on the Python documentation (`configs/gpt2.py:tiny` and others). A run with 8-bit products and a run in
bfloat16 with the same seed have equal initial parameters, batches and validation rows. For each model, the script
prints the mean difference of the last validation losses with its 90 % t interval. The losses are equivalent if this
interval lies within ± 0.01 nats, which is the two one-sided tests procedure at a level of 5 % (Schuirmann 1987). The
validation of a run also uses its products. The table is printed again after each seed. On a CPU, 8-bit values are
emulated.
"""

import argparse
import copy
import dataclasses
import importlib

import numpy as np

from pretrainax.config import Experiment
from pretrainax.reporting.paired import mean_interval
from pretrainax.reporting.tables import text_table
from pretrainax.runs.train import open_run
from pretrainax.runtime import host
from pretrainax.sharding.arrays import put_batch

MARGIN = 0.01  # nats
MODELS = {"GPT-2": "gpt2", "BERT": "bert_base", "T5": "t5_base"}  # name -> config
BASELINE = ""  # products of the runs to compare with, in bfloat16

# {(model, products): (train step, evaluation step)}; runs that differ only in seeds share the compiled programs
Programs = dict[tuple[str, str], tuple]


def experiment_of(model: str, options: argparse.Namespace) -> Experiment:
    """Returns the config of a short run on the Python documentation, without products and seed."""
    experiment = importlib.import_module(f"configs.{MODELS[model]}").get_config("tiny")
    experiment.train.dtype, experiment.train.steps = "bfloat16", options.steps
    experiment.train.global_batch_size, experiment.data.sequence_length = options.rows, options.length
    experiment.tokenizer.vocab_size = 2048
    experiment.schedule.warmup_steps = options.steps // 5
    experiment.evaluate.batches = 40
    return experiment


def final_loss(experiment: Experiment, key: tuple[str, str], programs: Programs) -> float:
    """Trains a model and returns its validation loss after the last step, in nats per target."""
    with open_run(experiment) as run:
        step, evaluate = programs.setdefault(key, (run.step.jitted, run.validation.eval_step))
        state = run.fresh_state()
        for i in range(experiment.train.steps):
            state, metrics = step(state, put_batch(run.train_batches[i], run.mesh), None, run.step.arguments)
        if not metrics["finite"]:
            return float("nan")
        return dataclasses.replace(run.validation, eval_step=evaluate).metrics(state.params)["loss"]


def row(model: str, products: str, baseline: list[float], losses: list[float]) -> list[str]:
    """Compares the losses of paired seeds and returns the cells of a row of the table."""
    differences = [loss - other for loss, other in zip(losses, baseline, strict=True)]
    mean, half = mean_interval(differences, alpha=0.1)
    interval = "unknown" if half is None else f"{mean - half:+.4f} to {mean + half:+.4f}"
    verdict = "equivalent" if half is not None and abs(mean) + half < MARGIN else "not shown to be equivalent"
    means = f"{np.mean(baseline):.4f}", f"{np.mean(losses):.4f}"
    return [model, products, f"{len(losses)}", *means, f"{mean:+.4f}", interval, verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", default="fp8,int8", help="values of config.train.products to test")
    parser.add_argument("--models", default=",".join(MODELS), help="names of models")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=16, help="rows per step")
    parser.add_argument("--length", type=int, default=64, help="tokens per row")
    options = parser.parse_args()
    formats = [BASELINE, *options.products.split(",")]
    losses: dict[tuple[str, str], list[float]] = {}
    programs: Programs = {}
    for seed in range(options.seeds):
        for model in options.models.split(","):
            for products in formats:
                experiment = copy.deepcopy(experiment_of(model, options))
                experiment.train.seed, experiment.train.products = seed, products
                host.start_jax(experiment)
                loss = final_loss(experiment, (model, products), programs)
                losses.setdefault((model, products), []).append(loss)
                print(f"seed {seed}, {model}, products {products or 'bfloat16'}: {loss:.4f}", flush=True)
        head = ("model", "products", "seeds", "bfloat16", "8 bits", "difference", "90 % interval", f"± {MARGIN} nats")
        rows = [
            row(model, products, losses[model, BASELINE], values)
            for (model, products), values in losses.items()
            if products != BASELINE
        ]
        print(text_table([head, *rows]), flush=True)


if __name__ == "__main__":
    main()
