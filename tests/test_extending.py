"""Tests the code of docs/how-to/own-code.md as a package, in its own loop and in the whole program."""

import os
import pathlib
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest

from pretrainax import models
from pretrainax.adapt import LoRA
from pretrainax.config import UserError
from pretrainax.distill import MiniLM
from pretrainax.models import Outputs
from pretrainax.runs.custom_model import WithLoss, check_custom
from tests.support import tiny

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "own-code.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
IMPORTS = """
import optax
from pretrainax.optim import AdamW
"""
CLASSES = """

@dataclasses.dataclass
class Factored(AdamW):  # keeps a factor [D, D] of each parameter [..., D], as Shampoo does
    def directions(self, params_shape):
        def init(params):
            return {"factor": jax.tree.map(lambda x: jnp.zeros((x.shape[-1],) * 2), params)}

        def update(updates, state, params=None):
            outer = jax.tree.map(lambda x: jnp.einsum("...i,...j->ij", x, x), updates)
            return updates, {"factor": jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["factor"], outer)}

        yield optax.GradientTransformation(init, update)
        yield from super().directions(params_shape)


@dataclasses.dataclass
class Histogram(pretrainax.Callback):
    every: int = 100

    def on_step(self, loop, state, metrics):
        if loop.step % self.every == 0:
            sizes = jax.tree.map(lambda x: float(jnp.std(x)), state.params)
            loop.note(f"standard deviations after step {loop.step}: {len(jax.tree.leaves(sizes))}")

    def evaluation_metrics(self, loop, state):
        return {"largest": max(float(abs(x).max()) for x in jax.tree.leaves(state.params))}
"""
CALL = re.compile("^(?:run|experiment)\\b", re.MULTILINE)  # matches the first line of a block that uses its class
DEFINITIONS = [CALL.split(block)[0] for block in BLOCKS if "\nclass " in block]
LOSS = next(block for block in BLOCKS if "def entropy_loss(" in block)
PACKAGE = "\n\n".join([LOSS, *DEFINITIONS, IMPORTS, CLASSES])  # the blocks import the names that they use
LOOP = """
import sys, jax, pretrainax
from mypackage.own import Bag, entropy_loss
from tests.support import tiny

def experiment():
    found = tiny.get_config("gpt")
    found.data.source.path, found.data.cache_dir = sys.argv[1:3]
    found.train.steps, found.schedule.warmup_steps, found.evaluate.batches = 8, 1, 1
    found.model.vocab_size = "auto"
    return found

for model in (None, Bag):
    asked = experiment()
    run = pretrainax.open(asked, extra_loss=entropy_loss, model=model)
    assert asked == experiment() and run.experiment.model.vocab_size == 512
    state, losses = run.init(), []
    for step, batch in run.batches(start=0, steps=8):
        state, metrics = run.step(state, batch)
        losses.append(run.host_metrics(metrics)["loss"])
    assert int(state.step) == 8 and step == 7 and losses[-1] < losses[0], losses
    figures = run.evaluate(state)
    assert -0.01 * 7 < figures["entropy_loss"] < 0 and figures["loss"] < losses[0]
    again, state = [], run.init()  # from the start: the same batches, and the same bits
    for _, batch in run.batches(0, 3):
        state, metrics = run.step(state, batch)
        again.append(run.host_metrics(metrics)["loss"])
    assert again == losses[:3]
    assert run.tokenizer.vocabulary.size <= run.model.config.vocab_size and run.mesh.size == jax.device_count()
print("done")
"""
PROGRAM = """
import sys, json, pretrainax
from mypackage.own import Bag, entropy_loss
from pretrainax.config import Choice
from pretrainax.training.metrics import read_metrics
from tests.support import tiny

def experiment(steps):
    found = tiny.get_config("gpt")
    found.data.source.path, found.data.cache_dir = sys.argv[1:3]
    found.train.steps, found.schedule.warmup_steps, found.evaluate.batches, found.train.log_every = steps, 1, 1, 1
    found.train.accumulate, found.checkpoint.every = 2, 2
    found.callbacks, found.optimizer = (Choice.named("Histogram")(every=2),), Choice.named("Factored")()
    return found

for name, model in (("ours", None), ("theirs", Bag)):
    folder = f"{sys.argv[3]}/{name}"
    for steps in (2, 4):  # the second goes on from the first
        assert pretrainax.train(experiment(steps), folder, extra_loss=entropy_loss, model=model, extend=steps > 2) == 0
    lines = read_metrics(f"{folder}/metrics.jsonl")
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3, 4]
    assert all(-0.07 < line["entropy_loss"] < 0 for line in lines)
    assert all(line["largest"] > 0 for line in lines if line["split"] == "valid")
    assert json.load(open(f"{folder}/config.json"))["callbacks"] == [{"type": "mypackage.own:Histogram", "every": 2}]
print(pretrainax.load(f"{sys.argv[3]}/ours"))
"""


