"""Tests validation: the metric that selects the best checkpoint, the metrics by part, and a separate objective.

Two models train for a few steps; the other tests only validate fresh parameters.
"""

import contextlib
import dataclasses
import io
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.config import Generator, RunFailed, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import (
    CausalLM,
    MaskedLM,
    NextSentencePrediction,
    ObjectiveMixture,
    PrefixLM,
    ReplacedTokenDetection,
    SequentialDenoising,
    SpanCorruption,
)
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import SourceMixture, TextFiles
from pretrainax.interop.origin import find_origin
from pretrainax.runs import final_report, header
from pretrainax.runs.description import describe
from pretrainax.runs.train import train
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.training.metrics import add_up, read_metrics, summarize
from tests.support import tiny
from tests.support.built import build_run

pytestmark = pytest.mark.slow


def config(variant, objective, text, cache):
    experiment = tiny.get_config(variant)
    experiment.objective, experiment.data.source = objective, TextFiles(path=str(text))
    experiment.data.cache_dir, experiment.mesh.data = str(cache), 8
    experiment.schedule.warmup_steps = 1
    return experiment


def electra(text, cache):
    experiment = config("bert", ReplacedTokenDetection(), text, cache)
    experiment.model.masked_lm_head, experiment.model.replaced_token_head = False, True
    experiment.model.generator = Generator(num_layers=2, d_model=16, d_ff=32, num_heads=2)
    return experiment


# --- the metric that selects a checkpoint ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text, cache, tmp_path_factory):
    """Trains an ELECTRA whose loss weight makes the discriminator worse; returns its folder and its output."""
    experiment, workdir, said = electra(text, cache), tmp_path_factory.mktemp("electra"), io.StringIO()
    experiment.model.generator.loss_weight = -10.0
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 6, 2, 1
    experiment.checkpoint.every = experiment.checkpoint.keep = 1
    experiment.train.on_spike = "stop"  # The loop then stores observations of steps.
    with contextlib.redirect_stderr(said):
        assert train(experiment, str(workdir)) == 0
    return workdir, said.getvalue()


@pytest.fixture
def unlearning(trained):
    return trained[0]


def lines(workdir, split):
    return [line for line in read_metrics(str(workdir / "metrics.jsonl")) if line["split"] == split]


def best(workdir, name):
    return min(lines(workdir, "valid"), key=lambda line: line[name])["step"]


@pytest.mark.slow
def test_the_best_checkpoint_of_an_electra_follows_the_discriminator(unlearning):
    assert (best(unlearning, "loss"), best(unlearning, "replaced_loss")) == (6, 2)
    assert sorted(path.name for path in (unlearning / "checkpoints").iterdir()) == ["2", "6"]  # best and newest
    origin, first = find_origin(f"{unlearning}@best"), lines(unlearning, "valid")[0]
    said = f"step 2, the best by validation replaced_loss: {first['replaced_loss']:.4f}"
    assert origin.description == f"{unlearning}, {said}"


def test_run_json_has_all_figures_and_the_best_of_the_one_that_counts(unlearning):
    first, last = (read_run_json(str(unlearning / "checkpoints" / step)) for step in ("2", "6"))
    valid = lines(unlearning, "valid")[0]
    beside = ("step", "split", "text_tokens", "text_bytes", "tokens", "flops")  # the progress of the run
    assert first["metrics"] == {name: value for name, value in valid.items() if name not in beside}
    assert last["extra"]["select_by"] == "replaced_loss" and last["extra"]["best_loss"] == valid["replaced_loss"]
    assert last["extra"]["evaluations_since_best"] == 2  # patience reads this


def test_spikes_are_looked_for_in_the_discriminators_loss(unlearning):
    recent = read_run_json(str(unlearning / "checkpoints" / "6"))["extra"]["recent"]
    assert [loss for loss, _ in recent] == [line["replaced_loss"] for line in lines(unlearning, "train")]


def test_the_table_of_an_electra_has_all_that_is_measured_beside_always_saying_original(trained):
    workdir, said = trained
    valid = lines(workdir, "valid")[-1]
    table = {" ".join(line.split()[:2]): line.split()[2:] for line in said.splitlines()}
    original = 1 - valid["replaced_fraction"]
    # The slice skips the standard errors.
    assert table["replaced accuracy"][::2][:2] == [f"{valid['replaced_accuracy']:.2%}", f"{original:.2%}"]
    entropy = -original * math.log(original) - (1 - original) * math.log(1 - original)
    assert table["replaced loss"][::2][:2] == [f"{valid['replaced_loss']:.4f}", f"{entropy:.4f}"]
    gain = entropy - valid["replaced_loss"]
    assert float(table["replaced loss"][3]) == pytest.approx(gain, abs=2e-4)  # the difference of two rounded numbers
    assert "WARNING: the model does not beat its baseline\n" in said
    assert "\n  replaced-token detection, nats per token: gain over always 'original' -" in said
    for label in ("precision", "recall", "fraction"):
        assert table[f"replaced {label}"][0] == f"{valid[f'replaced_{label}']:.2%}"
    assert "the best checkpoint is the one with the best validation replaced_loss" in said


