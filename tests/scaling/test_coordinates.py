"""Tests that the three families pass the coordinate checks, and that each kind of wrong multiplier fails."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.optim import Adafactor, Lamb, Muon, transfer
from pretrainax.scaling import coordinates, coordinates_report
from tests.support import tiny
from tests.support.tiers import few

WIDTHS = (32, 128)


def config_of(variant, **model):
    experiment = tiny.get_config(variant)
    experiment.data.source.path = "."  # The check does not read the data.
    for name, value in model.items():
        setattr(experiment.model, name, value)
    return experiment


def check(experiment, widths=WIDTHS):
    sizes = coordinates.measure(experiment, widths, seeds=1, most_seeds=1)
    return sizes, {x.module for x in sizes if x.verdict != "flat"}


@pytest.mark.parametrize("variant", few(["gpt", "bert", "t5"], ["gpt"]))
def test_the_families_have_equal_activations_and_updates_in_all_widths(variant):
    # If an encoder of width 32 feeds a decoder, its activations differ by up to 28 % from an encoder of width 128.
    widths = (64, 256) if variant == "t5" else WIDTHS
    sizes, broken = check(config_of(variant), widths)
    assert not broken, coordinates_report.table(widths, sizes)
    assert any(x.module.endswith("mlp/down") for x in sizes)


def mutated(monkeypatch, changes, **factors):
    """Multiplies fields of some parameters' multipliers by powers of the width: {field: exponent}."""
    original = transfer._multipliers

    def wrong(p):
        found = original(p)
        if not changes(p):
            return found
        return dataclasses.replace(found, **{k: getattr(found, k) * p.width**power for k, power in factors.items()})

    monkeypatch.setattr(transfer, "_multipliers", wrong)


KINDS = {
    "hidden update": (lambda p: p.is_kernel, {"update": 1}),
    "hidden init": (lambda p: p.is_kernel, {"init": 0.5}),
    "input update": (lambda p: p.path == "token_embedding/embedding", {"update": -1}),
    "vector update": (lambda p: "blocks" in p.path and p.path.endswith("scale"), {"update": 1}),
    "tied logits": (lambda p: "final_norm" in p.path, {"update": 1, "init": 1, "spread": 1, "folded": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_multiplier_of_each_kind_fails(kind, monkeypatch):
    changes, factors = KINDS[kind]
    mutated(monkeypatch, changes, **factors)
    assert check(config_of("gpt"))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [Adafactor(learning_rate=1e-2), Lamb(learning_rate=1e-2), Muon(learning_rate=1e-2, update_rms=0.2)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_other_optimizers_pass(optimizer):
    experiment = config_of("gpt")
    experiment.optimizer = optimizer
    sizes, broken = check(experiment)
    assert not broken, coordinates_report.table(WIDTHS, sizes)


@pytest.mark.parametrize("name", ["gpt2:tiny", "bert_base:tiny", "llama:tiny", "t5_base:tiny"])
def test_automatic_sizes_become_numbers(name):
    run, _ = coordinates._prepared(read_config_file(name), 128, 64)
    assert isinstance(run.model.vocab_size, int) and isinstance(run.model.position.max_length, int | None)


def test_a_width_without_whole_heads_is_refused():
    with pytest.raises(UserError, match="3/8 of config.model.num_heads 4 is not a whole number"):
        coordinates.measure(config_of("gpt"), (12, 32))


def planted(widths, slope, noise, seeds, rng):
    """Returns sizes that are proportional to width ** slope, with lognormal noise."""
    logs = slope * np.log(np.array(widths))[:, None] + noise * rng.standard_normal((len(widths), seeds))
    return coordinates.Sizes("block", "change", False, widths, tuple(map(tuple, np.exp(logs))))


@pytest.mark.parametrize("seeds", [2, 4])
def test_noise_alone_is_hardly_ever_called_a_dependence_on_the_width(seeds):
    rng = np.random.default_rng(0)
    verdicts = [planted((64, 128, 256, 512), 0.0, 0.3, seeds, rng).verdict for _ in range(400)]
    # The level is 5 % for a single width without the allowed difference of 15 %. The limit is 0.05 + 3 standard
    # deviations = 0.083.
    assert verdicts.count("NOT FLAT") / 400 <= 0.083
    assert verdicts.count("not known") / 400 > 0.3


def test_large_noise_is_hardly_ever_called_a_dependence_with_as_many_seeds_as_a_verdict_takes():
    """The sizes of seeds differ by a factor of e. If the error were that of the logs, 26 % would be called NOT FLAT."""
    rng, verdicts = np.random.default_rng(0), []
    for _ in range(300):
        sizes = planted((64, 128, 256, 512), 0.0, 1.0, coordinates.MOST_SEEDS, rng).by_seed
        of_seeds = (
            coordinates.Sizes("block", "change", False, (64, 128, 256, 512), tuple(x[:seeds] for x in sizes)).verdict
            for seeds in range(coordinates.SEEDS, coordinates.MOST_SEEDS + 1)
        )
        verdicts.append(next((verdict for verdict in of_seeds if verdict != "not known"), "not known"))
    assert verdicts.count("NOT FLAT") / 300 <= 0.05 + 3 * 0.0126  # standard errors


def test_a_dependence_is_found_as_soon_as_it_exceeds_the_noise():
    rng = np.random.default_rng(0)
    assert planted((64, 128, 256), 0.5, 0.02, 2, rng).verdict == "NOT FLAT"
    assert planted((64, 128, 256), 0.5, 0.5, 2, rng).verdict == "not known"
    assert planted((64, 128, 256), 0.0, 0.02, 2, rng).verdict == "flat"
    # A single seed has no error estimate.
    assert planted((64, 128, 256), 0.5, 0.0, 1, rng).error == 0.0
    diverged = coordinates.Sizes("block", "change", False, (64, 128), ((1.0, 1.0), (1.0, np.inf)))
    assert diverged.verdict == "NOT FLAT" and diverged.error == 0.0


def test_more_seeds_train_only_while_a_verdict_is_not_known(monkeypatch):
    """Tests a wide model whose first seed is twice as large; the mean of four seeds, 1.25, is within the limit."""
    trained, factors = [], {64: [1.0] * 6, 128: [2.0, 1.0, 1.0, 1.0, 1.0, 1.0]}

    class Run:
        def __init__(self, width):
            self.width, self.sizes = width, {("block", "change", False): []}

        def train(self, seed):
            trained.append((self.width, seed))
            self.sizes["block", "change", False].append(factors[self.width][seed])

    monkeypatch.setattr(coordinates, "_prepared", lambda _, width, base: (width,))
    monkeypatch.setattr(coordinates, "_Run", Run)
    (found,) = coordinates.measure(config_of("gpt"), (64, 128))
    assert found.verdict == "flat" and trained == [(width, seed) for seed in range(4) for width in (64, 128)]
    factors[128] = [1.0] * 6
    (found,) = coordinates.measure(config_of("gpt"), (64, 128))
    assert found.verdict == "flat" and len(found.by_seed[0]) == coordinates.SEEDS


@pytest.mark.slow
def test_the_command_prints_and_draws_the_sizes(tmp_path):
    command = [sys.executable, "-m", "pretrainax.inspect", "--config=tests/support/tiny.py:gpt", "--widths=32,64"]
    done = subprocess.run([*command, f"--picture={tmp_path}/a.png", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"module", "sizes", "error", "verdict"} <= json.loads(done.stdout)["sizes"][0].keys()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
