"""Tests ladders: the sizes and branches of a file, the registered prediction, and runs that resume."""

import dataclasses
import json
import os
import re

import numpy as np
import pytest

from pretrainax import zoo
from pretrainax.config import UserError, dump, resolve_auto
from pretrainax.scaling.compute_optimal import count_parameters, text_tokens
from pretrainax.scaling.fit import Fit
from pretrainax.scaling.law_intervals import Intervals
from pretrainax.scaling.power_laws import LossLaw, law_of
from pretrainax.studies.arms import configured
from pretrainax.studies.ladder import command, registration
from pretrainax.studies.ladder.jobs import LadderJob, leave_trunk, perform_rung
from pretrainax.studies.ladder.ladder import Ladder, read_ladder
from pretrainax.studies.ladder.report import write_report
from pretrainax.studies.ladder.rungs import Rungs, size_arm, size_flags
from pretrainax.studies.trainer import Trainer
from tests.support.runs import TINY, assert_same_run, write_text

PLANTED = LossLaw(1.5, 30.0, 0.3, 60.0, 0.25, "planted", with_embeddings=False)
FILE = """
config = "{config}"
flags = ["--config.data.source.path={text}", "--config.data.cache_dir={text}/../cache"]
widths = [32, 48, 64]
tokens = [26400, 52800, 105600]
rate = {{parameters = 1e5}}
held_out = {{width = 128, tokens = 330000}}
{more}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("ladder") / "text")


def write_file(folder, text, family="gpt", more="", **changes) -> str:
    content = FILE.format(config=f"{TINY}:{family}", text=text, more=more)
    for before, after in changes.values():
        assert before in content
        content = content.replace(before, after)
    path = folder / "ladder.toml"
    path.write_text(content)
    return str(path)


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_sizes_and_rates_follow_the_width(family, text, tmp_path):
    ladder, base = read_ladder(write_file(tmp_path, text, family))
    sizes = {}
    for width in (32, 64, 128):
        experiment = configured(size_arm(ladder, base, width))
        resolve_auto(experiment, 400)
        sizes[width] = count_parameters(experiment.model)[1]
        assert experiment.model.num_heads == width // 16 and experiment.model.d_ff == 2 * width
        # The rate has four digits.
        expected = base.optimizer.learning_rate * (sizes[width] / 1e5) ** (-1 / 3)
        assert experiment.optimizer.learning_rate == pytest.approx(expected, rel=1e-3)
    # Parameters grow with width², or faster if the number of layers grows too. Biases and norms grow with the width.
    assert 3.8 <= sizes[64] / sizes[32] <= 6 and 3.8 <= sizes[128] / sizes[64] <= 8


@pytest.mark.parametrize("preset, flag", [("qwen3_30b_a3b", "d_ff=48"), ("st_moe_l", "dense_after=352")])
def test_experts_keep_their_ratio_to_the_width(preset, flag):
    """Tests experts of 768 in a width of 2,048, and a feed-forward of 2,816 after experts in a width of 1,024."""
    assert f"--config.model.experts.{flag}" in size_flags(zoo.preset(preset), 128, 16)


@pytest.mark.parametrize(
    "change, problem",
    [
        (("[32, 48, 64]", "[32, 64]"), "widths is"),
        (("[32, 48, 64]", "[32, 40, 64]"), "head_width is 16, it must be a divisor"),
        (("parameters = 1e5", "parameters = 0.0"), r"rate.parameters is 0.0"),
        (("[26400, 52800", "[52800, 26400"), "tokens is"),
        (("[26400, 52800", "[nan, 52800"), "tokens is"),
        (("330000", "inf"), "held_out.tokens is inf"),
        (("330000", "-1"), "held_out.tokens is -1"),
        (("widths", "width"), "width is no field"),
        (("32, 48, 64", "32, 48, 64.5"), "widths"),
        (('cache"]', "cache\", '--config.evaluate.patience=3']"), "config.evaluate.patience would end"),
    ],
)
def test_mistakes_in_a_file_are_errors(change, problem, text, tmp_path):
    with pytest.raises(UserError, match=problem):
        read_ladder(write_file(tmp_path, text, change=change))


def test_a_model_whose_sizes_are_not_defined_is_an_error(text, tmp_path):
    change = ('cache"]', "cache\", '--config.model.embedding_dim=16']")
    with pytest.raises(UserError, match="config.model.embedding_dim is set: the sizes of a ladder do not define it"):
        read_ladder(write_file(tmp_path, text, "bert", change=change))


# --- branches -------------------------------------------------------------------------------------------------------


def trained(text, folder, steps, decay, keep=()):
    flags = [f"--config.data.source.path={text}", f"--config.data.cache_dir={text}/../cache", "--config.trackers=()"]
    flags += [
        f"--config.train.steps={steps}",
        f"--config.checkpoint.keep_at={keep}",
        "--config.evaluate.every=12",
        "--config.checkpoint.every=12",
    ]
    flags += [f"--config.schedule=WarmupStableDecay(warmup_steps=2, decay_steps={decay})"]
    return LadderJob(folder, f"{TINY}:gpt", tuple(flags))


@pytest.mark.slow
def test_a_branch_equals_a_run_of_its_length(text, tmp_path):
    trainer = Trainer()
    trunk, whole = trained(text, "trunk", 12, 3, keep=(6,)), trained(text, "whole", 8, 2, keep=(6,))
    branch = whole._replace(folder="branch", start=("trunk", 6))
    for job in (trunk, whole, branch):
        assert perform_rung(job, str(tmp_path), trainer.train) == 0
    assert_same_run(tmp_path / "branch" / "run", tmp_path / "whole" / "run")


def test_a_copy_that_was_killed_starts_again(tmp_path):
    for name in ("checkpoints/6", "tokenizer"):
        (tmp_path / "trunk" / name).mkdir(parents=True)
    (tmp_path / "trunk" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "run.copying" / "checkpoints").mkdir(parents=True)
    leave_trunk(str(tmp_path / "trunk"), 6, str(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir() and not (tmp_path / "run.copying").exists()


# --- a whole ladder, whose runs take no time --------------------------------------------------------------------------


class FakeWorker:
    """Performs the requests of the queue in this process; after `fail` runs, an interrupt follows."""

    fail, done = 10**9, 0

    def __init__(self, workdir):
        self.workdir, self.num_signals = workdir, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, request):
        if "speed" in request:
            return {"speed": {"step_seconds": 0.1, "fixed_seconds": 1.0, "devices": "1 x cpu"}}
        if FakeWorker.done >= FakeWorker.fail:
            raise KeyboardInterrupt
        FakeWorker.done += 1
        return {"code": perform_rung(LadderJob(**request["rung"]), self.workdir, self.train)}

    @staticmethod
    def train(experiment, folder):
        """Writes the files of a run; the loss follows the planted law with 0.1 % noise."""
        resolve_auto(experiment, 400)
        os.makedirs(os.path.join(folder, "tokenizer"), exist_ok=True)
        for step in experiment.checkpoint.keep_at:
            os.makedirs(os.path.join(folder, "checkpoints", str(step)))
        size, tokens = count_parameters(experiment.model)[1], text_tokens(experiment)
        noise = np.random.default_rng([size, int(tokens)]).standard_normal()
        loss = PLANTED.loss(size, tokens) * np.exp(0.001 * noise)
        line = {"step": experiment.train.steps, "split": "valid", "loss": loss}
        for name, content in (("config.json", dump(experiment)), ("metrics.jsonl", json.dumps(line) + "\n")):
            with open(os.path.join(folder, name), "w") as f:
                f.write(content)
        return 0


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(command, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "done", 0)
    return monkeypatch


@pytest.mark.slow  # The fits take 30 s.
def test_a_ladder_predicts_its_held_out_run_and_continues_after_a_kill(fake, text, tmp_path, capsys):
    path, workdir = write_file(tmp_path, text), str(tmp_path / "ladder")
    assert command.run(path, workdir, go=False) == 0
    assert "held-out/steps-1250" in capsys.readouterr().out and not os.path.exists(f"{workdir}/rungs")
    fake.setattr(FakeWorker, "fail", 9)  # The ninth run is the last rung.
    with pytest.raises(KeyboardInterrupt):
        command.run(path, workdir, go=True)
    registered = (tmp_path / "ladder" / "prediction.json").read_bytes()
    assert not os.path.exists(f"{workdir}/held-out/steps-1250/run")
    fake.setattr(FakeWorker, "fail", 10)
    assert command.run(path, workdir, go=True) == 0 and FakeWorker.done == 10
    assert (tmp_path / "ladder" / "prediction.json").read_bytes() == registered
    score = json.loads((tmp_path / "ladder" / "score.json").read_text())
    # The tolerance covers 0.1 % noise of the rungs and of the run, extrapolated.
    assert abs(score["error"]) < 0.01 and score["prediction_sha256"] in capsys.readouterr().out
    report = (tmp_path / "ladder" / "report.md").read_text()
    assert "The held-out run has loss" in report and (tmp_path / "ladder" / "law.png").exists()
    assert len(law_of(workdir).runs) == 9
    with pytest.raises(UserError, match="changed after the start in widths"):
        command.run(write_file(tmp_path, text, change=("[32, 48, 64]", "[32, 64, 96]")), workdir, go=True)
    write_file(tmp_path, text)
    (tmp_path / "ladder" / "prediction.json").write_bytes(registered.replace(b'"loss"', b'"loss" ', 1))
    with pytest.raises(UserError, match="changed after its registration"):
        command.run(path, workdir, go=True)


@pytest.mark.parametrize("correlation, end", [(0.0, "correlation of 0."), (0.4, "of 0.4, which widens the intervals.")])
def test_only_a_correlation_widens_the_intervals(correlation, end, tmp_path):
    law = dataclasses.replace(PLANTED, correlation=correlation)
    empty = Rungs({}, [], None)
    text = write_report(str(tmp_path), Ladder("gpt", (), ()), empty, Fit(law, Intervals({}, [], 0.01, ())), None)
    assert f"{end}\n" in text


def test_another_config_or_text_after_the_start_is_refused(fake, text, tmp_path):
    path, started = write_file(tmp_path, text), tmp_path / "ladder" / "ladder.json"
    fake.setattr(FakeWorker, "fail", 1)
    with pytest.raises(KeyboardInterrupt):
        command.run(path, str(tmp_path / "ladder"), go=True)
    content = json.loads(started.read_text())
    content["base"]["model"]["d_ff"] = 96  # The config file had another ratio when the ladder started.
    started.write_text(json.dumps(content))
    with pytest.raises(UserError, match=":gpt changed after the start: model.d_ff: 96 -> 64; restore it"):
        command.run(path, str(tmp_path / "ladder"), go=True)
    content["base"]["model"]["d_ff"], (source,) = 64, content["texts"]
    content["texts"][source] = "another text"
    started.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"the text of {re.escape(source)} changed after the start: restore it"):
        command.run(path, str(tmp_path / "ladder"), go=True)


def test_a_held_out_run_without_a_prediction_is_refused(fake, text, tmp_path):
    path = write_file(tmp_path, text)
    os.makedirs(tmp_path / "ladder" / "held-out" / "steps-1250")
    with pytest.raises(UserError, match="no prediction was registered before it"):
        command.run(path, str(tmp_path / "ladder"), go=True)
    assert not registration.is_registered(str(tmp_path / "ladder"))


def test_a_held_out_run_of_another_size_is_refused(fake, text, tmp_path):
    path = write_file(tmp_path, text, change=("330000", "105600"))
    with pytest.raises(UserError, match="times the FLOPs of the largest run, it must have 8 to 16 times"):
        command.run(path, str(tmp_path / "ladder"), go=False)