@pytest.fixture
def package(tmp_path):
    """Writes a package that is installed in another folder."""
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "own.py").write_text(PACKAGE)
    metadata = tmp_path / "mypackage-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    choices = "".join(f"{name} = mypackage.own:{name}\n" for name in ("Histogram", "Factored"))
    (metadata / "entry_points.txt").write_text(f"[pretrainax.choices]\n{choices}")
    return tmp_path


def run(package, code, *arguments):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{package}", "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, env=env, cwd=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_loop_of_ones_own_with_a_loss_and_a_model(package, text, cache):
    assert run(package, LOOP, text, cache).stdout.endswith("done\n")


@pytest.mark.slow
def test_the_program_with_a_loss_a_model_an_optimizer_a_callback_and_an_evaluator(package, text, cache, tmp_path):
    done = run(package, PROGRAM, text, cache, tmp_path / "runs")
    assert done.stderr.count("standard deviations after step 2: ") == 2
    assert "  extra loss  entropy_loss\n" in done.stderr
    assert re.search(r"  state +\S+ kB of optimizer state are replicated, because shapes differ", done.stderr)
    line = done.stdout.splitlines()[-1]  # from a loaded model
    assert line.startswith("LanguageModel(") and "step 4" in line


def test_a_model_of_ones_own_is_under_no_tuning_and_beside_no_teacher():
    experiment = tiny.get_config("gpt")
    experiment.tuning = LoRA()
    with pytest.raises(UserError, match="config.tuning and config.distill require a model of this package"):
        check_custom(experiment, None, build=models.build)
    check_custom(experiment, None, build=None)


def test_an_extra_loss_that_distillation_gives_no_weight_is_an_error():
    experiment = tiny.get_config("gpt")
    experiment.distill = MiniLM(teacher="runs/large")
    with pytest.raises(UserError, match="config.distill.hard is 0.0, which is also the weight of extra_loss"):
        check_custom(experiment, lambda outputs, batch: {}, build=None)
    experiment.distill.hard = 0.5
    check_custom(experiment, lambda outputs, batch: {}, build=None)


@pytest.mark.parametrize("name", ["entropy", "z_loss", "pair_loss", "label_loss"])
def test_an_extra_loss_has_a_name_of_its_own(name):
    model = types.SimpleNamespace(apply=lambda *_, **__: Outputs({}))
    wrapped = WithLoss(model, lambda outputs, batch: {name: (1.0, 1.0)})
    with pytest.raises(UserError, match=f"extra_loss returns '{name}': names must end in '_loss' and be no metric"):
        wrapped.apply({}, {}, deterministic=True)


@pytest.mark.parametrize(
    "result, message",
    [
        (jnp.float32(1), "returns no dict, it must return {name: .sum, count.} of scalars"),
        ({"a_loss": jnp.float32(1)}, "returns 'a_loss': one value, it must be .sum, count., two scalars"),
        ({"a_loss": (jnp.ones(3), 3.0)}, r"returns 'a_loss': values of shapes \[\(3,\), \(\)\], it must be"),
        ({"a_loss": (1.0, 1.0, 1.0)}, r"returns 'a_loss': values of shapes \[\(\), \(\), \(\)\], it must be"),
    ],
)
def test_an_extra_loss_that_is_no_sum_and_count_is_one_line(result, message):
    wrapped = WithLoss(types.SimpleNamespace(apply=lambda *_, **__: Outputs({})), lambda outputs, batch: result)
    with pytest.raises(UserError, match=f"extra_loss {message}"):
        wrapped.apply({}, {}, deterministic=True)
