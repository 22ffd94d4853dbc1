"""Tests the runs of a grid, their names, and invalid grids."""

import pytest

from pretrainax.config import UserError
from pretrainax.config.grid import describe_seeds, grid_of, swept_numbers
from pretrainax.config.overrides import set_field
from tests.support import tiny

RATES = "optimizer.learning_rate=1e-5,3e-5"


@pytest.fixture
def experiment(text):
    experiment = tiny.get_config("bert")
    experiment.data.source.path = str(text)
    return experiment


def test_seeds_begin_at_that_of_the_config_and_the_config_is_left_as_it_is(experiment):
    experiment.train.seed = 7
    runs = grid_of(experiment, 3, [])
    assert [(run.name, run.seed, run.experiment.train.seed) for run in runs] == [
        (f"seed-{seed}", seed, seed) for seed in (7, 8, 9)
    ]
    assert runs[1].flags == ["--config.train.seed=8"] and experiment.train.seed == 7


def test_a_grid_has_every_pair_and_all_values_of_a_seed_come_first(experiment):
    runs = grid_of(experiment, 2, [f"--config.{RATES}", "train.global_batch_size=8, 16"])
    assert [run.name for run in runs[:5]] == [
        "learning_rate=1e-5,global_batch_size=8,seed-0",
        "learning_rate=1e-5,global_batch_size=16,seed-0",
        "learning_rate=3e-5,global_batch_size=8,seed-0",
        "learning_rate=3e-5,global_batch_size=16,seed-0",
        "learning_rate=1e-5,global_batch_size=8,seed-1",
    ]
    assert len({run.name for run in runs}) == len(runs) == 8
    last = runs[-1]
    assert last.values == {"optimizer.learning_rate": "3e-5", "train.global_batch_size": "16"}
    assert last.flags == [
        "--config.evaluate.halves=True",
        "--config.optimizer.learning_rate=3e-5",
        "--config.train.global_batch_size=16",
        "--config.train.seed=1",
    ]
    assert (last.experiment.optimizer.learning_rate, last.experiment.train.global_batch_size) == (3e-5, 16)


def test_a_sweep_alone_keeps_the_seed_and_its_flags_make_its_config(experiment):
    for run in grid_of(experiment, None, ["schedule=WarmupLinear(warmup_steps=2, final_fraction=0.5), WarmupCosine()"]):
        assert run.seed is None
        assert run.name.startswith("schedule=Warmup") and "/" not in run.name and " " not in run.name
        for flag in run.flags:
            set_field(experiment, *flag.removeprefix("--").split("=", 1))
        assert run.experiment == experiment


def test_several_fields_change_together(experiment):
    runs = grid_of(experiment, None, ["optimizer.learning_rate, optimizer.b2=(1e-3,0.98),(3e-3,0.95)"])
    assert [run.name for run in runs] == ["learning_rate=1e-3,b2=0.98", "learning_rate=3e-3,b2=0.95"]
    assert [(run.experiment.optimizer.learning_rate, run.experiment.optimizer.b2) for run in runs] == [
        (1e-3, 0.98),
        (3e-3, 0.95),
    ]


def test_joint_fields_and_a_single_field_make_every_combination(experiment):
    sweeps = ["optimizer.learning_rate,optimizer.b2=(1e-3,0.98),(3e-3,0.95)", "train.global_batch_size=8,16"]
    assert len({run.name for run in grid_of(experiment, 2, sweeps)}) == 8


@pytest.mark.parametrize(
    "changes, halves",
    [({}, True), ({"select_by": "accuracy"}, True), ({"select_by": "perplexity"}, False), ({"batches": 1}, False)],
)
def test_a_sweep_reports_other_rows_than_it_selects_on_if_the_metric_allows(experiment, changes, halves):
    for name, value in changes.items():
        setattr(experiment.evaluate, name, value)
    metric = grid_of(experiment, None, [RATES])[0].experiment.select_by
    assert metric == f"{changes.get('select_by', 'loss')}{'/half=1' if halves else ''}"
    assert not grid_of(experiment, 2, [])[0].experiment.evaluate.halves  # seeds alone select nothing


def test_swept_numbers_are_found_inside_objects(experiment):
    adamw, lion = grid_of(experiment, None, ["optimizer=AdamW(learning_rate=1e-3),Lion(learning_rate=1e-4)"])
    assert swept_numbers(adamw)["optimizer.learning_rate"] == ("/AdamW", 1e-3)
    assert swept_numbers(lion)["optimizer.learning_rate"] == ("/Lion", 1e-4)


def test_values_that_a_folder_cannot_be_called_stay_apart(experiment):
    runs = grid_of(experiment, None, ["evaluate.prompts=('a/b',),('a:b',),()"])
    assert len({run.name for run in runs}) == 3 and all("/" not in run.name for run in runs)


def test_what_a_seed_decides_is_said_and_what_is_set_apart_stays(experiment):
    assert describe_seeds(experiment) == (
        "each seed is config.train.seed, which controls fresh parameters, the order of the data, dropout, masks"
    )
    experiment.train.order_seed = 3
    assert describe_seeds(experiment).endswith("fresh parameters, dropout, masks; config.train.order_seed stays 3")


@pytest.mark.parametrize(
    "seeds, sweeps, said",
    [
        (None, ["learning_rate"], '--sweep=learning_rate: give a field and its values, such as --sweep="optim'),
        (None, ["=1,2"], "--sweep==1,2: give a field and its values"),
        (None, ["train.steps=1,,2"], "--sweep=train.steps=1,,2: give a field and its values"),
        (None, ["optimizer.lerning_rate=1,2"], "did you mean 'learning_rate'"),
        (None, ["learning_rate=1,2"], "did you mean --config.optimizer.learning_rate"),
        (None, ["train.steps=10,many"], "--config.train.steps=many: it must be of type int"),
        (None, ["train.steps=10,1e1"], "10 and 1e1 are the same value"),
        (None, ["optimizer=1,2"], "cannot read"),
        (None, [RATES, RATES], "--sweep has a field twice"),
        (None, [RATES, "optimizer.learning_rate,optimizer.b2=(1e-3,0.9)"], "--sweep has a field twice"),
        (None, ["train.steps,train.seed=1,2"], "1 must be 2 values in brackets, one for each field"),
        (None, ["train.steps,train.seed=(1,2,3)"], "(1,2,3) must be 2 values in brackets"),
        (None, ["train.steps,train.seed=(1,2),(1,2)"], "(1,2) and (1,2) are the same value"),
        (None, ["layers.rate_decay=0.9,1.1"], "rate_decay=1.1: config.layers.rate_decay is 1.1, it must be in (0, 1]"),
        (None, ["evaluate.select_by=loss,accuracy"], "select by accuracy and loss, which are not comparable"),
        (10**9, ["train.steps=10,20"], "--seeds and --sweep make 2,000,000,000 runs, the maximum is 1,000"),
        (2, ["train.seed=1,2"], "--sweep of train.seed conflicts with --seeds"),
    ],
)
def test_what_is_no_grid_is_one_line(experiment, seeds, sweeps, said):
    with pytest.raises(UserError) as error:
        grid_of(experiment, seeds, sweeps)
    assert said in str(error.value)


def test_seeds_that_decide_nothing_are_refused(experiment):
    for use in ("init", "order", "dropout", "mask"):
        setattr(experiment.train, f"{use}_seed", 1)
    with pytest.raises(UserError, match="--seeds would repeat the same run: config.train.init_seed, "):
        grid_of(experiment, 2, [])
