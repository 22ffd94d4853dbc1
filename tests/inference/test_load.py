"""`pretrainax.load` returns the model that was trained, exported or imported, on any devices."""

import asyncio
import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

import pretrainax
from pretrainax import models
from pretrainax.config import MeshConfig, UserError
from pretrainax.inference.load import default_mesh, load
from pretrainax.interop.directories import export_workdir
from pretrainax.models import electra
from pretrainax.sharding.mesh import make_mesh
from tests.golden import CASES
from tests.golden.case import batch, weights
from tests.golden.electra import tiny
from tests.golden.make import golden
from tests.support.huggingface_weights import PUBLISHED, assert_same, write_directory, write_run
from tests.support.loaded import loaded_case
from tests.support.made_run import LOSSES, weights_at

ONE, SHARDED = make_mesh(MeshConfig(), jax.devices()[:1]), make_mesh(MeshConfig(data=1, fsdp=8))


def logits(model, arrays):
    return np.asarray(model(arrays).logits)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gpt2", "t5_1_1", "bert_masked_lm"])
def test_an_export_gives_the_logits_of_its_workdir(tmp_path, name):
    case = CASES[name]
    workdir = write_run(tmp_path / "run", case.config, pad_id=case.pad_id)
    export_workdir(str(workdir), str(tmp_path / "export"))
    expected, exported = (logits(load(path, mesh=ONE), batch(case)) for path in (workdir, tmp_path / "export"))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_array_equal(exported, expected)


@pytest.mark.parametrize("name", PUBLISHED[::6])  # tests/interop reads the files of all models
def test_a_hugging_face_directory_loads(tmp_path, name):
    model = load(write_directory(tmp_path / name, name))
    assert_same(model.params, weights(CASES[name].config))
    assert model.config.family == CASES[name].config.family and model.origin == str(tmp_path / name)
    assert model.tokenizer.decode(model.tokenizer.encode("a text.")) == "a text."


def test_the_mean_of_checkpoints_is_that_of_float64(made_run):
    expected = jax.tree.map(
        lambda *x: np.mean(np.stack(x).astype(np.float64), axis=0).astype(np.float32), *map(weights_at, LOSSES)
    )
    averaged = load(f"{made_run}@average", mesh=SHARDED)
    assert_same(averaged.params, expected)
    assert averaged.origin == f"{made_run}, mean of steps 10, 20, 30"
    assert_same(load(f"{made_run}@20").params, weights_at(20))
    assert_same(load(made_run).params, weights_at(30))


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["run", "mean", "directory"])
def test_each_device_reads_its_own_shards(made_run, tmp_path, kind):
    source = {"run": made_run, "mean": f"{made_run}@average"}.get(kind) or write_directory(tmp_path / "it", "gpt2")
    one = load(source, mesh=ONE)
    split = load(source, mesh=SHARDED)
    kernel = split.parameters["decoder/blocks/mlp/up/kernel"]  # [L, D, F]; the mesh shards D
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 2, kernel.shape[2])}
    assert_same(split.params, one.params)
    arrays = batch(CASES["gpt2"])  # 3 rows, which is not a multiple of 8 devices
    whole = logits(one, arrays)
    # The sums have several parts, in an order that depends on the processor. A softmax of large logits amplifies the
    # differences, so single values are off by 3e-4 of 23. All values together are off by a few ulp (1.2e-7) per sum,
    # which a wrong shard would exceed.
    close = 1e-5 * np.linalg.norm(whole)
    assert np.linalg.norm(logits(split, arrays) - whole) < close
    rows = {name: np.concatenate([x, x, x[:2]]) for name, x in arrays.items()}  # and 8 rows
    assert np.linalg.norm(logits(split, rows)[3:6] - whole) < close


def test_a_model_is_split_by_default_where_a_device_has_no_room_for_it():
    params = models.abstract_params(CASES["electra_base"].config)
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    gpt2 = models.abstract_params(dataclasses.replace(CASES["gpt2"].config, vocab_size=96))

    def by(params, room, devices=8):
        sizes = default_mesh(params, jax.devices()[:devices], room).shape
        return {axis: size for axis, size in sizes.items() if size > 1}

    assert by(params, 2 * size) == by(params, None) == {"data": 8}
    assert by(params, size) == {"fsdp": 8}  # 4 heads
    assert by(gpt2, 1, 4) == {"tensor": 4}
    assert by(params, 1, 1) == {}
    with pytest.raises(UserError, match="config.model.d_model 16 is not a multiple of config.mesh.fsdp 3"):
        default_mesh(gpt2, jax.devices()[:3], 1)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["all", "gradient_disentangled"])
