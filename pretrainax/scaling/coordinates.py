"""Checks that a config transfers to other widths: activations and their changes have equal sizes in all widths.

This is the coordinate check of Yang et al. 2022 (arXiv 2203.03466, appendix D.1), for any model. Each width trains for
a few steps on the same random documents. The check compares two sizes of each module over widths: the root mean square
(RMS) of the module's output, and the RMS of the output's change since the first step. If a factor of a learning rate or
of an initializer is wrong, one of these sizes grows or shrinks with the width.
"""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from pretrainax.config import Experiment, LayersConfig, MeshConfig, TrainConfig, Transfer, resized, resolve_auto
from pretrainax.config.validation import validate
from pretrainax.data.batch import HostBatch
from pretrainax.files.json_files import JsonObject
from pretrainax.models import AnyModel, build, electra
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.optim import WarmupConstant
from pretrainax.optim.transfer import Multipliers, multipliers_of
from pretrainax.planning.shapes import random_batches
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import flat
from pretrainax.training.run import build_steps
from pretrainax.training.train_step import Params, global_shapes

STEPS = 10
ROWS, LENGTH = 8, 64  # rows of a batch, and tokens of a row
LIMIT = 0.15  # relative difference over all widths, above which a size is not flat
SEEDS, MOST_SEEDS = 2, 6  # seeds of each width; more than SEEDS if the sizes differ too much for a verdict
_LEVEL = 0.05  # probability that noise alone makes one width of a row differ by more than the error
# Compiling takes most of the time. With this option, a step of a narrow GPT compiles in 7 instead of 21 CPU seconds.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": "1"}
_NAME = "transfer_output"  # name under which Flax stores an output
_LOGITS = "unembedding"  # the module whose output is the logits, also if it has no parameters


class Sizes(NamedTuple):
    """The sizes of one module's output in models of several widths, each the mean over layers."""

    module: str  # path of the module, or of the parameter for "update"
    # activation: RMS after the last step | change: RMS of the difference from the first step | update: RMS of the
    # change of an embedding table, a norm or a bias, which does not depend on the width.
    what: str
    # True for logits, and for outputs of other matrices of the kind "output" (optim/transfer.py). The contribution of
    # the initial values shrinks as 1 / sqrt(width), and the contribution of training is equal in all widths.
    is_output: bool
    widths: tuple[int, ...]
    by_seed: tuple[tuple[float, ...], ...]  # [widths][seeds]

    @property
    def sizes(self) -> tuple[float, ...]:
        """Returns the means over seeds, one per width."""
        return tuple(float(np.mean(values)) for values in self.by_seed)

    @property
    def difference(self) -> float:
        """Returns the largest relative difference between widths; inf if a model diverged.

        It is the difference from the geometric mean. An output may shrink: its expected size is the nearest value
        between s / sqrt(m) and s, where s is the size in the smallest width.
        """
        sizes, growth = np.array(self.sizes), np.array(self.widths) / self.widths[0]
        if not np.any(sizes):
            return 0.0
        if not np.all(np.isfinite(sizes) & (sizes > 0)):
            return math.inf
        expected = np.exp(np.mean(np.log(sizes)))
        if self.is_output:
            expected = np.clip(sizes, sizes[0] * growth**-0.5, sizes[0])
        return float(np.max(np.abs(sizes / expected - 1)))

    @property
    def error(self) -> float:
        """Returns the relative error of `difference` that the seeds show; 0 with one seed, or if a model diverged.

        It is the simultaneous interval (Bonferroni) of the mean logs of all widths, with a common variance.
        """
        values = np.array(self.by_seed)
        widths, seeds = values.shape
        if seeds == 1 or not np.all(np.isfinite(values) & (values > 0)):
            return 0.0
        variance = float(np.mean(np.var(np.log(values), axis=1, ddof=1)))
        quantile = float(stats.t.ppf(1 - _LEVEL / 2 / widths, widths * (seeds - 1)))
        return float(np.expm1(quantile * math.sqrt(variance / seeds)))

    def values(self) -> JsonObject:
        """Returns the values that `inspect --json` prints."""
        of = {"sizes": self.sizes, "difference": self.difference, "error": self.error, "verdict": self.verdict}
        return self._asdict() | of

    @property
    def verdict(self) -> Literal["flat", "NOT FLAT", "not known"]:
        """Returns the verdict; "not known": the difference exceeds LIMIT, but noise of the seeds may be the reason."""
        if self.difference <= LIMIT:
            return "flat"
        return "NOT FLAT" if self.difference - self.error > LIMIT else "not known"


