"""Tests masks by hand, and compares the masks of a few queries with rows of the full square mask."""

import chex
import jax
import jax.numpy as jnp
import pytest

from pretrainax.layers.attention import Mask
from tests.support.attending import PACKED, segments


def test_causal_mask_by_hand():
    assert Mask(causal=True).materialize(3, 4).astype(int).tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]]


def test_segment_mask_by_hand():
    mask = Mask(False, segments([1, 1, 2, 0]), segments([1, 2, 2, 0, 0]))
    assert mask.materialize(4, 5).astype(int).tolist() == [
        [[[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]
    ]


def test_causal_segment_mask_by_hand():
    ids = segments([1, 1, 2, 2], [1, 1, 1, 0])
    assert Mask(True, ids, ids).materialize(4, 4).astype(int).tolist() == [
        [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]],
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]],
    ]


def test_causal_window_by_hand():
    allowed = [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]]]
    assert Mask(True, window=2).materialize(4, 4).astype(int).tolist() == allowed


def test_two_sided_window_by_hand():
    allowed = [[[[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]]]
    assert Mask(False, window=2).materialize(4, 4).astype(int).tolist() == allowed


def test_a_window_may_hold_or_not():
    for holds in (True, False):
        mask = Mask(True, window=2, windowed=jnp.asarray(holds))
        chex.assert_trees_all_equal(mask.materialize(4, 4), Mask(True, window=2 if holds else None).materialize(4, 4))


def test_prefix_mask_by_hand():
    mask = Mask(True, prefix=segments([1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]))
    assert mask.materialize(4, 4).astype(int).tolist() == [
        [[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]],
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]],
        [[[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]],
    ]


def test_a_prefix_is_that_of_its_segment():
    mask = Mask(True, **PACKED, prefix=segments([1, 1, 0, 1, 1, 0]))
    assert mask.materialize(6, 6).astype(int).tolist() == [
        [
            [
                [1, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 0, 0, 1],
            ]
        ]
    ]


def test_a_window_looks_as_far_ahead_into_a_prefix_as_back():
    mask = Mask(True, window=2, prefix=segments([1, 1, 1, 0, 0]))
    assert mask.materialize(5, 5).astype(int).tolist() == [
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]]
    ]
    for holds in (True, False):
        other = mask.replace(windowed=jnp.asarray(holds))
        chex.assert_trees_all_equal(
            other.materialize(5, 5), mask.replace(window=2 if holds else None).materialize(5, 5)
        )


def test_a_mask_without_a_prefix_does_no_more_than_before():
    trace = str(jax.make_jaxpr(lambda ids: Mask(True, ids, ids).materialize(6, 6))(PACKED["query_segment_ids"]))
    assert " or " not in trace and " gt " not in trace


def test_mask_without_conditions_allows_all():
    assert Mask().materialize(2, 3).all()


SIX = PACKED["query_segment_ids"]
ROW_OF = {
    "causal": Mask(True),
    "causal window": Mask(True, window=3),
    "two-sided window": Mask(False, window=4),
    "layer without its window": Mask(True, window=2, windowed=jnp.asarray(False)),
    "prefix": Mask(True, prefix=segments([1, 1, 1, 0, 0, 0])),
    "window and prefix": Mask(True, window=2, prefix=segments([1, 1, 1, 1, 0, 0])),
    "segments": Mask(False, SIX, SIX),
    "all": Mask(True, SIX, SIX, window=2, prefix=segments([1, 1, 0, 1, 1, 0])),
}


def at(mask, position):
    """Returns the mask of the queries at these positions, [T] or [B, T], for the same keys."""
    ids = mask.query_segment_ids
    position = jnp.asarray(position, jnp.int32)
    return mask.replace(query_positions=position, query_segment_ids=None if ids is None else ids[0][position])


@pytest.mark.parametrize("name", ROW_OF)
def test_the_mask_of_one_query_is_its_row_of_the_square(name):
    square = ROW_OF[name].materialize(6, 6)
    # [1, 1]: a traced position in a single row
    one = jax.jit(lambda t: at(ROW_OF[name], t[None, None]).materialize(1, 6))
    for t in range(6):
        chex.assert_trees_all_equal(one(jnp.int32(t)), square[:, :, t : t + 1])


@pytest.mark.parametrize("name", ROW_OF)
def test_queries_of_rows_may_stand_at_different_positions(name):
    square = ROW_OF[name].materialize(6, 6)
    found = at(ROW_OF[name], [[0, 1], [4, 5], [2, 3]]).materialize(2, 6)
    chex.assert_trees_all_equal(found, jnp.stack([square[0, :, t : t + 2] for t in (0, 4, 2)]))


def test_keys_may_stand_elsewhere_too():
    later = Mask(True, query_positions=jnp.arange(4, 6), key_positions=jnp.arange(2, 6))
    chex.assert_trees_all_equal(later.materialize(2, 4), Mask(True).materialize(6, 6)[:, :, 4:, 2:])
