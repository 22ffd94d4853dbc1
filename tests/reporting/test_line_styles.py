"""Tests that curves differ without color, and that labels do not overlap."""

import numpy as np
import pytest

from pretrainax.reporting.line_styles import COLORS, label_columns, line_styles, spread


def test_eight_runs_differ_by_color_and_also_by_marker():
    styles = line_styles([f"run-{i}" for i in range(8)], range(8))
    assert len({style.color for style in styles}) == len({style.marker for style in styles}) == len(COLORS)
    assert [style.label for style in styles] == [f"run-{i}" for i in range(8)]


def test_of_more_runs_a_setting_shares_its_color_and_numbers_are_labels():
    styles = line_styles([f"run-{i}" for i in range(9)], "aaabbbccc")
    assert [style.label for style in styles] == list("123456789")
    assert len({style.color for style in styles}) == 3 and styles[0].color == styles[2].color


def test_more_settings_than_colors_differ_by_dashes():
    styles = line_styles([str(i) for i in range(32)], range(32))
    assert len({(style.color, style.dashes) for style in styles}) == 32


def test_names_that_do_not_fit_become_numbers():
    assert [style.label for style in line_styles(["a", "b" * 40], "ab")] == ["1", "2"]


@pytest.mark.parametrize("heights", [[0.5], [0.5] * 6, [0.0, 0.01, 0.02], [1.0, 0.99, 0.2], [0.3, 0.9, 0.31, 0.88]])
def test_labels_keep_their_distance_order_and_limits(heights):
    placed = spread(np.array(heights), 0.1, 0.0, 1.0)
    order = np.argsort(heights, kind="stable")
    assert (np.diff(placed[order]) >= 0.1 - 1e-9).all()  # rounding of sums of 0.1
    assert placed.min() >= 0 and placed.max() <= 1 + 1e-9


def test_labels_that_are_far_apart_do_not_move():
    assert spread(np.array([0.9, 0.1, 0.5]), 0.1, 0.0, 1.0).tolist() == pytest.approx([0.9, 0.1, 0.5])


def test_too_many_labels_use_all_the_room():
    np.testing.assert_allclose(np.sort(spread(np.full(21, 0.5), 0.1, 0.0, 1.0)), np.linspace(0, 1, 21))


def test_labels_are_next_to_the_ends_of_shorter_curves():
    columns = label_columns(np.array([1.0, 0.5, 0.52, 0.99]), width=0.1)
    assert [column.tolist() for column in columns] == [[1, 2], [0, 3]]
