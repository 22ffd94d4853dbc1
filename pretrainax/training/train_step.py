"""Defines the training state and the jitted update: microbatches, gradients, optimizer.

No function in this module waits for the devices. Parameters are initialized sharded: no device holds a complete array.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Optional, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.checkpoints.params import Params
from pretrainax.config import LayersConfig, TrainConfig
from pretrainax.data.batch import Batch, HostBatch, padding
from pretrainax.layers.compute import compiler_options
from pretrainax.layers.hashed_keys import hashed_key
from pretrainax.models import AnyModel
from pretrainax.models.decoder import Decoder
from pretrainax.models.heads import HEADS
from pretrainax.models.heads.vocabulary_loss import PER_TARGET, LossOptions
from pretrainax.optim.arguments import RunNumbers, numbers_of, rate_in, seed_argument
from pretrainax.optim.balancing import update_balance_biases
from pretrainax.optim.layers import mask_frozen
from pretrainax.optim.moving_average import updated_average
from pretrainax.optim.optimizers import Optimizer
from pretrainax.optim.schedules import Rate
from pretrainax.optim.transfer import scaled_initially
from pretrainax.sharding.arrays import split_microbatches
from pretrainax.sharding.optimizer_state import opt_state_shardings
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.sharding.rules import tree_shardings, with_shardings
from pretrainax.sharding.stages import uses_1f1b
from pretrainax.training import losses
from pretrainax.training.wrapped import Frozen

Shapes = dict[str, jax.ShapeDtypeStruct]  # shapes and dtypes of a batch
Keys = dict[str, jax.Array]  # a random key for each use
Seed = int | np.uint32 | jax.Array
_USES: tuple[str, ...] = ("params", "dropout", "sample")  # uses of random numbers, each with a separate stream


@flax.struct.dataclass
class TrainState:
    """The state that an update changes; the leaves are arrays, or the shapes or shardings of these arrays."""

    step: PyTree  # int32: number of updates so far, including skipped updates
    params: Params
    opt_state: optax.OptState
    ema: Optional[Params] = None  # moving average of `params`; None: `train.ema_decay` is not set


def global_shapes(batch: HostBatch, global_batch_size: int) -> Shapes:
    """Returns the shapes [B, …] and dtypes of the global batch, given the rows [b, …] of one process."""
    return {k: jax.ShapeDtypeStruct((global_batch_size, *v.shape[1:]), v.dtype) for k, v in batch.items()}


def abstract_params(model: AnyModel, batch_shapes: Shapes) -> Params:
    """Returns the shapes and dtypes of the model's parameters."""
    return abstract_variables(model, batch_shapes)["params"]


def abstract_variables(model: AnyModel, batch_shapes: Shapes) -> dict[str, Params]:
    """Returns the shapes and dtypes of all the model's variables: "params" and the frozen collections."""
    return jax.eval_shape(lambda: _init(model, batch_shapes, seed=0))


def abstract_frozen(variables: dict[str, Params], mesh: Mesh) -> Frozen:
    """Returns the shapes, dtypes and shardings of the frozen collections of `variables`, or None if there are none."""
    frozen = {name: tree for name, tree in variables.items() if name != "params"}
    return {name: with_shardings(tree, tree_shardings(mesh, tree)) for name, tree in frozen.items()} or None


