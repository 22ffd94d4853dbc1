"""What a model has learned: loss, perplexity, bits and accuracy over a validation split."""

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Optional

import jax

from pretrainax import cli


def evaluate(eval_step: Callable, params: Any, batches: Iterable[dict], bytes_per_token: Optional[float]) -> dict:
    """Sums over all batches, divided once (see `summarize`). The batches are on the device already."""
    totals = None
    for batch in batches:
        sums = eval_step(params, batch)
        totals = sums if totals is None else jax.tree.map(lambda a, b: a + b, totals, sums)
    return summarize(jax.device_get(totals), bytes_per_token)


def summarize(sums: dict[str, tuple], bytes_per_token: Optional[float] = None) -> dict:
    """{name: (sum, count)} as the figures of one line of metrics.jsonl.

    Bits per byte compare models across tokenizers. They need `bytes_per_token`, the mean length in UTF-8 of a target
    token, and a loss that is a likelihood of the text: a causal one. None for the others.
    """
    loss = float(sums["loss"][0]) / max(float(sums["loss"][1]), 1e-9)
    figures = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_token": loss / math.log(2),
        "accuracy": float(sums["accuracy"][0]) / max(float(sums["accuracy"][1]), 1e-9),
        "loss_tokens": float(sums["loss"][1]),
    }
    if bytes_per_token:
        figures["bits_per_byte"] = figures["bits_per_token"] / bytes_per_token
    return figures


def main() -> int:
    """`python -m pretrainax.evaluate --workdir=DIR`: the validation split under the newest checkpoint of a run."""
    from pretrainax import config, host, sharding
    from pretrainax.checkpoint import load_params
    from pretrainax.job import assemble
    from pretrainax.prepare import prepare
    from pretrainax.sample import samples

    workdir = cli.WORKDIR.value
    if not workdir or not os.path.exists(os.path.join(workdir, "config.json")):
        raise config.UserError(f"--workdir={workdir} holds no config.json: give the run directory of pretrainax.main")
    experiment = config.load(os.path.join(workdir, "config.json"))
    host.start_jax(experiment)
    prepared = prepare(experiment)
    mesh = sharding.make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        job = assemble(experiment, prepared, mesh)
        params = load_params(workdir, job.abstract_state.params)
        for name, value in job.validate(params).items():
            print(f"{name:16} {value:,.4f}")
        for text in samples(job.model, params, job.valid_batches[0], prepared.tokenizer):
            print(f"  · {text}")
    return 0


if __name__ == "__main__":
    cli.run(main)
