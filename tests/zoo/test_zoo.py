import dataclasses
import math

import jax
import numpy as np
import pytest
from golden import make

from pretrainax import models, zoo
from pretrainax.config import UserError
from pretrainax.zoo.convert import Row, from_huggingface


# As transformers counts them (tied matrices once), and as the papers round them.
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("bert_base", 109_514_298),
        ("bert_large", 335_174_458),
        ("t5_v1_0_small", 60_506_624),
        ("t5_v1_0_base", 222_903_552),
        ("t5_v1_0_large", 737_668_096),
        ("t5_v1_0_3b", 2_851_598_336),
        ("t5_v1_0_11b", 11_307_321_344),
        ("t5_small", 76_961_152),
        ("t5_base", 247_577_856),
        ("t5_large", 783_150_080),
        ("gpt2_124m", 124_439_808),
        ("gpt2_355m", 354_823_168),
        ("gpt2_774m", 774_030_080),
        ("gpt2_1558m", 1_557_611_200),
        ("llama1_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_1_405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    shapes = models.abstract_params(zoo.preset(name))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == parameters


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'bert_base'"):
        zoo.preset("bert_bse")


def test_an_unknown_variant_names_the_nearest():
    with pytest.raises(UserError, match="t5 has no variant 'bas', did you mean 'base'"):
        zoo.t5.t5("bas")


def test_a_preset_is_a_fresh_object():
    zoo.preset("llama3_1_8b").position.max_length = 1
    assert zoo.preset("llama3_1_8b").position.max_length == 131_072


def arrays(name):
    family = make.FAMILIES[name]
    golden = make.golden(name)
    state = {key.removeprefix("state/"): value for key, value in golden.items() if key.startswith("state/")}
    return family.config, family.huggingface_names(family.config), state


def test_a_kernel_is_transposed_cut_into_heads_and_stacked():
    config, table, state = arrays("bert")
    params = from_huggingface(table, state, config)
    kernel = params["encoder"]["blocks"]["self_attention"]["query"]["kernel"]  # [L, D, H, K]
    theirs = state["bert.encoder.layer.1.attention.self.query.weight"]  # [H * K, D]
    np.testing.assert_array_equal(kernel[1, :, 2, 5], theirs[2 * 8 + 5])


def test_a_missing_tensor_is_named():
    config, table, state = arrays("gpt2")
    del state["transformer.h.1.mlp.c_fc.weight"]
    with pytest.raises(UserError, match="no tensor 'transformer.h.1.mlp.c_fc.weight'"):
        from_huggingface(table, state, config)


def test_weights_of_another_size_are_refused():
    config, table, state = arrays("llama3")
    with pytest.raises(UserError, match="'model.layers.0.mlp.down_proj.weight' has shape"):
        from_huggingface(table, state, dataclasses.replace(config, d_ff=64))


def test_a_table_that_leaves_out_a_parameter_is_refused():
    config, table, state = arrays("gpt2")
    with pytest.raises(ValueError, match="decoder/final_norm/bias"):
        from_huggingface(table[:-1], state, config)


@pytest.mark.parametrize("name", make.FAMILIES)
def test_each_tensor_is_used_and_in_full(name):
    _, table, state = arrays(name)
    parts = {}
    for row in table:
        i, n = row.part or (0, 1)
        for layer in range(2 if "{layer}" in row.name else 1):
            parts.setdefault(row.name.format(layer=layer), []).append(i / n)
            assert isinstance(row, Row)
    assert parts.keys() == state.keys()
    assert all(sorted(found) == [i / len(found) for i in range(len(found))] for found in parts.values())