# --- by part --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(text, tmp_path_factory):
    """Makes two sources with different words."""
    other = tmp_path_factory.mktemp("other")
    for file in text.iterdir():
        (other / file.name).write_text(file.read_text()[::-1])
    return TextFiles(path=str(text)), TextFiles(path=str(other))


def built(experiment):
    """Builds the run of a config, and fresh parameters."""
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        run = build_run(experiment, prepare(experiment, report=lambda line: None), mesh, Watchdog())
        return run, run.fresh_state().params


def mixed(variant, objective, texts, text, cache):
    experiment = config(variant, objective, text, cache)
    experiment.data.source, experiment.evaluate.batches = SourceMixture(sources=texts, weights=(3.0, 1.0)), 2
    if variant == "bert":
        experiment.model.pair_head, experiment.data.sequence_length = True, 64
    return built(experiment)


@pytest.fixture(scope="module")
def of_spans(texts, text, cache):
    objective = ObjectiveMixture((SpanCorruption(), SequentialDenoising()), (1.0, 1.0))
    return mixed("t5", objective, texts, text, cache)


@pytest.fixture(scope="module")
def of_pairs(texts, text, cache):
    return mixed("bert", NextSentencePrediction(), texts, text, cache)


@pytest.fixture(scope="module")
def of_causal(texts, text, cache):
    return mixed("gpt", ObjectiveMixture((CausalLM(),), (1.0,)), texts, text, cache)


@pytest.fixture(params=["of_spans", "of_pairs", "of_causal"])
def mixture(request):
    return request.getfixturevalue(request.param)


def sums_of(run, params, batches):
    with jax.set_mesh(run.mesh):
        return add_up(
            jax.device_get([run.validation.eval_step(params, put_batch(batch, run.mesh))[0] for batch in batches])
        )


def validated(run, params):
    with jax.set_mesh(run.mesh):
        return run.validate(params)


# The values of these metrics depend on the most frequent prediction of a batch, and therefore on its rows.
OF_BATCHES = ("prediction_spread", "target_spread")


def test_the_pooled_figures_are_those_of_the_same_rows(mixture):
    run, params = mixture
    expected, found = summarize(sums_of(run, params, run.validation.batches())), validated(run, params)
    assert [name for name in found if "/" not in name] == list(expected)
    for name, value in expected.items():
        if name not in OF_BATCHES:
            assert found[name] == pytest.approx(value, rel=1e-5), name  # float32 sums in another order
    assert found["loss_tokens"] == expected["loss_tokens"]


def test_a_validation_without_targets_has_no_loss_so_that_it_is_not_the_best(mixture, monkeypatch):
    run, params = mixture
    step = run.validation.eval_step
    monkeypatch.setattr(run.validation, "eval_step", lambda *of: (jax.tree.map(np.zeros_like, step(*of)[0]), None))
    found = validated(run, params)
    assert found["loss_tokens"] == 0 and all(math.isnan(found[name]) for name in ("loss", "perplexity"))


