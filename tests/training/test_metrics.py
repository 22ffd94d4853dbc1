"""Tests metrics.jsonl, which is exact and survives kills, the printed lines, and the plots of any metrics."""

import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import pretrainax.models.heads  # noqa: F401  whose metrics are declared
from pretrainax.config import RunFailed
from pretrainax.config.metric import METRICS, Metric
from pretrainax.training import metrics_writer
from pretrainax.training.metrics import (
    meaning,
    metrics_from_loss,
    read_metrics,
    remove_lines_after,
    summarize,
    summarize_parts,
)
from pretrainax.training.metrics_writer import MetricsWriter
from tests.support.lines import example_metrics, log_steps

# --- the file ------------------------------------------------------------------------------------------------------


def test_a_line_is_step_split_and_the_metrics_in_their_order(tmp_path):
    log_steps(tmp_path, [4])
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == json.dumps({"step": 4, "split": "train", **example_metrics(4)})
    assert second == json.dumps({"step": 4, "split": "valid", **example_metrics(4)})


def test_a_line_is_in_the_file_at_once(tmp_path):
    run = MetricsWriter(str(tmp_path), total_steps=2)
    run.log(1, "train", example_metrics(1))
    assert len(read_metrics(run.path)) == 1
    run.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), None])
def test_what_json_cannot_say_is_null(tmp_path, value):
    run = MetricsWriter(str(tmp_path), total_steps=2)
    run.log(1, "train", {"loss": value})
    run.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "split": "train", "loss": None}


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    run = MetricsWriter(str(tmp_path), total_steps=2)
    run.log(1, "valid", {"loss": np.float32(1.5), "loss_tokens": np.float64(3), "skipped": 2})
    run.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "split": "valid", "loss": 1.5, "loss_tokens": 3.0, "skipped": 2}\n'
    )


def test_a_run_that_goes_on_from_an_earlier_step_leaves_the_same_bytes(tmp_path):
    log_steps(tmp_path / "whole", range(1, 11))
    log_steps(tmp_path / "killed", range(1, 8))
    log_steps(tmp_path / "killed", range(6, 11), resume_step=5)
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    log_steps(tmp_path, range(1, 4))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + b'{"step": 4, "spl')
    assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 4
    log_steps(tmp_path, [], resume_step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


DAMAGES = {
    "no JSON": b'{"step": 2, "split"\n',
    "zeros": bytes(40) + b"\n",
    "no UTF-8": b'{"step": 2, "split": "tr\xe1in", "loss": 1.0}\n',
    "nested": b"[" * 100_000 + b"\n",
    "a number": b"7\n",
    "a list": b"[2]\n",
    "empty": b"\n",
    "another step": b'{"step": "2", "split": "train", "loss": 1.0}\n',
    "another loss": b'{"step": 2, "split": "train", "loss": [1.0]}\n',
    "another name": b'{"step": 2, "split": "train", "losr": 1.0}\n',
    "no split": b'{"step": 2, "loss": 1.0}\n',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_left_out_counted_and_kept_aside(damage, tmp_path, capsys):
    log_steps(tmp_path, range(1, 5))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [*lines[:2], DAMAGES[damage], *lines[2:]]
    path.write_bytes(b"".join(damaged))
    capsys.readouterr()
    assert len(read_metrics(str(path))) == len(lines)
    run = MetricsWriter(str(tmp_path), total_steps=4, resume_step=4)
    assert capsys.readouterr().err == f"1 line is damaged in {path} and removed; the original is {path}.damaged\n"
    run.close()
    assert path.read_bytes() == b"".join(lines)
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"".join(damaged)
    MetricsWriter(str(tmp_path), total_steps=4, resume_step=4).close()
    assert capsys.readouterr().err == ""  # warned only once


def test_a_fresh_start_in_the_same_folder_leaves_nothing_of_the_old_run(tmp_path):
    log_steps(tmp_path, range(1, 4))
    log_steps(tmp_path, [], resume_step=0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_only_the_primary_process_writes(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path / "none"), total_steps=2, primary=False)
    run.header([("model", "tiny")])
    run.note("hello")
    run.log(1, "train", example_metrics(1))
    run.close()
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_one_clear_line(tmp_path):
    run = MetricsWriter(str(tmp_path), total_steps=2)
    run._file = open("/dev/full", "w")  # noqa: SIM115  every write to it fails for want of space
    with pytest.raises(RunFailed, match=r"metrics of step 1 to .*metrics.jsonl after [\d,]+ bytes: No space left"):
        run.log(1, "train", example_metrics(1))


# --- printed lines -------------------------------------------------------------------------------------------------


def test_without_a_terminal_a_log_is_a_line(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=206)
    run.log(40, "train", example_metrics(40) | {"loss": 3.2104})
    run.log(40, "valid", example_metrics(40) | {"loss": 3.5})
    run.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 40/206 · loss 3.210 · lr 1.0e-3 · 5,123 tokens/s · ETA 1:23",
        "step 40/206 · validation loss 3.5000 · perplexity 2.00 · token accuracy 25.00%",
    ]


def test_the_utilisation_is_shown_where_it_is_known(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=2)
    run.log(1, "train", example_metrics(1) | {"mfu": 0.412})
    run.close()
    assert "· MFU 41.2% ·" in capsys.readouterr().err


def test_the_remaining_time_counts_evaluations_too(tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 130.0])
    monkeypatch.setattr(metrics_writer.time, "perf_counter", lambda: next(clock))
    run = MetricsWriter(str(tmp_path), total_steps=40)
    run.log(10, "train", example_metrics(10))
    run.log(20, "train", example_metrics(20))  # 10 steps took 30 s, and 20 steps remain.
    run.close()
    assert capsys.readouterr().err.splitlines()[-1].endswith("ETA 1:00")


