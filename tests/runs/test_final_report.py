"""At its end, a run writes a table and a plot of its metrics."""

from types import SimpleNamespace

import jax
import pytest
from matplotlib import figure

from pretrainax.config.metric import METRICS
from pretrainax.runs import final_report
from pretrainax.runs.comparison import Comparison, Comparisons
from pretrainax.runs.final_report import FinalReport
from pretrainax.scoring.results import Estimate
from pretrainax.tasks import Instructions
from pretrainax.training.metrics import read_metrics
from pretrainax.training.metrics_writer import MetricsWriter
from tests.support.lines import example_metrics, log_steps

BASELINE = f"  unigram baseline: {final_report._BASELINE}"
MEANING = "  token accuracy: target tokens predicted correctly from the true context (teacher-forced)"


def finish(run, metrics, baseline):
    run.note(final_report.final_table(read_metrics(run.path), metrics, baseline, run.select_by))


def test_whole_sequences_that_are_right_are_shown_beside_their_tokens(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=4)
    run.log(4, "valid", example_metrics(4) | {"accuracy": 0.897, "sequence_accuracy": 0.54})
    metrics = {"loss": 2.5, "perplexity": 2.0, "accuracy": 0.897, "sequence_accuracy": 0.54}
    finish(run, metrics, {"loss": 3.0, "accuracy": 0.125})
    run.close()
    said = capsys.readouterr().err
    assert "token accuracy 89.70% · sequence accuracy 54.00%\n" in said
    assert "  sequence accuracy   54.00%\n" in said
    assert "  token accuracy: target tokens predicted correctly from the true context (teacher-forced)\n" in said
    assert "  sequence accuracy: targets with all tokens predicted correctly, as greedy decoding would\n" in said


def test_the_end_is_a_table_beside_the_unigram_baseline(tmp_path, capsys):
    log_steps(tmp_path, range(1, 5))
    run = MetricsWriter(str(tmp_path), total_steps=4, resume_step=4)
    run.close()
    capsys.readouterr()
    finish(run, {"loss": 2.0, "perplexity": 7.389, "accuracy": 0.5}, {"loss": 3.0, "accuracy": 0.125})
    assert capsys.readouterr().err.splitlines() == [
        "",
        "                              model   unigram baseline",
        "  training loss, last line   2.5000",
        "  validation loss            2.0000             3.0000",
        "  perplexity                   7.39              20.09",
        "  token accuracy             50.00%             12.50%",
        "",
        MEANING,
        BASELINE,
        "",
    ]


def test_of_text_there_are_figures_where_not_all_targets_are_text(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=4)
    finish(run, {"loss": 2.0, "text_loss": 2.5, "text_accuracy": 0.25}, {"loss": 3.0, "text_loss": 4.0})
    said = capsys.readouterr().err
    assert "  loss of text       2.5000             4.0000\n  accuracy of text   25.00%\n" in said
    assert "  loss of text: nats per target token of text, without sentinels, end tokens and [SEP]\n" in said
    same = {"loss": 2.0, "text_loss": 2.0 + 1e-9, "text_accuracy": 0.25, "bits_per_byte": 1.5, "text_loss/source=x": 1}
    run.log(4, "valid", same)
    assert capsys.readouterr().err == "step 4/4 · validation loss 2.0000 · bits per byte 1.5000\n"
    finish(run, same | {"loss/source=x": 1.0}, {})
    assert "loss of text" not in capsys.readouterr().err
    run.close()


def test_nothing_that_is_measured_is_missing_in_the_table(tmp_path, capsys):
    """The table has metrics of the whole validation, of a source, and of a head in another package."""
    figures = {name: 0.25 for name in (*METRICS, "my_loss", "my_accuracy")} | {"text_loss": 0.5}
    parts = {f"{name}/source={of}": 0.5 for name in ("loss", "accuracy", "pair_loss") for of in ("web", "books")}
    run = MetricsWriter(str(tmp_path), total_steps=4, select_by="pair_loss")
    run.log(3, "train", {"loss": 2.0, "pair_loss": 0.125})
    finish(run, figures | parts | {"loss/denoiser=R-0.15-3": 0.75}, {})
    run.close()
    said = capsys.readouterr().err.partition("\n\n")[2]
    whole, by_source, by_denoiser, notes, *_ = said.split("\n\n")
    assert len(whole.splitlines()) == 1 + 2 + len(figures)  # a header, and two training losses
    trained = "  training loss, last line        2.0000\n  training pair loss, last line   0.1250\n"
    assert trained in whole
    assert "  my loss                         0.2500" in whole and "  my accuracy                     25.00%" in whole
    assert [line.split() for line in by_source.splitlines()] == [
        ["by", "source", "loss", "token", "accuracy", "pair", "loss"],
        ["web", "0.5000", "50.00%", "0.5000"],
        ["books", "0.5000", "50.00%", "0.5000"],
    ]
    assert by_denoiser.splitlines() == ["  by denoiser     loss", "  R-0.15-3      0.7500"]
    assert "  pair accuracy: pairs of segments with the correct label" in notes.splitlines()


