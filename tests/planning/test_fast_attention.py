"""Which configs run a part of their attention without a fused kernel on an H100, according to their specs alone."""

import runpy

import pytest

from pretrainax.config.config_file import config_names, find_config
from pretrainax.config.validation import complete
from pretrainax.layers.attention import choose_backend
from pretrainax.planning.activations import attention_specs
from pretrainax.sharding.axes import AXES

# Configs whose header says SLOW ATTENTION. Shorten this list with each kernel; the goal is at most two.
SLOW = {
    *(
        "bart_base",
        "bert_base",
        "deberta_v3_base",
        "electra_base",
        "electra_small",
        "finetune",
        "roberta_base",
    ),  # dropout
    *("bigbird", "longformer"),  # blocks
    *("gemma", "grok", "t5gemma"),  # caps of logits, and windows to both sides
    *("gpt_oss", "modernbert_base"),  # sinks; windows to both sides
}


def warnings_of(name: str) -> set[str]:
    """The reasons that the header of a config's default variant gives."""
    experiment = runpy.run_path(find_config(name)[0])["get_config"]()
    complete(experiment)
    specs = attention_specs(experiment, dict.fromkeys(AXES, 1), "gpu")
    chosen = (choose_backend(experiment.train.attention, "gpu", spec) for spec in specs)
    return {warning for _, warning in chosen if warning}


@pytest.mark.slow
def test_few_configs_are_without_a_fused_kernel_on_an_h100():
    found = {name: reasons for name in config_names() if (reasons := warnings_of(name))}
    assert found.keys() == SLOW, found
