"""Each of our parameters is a view of one of transformers' tensors; a table must cover all tensors."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import UserError
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.zoo.convert import as_ours, from_huggingface, rows_of, tensor_locations, their_shape, to_huggingface
from pretrainax.zoo.family import FusedPart, NameRow
from tests.golden.case import weights
from tests.support.parity import ALL


def arrays(name):
    config, family = ALL[name].config, ALL[name].family.huggingface
    table = family.names(config)
    return config, table, to_huggingface(table, weights(config))


def counting(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_linear_map_is_transposed_and_cut_into_heads():
    row = NameRow("encoder/blocks/self_attention/query/kernel", "q.weight", transposed=True)
    theirs = counting(their_shape(row, (3, 2, 4)))  # [out, in]
    assert theirs.shape == (8, 3)
    assert as_ours(row, theirs, (3, 2, 4))[2, 1, 3] == theirs[1 * 4 + 3, 2]


def test_the_map_back_sums_over_heads_and_their_width():
    row = NameRow("encoder/blocks/self_attention/out/kernel", "o.weight", transposed=True)
    theirs = counting(their_shape(row, (2, 4, 3)))
    assert theirs.shape == (3, 8)
    assert as_ours(row, theirs, (2, 4, 3))[1, 3, 2] == theirs[2, 1 * 4 + 3]


@pytest.mark.parametrize("transposed, theirs_shape", [(True, (24, 3)), (False, (3, 24))])
def test_a_part_is_a_slice_of_their_outputs(transposed, theirs_shape):
    row = NameRow("decoder/blocks/self_attention/value/kernel", "qkv.weight", transposed, part=FusedPart(2, 1, 3))
    theirs = counting(their_shape(row, (3, 2, 4)))
    assert theirs.shape == theirs_shape
    place = (16 + 1 * 4 + 3, 2) if transposed else (2, 16 + 1 * 4 + 3)
    assert as_ours(row, theirs, (3, 2, 4))[2, 1, 3] == theirs[place]


def test_parts_may_be_of_several_sizes():
    attention = "decoder/blocks/self_attention"
    query = NameRow(f"{attention}/query/kernel", "qkv.weight", transposed=True, part=FusedPart(0, 4, 8))
    value = NameRow(
        f"{attention}/value/kernel", "qkv.weight", transposed=True, part=FusedPart(6, 2, 8)
    )  # two key heads come before the value
    theirs = counting(their_shape(query, (3, 4, 5)))
    assert theirs.shape == their_shape(value, (3, 2, 5)) == (40, 3)
    assert as_ours(query, theirs, (3, 4, 5))[1, 3, 4] == theirs[3 * 5 + 4, 1]
    assert as_ours(value, theirs, (3, 2, 5))[1, 0, 4] == theirs[6 * 5 + 4, 1]


def test_a_convolution_is_reversed():
    row = NameRow("encoder/convolution/kernel", "conv.weight", transposed=True)
    theirs = counting(their_shape(row, (3, 4, 5)))  # [out, in, width]
    assert theirs.shape == (5, 4, 3)
    assert as_ours(row, theirs, (3, 4, 5))[2, 1, 4] == theirs[4, 1, 2]


# This includes DeepSeekMoE, for which transformers has no class.
@pytest.mark.first(25)
@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.family.huggingface is not None])
def test_a_table_is_a_bijection(name):
    """Each number of their tensors is used exactly once, and the conversion to ours and back preserves every bit."""
    config, table, state = arrays(name)
    params = weights(config)
    assert sum(x.size for x in state.values()) == sum(x.size for x in jax.tree.leaves(params))
    for row, shape in rows_of(table, models.abstract_params(config)).values():
        theirs, index = next(tensor_locations(row, shape))
        assert np.shares_memory(as_ours(row, state[theirs], shape[len(index) :]), state[theirs]), row.path
    again = from_huggingface(table, state, config)
    for path, a, b in zip(parameter_names(params), jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert a.tobytes() == np.asarray(b).tobytes(), path


def test_the_first_layer_may_have_a_name_of_its_own():
    config, table, state = arrays("modernbert")
    params = from_huggingface(table, state, config)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, weights(config))
    scale = params["encoder"]["blocks"]["self_attention_norm"]["scale"]
    np.testing.assert_array_equal(scale[0], state["model.embeddings.norm.weight"])
    np.testing.assert_array_equal(scale[1], state["model.layers.1.attn_norm.weight"])


def test_missing_and_misshaped_tensors_are_all_named():
    config, table, state = arrays("gpt2")
    del state["transformer.h.1.mlp.c_fc.weight"], state["transformer.wpe.weight"]
    state["transformer.ln_f.weight"] = np.ones(3)
    with pytest.raises(UserError) as error:
        from_huggingface(table, state, config)
    for name in ("ln_f.weight is [3], expected", "wpe.weight", "h.1.mlp.c_fc.weight"):
        assert name in str(error.value)


def test_weights_of_another_size_are_refused():
    config, table, state = arrays("llama3")
    with pytest.raises(UserError, match="model.layers.0.mlp.down_proj.weight is"):
        from_huggingface(table, state, dataclasses.replace(config, d_ff=64))


def test_a_table_that_leaves_out_a_parameter_is_refused():
    config, table, state = arrays("gpt2")
    table = [row for row in table if row.path != "decoder/final_norm/bias"]
    with pytest.raises(ValueError, match="decoder/final_norm/bias"):
        from_huggingface(table, state, config)
