"""Tests the plot of an evaluation over steps: its curves and their titles."""

import numpy as np
import pytest
from matplotlib import figure

from pretrainax.scoring import plot
from pretrainax.scoring.results import Result


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Returns a function that draws results, and returns the plot instead of its file."""
    made = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: made.append(self))

    def draw(results):
        plot.draw(str(tmp_path / "a.png"), results, "a $title_")
        return made[-1]

    return draw


def results(*sources, measures=("loss", "bits_per_byte"), bounded=True):
    return [
        Result(source, measure, value, 0.5, {}, "", step=step, interval=(value - 1, value + 3) if bounded else None)
        for place, source in enumerate(sources)
        for measure in measures
        for step in (100, 200)
        for value in [10.0 * place + step / 100]
    ]


def curves_of(panel):
    """Returns the values of each curve, without the lines of the error bars."""
    return [[float(y) for y in line.get_ydata()] for line in panel.get_lines() if line.get_marker() == "o"]


def test_a_panel_has_the_curves_of_its_measure_alone(drawn):
    found = drawn(results("one", "two"))
    loss, bits = (panel for panel in found.axes if panel.get_visible())
    assert [panel.get_title("left") for panel in (loss, bits)] == ["loss", "bits per byte"]
    assert curves_of(loss) == curves_of(bits) == [[1.0, 2.0], [11.0, 12.0]]
    bars = loss.containers[0].lines[2][0].get_segments()
    np.testing.assert_allclose([bar[:, 1] for bar in bars], [[0, 4], [1, 5]])  # The intervals are asymmetric.


@pytest.mark.parametrize("sources, lines", [(("a_$b",), ["a_$b"]), (("one", "two"), ["one", "two"])])
def test_what_the_curves_are_of_stands_above_them_as_it_is_written(drawn, sources, lines):
    texts = drawn(results(*sources)).texts
    assert [text.get_text() for text in texts] == ["a $title_", *lines]
    assert not any(text.get_parse_math() for text in texts)


def test_a_long_name_is_cut_to_the_width(drawn):
    name = "x" * (plot._MAX_LINE_CHARACTERS + 1)
    assert drawn(results(name)).texts[1].get_text() == "x" * (plot._MAX_LINE_CHARACTERS - 1) + "…"
    assert drawn(results(name[1:])).texts[1].get_text() == name[1:]


@pytest.mark.slow
def test_panels_that_are_left_over_are_hidden(drawn):
    found = drawn(results("one", measures=("a", "b", "c", "d"), bounded=False))
    assert [panel.get_visible() for panel in found.axes] == [True] * 4 + [False] * 2
