"""Tests study files: the resulting studies, and one line for each mistake, with its place in the file."""

import dataclasses
import gzip
import json

import pytest

from pretrainax.config import UserError, to_json
from pretrainax.studies import checks
from pretrainax.studies.arms import tunable
from pretrainax.studies.checks import check_study
from pretrainax.studies.ladder.ladder import read_ladder
from pretrainax.studies.measures import ValidationLoss
from pretrainax.studies.study import Arm, Budget, Contrast, Final, Stop, Study, Tuning
from pretrainax.studies.study_file import read_study, study_from
from pretrainax.tokenization import ByteBPE
from tests.studies.fake_study import LastLoss
from tests.support.runs import ROOT, TINY, write_text

FILE = """
question = "GPT or T5?"
primary = {measure = "loss", one = "gpt", other = "t5"}
margin = 0.01
[[arms]]
name = "gpt"
config = "tests/support/tiny.py:gpt"
flags = ["--config.train.global_batch_size=4"]
[[arms]]
name = "t5"
config = "tests/support/tiny.py:t5"
[budget]
flops = 1e9
tokenizer = "own"
[tuning.grid]
"optimizer.learning_rate" = [0.3, 1, 3]
[final]
seeds = 4
vary = ["init", "order"]
[[measures]]
type = "tests.studies.fake_study:LastLoss"
name = "loss"
"""
RATE = "optimizer.learning_rate"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return f"--config.data.source.path={write_text(tmp_path_factory.mktemp('file') / 'text')}"


def valid(text: str, **changes) -> Study:
    arms = (Arm("gpt", f"{TINY}:gpt", (text,)), Arm("other", f"{TINY}:gpt", (text, "--config.model.num_layers=3")))
    study = Study("Which?", arms, Budget(flops=1e9), (LastLoss("loss"),), Contrast("loss", "gpt", "other"))
    return dataclasses.replace(study, **changes)


def test_a_file_becomes_a_study_and_json_becomes_the_same(tmp_path):
    (tmp_path / "study.toml").write_text(FILE)
    study = read_study(str(tmp_path / "study.toml"))
    assert study.arms[0] == Arm("gpt", "tests/support/tiny.py:gpt", ("--config.train.global_batch_size=4",))
    assert study.measures == (LastLoss("loss"),) and study.tuning == Tuning({RATE: (0.3, 1, 3)})
    assert study.final == Final(seeds=4, vary=("init", "order")) and study.margin == 0.01
    assert study_from(json.loads(json.dumps(to_json(study))), "plan.json") == study


def test_arms_share_the_config_and_flags_at_the_top_level(tmp_path):
    """Tests a file in short form and in long form: configs and fingerprints of all runs are equal."""
    flag, batch = "--config.train.steps=50", "--config.train.global_batch_size=4"
    short = FILE.replace('config = "tests/support/tiny.py:gpt"\n', "")
    short = short.replace("[[arms]]", f'config = "{TINY}:gpt"\nflags = ["{flag}"]\n[[arms]]', 1)
    (tmp_path / "study.toml").write_text(short)
    arms = read_study(str(tmp_path / "study.toml")).arms
    assert arms == (Arm("gpt", f"{TINY}:gpt", (flag, batch)), Arm("t5", "tests/support/tiny.py:t5", (flag,)))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("margin = 0.01", "flags = [1]", "flags[0] is 1, it must be of type str"),
        ('config = "tests/support/tiny.py:t5"\n', "", "arms[1].config is missing"),
        ("seeds = 4", "seed_s = 4", "final.seed_s is no field, did you mean 'seeds' or 'seed'?"),
        ('name = "t5"\n', "", "arms[1].name is missing"),
        ("flops = 1e9", 'flops = "1e9"', "budget.flops is '1e9', it must be of type float"),
        ('["init", "order"]', '["weights"]', "final.vary[0] is 'weights', it must be 'init' or 'order' or"),
        (":LastLoss", ":FirstLoss", "FirstLoss"),
        ("[0.3, 1, 3]", "3", "tuning.grid.optimizer.learning_rate is 3, it must be a tuple"),
        ("[final]", "[final", "is not a TOML file"),
    ],
)
def test_mistakes_of_form(old, new, message, tmp_path):
    assert old in FILE
    (tmp_path / "study.toml").write_text(FILE.replace(old, new))
    with pytest.raises(UserError) as error:
        read_study(str(tmp_path / "study.toml"))
    assert message in str(error.value) and "\n" not in str(error.value) and "study.toml" in str(error.value)


