"""Tests which configs run a part of their attention without a fused kernel on a GPU or TPU, from their specs."""

import runpy

import pytest

from pretrainax.config.config_file import config_names, find_config
from pretrainax.config.validation import complete
from pretrainax.layers.attention import choose_backend
from pretrainax.planning.activations import attention_specs
from pretrainax.sharding.axes import AXES

# Configs whose header says SLOW ATTENTION: they have block-sparse attention, which is linear in the length.
SLOW = {"bigbird", "longformer"}


def warnings_of(name: str, platform: str) -> set[str]:
    """Returns the reasons in the header of a config's default variant."""
    experiment = runpy.run_path(find_config(name)[0])["get_config"]()
    complete(experiment)
    specs = attention_specs(experiment, dict.fromkeys(AXES, 1), platform)
    chosen = (choose_backend(experiment.train.attention, platform, spec) for spec in specs)
    return {warning for _, warning in chosen if warning}


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_few_configs_are_without_a_fused_kernel(platform):
    found = {name: reasons for name in config_names() if (reasons := warnings_of(name, platform))}
    assert found.keys() == SLOW, found
