"""Tests that the command of each large config is valid, and that its memory fits on H100 GPUs and TPU v5p."""

import re

import pytest

from pretrainax.config.config_file import read_config_file
from pretrainax.config.overrides import set_field
from pretrainax.config.phases import phases_of
from pretrainax.config.validation import complete, validate
from pretrainax.planning import memory
from pretrainax.planning.search import resolve_remat
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import mesh_sizes
from tests.support.docs_pages import config_commands
from tests.test_configs import VARIANTS

TORUS = {8: "2x2x2", 64: "4x4x4", 256: "4x8x8", 512: "8x8x8"}


def experiment_of(words):
    """Builds the config of a command from its --config flags, as the command does."""
    (config,) = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    experiment = read_config_file(config)
    for word in words:
        if match := re.fullmatch(r"--(config\.[^=]+)=(.*)", word, re.DOTALL):
            set_field(experiment, *match.groups())
    complete(experiment)
    validate(experiment, files=False)
    return experiment


def large():
    return [name for name in VARIANTS for words in config_commands(name) if any("--config.mesh." in w for w in words)]


def test_most_large_models_name_a_mesh():
    assert len(large()) >= 15


@pytest.mark.first(1)
@pytest.mark.parametrize("chip", ["h100", "v5p"])
@pytest.mark.parametrize("name", sorted(large(), key=["olmoe"].count, reverse=True))
def test_the_documented_mesh_fits(name, chip):
    (words,) = [words for words in config_commands(name) if any("--config.mesh." in word for word in words)]
    experiment = experiment_of(words)
    mesh = experiment.mesh
    devices = max(mesh.data, 1) * mesh.fsdp * mesh.expert  # Without a flag, `data` is -1: all other devices.
    topology = Topology.parse(f"h100:{devices // 8}x8" if chip == "h100" else f"v5p:{TORUS[devices]}")
    resolve_remat(experiment, topology)
    sizes = mesh_sizes(mesh, topology.num_devices, processes=topology.hosts)
    for phase in phases_of(experiment):
        needed = memory.estimate(phase.experiment, sizes, topology.chip)
        assert needed.fits(topology.chip), (
            f"{name}: {needed.total / 1e9:.1f} GB of {topology.chip.memory_bytes / 1e9:.1f}"
        )