def test_the_figures_of_a_part_are_those_of_its_rows_alone(mixture):
    """The test repeats each validation row eight times in a separate batch, so the counts are eight times larger."""
    run, params = mixture
    rows, found, by_part = range(2 * 8), validated(run, params), {}
    for row in rows:
        (stream, _), batch = run.validation.valid_batches.schedule[row], run.validation.valid_batches[row // 8]
        alone = {name: np.repeat(x[row % 8 : row % 8 + 1], 8, axis=0) for name, x in batch.items()}
        for part in run.validation.parts[stream]:
            by_part.setdefault(part, []).append(sums_of(run, params, [alone]))
    assert {name.partition("/")[2] for name in found} == {"", *by_part}
    for part, sums in by_part.items():
        for name, value in summarize(add_up(sums)).items():
            if name not in ("perplexity", "bits_per_token", *OF_BATCHES):
                factor = 8 if name == "loss_tokens" else 1
                assert factor * found[f"{name}/{part}"] == pytest.approx(value, rel=1e-5), (name, part)


def test_each_half_of_a_validation_has_the_figures_of_its_batches(text, cache):
    experiment = config("gpt", CausalLM(), text, cache)
    experiment.evaluate.batches, experiment.evaluate.halves = 4, True
    run, params = built(experiment)
    batches, found = list(run.validation.batches()), validated(run, params)
    for half, rows in (("half=1", batches[:2]), ("half=2", batches[2:])):
        for name, value in summarize(sums_of(run, params, rows)).items():
            if name not in ("perplexity", "bits_per_token", *OF_BATCHES):
                assert found[f"{name}/{half}"] == pytest.approx(value, rel=1e-5)  # float32 sums in another order


def test_a_mixture_of_causal_objectives_has_bits_per_byte_of_each_source(of_causal):
    run, params = of_causal
    sources = [part for (part,) in run.validation.parts]
    names = ["bits_per_byte", *(f"bits_per_byte/{source}" for source in sources)]
    assert len(names) == 3 and all(found > 0 for found in map(validated(run, params).get, names))
    for name in names:
        run.experiment.evaluate.select_by = name
        validate(run.experiment)
    run.experiment.evaluate.select_by = ""


def test_a_source_has_its_share_of_the_rows_and_each_objective_too(of_spans):
    run, params = of_spans
    parts = dict.fromkeys(part for parts in run.validation.parts for part in parts)
    assert [part.partition("=")[0] for part in parts] == ["source", "denoiser", "denoiser", "source"]
    assert run.validation.rows == [6, 6, 2, 2]
    sources = [name for name in validated(run, params) if name.startswith("loss_tokens/source")]
    assert len(sources) == 2


def test_what_a_validation_sees_nothing_of_is_said_and_cannot_be_selected_by(of_spans):
    run, _ = of_spans
    source = dataclasses.replace(run.experiment.data.source, stages=((0.5, (1.0, 0.0)),))
    experiment = dataclasses.replace(run.experiment, data=dataclasses.replace(run.experiment.data, source=source))
    run, _ = built(experiment)
    unseen = run.validation.parts[-1][0]
    said = []
    with jax.set_mesh(run.mesh):
        header.print_header(run, SimpleNamespace(header=said.extend), [])
        warning = f"NOT VALIDATED: validation has no row of {unseen}: raise config.evaluate.batches or weights"
        assert ("WARNING", warning) in said
        run.experiment.evaluate.select_by = f"loss/{unseen}"
        with pytest.raises(UserError, match="but validation has no row of it"):
            header.print_header(run, SimpleNamespace(header=said.extend), [])


# --- a separate objective -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_rate(text, cache):
    """Builds a run that trains on 30 % of the tokens and validates on 15 %, and one that validates as it trains."""
    experiment = config("bert", MaskedLM(rate=0.3), text, cache)
    plain, _ = built(dataclasses.replace(experiment))
    experiment.evaluate = dataclasses.replace(experiment.evaluate, objective=MaskedLM(rate=0.15), batches=2)
    return built(experiment), plain


def test_validation_asks_its_own_objective(other_rate):
    (run, params), _ = other_rate
    tokens = sum(float(batch["loss_weights"].sum()) for batch in run.validation.batches())
    read = sum(int((batch["segment_ids"] > 0).sum()) for batch in run.validation.batches())
    assert tokens / read == pytest.approx(0.15, abs=0.02)  # excluding the special tokens, 2 of 32
    found = validated(run, params)
    assert found["loss_tokens"] == tokens and math.isfinite(found["loss"])
    assert dict(header.rows(run))["validation"] == "MaskedLM()"


def test_what_validation_asks_is_measured_and_checked_before_the_first_step(other_rate, monkeypatch):
    (run, _), plain = other_rate
    said = {}
    for each in (run, plain):
        rows = []
        with jax.set_mesh(each.mesh):
            header.print_header(each, SimpleNamespace(header=rows.extend), [])
        said[each is run] = [line for name, line in rows if name == "measured"]
    assert len(said[True]) == 2 and said[True][1].startswith("in validation MaskedLM: mask rate 0.1")
    assert said[False] == said[True][:1]
    rows_of_30_percent = lambda row: (MaskedLM(), plain.train_batches.examples(row)[1])  # noqa: E731
    monkeypatch.setattr(run.validation.valid_batches, "examples", rows_of_30_percent)
    with pytest.raises(RunFailed, match=r"mask rate 0\.[23].* expected 0\.15 .* config\.evaluate\.objective"):
        with jax.set_mesh(run.mesh):
            header.print_header(run, SimpleNamespace(header=lambda rows: None), [])


def test_the_batches_of_training_are_the_same_bit_for_bit(other_rate):
    (run, _), plain = other_rate
    assert run.validation.valid_batches[0]["targets"].shape != plain.validation.valid_batches[0]["targets"].shape
    for step in range(3):
        batch, same = run.train_batches[step], plain.train_batches[step]
        assert batch.keys() == same.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], same[name], strict=True)


