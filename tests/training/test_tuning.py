"""Tests runs with parameter-efficient tuning: the stored parameters, resumption, and use of the result."""

import contextlib
import dataclasses
import io
import json
import shutil
from unittest import mock

import chex
import jax
import numpy as np
import pytest

import pretrainax
from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.adapt import IA3, LoRA, PromptTuning
from pretrainax.checkpoints.params import write_params
from pretrainax.config import Classify, UserError
from pretrainax.data.packing import OneEach
from pretrainax.interop import directories
from pretrainax.interop.origin import find_origin
from pretrainax.interop.run_start import TrainedStart
from pretrainax.interop.start import load_start
from pretrainax.optim.schedules import WarmupConstant
from pretrainax.planning.memory import estimate
from pretrainax.runs.train import open_run, train
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.param_paths import flat
from pretrainax.tasks import Classification
from pretrainax.training import train as core
from tests.support import tiny
from tests.support.runs import arrays, assert_same_run, lines, run_json

pytestmark = pytest.mark.slow

TUNING = LoRA(rank=2, dropout=0.1)


def experiment_of(text, cache, steps=4, tuning=None, start=None):
    e = tiny.get_config("bert")
    e.data.source.path, e.data.cache_dir = str(text), str(cache)
    e.train.steps, e.train.log_every, e.train.ema_decay = steps, 2, 0.5
    e.schedule, e.optimizer.learning_rate = WarmupConstant(warmup_steps=1), 3e-2
    e.evaluate.every, e.checkpoint.every, e.checkpoint.keep = 4, 2, 5
    e.tuning, e.checkpoint.init_from = tuning, None if start is None else str(start)
    return e


def without_finish():
    """Skips the plots and samples at the end of a run."""
    return mock.patch.object(core, "finish")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tuning")


@pytest.fixture(scope="module")
def base(folder, text, cache):
    """Trains a run from which other runs start."""
    with without_finish():
        assert train(experiment_of(text, cache, steps=2), str(folder / "base")) == 0
    return folder / "base"


