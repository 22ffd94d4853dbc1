import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import LongContextScaling, LongRopeScaling, ModelConfig, RotaryPositions
from pretrainax.layers.positions import AttentionPositions, positions_for
from pretrainax.layers.positions.rotary import rotary_angles, rotate


def test_rotary_by_hand(variant):
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    cosines, sines = rotary_angles(jnp.array([[7]]), 4, 100.0)
    a, b = 7.0, 0.7  # The rotation planes are (0, 2) and (1, 3). theta^(-1/2) is 0.1.
    expected = [
        np.cos(a) - 3 * np.sin(a),
        2 * np.cos(b) - 4 * np.sin(b),
        3 * np.cos(a) + np.sin(a),
        4 * np.cos(b) + 2 * np.sin(b),
    ]
    np.testing.assert_allclose(variant(rotate)(x, cosines, sines)[0, 0, 0], expected, rtol=1e-5)  # float32 rounding


def test_a_part_of_a_head_is_turned_and_the_rest_left(variant):
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 10))
    position = RotaryPositions(16, theta=100.0, fraction=0.4)
    config = ModelConfig(d_model=20, num_heads=2, position=position)
    terms = positions_for(config).terms(
        AttentionPositions(jnp.array([[0, 1, 2], [4, 5, 6]])), causal=True, dtype=x.dtype
    )
    turned = variant(lambda x: terms.rotate(x, x)[0])(x)
    angles = rotary_angles(jnp.array([[0, 1, 2], [4, 5, 6]]), 4, 100.0)
    chex.assert_trees_all_close(turned[..., :4], rotate(x[..., :4], *angles), rtol=1e-6)  # float32, compiled separately
    chex.assert_trees_all_equal(turned[..., 4:], x[..., 4:])


def test_rotary_products_depend_on_the_distance_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 4, 1, 8)) for i in (0, 1))

    def products(start):
        positions = start + jnp.arange(4)[None]
        angles = rotary_angles(positions, 8, 10_000.0)
        return jnp.einsum("BTHK,BSHK->BHTS", rotate(q, *angles), rotate(k, *angles))

    # float32 represents angles of up to 1,000 within 6e-5.
    np.testing.assert_allclose(products(0), products(1000), atol=1e-3)


def test_long_context_scaling_by_hand():
    # In a context of 100 tokens, the planes rotate 100 w / 2 pi = 15.9, 1.59, 0.159 and 0.0159 times.
    scaling = LongContextScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=100)
    cosines, _ = rotary_angles(jnp.array([[1]]), 8, 10_000.0, scaling)
    turns = 10 / (2 * np.pi)
    alone = (turns - 1) / 3
    frequencies = [1.0, 0.1 * (alone + (1 - alone) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(cosines[0, 0], np.cos(frequencies), rtol=1e-6)  # float32 rounding


LONG_ROPE = LongRopeScaling((2.0, 4.0), (10.0, 20.0), factor=4.0, original_length=4)
GAIN = np.sqrt(1 + np.log(4) / np.log(4))


def test_long_rope_by_hand(variant):
    """Tests two segments of a row: long factors rotate the segment of five tokens, short factors rotate the other."""
    positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3, 4]])
    cosines, sines = variant(lambda p: rotary_angles(p, 4, 100.0, LONG_ROPE))(positions)
    for row, (longer, found) in enumerate(zip(([1] * 5 + [0] * 4, [0] * 4 + [1] * 5), cosines, strict=True)):
        for place, is_long in enumerate(longer):
            p, (first, second) = int(positions[row, place]), LONG_ROPE.long_factors if is_long else (2.0, 4.0)
            expected = GAIN * np.cos([p / first, 0.1 * p / second])  # theta^(-1/2) is 0.1
            np.testing.assert_allclose(found[place], expected, rtol=1e-6)  # float32 rounding
    np.testing.assert_allclose(cosines**2 + sines**2, GAIN**2 * np.ones((2, 9, 2)), rtol=1e-6)


