"""curves.png can be drawn of anything that a run logs."""

import numpy as np
import pytest

from pretrainax.reporting import curves


def points(count: int, **values) -> list[dict]:
    return [
        {"step": step, "split": "train", "loss": 9 / step, "learning_rate": 1e-3, "gradient_norm": 1.0, **values}
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        points(1),
        points(3, loss=None, gradient_norm=None),
        points(50) + points(1, gradient_norm=1e6) + [{"step": 9, "split": "valid", "loss": 3.0}],
        points(5, learning_rate=0.0, gradient_norm=0.0),
    ],
    ids=["nothing", "one point", "all null", "a spike", "zeros"],
)
@pytest.mark.filterwarnings("error")
def test_any_run_has_a_picture(tmp_path, lines):
    curves.draw(str(tmp_path / "curves.png"), lines, title="run", subtitle="decoder", baseline_loss=4.0)
    assert (tmp_path / "curves.png").stat().st_size > 10_000  # bytes; a blank page of this size has fewer


def test_the_trend_follows_a_straight_line_and_skips_gaps():
    values = np.full(60, 2.0)
    values[20] = np.nan
    np.testing.assert_allclose(curves._trend(values), 2.0, rtol=1e-12)  # rounding of a weighted mean


@pytest.mark.parametrize("name", ["dollar$x_{$", "back\\slash", "100%", "new\nline"])
def test_a_workdir_of_any_name_is_a_title(tmp_path, name):
    curves.draw(str(tmp_path / "curves.png"), points(3), title=name)
    assert (tmp_path / "curves.png").exists()