@pytest.fixture(scope="module")
def tuned(folder, base, text, cache):
    """Trains a run with tuning; returns its folder and its output."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert train(experiment_of(text, cache, 4, TUNING, base), str(folder / "tuned")) == 0
    return folder / "tuned", said.getvalue()


def test_only_what_is_trained_is_stored_and_the_header_counts_it(tuned):
    run, said = tuned
    stored = run_json(run)["arrays"]
    kinds = {name.rpartition("/")[2] for name in stored if name.startswith(("params/", "ema/"))}
    assert kinds == {"lora_a", "lora_b"}
    assert not any("embedding" in name for name in stored)
    # 2 layers × (queries and values) × (32 inputs + 32 outputs) × rank 2.
    assert "LoRA(rank=2, dropout=0.1): trains 512 parameters" in " ".join(said.split())
    losses = [line["loss"] for line in lines(run, "train")]
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_a_run_that_was_cut_short_ends_the_same(tuned, folder, base, text, cache):
    part = folder / "part"
    shutil.copytree(tuned[0], part)
    shutil.rmtree(part / "checkpoints" / "4")
    (part / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines(part) if x["step"] <= 2))
    with without_finish():
        assert train(experiment_of(text, cache, 4, TUNING, base), str(part)) == 0
    assert_same_run(part, tuned[0])


def test_what_is_loaded_says_what_the_run_has_validated(tuned, base, text, cache):
    loaded, before = pretrainax.load(str(tuned[0])), pretrainax.load(str(base))
    assert loaded.parameters.keys() == before.parameters.keys() and loaded.experiment.tuning is None
    query = "encoder/blocks/self_attention/{}/kernel"
    changed = [x for x in loaded.parameters if not np.array_equal(loaded.parameters[x], before.parameters[x])]
    assert changed == [query.format("query"), query.format("value")]
    with open_run(experiment_of(text, cache, 4, TUNING, base)) as run:
        run.start.read_frozen(run, str(tuned[0]), is_new=False)
        batch = next(run.validation.batches())
        trained = {name: x for name, x in arrays(tuned[0]).items() if name.startswith("['params']")}
        params = jax.tree.unflatten(jax.tree.structure(run.abstract_state.params), trained.values())
        variables = {"params": params, **run.frozen}
        wanted = jax.jit(lambda v: run.model.apply(v, batch, deterministic=True).heads["lm"].logits())(variables)
    np.testing.assert_allclose(loaded(batch).logits, wanted, atol=1e-4, rtol=0)


def test_a_tuned_run_starts_another(tuned, text, cache, tmp_path):
    again = experiment_of(text, cache, 2, dataclasses.replace(TUNING, rank=3), tuned[0])
    assert TrainedStart().describe(again, str(tmp_path / "again")) == [("start", f"from {tuned[0]}, step 4")]
    loaded = pretrainax.load(str(tuned[0]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), loaded.params)
    chex.assert_trees_all_equal(load_start(find_origin(str(tuned[0])), again.model, abstract), loaded.params)
    again.model.d_model = 64
    with pytest.raises(UserError, match="config.model.d_model is 64, there 32.* of another shape"):
        TrainedStart().describe(again, str(tmp_path / "again"))


@pytest.mark.slow
def test_heads_that_the_start_lacks_are_trained_beside(base, text, cache, tmp_path):
    headless, whole = tmp_path / "headless", pretrainax.load(str(base)).parameters
    described = config_lib.load(str(base / "config.json"))
    described.model.masked_lm_head, described.model.head = False, Classify(num_labels=2, kind="single")
    described.objective = Classification(labels=("bad", "good"))
    head = {"classifier/dense/kernel", "classifier/dense/bias", "classifier/output/kernel", "classifier/output/bias"}
    abstract = models.abstract_params(described.model)
    body = {path: whole[path] if path in whole else np.ones(x.shape, "f4") for path, x in flat(abstract).items()}
    write_params(str(headless), abstract, lambda path, index: np.asarray(body[path][index]), {})
    (headless / "config.json").write_text(config_lib.dump(described))
    experiment = experiment_of(text, cache, 2, IA3(), headless)
    experiment.checkpoint.fresh_heads = True
    ((_, said),) = TrainedStart().describe(experiment, str(tmp_path / "run"))
    assert said.endswith(
        "fresh: masked_lm_head/dense, masked_lm_head/norm, unembedding; left out: classifier/dense, classifier/output"
    )
    with without_finish():
        assert train(experiment, str(tmp_path / "run")) == 0
    trained = {name.removeprefix("params/") for name in run_json(tmp_path / "run")["arrays"] if "params/" in name[:7]}
    assert {x for x in trained if not x.endswith("/ia3")} == whole.keys() - body.keys()
    assert body.keys() - whole.keys() == head
    loaded = pretrainax.load(str(tmp_path / "run")).parameters
    assert loaded.keys() == whole.keys()
    kernel = arrays(tmp_path / "run")["['params']['masked_lm_head']['dense']['kernel']"]
    np.testing.assert_array_equal(loaded["masked_lm_head/dense/kernel"], kernel)


@pytest.mark.parametrize("loss", ("gone", "another"))
def test_a_start_that_is_gone_or_another_one_is_refused(loss, tuned, base, text, cache, tmp_path):
    copy, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, copy)
    shutil.copytree(tuned[0], run)
    known = json.loads((run / "start.json").read_text())
    (run / "start.json").write_text(json.dumps(known | {"directory": str(copy)}))
    pretrainax.load(str(run))
    if loss == "gone":
        shutil.rmtree(copy)
    else:
        (run / "start.json").write_text(json.dumps(known | {"directory": str(copy), "sha256": "0" * 64}))
    line = f"step 2 of {copy}, which (cannot be read: restore it|is not what it was when the run started)"
    with pytest.raises(UserError, match=line):
        pretrainax.load(str(run))
    experiment = config_lib.load(run / "config.json")
    with pytest.raises(UserError, match=line):
        train(experiment, str(run))


def test_a_plan_counts_what_is_frozen_once_and_what_is_trained_with_its_moments(text, cache, base):
    experiment = experiment_of(text, cache, 4, None, base)
    whole = estimate(experiment, dict.fromkeys(AXES, 1))
    experiment.tuning = TUNING
    tuned = estimate(experiment, dict.fromkeys(AXES, 1))
    assert tuned.parameters == 4 * 512 and tuned.frozen == whole.parameters and whole.frozen == 0
    assert tuned.optimizer < 3 * tuned.parameters and tuned.gradients == tuned.parameters
    assert "frozen" in dict(tuned.parts()) and "frozen" not in dict(whole.parts())


@pytest.mark.slow
def test_a_run_with_a_prompt_is_scored_and_writes_no_embeddings(base, text, cache, tmp_path):
    experiment = experiment_of(text, cache, 2, PromptTuning(3), base)
    experiment.data.packing = OneEach()
    assert train(experiment, str(tmp_path / "run")) == 0
    assert sorted(x for x in run_json(tmp_path / "run")["arrays"] if x.startswith("params/")) == [
        "params/token_embedding/prompt"
    ]
    loaded = pretrainax.load(str(tmp_path / "run"))
    assert np.isfinite(np.asarray(loaded(loaded.encode(["tal okto"])).logits)).all()
    with pytest.raises(UserError, match="it cannot give embeddings: for that, tune it by LoRA"):
        loaded.embed(["tal okto"])
    with pytest.raises(UserError, match="cannot be merged into a plain model: only export --adapter"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