def test_the_end_is_a_table_without_a_baseline_too(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=4)
    finish(run, {"loss": 2.0, "perplexity": 7.389, "accuracy": 0.5}, {})
    run.close()
    assert capsys.readouterr().err.splitlines()[1:3] == ["                     model", "  validation loss   2.0000"]


def test_the_training_loss_is_the_same_in_table_picture_and_file(tmp_path, capsys, monkeypatch):
    run = MetricsWriter(str(tmp_path), total_steps=40)
    for step in range(1, 41):
        run.log(step, "train", example_metrics(step) | {"loss": 3.0 + 0.25 * (step % 2)})
    written = []
    monkeypatch.setattr(figure.Figure, "text", lambda self, x, y, text, **style: written.append(text))
    final_report.draw_curves(run.workdir, "", {"loss": 3.0}, run.select_by)
    finish(run, {"loss": 2.0}, {})
    run.close()
    assert read_metrics(run.path)[-1]["loss"] == 3.0
    assert written[written.index("training loss") - 1] == "3.000"
    assert "training loss, last line   3.0000\n" in capsys.readouterr().err


@pytest.mark.parametrize("of_text, panels", [(2.0, []), (2.5, ["text loss, nats per target"])])
def test_a_loss_that_is_the_loss_of_text_too_is_drawn_once(tmp_path, monkeypatch, of_text, panels):
    pictures = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda picture, *args, **kwargs: pictures.append(picture))
    run = MetricsWriter(str(tmp_path), total_steps=4)
    for split in ("train", "valid"):
        run.log(4, split, example_metrics(4) | {"loss": 2.0, "text_loss": of_text})
    final_report.draw_curves(run.workdir, "", None, run.select_by)
    run.close()
    assert [panel.get_title(loc="left") for panel in pictures[0].axes[3:]] == panels


def test_the_table_has_errors_and_gains_beside_the_figures(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=4)
    compared = Comparisons(
        {
            "loss": Comparison(Estimate(2.0, 0.125), 3.0, Estimate(1.0, 0.0625)),
            "accuracy": Comparison(Estimate(0.5, 0.01), 0.125, Estimate(0.375, 0.02)),
            "masked_loss": Comparison(Estimate(2.5, None), 2.25, Estimate(-0.25, None)),
        },
        "24 rows of 1 document",
    )
    metrics = {"loss": 2.0, "accuracy": 0.5, "loss_tokens": 7, "masked_loss": 2.5}
    baseline = {name: x.baseline for name, x in compared.metrics.items()}
    run.note(final_report.final_table([], metrics, baseline, "loss", compared))
    run.close()
    assert capsys.readouterr().err.splitlines() == [
        "",
        "                     model        ±   baseline      gain        ±",
        "  validation loss   2.0000   0.1250     3.0000   +1.0000   0.0625",
        "  token accuracy    50.00%    1.00%     12.50%   +37.50%    2.00%",
        "  target tokens          7",
        "  masked loss       2.5000              2.2500   -0.2500",
        "",
        MEANING,
        "  masked loss: nats per target at [MASK], where the input hides the target",
        f"  baseline: {final_report._COPYING}",
        "  ±: standard error over 24 rows of 1 document; gain: positive if the model is better",
        "",
    ]


def test_a_run_of_two_processes_says_why_generated_text_has_no_baselines(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    task, notes = Instructions(), []
    experiment = SimpleNamespace(select_by="loss", validation_objective=task, checkpoint=None)
    experiment.evaluate = SimpleNamespace(average=0)
    validation = SimpleNamespace(valid_batches=SimpleNamespace(streams=[SimpleNamespace(objective=task)]))
    run = SimpleNamespace(experiment=experiment, validation=validation, is_primary=False, validated=lambda state: state)
    run.peers = SimpleNamespace(agree=lambda is_stopping: is_stopping)
    loop = SimpleNamespace(run=run, is_stopping=False, note=notes.append, workdir=str(tmp_path))
    FinalReport().on_end(loop, None, {"loss": 1.0})
    assert notes[1:] == [
        "no baselines: the run has 2 processes, but the baselines of generated text need one; "
        "python -m pretrainax.evaluate in one process computes them"
    ]
