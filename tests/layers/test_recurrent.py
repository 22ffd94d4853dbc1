"""Tests which tokens an LSTM reads, its direction, and the mix of layers. tests/zoo/test_elmo.py tests its values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, MeshConfig, ModelConfig, NoPositions, Recurrent, UserError
from pretrainax.layers.characters import CharacterEmbedding
from pretrainax.layers.compute import Compute
from pretrainax.layers.recurrent import RecurrentStack
from pretrainax.layers.scalar_mix import ScalarMix
from pretrainax.sharding.arrays import check_mesh
from pretrainax.sharding.mesh import make_mesh
from tests.support import tiny

CONFIG = ModelConfig(
    family="recurrent",
    num_layers=2,
    d_model=4,
    d_ff=6,
    position=NoPositions(),
    parts=(Recurrent(character_dim=3, filters=(4, 5), highways=1),),
    init_stddev=0.5,
)
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]])


def stack(variant, x, segment_ids=SEGMENTS, dtype="float32"):
    module = RecurrentStack(CONFIG, Compute(dtype=dtype), num_layers=2)
    params = module.init(jax.random.key(0), x, segment_ids, deterministic=True)
    return variant(lambda p, x, s: module.apply(p, x, s, deterministic=True)[0])(params, x, segment_ids)


def changed(variant, place):
    """Returns the positions of each half of the hidden states that depend on the word at `place`, [T] bool both."""
    x = jax.random.normal(jax.random.key(1), (1, 8, 4))
    differs = np.asarray(stack(variant, x) != stack(variant, x.at[0, place].add(1.0)))[0]
    return differs[:, :4].any(-1).tolist(), differs[:, 4:].any(-1).tolist()


@pytest.mark.slow
def test_each_half_reads_in_its_direction_and_never_another_text(variant):
    forward, backward = changed(variant, 4)
    assert forward == [False, False, False, False, True, True, False, False]
    assert backward == [False, False, False, True, True, False, False, False]


def test_padding_is_read_by_nothing_that_counts(variant):
    forward, backward = changed(variant, 6)
    assert not any(forward[:6] + backward[:6])


@pytest.mark.first(1)
def test_the_stream_is_in_the_dtype_of_activations(variant):
    x = jax.random.normal(jax.random.key(1), (1, 8, 4))
    exact, rounded = stack(variant, x), stack(variant, x.astype(jnp.bfloat16), dtype="bfloat16")
    assert rounded.dtype == jnp.bfloat16 and rounded.shape == (1, 8, 8)
    # The mantissa has 8 bits, and two layers read six words.
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.05)


def test_words_are_read_one_by_one(variant):
    module = CharacterEmbedding(CONFIG, "float32")
    characters = jax.random.randint(jax.random.key(0), (2, 3, WORD_LENGTH), 0, NUM_CHARACTERS)
    params = module.init(jax.random.key(1), characters)
    together = variant(module.apply)(params, characters)
    assert together.shape == (2, 3, 4)
    alone = variant(module.apply)(params, characters[1:, 2:])
    # The sums are equal, but the products have other shapes.
    np.testing.assert_allclose(together[1:, 2:], alone, atol=1e-6)


def test_a_mix_is_a_mean_of_layers_by_the_softmax_of_their_weights(variant):
    layers = jnp.arange(24.0).reshape(3, 1, 2, 4)
    params = {"params": {"weights": jnp.log(jnp.array([1.0, 2.0, 5.0])), "scale": jnp.array([2.0])}}
    expected = 2.0 * (layers[0] + 2.0 * layers[1] + 5.0 * layers[2]) / 8.0
    np.testing.assert_allclose(variant(ScalarMix().apply)(params, layers), expected, rtol=1e-6)
    fresh = ScalarMix().init(jax.random.key(0), layers)
    np.testing.assert_allclose(variant(ScalarMix().apply)(fresh, layers), layers.mean(0), rtol=1e-6)


def test_a_length_that_is_split_is_refused():
    experiment = tiny.get_config("elmo")
    mesh = make_mesh(MeshConfig(data=4, sequence=2), jax.devices())
    with pytest.raises(
        UserError,
        match="config.mesh.sequence is 2, and config.model is an LSTM",
    ):
        check_mesh(experiment, mesh)
