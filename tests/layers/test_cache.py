"""Tests ring buffers of keys and values, by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers.attention import Mask
from pretrainax.layers.cache import KeyValues, slot_distance


def numbered(lengths, padded):
    """Returns keys filled with 10 · row + position (99 in padding), and their negatives as values, [B, S, 2, 3]."""
    place = np.arange(padded)[None]
    number = np.where(place < np.array(lengths)[:, None], 10 * np.arange(len(lengths))[:, None] + place, 99)
    keys = jnp.broadcast_to(jnp.asarray(number, jnp.float32)[:, :, None, None], (*number.shape, 2, 3))
    return KeyValues.from_arrays(keys, -keys)


def slots(ring):
    """Returns the number in each slot, [B, C]."""
    keys, values = ring.heads_last()
    chex.assert_trees_all_equal(keys, -values)
    return np.asarray(keys[:, :, 0, 0])


def test_slots_stand_so_far_behind_the_newest():
    np.testing.assert_array_equal(slot_distance(5, 4), [1, 0, 3, 2])  # The slots hold tokens 4, 5, 2 and 3.
    # The slots hold tokens 0, 1 and 2; the last slot is empty.
    np.testing.assert_array_equal(slot_distance(2, 4), [2, 1, 0, 3])


def test_rows_are_aligned_at_their_last_token():
    ring = numbered([5, 2], 6).ring(jnp.array([5, 2]), 8, 6)
    # The rows have six positions, and two slots are free. The last token has index 5 in both rows.
    np.testing.assert_array_equal(slots(ring)[0, 1:6], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(slots(ring)[1, 4:6], [10, 11])


def test_rows_that_are_read_again_join_the_ring_of_the_others():
    """Tests a ring that has wrapped around; the next token has a larger index than the tokens that are read again."""
    ring = numbered([5, 3], 6).ring(jnp.array([5, 3]), 4, jnp.asarray(11))
    np.testing.assert_array_equal(slots(ring)[0], [2, 3, 4, 1])  # The slots hold tokens 8, 9, 10 and 7.
    np.testing.assert_array_equal(slots(ring)[1, :3], [10, 11, 12])


@pytest.mark.parametrize("rows", (1, 2))
def test_a_ring_keeps_the_last_tokens(variant, rows):
    lengths = jnp.array([6, 3])[:rows]
    # The ring holds positions 2 … 5 of 0 … 5; position i is in slot i mod 4.
    ring = numbered(lengths, 6).ring(lengths, 4, 6)
    np.testing.assert_array_equal(slots(ring)[0], [4, 5, 2, 3])
    new = jnp.full((rows, 1, 2, 3), 7.0)
    written = variant(lambda ring, index: ring.append(KeyValues.from_arrays(new, -new), index))(ring, 6)
    np.testing.assert_array_equal(slots(written)[0], [4, 5, 7, 3])
    chex.assert_trees_all_equal_shapes_and_dtypes(written, ring)


def test_a_query_sees_what_is_of_its_text():
    ring = numbered([6, 2], 6).ring(jnp.array([6, 2]), 4, 6)
    # The query is token 6 of every row. In its own document it is token 6 in the first row, and token 2 in the second.
    mask, bias = ring.mask_for_query(
        jnp.asarray(6), Mask(True, query_positions=jnp.array([[6], [2]])), jnp.arange(8.0)[None, None, None]
    )
    np.testing.assert_array_equal(
        mask.materialize(1, 4)[:, 0, 0], [[True, True, True, True], [True, True, True, False]]
    )  # The slots hold tokens 4, 5, 6 and 3.
    # The last entry of the bias (7) belongs to the query's own token.
    np.testing.assert_array_equal(bias[0, 0, 0], [5, 6, 7, 4])


@pytest.mark.parametrize("rows", ([1], [1, 1, 0]))
def test_rows_are_taken(rows):
    kept = numbered([3, 3], 3)
    np.testing.assert_array_equal(slots(kept.take(jnp.array(rows))), slots(kept)[rows])


def test_of_one_row_there_is_no_axis_of_rows():
    assert [x.shape for x in jax.tree.leaves(numbered([3], 3))] == [(2, 3, 3)] * 2
    assert [x.shape for x in jax.tree.leaves(numbered([3, 3], 3))] == [(2, 2, 3, 3)] * 2