def test_a_run_of_electra_is_its_discriminator_beside_its_generator(tmp_path, shared):
    config = tiny("small")
    config.generator.share_embeddings = shared
    model = load(write_run(tmp_path / "run", config), mesh=ONE)
    whole = weights(config)
    for part, expected in ((model, electra.discriminator), (model.generator, electra.generator)):
        wanted, params = expected(config, whole)
        assert part.config == wanted
        assert_same(part.params, params)
    arrays = {name: x for name, x in batch(CASES["electra_small"]).items() if name != "loss_weights"}
    assert model(arrays).logits.shape == (3, 14) and model.generator(arrays).logits.shape == (3, 14, 99)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["gpt2", "albert", "t5_1_1"])  # all layers of albert share one block
def test_hidden_states_are_those_of_transformers(name):
    model, arrays = loaded_case(name), batch(CASES[name])
    outputs, expected = model(arrays, hidden=True), golden(name)
    np.testing.assert_array_equal(outputs.logits, model(arrays).logits)
    assert model(arrays).hidden is None
    for side, states in outputs.hidden.items():
        theirs = expected[f"hidden {side}"]
        assert states.shape == theirs.shape
        real = arrays["encoder_segment_ids" if f"{side}_tokens" in arrays else "segment_ids"] > 0
        # The last hidden state of transformers follows the last norm.
        np.testing.assert_allclose(np.asarray(states)[:-1, real], theirs[:-1, real], atol=2e-4, rtol=0)


def test_each_batch_is_progress():
    calls, arrays = [], batch(CASES["gpt2"])
    loaded = dataclasses.replace(loaded_case("gpt2"), progress=lambda: calls.append(1))
    for count in (1, 2):
        loaded(arrays)
        assert len(calls) == count


def test_the_dtype_is_that_of_activations(made_run):
    exact, coarse = load(made_run, mesh=ONE), load(made_run, "bfloat16", ONE)
    assert {x.dtype.name for x in coarse.parameters.values()} == {"float32"}
    a, b = (model(batch(CASES["gpt2"])).heads["lm"].features.dtype.name for model in (exact, coarse))
    assert (a, b) == ("float32", "bfloat16")
    with pytest.raises(UserError, match="dtype is 'float16', did you mean"):
        load(made_run, dtype="float16")


def test_a_tokenizer_that_the_checkpoint_was_not_trained_with_is_refused(run):
    vocabulary = run / "tokenizer" / "vocabulary.json"
    vocabulary.write_text(vocabulary.read_text().replace("<mask>", "<hole>"))
    for which in "", "@10", "@average":
        with pytest.raises(UserError, match="whose ids mean other text: restore the run's own tokenizer/ folder"):
            load(f"{run}{which}")


def test_a_run_that_has_moved_is_loaded_where_it_is(run):
    assert load(run).experiment.tokenizer.path == str(run / "tokenizer")


@pytest.mark.parametrize(
    "content, message", [("{", "config.json"), ('{"hidden_size": 3}', "unknown field 'hidden_size'")]
)
def test_a_config_of_another_project_is_one_line(run, content, message):
    (run / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load(run)


def test_a_notebook_whose_event_loop_runs_can_load(made_run):
    async def cell():
        return load(made_run).origin

    assert asyncio.run(cell()) == f"{made_run}, step 30"


@pytest.mark.slow
def test_the_package_imports_nothing_until_it_is_used():
    code = (
        "import sys, pretrainax; heavy = ('jax', 'numpy', 'flax', 'absl', 'pretrainax.config')\n"
        "print([name for name in heavy if name in sys.modules], pretrainax.__version__)\n"
        "print(pretrainax.load.__module__, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"[] {pretrainax.__version__}", "pretrainax.inference.load True"]
    assert "load" in dir(pretrainax)
    with pytest.raises(AttributeError, match="module 'pretrainax' has no attribute 'loda'"):
        getattr(pretrainax, "loda")  # noqa: B009
