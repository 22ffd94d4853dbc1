"""Tests that the header lists the whole recipe, and warns about settings that are probably mistakes."""

import dataclasses
import sys
import types

import jax
import pytest

from pretrainax.adapt import LoRA, PromptTuning
from pretrainax.config import LayersConfig, UserError
from pretrainax.data.objectives import CausalLM
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import PythonDocs, SourceMixture, TextFiles
from pretrainax.runs import header
from pretrainax.runs.export_check import ExportCheck
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.mesh import make_mesh
from pretrainax.tasks import Classification
from pretrainax.training.run import Run
from tests.support import tiny
from tests.support.built import build_run


@pytest.fixture(scope="module")
def run(text, cache) -> Run:
    """Builds a run of 40 steps of 8 rows."""
    experiment = tiny.get_config("gpt")
    experiment.data.source.path, experiment.data.cache_dir = str(text), str(cache)
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        return build_run(experiment, prepare(experiment), mesh, Watchdog())


def rows(run: Run, epochs: tuple[float, ...] = (0.5,), papers_source: str = "", **changes) -> list[tuple[str, str]]:
    """Returns the header of a run with a changed config, which reads its text for `epochs` epochs."""
    experiment = dataclasses.replace(run.experiment)
    for path, value in changes.items():
        part, _, field = path.rpartition("__")
        if part:
            setattr(experiment, part, dataclasses.replace(getattr(experiment, part), **{field: value}))
        else:
            setattr(experiment, field, value)
    batches = types.SimpleNamespace(epochs=epochs)
    with jax.set_mesh(run.mesh):
        changed = dataclasses.replace(run, experiment=experiment, train_batches=batches)
        return header.rows(changed, header.Paper(papers_source))


def test_deviations_are_one_row_and_none_where_nobody_knows(run):
    said = header.rows(run, header.Paper(deviations="the source has growing batches"))
    assert ("deviations", "the source has growing batches") in said and said[-1][0] == "deviations"
    assert "deviations" not in dict(header.rows(run))


def test_the_numbers_of_values_by_source_are_one_row_and_none_where_nobody_knows(run):
    counts = "3 values from released code, 0 from the paper, 2 recalled (source not checked), 1 chosen by PretrainAX"
    assert ("recipe", counts) in header.rows(run, header.Paper(recipe=counts))
    assert "recipe" not in dict(header.rows(run))


def warnings(*args, **kwargs) -> list[str]:
    return [value for name, value in rows(*args, **kwargs) if name == "WARNING"]


def test_layers_that_stay_as_they_are_drawn_or_never_begin_are_a_warning(run):
    assert warnings(run, layers=LayersConfig(rate_decay=0.5, unfreeze_every=13)) == []  # 3 · 13 < 40
    (line,) = warnings(run, layers=LayersConfig(unfreeze_every=14))
    assert line.startswith("NOT ALL ARE TRAINED: with config.layers.unfreeze_every 14 the lowest layer begins after 42")
    assert warnings(run, layers=LayersConfig(unfreeze_every=14, frozen_embeddings=True, frozen=1))[1:] == []
    (line,) = warnings(run, layers=LayersConfig(frozen=1))
    assert line.startswith("FROZEN AT RANDOM: config.layers has the first block frozen, but config.checkpoint.init_f")
    assert warnings(run, layers=LayersConfig(frozen=1), checkpoint__init_from="runs/a") == []


def test_the_layers_have_a_row_with_the_parameters_that_are_trained(run):
    assert "layers" not in dict(rows(run))
    said = dict(rows(run, layers=LayersConfig(rate_decay=0.5, frozen=2, frozen_embeddings=True)))["layers"]
    norm = 2 * run.experiment.model.d_model  # The last norm; the output matrix is the embedding.
    assert said == (
        "rate · 0.5^(layers above); the embeddings and the first 2 blocks frozen; "
        f"{norm} of {run.parameters:,} parameters are trained"
    )


def test_it_names_source_tokens_epochs_objective_tokenizer_optimizer_and_schedule(run, text):
    said = dict(rows(run))
    assert said["source"] == f"TextFiles(path='{text}')"
    assert said["run"] == "40 steps, 10.2 k tokens, 0.5 epochs"  # 8 rows of 32 tokens per step
    assert said["objective"] == "CausalLM()" and said["tokenizer"] == "ByteBPE(vocab_size=400), 400 ids"
    assert said["optimizer"] == "AdamW(learning_rate=0.003), peak learning rate 3.0e-3"
    assert said["schedule"] == "WarmupCosine(warmup_steps=5), warmup over 5 steps"
    assert "WARNING" not in said


def test_the_length_of_fine_tuning_is_that_of_its_records(run):
    corpus = types.SimpleNamespace(num_records=8_551)
    prepared = dataclasses.replace(run.prepared, train=(corpus,))
    experiment = dataclasses.replace(run.experiment, objective=Classification(labels=("a", "b")))
    experiment.train = dataclasses.replace(experiment.train, steps=801)
    changed = dataclasses.replace(run, experiment=experiment, prepared=prepared)
    assert header._length(changed, "3.3 M tokens", "3 epochs") == (
        "3 epochs of 8,551 records = 801 steps, 3.3 M tokens; validation every 10 and checkpoint every 5"
    )


