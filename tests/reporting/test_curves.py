"""Tests that curves.png can show everything that a run logs."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from pretrainax.config.choice import import_built_in
from pretrainax.reporting import curves

import_built_in()  # declares the metrics


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
    curves.draw(str(tmp_path / "curves.png"), lines, title="run", subtitle="decoder", baseline={"loss": 4.0})
    assert (tmp_path / "curves.png").stat().st_size > 10_000  # A blank page of this size has fewer bytes.


def lines_drawn(tmp_path, monkeypatch, lines, **options):
    """Draws a picture and returns its panels."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda picture, *args, **kwargs: drawn.append(picture))
    curves.draw(str(tmp_path / "curves.png"), lines, title="run", **options)
    return drawn[0].axes


def test_the_standard_errors_of_validations_are_a_band_with_gaps(tmp_path, monkeypatch):
    errors = ({"loss": 0.5}, {}, {"loss": 0.25})
    valid = [{"step": n, "split": "valid", "loss": 3.0, "standard_errors": e} for n, e in enumerate(errors, start=1)]
    panel, *_ = lines_drawn(tmp_path, monkeypatch, points(3) + valid)
    (band,) = panel.collections
    bounds = [(path.vertices[:, 1].min(), path.vertices[:, 1].max()) for path in band.get_paths()]
    assert bounds == [(2.5, 3.5), (2.75, 3.25)] and "band: standard error" in panel.get_title(loc="right")
    panel, *_ = lines_drawn(tmp_path, monkeypatch, points(3) + valid[1:2])
    assert not panel.collections and "band" not in panel.get_title(loc="right")


def test_a_point_without_neighbours_is_a_dot_in_every_panel(tmp_path, monkeypatch):
    nan = {"loss": None, "learning_rate": None, "gradient_norm": None}
    gaps = [line | (nan if line["step"] in (4, 6) else {}) for line in points(9)]
    for lines, alone in ((points(1), [0]), (gaps, [4]), (points(9), [])):
        for panel in lines_drawn(tmp_path, monkeypatch, lines):
            curve = panel.get_lines()[0]
            assert curve.get_marker() == "o" and curve.get_markevery() == alone


def test_every_axis_has_a_title(tmp_path, monkeypatch):
    for panel in lines_drawn(tmp_path, monkeypatch, points(3)):
        assert panel.get_xlabel() == "step" and panel.get_title(loc="left")


def test_every_further_loss_and_every_kind_of_parts_has_a_panel(tmp_path, monkeypatch):
    valid = {"loss": 5.0, "replaced_loss": 0.5, "accuracy": 0.1, "replaced_loss/source=web": 0.4}
    valid |= {"replaced_loss/source=books": 0.3, "loss/source=web": 5.0, "replaced_loss/denoiser=R": 0.2}
    lines = [line | {"replaced_loss": 0.6} for line in points(3)] + [{"step": 3, "split": "valid", **valid}]
    panels = lines_drawn(tmp_path, monkeypatch, lines, select_by="replaced_loss")
    assert [panel.get_title(loc="left") for panel in panels[:1] + panels[3:]] == [
        "replaced loss, nats per token",
        "loss, nats per target",
        "validation replaced loss by source",
        "validation replaced loss by denoiser",
    ]
    assert panels[0].get_lines()[0].get_ydata().tolist() == [0.6] * 3
    assert [text.get_text() for text in panels[4].get_legend().get_texts()] == ["web", "books"]
    assert [line.get_ydata().tolist() for line in panels[4].get_lines()] == [[0.4], [0.3]]


@pytest.mark.parametrize(
    "select_by, titles",
    [
        ("loss/source=web", ["loss, nats per target", "validation loss by source"]),
        (
            "accuracy",
            ["loss, nats per target", "accuracy", "validation loss by source", "validation accuracy by source"],
        ),
        (
            "bits_per_byte/source=web",
            [
                "loss, nats per target",
                "bits per byte",
                "validation loss by source",
                "validation bits per byte by source",
            ],
        ),
        (
            "text_loss/source=web",
            ["text loss, nats per target", "loss, nats per target", "validation text loss by source"],
        ),
    ],
)
def test_the_figure_that_counts_is_shown_beside_the_loss(tmp_path, monkeypatch, select_by, titles):
    figure = select_by.partition("/")[0]
    valid = {"loss": 5.0, figure: 0.25, "loss/source=web": 4.0, f"{figure}/source=web": 0.5, "perplexity": 9.0}
    lines = [*points(3), {"step": 3, "split": "valid", **valid}]
    panels = lines_drawn(tmp_path, monkeypatch, lines, select_by=select_by)
    assert [panel.get_title(loc="left") for panel in panels[:1] + panels[3:]] == titles
    drawn = [line.get_ydata().tolist() for panel in panels for line in panel.get_lines()]
    assert [valid[select_by]] in drawn and [valid["loss"]] in drawn


@pytest.mark.parametrize(
    "metric, names, title",
    [
        ("loss", ["loss"], "loss, nats per target"),
        ("loss", ["loss", "labels"], "loss"),  # The loss of a task is in nats per label, or a squared error.
        ("balance_loss", ["loss"], "balance loss"),  # This loss is not a log-likelihood.
        ("hidden_loss", ["loss"], "hidden loss"),
        ("soft_loss", ["loss"], "soft loss, nats"),
        ("accuracy", ["labels"], "accuracy"),
        ("bits_per_byte", ["loss"], "bits per byte"),
    ],
)
def test_a_panel_has_the_unit_of_its_metric(metric, names, title):
    assert curves.metric_title(metric, names) == title


def test_a_long_run_is_drawn_by_means_of_neighbours_and_its_last_point(tmp_path, monkeypatch):
    long = points(30_011)
    panel = lines_drawn(tmp_path, monkeypatch, long)[0]
    steps, values = panel.get_lines()[0].get_data()
    assert len(steps) == curves.MOST_POINTS
    assert (steps[-1], values[-1]) == (30_011, long[-1]["loss"])
    assert np.all(np.diff(steps) > 0)


def test_the_trend_follows_a_straight_line_and_skips_gaps():
    values = np.full(60, 2.0)
    values[20] = np.nan
    np.testing.assert_allclose(curves.trend_of(values), 2.0, rtol=1e-12)  # rounding of a weighted mean


@pytest.mark.first(3)
@pytest.mark.parametrize("name", ["dollar$x_{$", "back\\slash", "100%", "new\nline"])
def test_a_workdir_of_any_name_is_a_title(tmp_path, name):
    curves.draw(str(tmp_path / "curves.png"), points(3), title=name)
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    "values, explanation",
    [
        ({}, "unigram baseline: token frequencies and the form of the targets"),
        ({"masked_loss": 5.0}, "baseline: token frequencies, the form of the targets and copying"),
    ],
)
def test_the_baseline_of_a_masked_loss_copies(tmp_path, monkeypatch, values, explanation):
    lines = points(3) + [{"step": 3, "split": "valid", "loss": 4.0, **values}]
    loss, *_ = lines_drawn(tmp_path, monkeypatch, lines, baseline={"loss": 3.5})
    assert [text.get_text() for text in loss.texts] == [explanation]
