"""Tests that the steps of an arm follow from its budget, and that their predicted cost equals the cost of a run."""

import json

import pytest

from pretrainax.config import UserError
from pretrainax.studies.arms import configured, length_flags
from pretrainax.studies.budgets import ArmCost, lengths_of
from pretrainax.studies.study import Arm, Budget, Contrast, Final, Study
from pretrainax.studies.trainer import Trainer
from tests.support.runs import TINY, write_text
from tests.support.tiers import few


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns the flags of a text and an empty cache."""
    folder = tmp_path_factory.mktemp("budgets")
    return (f"--config.data.source.path={write_text(folder / 'text')}", f"--config.data.cache_dir={folder / 'cache'}")


def study(*arms: Arm, **budget) -> Study:
    return Study("Which?", arms, Budget(**budget), (), Contrast("loss", arms[0].name, arms[-1].name), final=Final())


ELECTRA = (
    "--config.model.num_layers=2",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
    "--config.model.num_heads=4",
    "--config.model.embedding_dim=16",
    "--config.data.sequence_length=32",
    "--config.train.global_batch_size=8",
    "--config.tokenizer=WordPiece(vocab_size=400)",
    "--config.data.source=TextFiles(path='')",
)
ARMS = {
    "sophia": Arm("sophia", f"{TINY}:gpt", ("--config.optimizer=Sophia(interval=3)", "--config.train.attention=xla")),
    "gpt": Arm("gpt", f"{TINY}:gpt"),
    "t5": Arm("t5", f"{TINY}:t5"),
    "phases": Arm("phases", f"{TINY}:gpt", ("--config.phases=(Phase(share=0.5, sequence_length=16), Phase())",)),
    "electra": Arm("electra", "electra_small", ELECTRA),
}


@pytest.mark.parametrize("name", few(list(ARMS), ["sophia"]))
def test_predicted_flops_are_those_of_the_run(name, data, tmp_path):
    arm = ARMS[name]
    arm = Arm(name, arm.config, (*arm.flags, *data))
    predicted = ArmCost(arm, Budget(flops=1e12)).at(steps=7)
    assert Trainer().train(configured(arm, length_flags(configured(arm), 7)), str(tmp_path / "run")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert predicted.flops == [line["flops"] for line in lines if line["split"] == "train"][-1]


def test_arms_with_equal_budgets_have_steps_that_cost_it(data):
    one, other = (Arm(name, ARMS[name].config, (*ARMS[name].flags, *data)) for name in ("gpt", "sophia"))
    lengths = lengths_of(study(one, other, flops=6e9), {})
    for length in lengths.values():
        assert 0.98 * 6e9 < length.flops <= 6e9
    # Sophia's Hessian costs 8/3 gradients at every third step. The tolerance is one of Sophia's 56 steps.
    assert lengths["gpt"].steps / lengths["sophia"].steps == pytest.approx(1 + 8 / 9, rel=0.02)


def test_a_budget_in_bytes_is_a_number_of_bytes(data):
    arm = Arm("gpt", f"{TINY}:gpt", data)
    length = lengths_of(study(arm, arm, bytes=6e4), {})["gpt"]
    assert length.text_bytes == pytest.approx(6e4, rel=0.02) and length.epochs < 1


def test_a_budget_in_seconds_uses_the_measured_speed(data):
    arm = Arm("gpt", f"{TINY}:gpt", data)
    assert lengths_of(study(arm, arm, seconds=60.0), {"gpt": 0.25})["gpt"].steps == 240


@pytest.mark.parametrize("steps", [1001, 1003])
def test_a_budget_of_exactly_n_steps_is_n_steps(steps, data):
    """1000 * (1001 / 1000) is below 1001."""
    assert ArmCost(Arm("gpt", f"{TINY}:gpt", data), Budget(seconds=steps), 1.0).length().steps == steps


@pytest.mark.parametrize(
    "budget, message",
    [
        ({"flops": 3e7}, "the arm gpt cannot have budget.flops 3e+07: the cost of 1 step is"),
        ({"tokens": 1e6}, "the corpus of the arm gpt is too small for the budget"),
    ],
)
def test_impossible_budgets(data, budget, message):
    arm = Arm("gpt", f"{TINY}:gpt", data)
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        lengths_of(study(arm, arm, **budget), {})


def test_the_schedule_keeps_its_shape():
    flags = ("--config.train.steps=1000", "--config.schedule=WarmupStableDecay(warmup_steps=100, decay_steps=200)")
    arm = Arm("gpt", f"{TINY}:gpt", flags)
    experiment = configured(arm, length_flags(configured(arm), 50))
    assert (experiment.train.steps, experiment.schedule.warmup_steps, experiment.schedule.decay_steps) == (50, 5, 10)
    assert experiment.evaluate.every == 5
