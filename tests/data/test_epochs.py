"""Tests that epochs and data determine the steps of a run, and that the steps determine warmup and intervals."""

import json

import pytest

from pretrainax.config import AUTO, UserError, dump, grid, load
from pretrainax.config import config_file as config_files
from pretrainax.config.overrides import set_field
from pretrainax.config.validation import complete, validate
from pretrainax.data.objectives import CausalLM
from pretrainax.data.packing import FirstFit, OneEach
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import Csv, JsonLines, SourceMixture, Tsv
from pretrainax.optim import WarmupConstant, WarmupInverseSquareRoot
from pretrainax.tasks import Classification, Regression
from pretrainax.tasks.chunks import Chunks
from pretrainax.tokenization import Characters
from tests.support import tiny


def write(folder, count, kind="jsonl"):
    rows = [{"text": f"word {i} of a text", "label": i % 2} for i in range(count)]
    if kind == "jsonl":
        content = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        content = "".join(f"{row['text']},{row['label']}\n" for row in [{"text": "text", "label": "label"}, *rows])
    path = folder / f"{count}.{kind}"
    path.write_text(content.replace(",", "\t") if kind == "tsv" else content)
    return str(path)


def fine_tuning(folder, count=50, epochs=3.0, **fields):
    """Makes a config that trains on `count` records for a number of epochs."""
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head, experiment.tokenizer = False, Characters()
    experiment.objective, experiment.data.cache_dir = Classification(), str(folder / "cache")
    path = write(folder, count)
    experiment.data.source = JsonLines(path, valid_path=path)
    set_field(experiment, "config.train.budget", f"{epochs} epochs")
    for name, value in fields.items():
        set_field(experiment, f"config.{name.replace('__', '.')}", str(value))
    return experiment


def prepared(experiment):
    complete(experiment)
    validate(experiment)
    prepare(experiment, report=lambda message: None)
    return experiment


def numbers(experiment):
    """Returns the steps, the warmup steps, and the intervals of validations and of checkpoints."""
    e = experiment
    return e.train.steps, e.schedule.warmup_steps, e.evaluate.every, e.checkpoint.every


@pytest.mark.parametrize(
    "count, batch, epochs, wanted",
    [
        (8_551, 32, 3, (801, 80, 268, 268)),  # CoLA, in BERT's recipe
        (50, 8, 3, (18, 1, 7, 7)),
        (50, 8, 0.5, (3, 0, 3, 3)),
        (50, 8, 2.56, (16, 1, 7, 7)),
        (48, 8, 4, (24, 2, 6, 6)),
        (5, 8, 1, (1, 0, 1, 1)),
        (2, 1, 7, (14, 1, 2, 2)),
        (30, 10, 0.7, (2, 0, 2, 2)),
        (100, 10, 0.7, (7, 0, 7, 7)),  # 0.7 · 10 is less than 7 in floats.
    ],
)
def test_steps_are_the_epochs_of_the_records(count, batch, epochs, wanted, tmp_path):
    experiment = prepared(fine_tuning(tmp_path, count, epochs, train__global_batch_size=batch))
    assert numbers(experiment) == wanted
    assert experiment.train.budget is None


@pytest.mark.parametrize("source", [Csv, Tsv, JsonLines])
def test_held_out_and_broken_records_do_not_count(source, tmp_path):
    path = write(tmp_path, 200, {Csv: "csv", Tsv: "tsv", JsonLines: "jsonl"}[source])
    with open(path, "a") as f:
        f.write("broken\n" * 40)
    experiment = fine_tuning(tmp_path, epochs=2)
    experiment.data.source = source(path, valid_fraction=0.25, on_error="skip")
    complete(experiment)
    rows = prepare(experiment, report=lambda message: None).train[0].num_records
    assert 120 < rows < 180 and experiment.train.steps == 2 * rows // 8