def measure(
    experiment: Experiment, widths: Sequence[int], seeds: int = SEEDS, most_seeds: int = MOST_SEEDS
) -> list[Sizes]:
    """Trains the model of a config in several widths for `STEPS` steps, and returns the sizes of its outputs.

    The learning rate is constant, and the batches are small and random. With config.transfer of None, the smallest
    width is the base width.

    Args:
      seeds: number of seeds of each width.
      most_seeds: maximum number of seeds, used if fewer seeds give the verdict "not known".

    Raises:
      UserError: a width does not fit the model, or the config is invalid.
    """
    with futures.ThreadPoolExecutor() as threads:  # compiling takes most of the time
        runs = list(threads.map(lambda width: _Run(*_prepared(experiment, width, min(widths))), widths))
    found = []
    for seed in range(max(seeds, most_seeds)):
        for run in runs:
            run.train(seed)
        if seed + 1 >= seeds:
            found = _compared(widths, [run.sizes for run in runs])
            if all(x.verdict != "not known" for x in found):
                break
    return found


def _compared(widths: Sequence[int], by_width: Sequence[Mapping[tuple[str, str, bool], list[float]]]) -> list[Sizes]:
    """Collects the sizes of all widths for each module and kind of size."""
    found = []
    for key in sorted({(module, what) for module, what, _ in by_width[-1]}):
        is_output = any((*key, True) in sizes for sizes in by_width)  # no matrix of the base model has this kind
        values = (x[*key, True] if (*key, True) in x else x[*key, False] for x in by_width)
        found.append(Sizes(*key, is_output, tuple(widths), tuple(map(tuple, values))))
    return found


def _prepared(experiment: Experiment, width: int, base_width: int) -> tuple[Experiment, list[HostBatch]]:
    """Returns the config of a short run of the model in one width, and its batches."""
    run = copy.deepcopy(experiment)
    run.model, run.transfer = resized(run.model, width), run.transfer or Transfer(base_width)
    run.mesh, run.schedule, run.phases, run.layers = MeshConfig(), WarmupConstant(0), (), LayersConfig()
    run.data.sequence_length = min(run.data.sequence_length, LENGTH)
    run.train = TrainConfig(steps=STEPS, global_batch_size=ROWS, dtype="float32", scan_unroll=1)
    run.model.dropout_rate = run.model.attention_dropout_rate = 0.0
    batches, run.model.vocab_size = random_batches(run, STEPS)
    resolve_auto(run, None)
    validate(run, files=False)
    return run, batches