def test_on_a_terminal_a_bar_moves_and_notes_stand_above_it(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    run = MetricsWriter(str(tmp_path), total_steps=4)
    run.log(2, "train", example_metrics(2))
    run.note("saved")
    run.close()
    last = terminal.getvalue().split("\r")[-1]
    assert "50%" in last and "2/4 · ETA 0:01" in last
    assert "step 2/4 · loss 5.000 · lr 1.0e-3 · 5,123 tokens/s · ETA 0:01\n" in terminal.getvalue()  # this line stays
    assert "saved\n" in terminal.getvalue()


def test_the_header_is_an_aligned_table(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=4)
    run.header([("model", "decoder"), ("parameters", "0.8 M")])
    run.close()
    assert capsys.readouterr().err == "PretrainAX\n  model       decoder\n  parameters  0.8 M\n\n"


def test_a_line_of_training_and_one_of_validation_show_the_figure_that_counts(tmp_path, capsys):
    run = MetricsWriter(str(tmp_path), total_steps=4, select_by="total_loss")
    run.log(1, "train", {"loss": 2.0, "total_loss": 2.5})
    run.log(1, "valid", {"loss": 2.0, "pair_loss": 0.5, "total_loss": 2.5, "loss/source=web": 3.0})
    run.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 1/4 · loss 2.000 · total loss 2.5000",
        "step 1/4 · validation loss 2.0000 · pair loss 0.5000 · total loss 2.5000",
    ]


@pytest.mark.parametrize("figure, label", [("loss", "validation loss"), ("accuracy", "token accuracy")])
def test_a_part_that_counts_is_told_from_the_whole(tmp_path, capsys, figure, label):
    run = MetricsWriter(str(tmp_path), total_steps=4, select_by=f"{figure}/source=web")
    run.log(1, "valid", {"loss": 0.5, "accuracy": 0.5, f"{figure}/source=web": 0.25, f"{figure}/source=books": 1.0})
    run.close()
    parts = capsys.readouterr().err.strip().split(" · ")
    form = ".4f" if figure == "loss" else ".2%"
    assert f"{label} {0.5:{form}}" in parts and parts[-1] == f"{label} of source=web {0.25:{form}}"
    assert len(parts) == 4