def test_numbers_that_are_set_stay(tmp_path):
    experiment = prepared(
        fine_tuning(tmp_path, schedule__warmup_steps=5, evaluate__every=2, checkpoint__every=3, train__accumulate=2)
    )
    assert numbers(experiment) == (18, 5, 2, 3)


def test_intervals_and_warmup_follow_from_given_steps_too(tmp_path):
    experiment = fine_tuning(tmp_path)
    experiment.train.steps, experiment.train.budget = 100, None
    assert numbers(prepared(experiment)) == (100, 10, 7, 7)


def test_preparing_again_changes_nothing_and_the_run_stores_numbers(tmp_path):
    experiment = prepared(fine_tuning(tmp_path))
    (tmp_path / "config.json").write_text(dump(experiment))
    saved = load(str(tmp_path / "config.json"))
    assert saved == experiment and "budget" not in json.loads(dump(experiment))["train"]
    assert numbers(prepared(saved)) == (18, 1, 7, 7) and saved.objective.labels == ("0", "1")


def test_an_epoch_reads_every_window_of_long_texts(tmp_path):
    experiment = fine_tuning(tmp_path, epochs=2)
    experiment.data.sequence_length = 12
    experiment.objective.chunks = Chunks(stride=2)
    complete(experiment)
    corpus = prepare(experiment, report=lambda message: None).train[0]
    assert corpus.num_documents > 50 and experiment.train.steps == 2 * corpus.num_documents // 8


def test_buckets_leave_some_records_out_of_each_epoch(tmp_path):
    experiment = fine_tuning(tmp_path, epochs=2)
    experiment.data.packing = OneEach(buckets=(20,))
    assert prepared(experiment).train.steps in (10, 11, 12)


@pytest.mark.parametrize("packing", [None, FirstFit()])
def test_epochs_of_pretraining_are_those_of_its_rows(packing, tmp_path):
    experiment = tiny.get_config("gpt")
    path = write(tmp_path, 2000)
    experiment.data.source, experiment.data.packing = JsonLines(path, valid_path=path), packing
    experiment.data.cache_dir, experiment.tokenizer, experiment.model.vocab_size = (
        str(tmp_path / "c"),
        Characters(),
        AUTO,
    )
    set_field(experiment, "config.train.budget", "2 epochs")
    data = prepare(experiment, report=lambda message: None)
    rows = batches_of(experiment, data, "train").rows_per_epoch
    assert experiment.train.steps == 2 * rows // 8 and experiment.evaluate.every == -(-rows // 8)
    # A row takes 33 tokens: 32 inputs and the next token.
    assert packing is not None or rows == pytest.approx(data.train[0].num_tokens / 33, abs=2)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"train__steps": 5}, r"config.train.steps is 5 and config.train.budget is '3.0 epochs': set only one of them"),
        ({"train__budget": "0 epochs"}, r"config.train.budget is '0 epochs', it must be greater than 0"),
        (
            {"train__budget": "-2 epochs"},
            r"config.train.budget is '-2 epochs', it must be a number and a unit, such as",
        ),
        ({"train__budget": "nan epochs"}, r"config.train.budget is 'nan epochs', it must be a number and a unit"),
        (
            {"train__budget": "1e999 epochs"},
            r"config.train.budget is '1e999 epochs', it must be greater than 0",
        ),
        ({"train__budget": "3"}, r"config.train.budget is '3', it must be a number and a unit, such as '3 epochs'"),
        ({"evaluate__every": -1}, r"config.evaluate.every is -1, it must be at least 0"),
        ({"checkpoint__every": -1}, r"config.checkpoint.every is -1, it must be at least 0"),
        ({"schedule__warmup_steps": -1}, r"config.schedule.warmup_steps is -1, it must be at least 0"),
        ({"phases": "(Phase(share=0.5), Phase())"}, r"config.train.budget does not support config.phases"),
    ],
)
def test_a_mistake_is_one_line(fields, said, tmp_path):
    with pytest.raises(UserError, match=said) as e:
        prepared(fine_tuning(tmp_path, **fields))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"checkpoint__keep_at": "(100,)"}, "config.checkpoint.keep_at has 100: steps must be from 0 to .*, 18"),
        ({"train__profile_steps": "20:21"}, "steps must be from 2, .* to config.train.steps, 18"),
        ({"train__on_spike": "rollback"}, "config.checkpoint.keep 2 covers the last 7 steps"),
        ({"train__budget": "1e9 epochs"}, "config.train.steps is .*, it must be at most 2147483647"),
    ],
)
def test_what_the_number_of_steps_makes_invalid_is_one_line(fields, said, tmp_path):
    with pytest.raises(UserError, match=said):
        prepared(fine_tuning(tmp_path, **fields))