class _Run:
    """Trains the model of one width with several seeds; `sizes` are {(module or parameter, what, is_output): sizes}."""

    def __init__(self, run: Experiment, batches: Sequence[HostBatch]):
        self.sizes: dict[tuple[str, str, bool], list[float]] = {}
        self._mesh = make_mesh(run.mesh, jax.devices()[:1])
        with jax.set_mesh(self._mesh):
            self._built = built = build_steps(run, global_shapes(batches[0], ROWS), self._mesh)
            assert run.transfer is not None
            self._multipliers = flat(multipliers_of(run.model, run.transfer, built.abstract_state.params))
            self._batches = [put_batch(batch, self._mesh) for batch in batches]
            self._step = built.step.lower(built.abstract_state, self._batches[0]).compile(_COMPILER_OPTIONS)
            outputs = jax.jit(functools.partial(_outputs, built.model))
            lowered = outputs.lower(built.abstract_state.params, self._batches[0])
            self._outputs = lowered.compile(_COMPILER_OPTIONS)
            built.init(0)  # compiles

    def train(self, seed: int) -> None:
        """Trains from the initial values of a seed, and appends the size of each output to `sizes`."""
        multipliers, batches = self._multipliers, self._batches
        with jax.set_mesh(self._mesh):
            state = self._built.init(seed)
            first, old = self._outputs(state.params, batches[0]), jax.device_get(flat(state.params))
            for batch in batches:
                state, _ = self._step(state, batch, None, self._built.step.arguments)
            last, new = self._outputs(state.params, batches[0]), jax.device_get(flat(state.params))
        for what, tree in ("activation", last), ("change", jax.tree.map(jnp.subtract, last, first)):
            for path, x in tree.items():
                self._add(path, what, _is_output(multipliers, path), _size(multipliers, path, _rms(x)))
        for path, m in multipliers.items():
            if not path.endswith(("kernel", "key/bias")):  # a key bias has no effect; its gradient is only rounding
                update = np.sqrt(np.mean(np.square((new[path] - old[path]) / m.folded)))
                self._add(path, "update", False, float(update))

    def _add(self, path: str, what: str, is_output: bool, size: float) -> None:
        self.sizes.setdefault((path, what, is_output), []).append(size)


def _is_output(multipliers: Mapping[str, Multipliers], path: str) -> bool:
    """Returns True for logits and for outputs of matrices of the kind "output"."""
    kernel = multipliers.get(f"{path}/kernel")
    return path.endswith(_LOGITS) or (kernel is not None and kernel.kind == "output")


def _size(multipliers: Mapping[str, Multipliers], path: str, x: np.ndarray) -> float:
    """Returns the mean of the RMS [layers, …] of a module's output, without the factor that its parameters contain."""
    own = [m for name, m in multipliers.items() if name.rpartition("/")[0] == path]
    return float((x / np.ravel(own[0].folded if own else 1.0)).mean())


def _components(model: AnyModel, params: Params) -> dict[str, tuple[AnyModel, Params]]:
    """Returns the model and its parameters, or the two encoders of ELECTRA, by prefix of their paths."""
    if model.config.generator is None:
        return {"": (model, params)}
    encoders = {"generator/": electra.generator, "": electra.discriminator}
    split = {prefix: extract(model.config, params) for prefix, extract in encoders.items()}
    return {prefix: (build(config, model.compute), tree) for prefix, (config, tree) in split.items()}


def _record(call, args, kwargs, context):
    """Stores the output of a module; Flax calls this interceptor instead of every method of a module."""
    result = call(*args, **kwargs)
    output = result[0] if isinstance(result, tuple) else result
    if isinstance(output, LanguageModelOutput):
        output = output.logits()
    is_output = isinstance(output, jax.Array) and jnp.issubdtype(output.dtype, jnp.floating) and output.ndim > 1
    if context.method_name == "__call__" and context.module.name is not None and is_output:
        features = output.reshape(-1, math.prod(output.shape[2:])) if output.ndim > 2 else output
        context.module.sow("intermediates", _NAME, features.astype(jnp.float32))
    return result


def _outputs(model: AnyModel, params: Params, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the outputs of all modules with parameters, {path of the module: [layers, …, tokens, features]}."""
    found = {}
    for prefix, (component, component_params) in _components(model, params).items():
        with nn.intercept_methods(_record):
            _, sown = component.apply(
                {"params": component_params}, batch, deterministic=True, mutable=["intermediates"]
            )
        values = flat(sown["intermediates"])
        modules = {path.rpartition("/")[0] for path in flat(component_params)} | {_LOGITS}
        found |= {prefix + path: values[f"{path}/{_NAME}"][0] for path in modules if f"{path}/{_NAME}" in values}
    return found


def _rms(x: jax.Array) -> np.ndarray:
    """Returns the root mean square of tokens and features, [layers, …]."""
    return np.sqrt(np.mean(np.square(np.asarray(x)), axis=(-2, -1)))