def test_all_mistakes_of_form_are_listed(tmp_path):
    (tmp_path / "study.toml").write_text(FILE.replace("seeds = 4", "seed_s = 4").replace('name = "t5"\n', ""))
    with pytest.raises(UserError, match="arms.1..name is missing; .*final.seed_s is no field"):
        read_study(str(tmp_path / "study.toml"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"final": Final(seeds=1)}, "final.seeds is 1, it must be at least 2"),
        ({"final": Final(seed=999)}, "tuning has the seeds 1000 to 1000 and final 999 to 1003: they must differ"),
        ({"budget": Budget()}, "budget has no amount: set exactly one of flops, tokens"),
        ({"budget": Budget(flops=1e9, tokens=1e6)}, "budget has flops and tokens: set exactly one"),
        ({"budget": Budget(dollars=5.0)}, "budget.dollars needs budget.machine"),
        ({"budget": Budget(flops=1e9, machine="h200x")}, "budget.machine: "),
        ({"tuning": Tuning({"optimizer.rate": (0.5, 1, 2), RATE: (0.5, 1)})}, "optimizer.rate is in no arm, "),
        ({"tuning": Tuning({RATE: (0.5, 2)})}, "it must have 1 and other positive multiples, in order"),
        ({"tuning": Tuning({RATE: (1, float("inf"))})}, "it must have 1 and other positive multiples, in order"),
        ({"tuning": Tuning({"optimizer.b2": (0.9, 1)})}, f"tuning.grid lacks {RATE} of the arm gpt"),
        ({"tuning": Tuning({RATE: (0.5, 1)}, measure="accuracy")}, "tuning.measure is 'accuracy'"),
        (
            {"measures": (ValidationLoss("nats"),), "tuning": Tuning({RATE: (0.5, 1)})},
            "tuning.measure is 'loss', which reads all records of the validation, also those on which nats scores",
        ),
        ({"primary": Contrast("loss", "gpt", "bert")}, "primary.other is 'bert', allowed: gpt, other"),
        ({"primary": Contrast("bytes", "gpt", "other")}, "primary.measure is 'bytes', allowed: loss"),
        ({"primary": Contrast("loss", "gpt", "gpt")}, "primary compares 'gpt' with itself"),
        ({"measures": (LastLoss("loss"), LastLoss("loss"))}, "measures[1].name is 'loss', and so is measures[0].name"),
        ({"margin": 0.0}, "margin is 0.0, it must be above 0"),
        ({"stop": Stop(looks=3)}, "stop.looks is 3, which only the rule 'group_sequential' uses"),
        ({"stop": Stop("group_sequential")}, "stop.looks is 1; it must be at least 2 with stop.rule"),
        ({"stop": Stop("group_sequential", 5)}, "stop.looks is 5; it must be at most 4 for 5 seeds"),
    ],
)
def test_mistakes_of_values(change, message, text):
    study = valid(text, tuning=Tuning({RATE: (0.5, 1, 2)}))
    with pytest.raises(UserError) as error:
        check_study(dataclasses.replace(study, **change), "study.toml")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arm, message",
    [
        (("gpt", f"{TINY}:gpt", ()), "arms[1].name is 'gpt', and so is arms[0].name: names must differ"),
        (("a/b", f"{TINY}:gpt", ()), "arms[1].name is 'a/b', it must consist of letters"),
        (("other", "bret_base", ()), "arms[1] (other): no config file 'bret_base'"),
        (("other", f"{TINY}:gpt", ("--steps=5",)), "arms[1] (other): --steps=5 is no flag of a config field"),
        (("other", f"{TINY}:gpt", ("--config.train.step=5",)), "arms[1] (other): config.train has no field 'step'"),
        (
            ("other", f"{TINY}:gpt", ("--config.evaluate.patience=5",)),
            "config.evaluate.patience would end a run",
        ),
        (("other", f"{TINY}:t5", ()), "budget.tokenizer is 'shared', but the arms gpt and other have ByteBPE"),
    ],
)
def test_mistakes_of_arms(arm, message, text):
    name, config, flags = arm
    study = valid(text)
    with pytest.raises(UserError) as error:
        check_study(dataclasses.replace(study, arms=(study.arms[0], Arm(name, config, (text, *flags)))), "study.toml")
    assert message in str(error.value)


def test_a_measure_that_an_arm_cannot_have(text, monkeypatch):
    def problems(self, experiment):
        yield from ["3 layers are too many"] * (experiment.model.num_layers == 3)

    monkeypatch.setattr(LastLoss, "problems", problems)
    with pytest.raises(UserError, match=r"arms\[1\] \(other\): measures\[0\] \(loss\): 3 layers are too many"):
        check_study(valid(text), "study.toml")


def test_each_arm_must_have_a_tuned_field(text, monkeypatch):
    """Tests an arm without a tuned field.

    The search makes an equal number of trials for each arm, and would search such an arm forever.
    """

    def of_own_optimizer(experiment):  # The learning rate of its optimizer is not a float.
        return {} if experiment.model.num_layers == 3 else tunable(experiment)

    monkeypatch.setattr(checks, "tunable", of_own_optimizer)
    with pytest.raises(UserError, match=rf"the arm other has none of the fields of tuning.grid, \['{RATE}'\]"):
        check_study(valid(text, tuning=Tuning({RATE: (0.5, 1, 2)})), "study.toml")


def test_every_rate_of_muon_must_be_tuned(text):
    study = valid(text, tuning=Tuning({RATE: (0.5, 1, 2)}))
    muon = Arm("other", f"{TINY}:gpt", (text, "--config.optimizer=Muon()"))
    with pytest.raises(UserError, match="tuning.grid lacks optimizer.adam_learning_rate of the arm other"):
        check_study(dataclasses.replace(study, arms=(study.arms[0], muon)), "study.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "studies").glob("*.toml")), ids=lambda path: path.stem)
def test_the_studies_of_the_docs_can_start(path, tmp_path, monkeypatch):
    tokenizer = ByteBPE(vocab_size=264).build(iter(["some words"] * 20))
    tokenizer.save(str(tmp_path / "ladders/gpt/rungs/width-32/seed-0/steps-481/run/tokenizer"))
    for name in ("books/train-00000-of-00008", "books/valid", "books/test", "books/part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write('{"text": "some words"}\n')
    for name in ("sst2", "cola", "conll2000"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        for split in ("train", "test"):
            record = '{"text": "good", "label": 1, "tokens": ["good"], "tags": ["O"]}\n'
            (tmp_path / "tasks" / name / f"{split}.jsonl").write_text(record)
    monkeypatch.chdir(tmp_path)
    if path.stem.startswith("ladder-"):
        assert (read_ladder(str(path))[0].held_out is None) == (path.stem == "ladder-gpt-repeated")
        return
    study = read_study(str(path))
    assert [*check_study(study, str(path))] == [arm.name for arm in study.arms]