def test_a_mixture_has_no_epoch(tmp_path):
    experiment = tiny.get_config("gpt")
    sources = [JsonLines(write(tmp_path, count), valid_fraction=0.1) for count in (1000, 2000)]
    experiment.data.source = SourceMixture(tuple(sources), weights=(1.0, 1.0))
    experiment.objective, experiment.tokenizer, experiment.model.vocab_size = CausalLM(), Characters(), AUTO
    experiment.data.cache_dir = str(tmp_path / "cache")
    set_field(experiment, "config.train.budget", "2 epochs")
    for check in (validate, lambda experiment: prepare(experiment, report=lambda message: None)):
        with pytest.raises(UserError, match="config.train.budget in epochs, .* mix several streams of rows"):
            check(experiment)
    set_field(experiment, "config.train.budget", "1e9 flops")
    validate(experiment)  # The intervals are fractions of the run.


# --- schedules, grids, configs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [WarmupConstant, WarmupInverseSquareRoot])
def test_a_warmup_that_is_auto_is_a_tenth_of_the_steps(schedule):
    auto, explicit = schedule(AUTO).build(1.0, 50), schedule(5).build(1.0, 50)
    assert [float(auto(step)) for step in range(50)] == [float(explicit(step)) for step in range(50)]
    assert float(schedule(AUTO).build(1.0, 0)(0)) > 0  # The plan of a run has 0 steps before its data exists.


def test_epochs_may_be_swept(tmp_path):
    experiment = fine_tuning(tmp_path)
    complete(experiment)
    runs = grid.grid_of(experiment, None, ["train.budget=1 epoch,2 epochs,4 epochs"])
    budgets = [f"--config.train.budget={n}" for n in ("1 epoch", "2 epochs", "4 epochs")]
    assert [run.flags for run in runs] == [["--config.evaluate.halves=True", budget] for budget in budgets]
    assert [prepared(run.experiment).train.steps for run in runs] == [6, 12, 25]


def test_records_of_your_own_train_for_three_epochs(tmp_path):
    for name in ("classification", "regression"):
        experiment = config_files.read_config_file(f"finetune:{name}")
        path = write(tmp_path, 200)
        experiment.data.source, experiment.data.cache_dir = JsonLines(path, valid_path=path), str(tmp_path / "cache")
        experiment.tokenizer, experiment.model.vocab_size = Characters(), AUTO
        assert numbers(prepared(experiment)) == (18, 1, 7, 7)  # 3 · 200 / 32
        assert isinstance(experiment.objective, Regression if name == "regression" else Classification)


def test_flags_of_a_named_task_may_set_epochs():
    experiment = config_files.read_config_file("finetune:cola")
    assert numbers(experiment) == (801, 80, 80, 80)
    set_field(experiment, "config.train.budget", "2 epochs")
    assert numbers(experiment) == (0, AUTO, 0, 0)
    set_field(experiment, "config.evaluate.every", "100")
    complete(experiment)
    validate(experiment, files=False)
    assert numbers(experiment) == (0, AUTO, 100, 0)