def abstract_state(
    params: Params, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh, has_ema: bool = False
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the training state, for example to restore a checkpoint."""
    shapes = jax.eval_shape(lambda params: _state(params, optimizer, has_ema), params)
    return with_shardings(shapes, state_shardings(mesh, optimizer, params, has_ema))


def state_shardings(
    mesh: Mesh, optimizer: optax.GradientTransformationExtraArgs, params: Params, has_ema: bool = False
) -> TrainState:
    """Returns the sharding of each array in the training state, given `params` (arrays or shapes)."""
    shardings = tree_shardings(mesh, params)
    return TrainState(
        step=NamedSharding(mesh, P()),
        params=shardings,
        opt_state=opt_state_shardings(mesh, optimizer, params),
        ema=shardings if has_ema else None,
    )


def make_init(
    model: AnyModel,
    optimizer: optax.GradientTransformationExtraArgs,
    batch_shapes: Shapes,
    mesh: Mesh,
    has_ema: bool = False,
    multipliers: Optional[PyTree] = None,
) -> Callable[[int], TrainState]:
    """Builds the jitted function `seed -> state`: zero moments, and parameters that do not depend on the mesh."""

    def make(seed):
        params = _init_params(model, batch_shapes, seed)
        params = params if multipliers is None else scaled_initially(params, multipliers)
        state = _state(params, optimizer, has_ema)
        return jax.lax.with_sharding_constraint(state, state_shardings(mesh, optimizer, state.params, has_ema))

    jitted = jax.jit(make)
    return lambda seed: jitted(seed_argument(seed))


def fresh_params(
    model: AnyModel, batch_shapes: Shapes, mesh: Mesh, seed: int, paths: Collection[str]
) -> dict[str, jax.Array]:
    """Initializes the parameters at `paths` to the values of `make_init`; returns sharded arrays, {path: array}."""

    def make(seed):
        params = _init_params(model, batch_shapes, seed)
        params = jax.lax.with_sharding_constraint(params, tree_shardings(mesh, params))
        pairs = zip(parameter_names(params), jax.tree.leaves(params), strict=True)
        return {path: x for path, x in pairs if path in paths}

    return jax.jit(make)(seed_argument(seed))


def state_from(
    params: Params, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh, has_ema: bool = False
) -> TrainState:
    """Creates a state at step 0 with zero moments and the given parameters, whose buffers are donated."""
    shardings = state_shardings(mesh, optimizer, params, has_ema)
    return jax.jit(lambda p: _state(p, optimizer, has_ema), out_shardings=shardings, donate_argnums=0)(params)


def _state(params: Params, optimizer: optax.GradientTransformationExtraArgs, has_ema: bool) -> TrainState:
    ema = jax.tree.map(jnp.copy, params) if has_ema else None
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params), ema=ema)


def _init_params(model: AnyModel, batch_shapes: Shapes, seed: Seed) -> Params:
    return _init(model, batch_shapes, seed)["params"]


def _init(model: AnyModel, batch_shapes: Shapes, seed: Seed) -> dict[str, Params]:
    # One row is enough: no parameter depends on the batch size, and the compiler removes the forward pass.
    row = {name: jnp.zeros((1, *x.shape[1:]), x.dtype) for name, x in batch_shapes.items()}
    return model.init({"params": init_key(seed)}, row, deterministic=True)


def init_key(seed: Seed) -> jax.Array:
    """Derives from a seed the random key that initializes the parameters."""
    return _key(seed, "params")


def _key(seed: Seed, use: str) -> jax.Array:
    return dict(zip(_USES, jax.random.split(jax.random.key(seed), len(_USES)), strict=True))[use]


@dataclasses.dataclass(frozen=True)
class Update:
    """The jitted update `(state, batch, frozen=None) -> (state, metrics)`.

    Random seeds, learning rates and other numbers are arguments, so that runs which differ only in them share the
    compiled program.
    """

    jitted: jax.stages.Wrapped  # (state, batch, frozen, arguments) -> (state, metrics)
    mesh: Mesh
    numbers: RunNumbers

    def __call__(self, state: TrainState, batch: Batch, frozen: Frozen = None) -> tuple[TrainState, PyTree]:
        return self.jitted(state, batch, frozen, self.arguments)

    @functools.cached_property
    def arguments(self) -> dict[str, jax.Array]:
        """Returns the arrays of `numbers` on the devices: a step copies none of them."""
        return self.numbers.arrays(NamedSharding(self.mesh, P()))

    def lower(self, state: TrainState, batch: PyTree, frozen: PyTree = None) -> jax.stages.Lowered:
        """Lowers the update for arrays or shapes; the compiled program takes (state, batch, frozen, arguments)."""
        return self.jitted.lower(state, batch, frozen, self.numbers.shapes())


def make_train_step(
    model: AnyModel,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Rate,
    train: TrainConfig,
    mesh: Mesh,
    chosen: Optional[Optimizer] = None,
    layers: Optional[LayersConfig] = None,
) -> Update:
    """Builds the jitted update, which computes gradients and applies the optimizer to the training state.

    The input state is donated, `frozen` is not. If the objective or the gradient norm is not finite, the update leaves
    parameters and moments unchanged, but advances the step and the moving average.

    Args:
      optimizer: built by an optimizer of pretrainax.optim; its `update` takes `step`.
      schedule: computes the learning rates.
      chosen: `config.optimizer`, which selects the point at which gradients are computed (if None, the parameters).
      layers: `config.layers`, which selects the parameters to freeze. If None, no parameter is frozen.

    The update's metrics stay on the device: "sums" {metric: (sum, count)}; "text", the numbers of text tokens and
    bytes, if the batch has them; "gradient_norm" and "gradient_squares" [parameters], before clipping;
    "learning_rate"; "finite", True if the update was applied; and "bad_parameter", the index in tree order
    (`param_paths.parameter_names`) of the first parameter with a non-finite gradient, or -1 if there is none.
    """
    compute_gradients = _make_gradients(model, train, mesh)
    chosen, layers = chosen or Optimizer(), layers or LayersConfig()

    def step(state, batch, frozen, arguments):
        keys = _keys(arguments, state.step)
        point = chosen.gradient_point(state.params, state.opt_state)
        gradients, (loss, sums) = compute_gradients(point, batch, keys, frozen)
        gradients = mask_frozen(layers, gradients)
        extra = {"step": state.step, "arguments": arguments}
        if chosen.needs_gradient_function:
            extra["gradients_at"] = lambda params: compute_gradients(params, batch, keys, frozen)[0]
        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)])  # [parameters]
        norm, is_nonfinite = jnp.sqrt(jnp.sum(squares)), ~jnp.isfinite(squares)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, **extra)
            new_params = optax.apply_updates(state.params, updates)
            updated = update_balance_biases(model.config.experts, layers, new_params, sums), opt_state
            unchanged = state.params, state.opt_state
            params, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, unchanged)
            ema = updated_average(state.ema, params, state.step, train.ema_decay)
        metrics = {
            "sums": {**sums, "padding_fraction": padding(batch)},
            "text": {name: batch[name].sum() for name in ("text_tokens", "text_bytes") if name in batch},
            "gradient_norm": norm,
            "gradient_squares": jax.lax.with_sharding_constraint(squares, NamedSharding(mesh, P())),
            "learning_rate": rate_in(arguments["rates"])(state.step),
            "finite": finite,
            "bad_parameter": jnp.where(jnp.any(is_nonfinite), jnp.argmax(is_nonfinite), -1).astype(jnp.int32),
        }
        new = TrainState(state.step + 1, params, opt_state, ema)
        return jax.lax.with_sharding_constraint(new, state_shardings(mesh, optimizer, params, ema is not None)), metrics

    jitted = jax.jit(step, donate_argnums=0, compiler_options=compiler_options(train))
    return Update(jitted, mesh, numbers_of(schedule, train, chosen))


def _make_gradients(
    model: AnyModel, train: TrainConfig, mesh: Mesh
) -> Callable[[Params, Batch, Keys, Frozen], tuple[Params, tuple[jax.Array, losses.Sums]]]:
    """Builds the function `(params, batch, keys, frozen) -> (gradients, (objective, sums))`, summed over microbatches.

    Each loss is sum / count over the rows of all microbatches, so it depends neither on the number of devices nor on
    `train.accumulate`, for any loss weights. The counts depend only on the batch, so they are computed before the first
    microbatch.
    """

    def objective(params, batch, counts, keys, frozen):
        def loss_of_outputs(outputs, labels):
            losses.check_labels(outputs, batch)
            with jax.named_scope("loss"):
                return losses.objective(outputs, labels, counts, **loss_options(train))

        variables = {"params": params, **(frozen or {})}
        if uses_1f1b(train, mesh.shape):
            method = "one_forward_one_backward_loss"
            return cast(Decoder, model).apply(variables, batch, loss_of_outputs, rngs=keys, method=method)
        return loss_of_outputs(model.apply(variables, batch, deterministic=False, rngs=keys), batch)

    def micro_step(params, batch, counts, keys, frozen):
        values, gradients = jax.value_and_grad(objective, has_aux=True)(params, batch, counts, keys, frozen)
        # The gradient of each microbatch is sharded: no device holds or accumulates the full gradient.
        return jax.lax.with_sharding_constraint(gradients, tree_shardings(mesh, gradients)), values

    def compute_gradients(params, batch, keys, frozen):
        counts = losses.counts(batch)
        if train.accumulate == 1:
            return micro_step(params, batch, counts, _fold_in(keys, 0), frozen)
        batches = split_microbatches(batch, train.accumulate, mesh)

        def body(total, xs):
            number, micro_batch = xs
            gradients, values = micro_step(params, micro_batch, counts, _fold_in(keys, number), frozen)
            return jax.tree.map(jnp.add, total, gradients), values

        zeros = jax.tree.map(jnp.zeros_like, params)
        gradients, values = jax.lax.scan(body, zeros, (jnp.arange(train.accumulate), batches))
        return gradients, jax.tree.map(lambda x: x.sum(axis=0), values)  # [A] -> []

    return compute_gradients


def make_eval_step(model: AnyModel, train: TrainConfig, mesh: Mesh, sequences: bool = False) -> jax.stages.Wrapped:
    """Builds the jitted evaluation without dropout, `(params, batch, frozen=None) -> (sums, values)`.

    The sums are {metric: (sum, count)}, and the values {metric: (value, weight)} of single predictions, [B, …] each.

    Args:
      sequences: whether to also count the sequences whose targets are all predicted correctly.
    """
    options: LossOptions = {**loss_options(train), "sequences": sequences, "per_target": True}

    def eval_step(params, batch, frozen=None):
        outputs = model.apply({"params": params, **(frozen or {})}, batch, deterministic=True)
        sums = losses.objective(outputs, batch, losses.counts(batch), **options)[1]
        values = {name for name in sums if name.startswith(PER_TARGET)}
        return {n: s for n, s in sums.items() if n not in values}, {n.removeprefix(PER_TARGET): sums[n] for n in values}

    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, P()))


def make_answer_step(model: AnyModel, train: TrainConfig, mesh: Mesh) -> jax.stages.Wrapped:
    """Builds the jitted evaluation of a task head, `(params, batch, frozen=None) -> (sums, outputs)`.

    The sums are as in `make_eval_step`. The outputs are the arrays [B, …] that `Head.predictions` returns, replicated.
    """

    def answer_step(params, batch, frozen=None):
        outputs = model.apply({"params": params, **(frozen or {})}, batch, deterministic=True)
        (name,) = outputs.heads  # the model of a task has one head
        answers = HEADS[name].predictions(outputs.heads[name], batch)
        return losses.objective(outputs, batch, losses.counts(batch), **loss_options(train))[1], answers

    return jax.jit(answer_step, out_shardings=NamedSharding(mesh, P()))


def loss_options(t: TrainConfig) -> LossOptions:
    """Returns the loss options in `config.train` as keyword arguments of `losses.objective`."""
    return LossOptions(z_loss=t.z_loss, label_smoothing=t.label_smoothing, chunk=t.loss_chunk, products=t.head_products)


def _keys(seeds: Mapping[str, jax.Array], step: jax.Array) -> Keys:
    """Derives a step's random keys, {use: key}. Dropout draws the most numbers, so its key uses a fast hash."""
    keys = _fold_in({use: _key(seeds[use], use) for use in ("dropout", "sample")}, step)
    return keys | {"dropout": hashed_key(keys["dropout"])}


def _fold_in(keys: Keys, number: int | jax.Array) -> Keys:
    return {use: jax.random.fold_in(key, number) for use, key in keys.items()}