def test_importing_it_brings_in_neither_jax_nor_matplotlib():
    code = (
        "import sys, pretrainax.training.metrics_writer; "
        "sys.exit(bool({'jax', 'matplotlib', 'tensorboardX', 'wandb', 'mlflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_of_sums_and_counts():
    sums = {"loss": (6.0, 4.0), "accuracy": (1.0, 4.0), "text_loss": [5.0, 2.0], "bits_per_byte": (9.0, 12.0)}
    metrics = summarize(sums)
    assert metrics == pytest.approx(
        {
            "loss": 1.5,
            "perplexity": math.exp(1.5),
            "bits_per_token": 1.5 / math.log(2),
            "accuracy": 0.25,
            "loss_tokens": 4.0,
            "text_loss": 2.5,
            "bits_per_byte": 0.75,
        }
    )


def test_no_bits_per_byte_where_the_loss_is_no_likelihood_of_the_text():
    assert "bits_per_byte" not in summarize({"loss": (6.0, 4.0), "accuracy": (1.0, 4.0)})


def test_further_sums_are_means_beside_the_loss_and_the_z_loss_is_part_of_none():
    sums = {"loss": (6.0, 4.0), "accuracy": (1.0, 4.0), "z_loss": (9.0, 4.0), "pair_loss": (3.0, 2.0)}
    metrics = summarize(sums | {"my_share": (0.0, 0.0)})
    assert metrics["pair_loss"] == 1.5 and "my_share" not in metrics  # It has no targets.
    assert "z_loss" not in metrics and metrics["loss"] == 1.5


def test_a_batch_without_targets_has_figures_of_nothing():
    heads = ("accuracy", "text_loss", "pair_loss", "pair_accuracy", "replaced_loss", "replaced_recall", "bits_per_byte")
    nothing = {name: (0.0, 0.0) for name in ("loss", *heads)}
    assert summarize(nothing) == {"loss": 0, "perplexity": 1, "bits_per_token": 0, "loss_tokens": 0}
    assert math.isnan(summarize(nothing, math.nan)["perplexity"])
    assert summarize_parts([("source=web",)], [nothing]) == {"loss_tokens/source=web": 0}
    asked = nothing | {"loss": (6.0, 3.0), "replaced_loss": (1.0, 8.0), "replaced_precision": (0.0, 0.0)}
    assert summarize(asked).keys() == summarize(nothing).keys() | {"replaced_loss", "replaced_fraction"}


@pytest.mark.parametrize("loss, finite", [(0.0, 1.0), (700.0, math.exp(700.0)), (1e9, math.exp(700.0))])
def test_perplexity_is_finite_for_any_loss(loss, finite):
    assert metrics_from_loss(loss)["perplexity"] == finite


def test_parts_are_added_before_they_are_divided_and_a_batch_may_be_of_two():
    sums = [{"loss": (4.0, 1.0), "accuracy": (1.0, 1.0)}, {"loss": (0.0, 3.0), "accuracy": (0.0, 3.0)}]
    of_both = summarize_parts([("source=web", "denoiser=R"), ("source=web", "denoiser=S")], sums)
    assert of_both == {
        **{"loss/source=web": 1.0, "accuracy/source=web": 0.25, "loss_tokens/source=web": 4.0},
        **{"loss/denoiser=R": 4.0, "accuracy/denoiser=R": 1.0, "loss_tokens/denoiser=R": 1.0},
        **{"loss/denoiser=S": 0.0, "accuracy/denoiser=S": 0.0, "loss_tokens/denoiser=S": 3.0},
    }
    assert summarize_parts([(), ()], sums) == {}


def test_heads_give_the_sum_that_is_trained_and_the_share_that_was_replaced():
    tokens = {"loss": (6.0, 3.0), "accuracy": (0.0, 3.0)}
    assert summarize(tokens | {"pair_loss": (1.0, 2.0), "pair_accuracy": (1.0, 2.0)})["total_loss"] == 2.5
    replaced = {"replaced_loss": (1.0, 8.0), "replaced_recall": (1.0, 2.0)}
    assert summarize(tokens | replaced)["replaced_fraction"] == 0.25


def test_a_further_head_that_is_trained_is_in_the_total_loss(monkeypatch):
    third = Metric("third_loss", "nats of a head of another package", in_total_loss=True)
    monkeypatch.setitem(METRICS, third.name, third)
    sums = {"loss": (4.0, 2.0), "pair_loss": (1.0, 2.0), "third_loss": (6.0, 2.0), "soft_loss": (1.0, 1.0)}
    assert summarize(sums)["total_loss"] == 2.0 + 0.5 + 3.0


def test_a_figure_of_a_part_means_what_the_whole_does():
    assert meaning("loss/source=web") == "nats per target token, of source=web" and meaning("my_loss") == ""


def test_of_a_file_that_is_not_there_no_line_is_damaged(tmp_path):
    assert remove_lines_after(str(tmp_path / "metrics.jsonl"), step=3) == 0
    assert not list(tmp_path.iterdir())


def test_a_last_line_without_its_end_is_dropped_and_no_damage(tmp_path):
    path, line = tmp_path / "metrics.jsonl", b'{"step": 1, "split": "train", "loss": null}'
    path.write_bytes(line + b"\n" + line)
    assert read_metrics(str(path)) == [{"step": 1, "split": "train", "loss": None}]
    assert remove_lines_after(str(path), step=1) == 0 and path.read_bytes() == line + b"\n"
