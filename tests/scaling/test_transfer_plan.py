"""Tests `plan --transfer_from=RUN`, which gives hyperparameters for a larger run from a tuned run."""

import pytest

from pretrainax.config import Transfer, UserError, dump
from pretrainax.optim import AdamW, Muon
from pretrainax.scaling.transfer_plan import plan_transfer
from tests.support import tiny


@pytest.fixture
def base_run(tmp_path):
    """Writes the config of a run of 40 steps of 8 rows, with width 32 and 2 layers."""
    experiment = tiny.get_config("gpt")
    experiment.optimizer = AdamW(learning_rate=0.01, weight_decay=0.2)
    (tmp_path / "config.json").write_text(dump(experiment))
    return str(tmp_path)


def large(steps):
    experiment = tiny.get_config("gpt")
    model = experiment.model
    model.d_model, model.d_ff, model.num_heads, model.num_layers = 128, 256, 16, 6
    experiment.train.steps = steps
    return experiment


def test_as_many_tokens_keep_batch_rate_and_decay(base_run):
    plan = plan_transfer(large(40), base_run)
    assert plan.run.transfer == Transfer(32, 2)
    assert plan.flags() == [
        '--config.transfer="Transfer(base_width=32, base_depth=2)"',
        '--config.optimizer="AdamW(learning_rate=0.01, weight_decay=0.2)"',
        "--config.train.global_batch_size=8",
        "--config.train.steps=40",
    ]


def test_more_tokens_raise_the_batch_and_the_rate_and_lower_the_decay(base_run):
    tokens = 64
    plan = plan_transfer(large(40 * tokens), base_run)
    growth = 4  # This is the power of 2 next to 64^0.383 = 4.9.
    run = plan.run
    assert (run.train.global_batch_size, run.train.steps) == (8 * growth, 40 * tokens // growth)
    assert run.optimizer.learning_rate == pytest.approx(0.01 * growth**0.5)
    # The product rate · decay · tokens / batch is constant.
    assert run.optimizer.weight_decay == pytest.approx(0.2 * growth**0.5 / tokens)
    assert plan.tokens == tokens * plan.base_tokens


@pytest.mark.parametrize("accumulate, batch", [(4, 8), (3, 6), (16, 16)])
def test_the_batch_includes_all_microbatches(base_run, accumulate, batch):
    experiment = large(40)
    experiment.train.accumulate = accumulate
    plan = plan_transfer(experiment, base_run)
    assert plan.flags()[-2:] == [f"--config.train.global_batch_size={batch}", f"--config.train.steps={320 // batch}"]


def test_the_base_of_a_transferred_run_stays_the_base(tmp_path):
    """Tests a chain small, medium, large, in which the medium run has the rates of the small run."""
    medium = large(40)
    medium.transfer, medium.optimizer = Transfer(32, 2, output_scale=8.0), AdamW(learning_rate=0.01)
    (tmp_path / "config.json").write_text(dump(medium))
    plan = plan_transfer(large(40), str(tmp_path))
    assert plan.run.transfer == Transfer(32, 2, output_scale=8.0)
    assert '--config.transfer="Transfer(base_width=32, base_depth=2, output_scale=8.0)"' in plan.flags()


def test_both_rates_of_muon_and_its_other_options_are_transferred(tmp_path):
    base = tiny.get_config("gpt")
    base.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02, momentum=0.9)
    (tmp_path / "config.json").write_text(dump(base))
    experiment = large(40 * 64)
    experiment.optimizer = Muon()
    plan = plan_transfer(experiment, str(tmp_path))
    (flag,) = [flag for flag in plan.flags() if "optimizer" in flag]
    assert flag.startswith('--config.optimizer="Muon(learning_rate=0.08, momentum=0.9, adam_learning_rate=0.04')
    assert plan.values()["optimizer"]["adam_learning_rate"] == 0.04
    assert "0.04 " in next(line for line in str(plan).splitlines() if line.startswith("input"))


def test_the_table_has_the_rates_of_all_kinds(base_run):
    text = str(plan_transfer(large(40), base_run))
    assert "width × 4, depth × 3, tokens × 1" in text
    assert [word in text for word in ("hidden", "input", "vector", "0.0025", "0.000833")] == [True] * 5


def test_another_optimizer_is_refused(base_run):
    experiment = large(40)
    experiment.optimizer = Muon()
    with pytest.raises(UserError, match="a run with AdamW, and config.optimizer is Muon: use the same one"):
        plan_transfer(experiment, base_run)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run: it has no config.json"):
        plan_transfer(large(40), str(tmp_path))