def test_padding_makes_no_segment_long():
    """Tests padding positions that continue to count, or that equal the number of virtual tokens (the old context)."""
    for padding in ([4, 5, 6], [4, 4, 4]):
        positions, segment_ids = jnp.array([[0, 1, 2, 3, *padding]]), jnp.array([[1, 1, 1, 1, 0, 0, 0]])
        cosines, _ = rotary_angles(positions, 4, 100.0, LONG_ROPE, segment_ids)
        np.testing.assert_allclose(cosines[0, 3], GAIN * np.cos([3 / 2.0, 0.3 / 4.0]), rtol=1e-6)  # float32 rounding


@pytest.mark.parametrize("position, factors", [(3, (2.0, 4.0)), (4, (10.0, 20.0)), (9, (10.0, 20.0))])
def test_a_new_token_is_turned_by_the_length_that_its_text_has_reached(position, factors):
    cosines, _ = rotary_angles(jnp.array([[position]]), 4, 100.0, LONG_ROPE)
    expected = GAIN * np.cos([position / factors[0], 0.1 * position / factors[1]])
    np.testing.assert_allclose(cosines[0, 0], expected, rtol=1e-6)  # float32 rounding


@pytest.mark.parametrize("is_local", (False, True))
def test_a_token_alone_is_turned_as_in_its_row(is_local):
    position = RotaryPositions(16, theta=100.0, local_theta=10.0)
    config = ModelConfig(d_model=16, num_heads=2, num_kv_heads=2, position=position)
    q, k = (jax.random.normal(jax.random.key(i), (2, 6, 2, 8)) for i in (0, 1))
    places = jnp.array([[0, 1, 2, 0, 1, 2], [3, 4, 5, 6, 7, 8]])

    def turned(part):
        terms = positions_for(config).terms(AttentionPositions(places[:, part]), causal=True, dtype=q.dtype)
        return terms.in_block(config, jnp.array(is_local), jnp.array(0), True).rotate(q[:, part], k[:, part])

    whole = turned(slice(6))
    for t in range(6):
        alone = turned(slice(t, t + 1))
        # float32, compiled separately
        chex.assert_trees_all_close(alone, tuple(x[:, t : t + 1] for x in whole), atol=1e-6)


def test_each_so_manieth_layer_turns_nothing(variant):
    position = RotaryPositions(16, theta=100.0, local_theta=10.0, no_rotation_every=3)
    config = ModelConfig(d_model=16, num_heads=2, position=position)
    q, k = (jax.random.normal(jax.random.key(i), (2, 6, 2, 8)) for i in (0, 1))
    places = AttentionPositions(jnp.array([[0, 1, 2, 0, 1, 2], [3, 4, 5, 6, 7, 8]]))
    plain = dataclasses.replace(config, position=dataclasses.replace(position, no_rotation_every=None))

    @variant
    def turned(number, of=config):
        terms = positions_for(of).terms(places, causal=True, dtype=q.dtype)
        return terms.in_block(of, jnp.array(True), number, True).rotate(q, k)

    everywhere = positions_for(plain).terms(places, causal=True, dtype=q.dtype)
    everywhere = everywhere.in_block(plain, jnp.array(True), jnp.array(2), True).rotate(q, k)
    for number in range(7):
        expected = (q, k) if number in (2, 5) else everywhere
        chex.assert_trees_all_close(
            turned(jnp.array(number)), expected, rtol=1e-5, atol=1e-6
        )  # float32, compiled separately


def test_angles_of_other_rows_are_named():
    cosines, sines = rotary_angles(jnp.array([[7, 8]]), 4, 100.0)
    with pytest.raises(AssertionError, match=r"angles are \[B, T, P\]"):
        rotate(jnp.ones((2, 2, 1, 4)), cosines, sines)
