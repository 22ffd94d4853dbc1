"""Tests the matmuls of a tuning update against counts by hand; tests/planning/test_products.py compares with XLA."""

import pytest

from pretrainax.adapt import IA3, BitFit, LoRA, PrefixTuning, PromptTuning
from pretrainax.models.flops import FULL, UpdateCost, flops_per_step, other_flops, update_cost
from tests.support import tiny

ROWS, INPUTS, TARGETS = 8, 32, 12


def experiment_of(variant, tuning):
    experiment = tiny.get_config(variant)
    experiment.tuning = tuning
    return experiment


def flops_of(variant, tuning, targets=TARGETS):
    experiment = experiment_of(variant, tuning)
    return flops_per_step(experiment.model, ROWS, INPUTS, targets, cost=update_cost(experiment))


def test_an_update_without_tuning_is_full():
    assert update_cost(tiny.get_config("gpt")) == FULL


@pytest.mark.parametrize("tuning", [IA3(), BitFit()])
def test_vectors_cost_no_gradient_of_a_matrix(tuning):
    """Each matrix has two matmuls; attention has all, because its products have no parameters."""
    config = tiny.get_config("gpt").model
    blocks, head = other_flops(config, INPUTS, INPUTS)
    pairs = 6 * 2 * INPUTS**2 * config.num_layers * config.num_heads * config.dim_per_head
    assert flops_of("gpt", tuning, INPUTS) == ROWS * (2 * (blocks + head) + pairs)


def test_lora_adds_three_matmuls_for_each_of_its_matrices():
    config = tiny.get_config("gpt").model
    width = config.num_heads * config.dim_per_head
    added = config.num_layers * 3 * 2 * 4 * (config.d_model + width)  # per token, with rank 4
    extra = flops_of("gpt", LoRA(rank=4, targets=("query",)), INPUTS) - flops_of("gpt", BitFit(), INPUTS)
    assert extra == ROWS * INPUTS * added


def test_fully_trained_matrices_have_a_gradient():
    config = tiny.get_config("gpt").model
    lora = LoRA(rank=4, targets=("query",))
    trained = LoRA(rank=4, targets=("query",), fully_trained=("mlp/up",))
    extra = flops_of("gpt", trained, INPUTS) - flops_of("gpt", lora, INPUTS)
    assert extra == ROWS * INPUTS * config.num_layers * 2 * config.d_model * config.d_ff


def test_virtual_tokens_are_part_of_the_row_but_not_of_the_predictions():
    experiment = experiment_of("gpt", PromptTuning(length=6))
    longer, _ = other_flops(experiment.model, INPUTS + 6, INPUTS)
    _, head = other_flops(experiment.model, INPUTS, INPUTS)
    width = experiment.model.num_layers * experiment.model.num_heads * experiment.model.dim_per_head
    assert flops_of("gpt", PromptTuning(length=6), INPUTS) == ROWS * (
        2 * (longer + head) + 6 * 2 * (INPUTS + 6) ** 2 * width
    )


def test_a_prompt_is_in_the_encoder_alone_and_prefixes_are_in_both_stacks():
    assert update_cost(experiment_of("t5", PromptTuning(length=6))).virtual == (6, 0)
    assert update_cost(experiment_of("t5", PrefixTuning(length=6))).virtual == (6, 6)


def test_an_encoder_without_trained_parameters_has_no_backward_pass():
    cost = update_cost(experiment_of("t5", LoRA(rank=4, targets=("decoder/.*/query",))))
    assert (cost.blocks, cost.encoder, cost.per_input) == (2, 1, 0) and cost.per_target > 0
    assert update_cost(experiment_of("t5", LoRA(rank=4, targets=("encoder/.*/query",)))).encoder == 2


def test_keys_of_cross_attention_read_the_tokens_of_the_encoder():
    cost = update_cost(experiment_of("t5", LoRA(rank=4, targets=("cross_attention/key",))))
    assert cost.per_target == 0 and cost.per_input > 0


def test_frozen_layers_cost_as_much_as_trained_ones():
    experiment = tiny.get_config("gpt")
    experiment.layers.frozen = 1
    assert update_cost(experiment) == UpdateCost()