@pytest.mark.parametrize(
    "trained, asked, reason",
    [
        (CausalLM(), PrefixLM(), "none: the loss of PrefixLM is not a likelihood of the text"),
        (PrefixLM(), CausalLM(), None),
        (
            CausalLM(),
            ObjectiveMixture((CausalLM(), PrefixLM()), (1.0, 1.0)),
            "none: the loss of PrefixLM is not a likelihood of the text",
        ),
    ],
)
def test_bits_per_byte_are_there_or_the_reason_is_by_what_validation_asks(trained, asked, reason, text, cache):
    experiment = config("gpt", trained, text, cache)
    experiment.evaluate.objective = asked
    run, _ = built(experiment)
    assert ("target_bytes" in run.validation.valid_batches[0]) == (reason is None)
    with jax.set_mesh(run.mesh):
        assert dict(describe(run)).get("bits per byte") == reason


def test_the_baseline_has_the_form_of_what_validation_asks(text, cache):
    """The baseline is the same as for a run that trains on the validation objective, on the same text."""
    asked, found = SpanCorruption(noise_density=0.5, mean_span_length=2.0), []
    for trained, own in ((SpanCorruption(), asked), (asked, None)):
        experiment = config("t5", trained, text, cache)
        experiment.evaluate.objective, experiment.evaluate.batches = own, 2
        run, params = built(experiment)
        with jax.set_mesh(run.mesh):
            compared = final_report._compare(SimpleNamespace(run=run, is_stopping=False), params)
        found.append({name: x.baseline for name, x in compared.metrics.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-3)  # other epochs, so another weight of the smoothing


# --- mistakes -------------------------------------------------------------------------------------------------------


def message(experiment):
    with pytest.raises(UserError) as error:
        validate(experiment)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_figure_that_no_validation_has_is_one_line(texts, text, cache):
    experiment = electra(text, cache)
    for figure in ("replaced_recall", "loss", "perplexity"):
        experiment.evaluate.select_by = figure
        validate(experiment)
    experiment.evaluate.select_by = "replaced_los"
    assert "config.evaluate.select_by is 'replaced_los', did you mean 'replaced_loss'" in message(experiment)
    experiment = config("gpt", tiny.get_config("gpt").objective, text, cache)
    experiment.evaluate.select_by = "xyz"
    allowed = "accuracy, bits_per_byte, bits_per_token, loss, perplexity, text_accuracy, text_loss"
    assert message(experiment) == f"config.evaluate.select_by is 'xyz', allowed: {allowed}"
    experiment.evaluate.select_by = "loss/source=nowhere"
    assert "config.evaluate.select_by is 'loss/source=nowhere'" in message(experiment)
    experiment.data.source = SourceMixture(sources=texts)
    experiment.evaluate.select_by = f"loss/{texts[1].part}"
    validate(experiment)


@pytest.mark.parametrize(
    "objective, said",
    [
        (
            NextSentencePrediction(),
            "config.model.pair_head is False, NextSentencePrediction trains it: set it to True",
        ),
        (MaskedLM(rate=2.0), "config.evaluate.objective.rate is 2.0, it must be in (0, 1]"),
        (SpanCorruption(), "config.evaluate.objective is SpanCorruption, which trains config.model.family"),
        (
            ReplacedTokenDetection(),
            "config.evaluate.objective is ReplacedTokenDetection, config.model has no replaced_token_head: set "
            "config.evaluate.objective to MaskedLM",
        ),
    ],
)
def test_an_objective_of_validation_that_does_not_fit_is_named(objective, said, text, cache):
    experiment = config("bert", MaskedLM(), text, cache)
    experiment.evaluate.objective = objective
    assert said in message(experiment)


def test_a_validation_is_made_of_the_same_kind_of_text_as_the_training(text, cache):
    experiment = config("bert", NextSentencePrediction(), text, cache)
    experiment.model.pair_head, experiment.evaluate.objective = True, MaskedLM()
    assert message(experiment) == (
        "config.evaluate.objective is MaskedLM, which reads tokens, but config.objective NextSentencePrediction "
        "reads sentences: both must read the same unit"
    )
