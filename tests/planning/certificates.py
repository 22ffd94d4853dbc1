"""Writes tests/planning/certificates.json, the certificates of all configs on five chips at a reduced depth.

    python -m tests.planning.certificates                                 all configs on all chips
    python -m tests.planning.certificates --chips=h100 --configs=gpt2     replaces only these certificates

Each config has two layers per stack, or one period of its layer pattern, and TOKENS tokens on one device, so that a
step for an H100 compiles in 20 s of an idle core. Widths, lengths, vocabulary, kernels, optimizer and rematerialization
are those of the config. The depth changes the shares and ratios; compare only certificates of the same depth.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
import time

import jax

from pretrainax.config import Experiment, MeshConfig, UserError, resolve_auto
from pretrainax.config.config_file import config_names, read_config_file
from pretrainax.planning.certificate import Entry, certify
from pretrainax.planning.compiled import compile_step
from pretrainax.planning.search import resolve_remat
from pretrainax.planning.topologies import Topology

FILE = pathlib.Path(__file__).with_suffix(".json")
CHIPS = {"h100": "h100:1", "b200": "b200:1", "v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1"}
TOKENS = 2**16  # a multiple of 128 rows of 512 tokens, so that the number of predicted tokens is aligned
LEAST_ROWS = 8
LOSS = 0.03  # a certificate may be worse than the committed one by this fraction
# Entries that a reduced depth makes meaningless: counts of a run, and times that follow from the size of the model.
_EXCLUDED = {"compiled_programs", "loader_over_chip", "checkpoint"}


def reduced(name: str) -> Experiment:
    """Returns a config with two layers per stack, or one period of its layers, and TOKENS tokens on one device."""
    experiment = dataclasses.replace(read_config_file(name), phases=())
    resolve_auto(experiment, experiment.tokenizer.size if experiment.tokenizer.path is None else None)
    model, period = experiment.model, len(experiment.model.layer_pattern)
    if model.experts is not None:
        period = math.lcm(period, model.experts.every or 1)
        model.experts.first_dense = model.experts.first_dense and 1
    model.num_layers = max(2, period)
    model.num_decoder_layers = model.num_decoder_layers and model.num_layers
    if model.generator is not None:
        model.generator.num_layers = model.num_layers
    experiment.layers.frozen = 0
    experiment.train.global_batch_size = max(TOKENS // experiment.data.sequence_length, LEAST_ROWS)
    experiment.train.accumulate, experiment.mesh = 1, MeshConfig()
    return experiment


def certificate(name: str, chip: str) -> list[Entry]:
    """Compiles the reduced config for a chip and returns its certificate; raises UserError if the step does not fit."""
    experiment, topology = reduced(name), Topology.parse(CHIPS[chip])
    resolve_remat(experiment, topology)
    return certify(experiment, topology, compile_step(experiment, topology))


def compared(entries: list[Entry]) -> dict[str, float]:
    """Returns the values of a certificate that `certificates.json` stores, with four digits."""
    found = {entry.name: entry.value for entry in entries if entry.name not in _EXCLUDED and entry.value is not None}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def losses(entries: list[Entry], committed: dict[str, float]) -> list[str]:
    """Lists the entries that are worse than the committed ones by more than LOSS."""
    found, larger = compared(entries), {entry.name: entry.larger_is_better for entry in entries}
    messages = [f"{name} is missing; it was {value}" for name, value in committed.items() if name not in found]
    for name, value in found.items():
        before = committed.get(name, value)
        worse = value < before * (1 - LOSS) if larger[name] else value > before * (1 + LOSS)
        messages += [f"{name} is {value}; it was {before}"] if worse else []
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=lambda text: text.split(","), default=list(CHIPS))
    parser.add_argument("--configs", type=lambda text: text.split(","), default=sorted(config_names()))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # only compiles; does not occupy a local accelerator
    failed = False
    for chip, name in itertools.product(options.chips, options.configs):
        start = time.perf_counter()
        try:
            found: object = compared(certificate(name, chip))
        except UserError as e:
            found = str(e)
        except Exception as e:  # the compilers raise exceptions of many types; the other configs go on
            print(f"{chip} {name}: {type(e).__name__}: {e}"[:300], file=sys.stderr, flush=True)
            failed = True
            continue
        jax.clear_caches()
        committed = json.loads(FILE.read_text()) if FILE.exists() else {}
        committed.setdefault(chip, {})[name] = found
        FILE.write_text(json.dumps(committed, indent=1, sort_keys=True) + "\n")
        print(f"{chip} {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