@pytest.mark.parametrize(
    "records, objective, is_warned",
    [((1,), Classification(), True), ((10, 10), Classification(), False), ((1,), CausalLM(), False)],
)
def test_a_task_that_few_records_validate_is_a_warning(records, objective, is_warned, run):
    """By default a source holds out 1 % of its records: 1 of 100."""
    valid = tuple(types.SimpleNamespace(num_records=count) for count in records)
    experiment = dataclasses.replace(run.experiment, objective=objective)
    prepared = dataclasses.replace(run.prepared, valid=valid)
    found = list(header._few_records(dataclasses.replace(run, experiment=experiment, prepared=prepared)))
    assert len(found) == is_warned
    assert not found or found[0].startswith("ONLY 1 VALIDATION RECORDS: metrics and the best checkpoint are mostly")


def test_epochs_are_those_of_the_batches_of_the_run(run):
    read = run.experiment.train.steps * run.experiment.train.global_batch_size
    assert run.train_batches.epochs == (read / run.train_batches.rows_per_epoch,)


def test_the_built_in_text_is_called_a_trial_with_the_flag_of_the_papers(run):
    flag = "HuggingFace(path='allenai/c4', name='en')"
    said = dict(rows(run, papers_source=flag, data__source=PythonDocs()))["source"]
    size = sum(corpus.num_bytes for corpus in (*run.prepared.train, *run.prepared.valid)) / 1e6
    assert said == (
        f"PythonDocs(): a smoke test on {size:.0f} MB of Python's documentation; for the dataset of the paper: "
        f'--config.data.source="{flag}"'
    )
    own = dict(rows(run, data__source=PythonDocs()))["source"]
    assert own.endswith("for your own data: --config.data.source=\"TextFiles(path='FOLDER')\"")


@pytest.mark.parametrize("epochs, loud", [(4.0, False), (4.1, True), (1360.0, True)])
def test_more_than_a_few_epochs_are_a_warning(run, epochs, loud):
    said = warnings(run, epochs=(epochs,))
    assert len(said) == loud
    assert not loud or said[0].startswith(f"THE SAME TEXT {header.three_digits(epochs)} TIMES")


def test_of_several_sources_the_one_that_is_read_too_often_is_named(run):
    source = SourceMixture((TextFiles("web"), TextFiles("books")))
    (said,) = warnings(run, epochs=(0.1, 7.0), data__source=source)
    assert "7 TIMES" in said and "TextFiles(path='books')" in said and "web" not in said


@pytest.mark.parametrize("warmup, loud", [(5, False), (40, False), (41, True), (10_000, True)])
def test_a_warm_up_longer_than_the_run_is_a_warning(run, warmup, loud):
    said = warnings(run, schedule__warmup_steps=warmup)
    assert len(said) == loud
    assert not loud or f"warmup_steps is {warmup:,}, but the run has 40 steps" in said[0]


def test_the_rate_that_a_long_warm_up_ends_at_is_that_of_the_schedule(run):
    (said,) = warnings(run, schedule__warmup_steps=400)
    schedule = dataclasses.replace(run.experiment.schedule, warmup_steps=400)
    assert f"ends at {header.scientific(float(schedule.build(3e-3, 40)(39)))} " in said


def test_warnings_come_last(run):
    names = [name for name, _ in rows(run, epochs=(9.0,), schedule__warmup_steps=400)]
    assert names[-2:] == ["WARNING", "WARNING"] and names.count("WARNING") == 2


def export_rows(run, tuning=None, **changes):
    model = dataclasses.replace(run.experiment.model, **changes)
    return ExportCheck().rows(
        dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, model=model, tuning=tuning))
    )


@pytest.mark.parametrize("changes", [{}, {"use_bias": False}])
def test_the_class_of_the_export_is_said_before_the_first_step(run, changes):
    assert export_rows(run, **changes) == [("exports as", "GPT2LMHeadModel of transformers")]
    assert export_rows(run, tuning=LoRA(), **changes) == export_rows(run, **changes)


def test_what_cannot_be_exported_is_a_warning_before_the_first_step(run):
    ((name, line),) = export_rows(run, norm="rms")
    assert name == "WARNING" and line.endswith("GPT2LMHeadModel of transformers cannot express config.model.norm='rms'")
    assert line.startswith("cannot be exported as a model of transformers: no architecture of transformers")
    ((name, line),) = export_rows(run, tuning=PromptTuning())
    assert name == "WARNING" and line.endswith("plain model: only export --adapter may write it, for peft")


def test_a_model_of_ones_own_has_no_class_of_an_export(run):
    ((name, line),) = ExportCheck().rows(dataclasses.replace(run, model=types.SimpleNamespace()))
    assert name == "WARNING" and line.startswith("load and export build config.model instead of SimpleNamespace, with")


def test_the_class_of_the_export_is_found_without_transformers(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import raises ImportError
    assert export_rows(run)[0][0] == "exports as"


def test_bits_per_byte_that_a_text_does_not_have_are_nothing_to_select_by(run, monkeypatch):
    monkeypatch.setattr(run.validation.valid_batches, "no_target_bytes", "the tokenizer does not tell 'a' from 'A'")
    evaluate = dataclasses.replace(run.experiment.evaluate, select_by="bits_per_byte")
    changed = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, evaluate=evaluate))
    with pytest.raises(UserError, match="which is not available: the tokenizer does not tell 'a' from 'A'"):
        header.print_header(changed, writer=None, first=[])
