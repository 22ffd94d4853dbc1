"""Builds a run from its config, for training, evaluation, the planner and the benchmarks.

`open_run` builds a `Run` from a config. It calls `build_run`, which needs prepared data and a mesh. `build_run` calls
`build_steps`, which needs no data. `work.py` computes the cost of a step, and `validation.py` evaluates the model.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

import jax
import optax

from pretrainax import models
from pretrainax.config import Experiment, RunPhase, TrainConfig, UserError, phase_at, phase_in_errors, phases_of
from pretrainax.data.collate import collate
from pretrainax.data.objectives import Objective
from pretrainax.data.pipeline import Batches, PhaseBatches, batches_of, phase_batches
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.data.sources.base import Note
from pretrainax.layers.attention_spec import AttentionSpec, collect_attention_specs
from pretrainax.layers.compute import resolve_auto
from pretrainax.optim.arguments import build_optimizer, numbers_of, update_key
from pretrainax.optim.transfer import multipliers_of
from pretrainax.runtime import determinism, host
from pretrainax.runtime.agreement import check_same
from pretrainax.runtime.shared_programs import current_programs
from pretrainax.runtime.signals import PreemptionHandler
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.arrays import check_mesh
from pretrainax.sharding.mesh import batch_share, make_mesh
from pretrainax.training import train_step
from pretrainax.training.start import FRESH, Start
from pretrainax.training.train_step import Frozen, Params
from pretrainax.training.validation import Validation
from pretrainax.training.work import Work
from pretrainax.training.wrapped import merged, model_params, plain, trained_model

# Generates text for a validation: (run, params, task) -> (arguments of the task's `metrics`, metadata of the records).
GenerateOutputs = Callable[["Run", Params, Objective], tuple[Sequence, list[Note]]]


def no_generation(run: "Run", params: Params, task: Objective) -> tuple[Sequence, list[Note]]:
    """Raises UserError, because pretrainax.training cannot generate text; this is `build_run`'s default `write`."""
    raise UserError(
        f"{type(task).__name__} generates answers, which pretrainax.training does not support: train with "
        "pretrainax.runs.train, or set config.objective.answers to 0"
    )


@dataclasses.dataclass
class Run:
    """The data, the model and the jitted steps of a config, before anything is allocated on a device.

    A run with phases has one `Run` per phase, each with its own model, batches and steps; `at` returns the `Run` that
    trains a given step. `experiment`, `prepared` and the validation rows are the same in all phases: those of the
    config without phases.
    """

    experiment: Experiment
    prepared: Prepared
    peers: Watchdog  # watches the other processes of the run
    mesh: jax.sharding.Mesh
    model: models.AnyModel
    optimizer: optax.GradientTransformationExtraArgs
    batch_shapes: dict[str, jax.ShapeDtypeStruct]  # shapes of the global batch
    train_batches: Batches
    step: train_step.Update
    init: Callable[[int], train_step.TrainState]  # seed -> state
    abstract_state: train_step.TrainState  # shapes, dtypes and shardings
    abstract_frozen: Frozen  # shapes, dtypes and shardings
    work: Work  # tokens and FLOPs of a step
    validation: Validation
    start: Start
    write: GenerateOutputs
    phase: Optional[RunPhase] = None  # None: the run has no phases
    phases: tuple["Run", ...] = dataclasses.field(default=(), repr=False)  # all phases, including this one

    @property
    def trained(self) -> Experiment:
        """Returns the config of this phase, or the run's config if it has no phases."""
        return self.phase.experiment if self.phase else self.experiment

    @property
    def parts(self) -> tuple["Run", ...]:
        """Returns the `Run` of each phase, or just this `Run` if there are no phases."""
        return self.phases or (self,)

    @property
    def stop(self) -> int:
        """Returns the total number of completed updates when the phase ends."""
        return self.phase.stop if self.phase else self.experiment.train.steps

    @property
    def steps(self) -> int:
        """Returns the number of updates in the phase."""
        return self.phase.steps if self.phase else self.experiment.train.steps

    def at(self, step: int) -> "Run":
        """Returns the `Run` of the phase that contains update `step` + 1."""
        return phase_at(self.parts, step)

    def steps_left(self, step: int) -> float:
        """Returns how many updates of this phase need as many FLOPs as all remaining updates after `step`."""
        remaining = [(part.work.flops_per_step, part.stop - max(step, part.stop - part.steps)) for part in self.parts]
        return sum(flops * steps for flops, steps in remaining if steps > 0) / self.work.flops_per_step

    @property
    def batches(self) -> PhaseBatches:
        """Returns the batches of all phases."""
        return PhaseBatches([part.train_batches for part in self.parts])

    @property
    def is_primary(self) -> bool:
        """Returns True if this process writes files and logs for all processes."""
        return jax.process_index() == 0

    @property
    def frozen(self) -> Frozen:
        """Returns the model's frozen parameters, or None if there are none or `freeze` has not been called."""
        return self.validation.frozen

    def freeze(self, frozen: Frozen) -> None:
        """Sets the frozen parameters of all phases."""
        for part in self.parts:
            part.validation.frozen = frozen

    def fresh_state(self) -> train_step.TrainState:
        """Initializes a new run's sharded state, with parameters drawn from the "init" seed and zero moments."""
        return self.init(self.experiment.train.seed_of("init"))

    def fresh_params(self, paths: list[str]) -> dict[str, jax.Array]:
        """Initializes the unwrapped model's parameters at `paths` as `fresh_state` does; returns {path: array}."""
        seed = self.experiment.train.seed_of("init")
        return train_step.fresh_params(plain(self.model), self.batch_shapes, self.mesh, seed, paths)

    def state_of(self, params: Params) -> train_step.TrainState:
        """Creates a new run's state from the given parameters, whose buffers are donated."""
        has_ema = self.abstract_state.ema is not None
        return train_step.state_from(params, self.optimizer, self.mesh, has_ema)

    def validated(self, state: train_step.TrainState) -> Params:
        """Returns the parameters to validate: `state.params` or their moving average, per `evaluate.parameters`."""
        if self.experiment.evaluate.parameters == "trained":
            return state.params
        assert state.ema is not None  # config/validation.py
        return state.ema

    def validate(self, params: Params) -> dict[str, float]:
        """Computes the validation objective's metrics on the validation split."""
        return self.experiment.validation_objective.validate(self, params)

    def plain(self, params: Params) -> tuple[models.AnyModel, Params]:
        """Returns the model and parameters for use after training, with adapters merged and the teacher removed."""
        return merged(self.model, params, self.frozen)

    @functools.cached_property
    def parameters(self) -> int:
        """Returns the number of trained and frozen parameters, not counting any teacher or distillation projections."""
        model_parameters = model_params(self.model, self.abstract_state.params, self.abstract_frozen)
        return sum(p.size for p in jax.tree.leaves(model_parameters))

    @functools.cached_property
    def trained_parameters(self) -> int:
        """Returns the number of trained parameters."""
        return sum(p.size for p in jax.tree.leaves(self.abstract_state.params))


class Steps(NamedTuple):
    """The parts of a run that do not depend on the data: model, optimizer and jitted steps."""

    model: models.AnyModel
    optimizer: optax.GradientTransformationExtraArgs
    step: train_step.Update
    init: Callable[[int], train_step.TrainState]  # seed -> state
    eval_step: jax.stages.Wrapped
    answer_step: jax.stages.Wrapped
    abstract_state: train_step.TrainState
    abstract_frozen: Frozen
    attention_specs: list[AttentionSpec]


def build_steps(
    experiment: Experiment,
    batch_shapes: dict[str, jax.ShapeDtypeStruct],
    mesh: jax.sharding.Mesh,
    validated: Optional[Experiment] = None,
    make_model: Callable[[Experiment, TrainConfig], models.AnyModel] = trained_model,
) -> Steps:
    """Builds the model, optimizer and jitted steps, without using any device; call it inside `jax.set_mesh(mesh)`.

    Args:
      experiment: a config without phases.
      validated: the config whose validation rows `eval_step` evaluates; defaults to `experiment`.
      make_model: builds the model to train, as `Start.model` does.

    Raises:
      UserError: the mesh does not divide the batch or the model, or the attention cannot run on it.
    """
    check_mesh(experiment, mesh)
    train = resolve_auto(experiment.train, experiment.model.vocab_size)
    model = make_model(experiment, train)
    with collect_attention_specs() as attention_specs:
        variables = train_step.abstract_variables(model, batch_shapes)
    params = variables["params"]
    schedule = experiment.schedule.build(experiment.optimizer.learning_rate, train.steps)
    chosen, layers, has_ema = experiment.optimizer, experiment.layers, train.ema_decay is not None
    multipliers = experiment.transfer and multipliers_of(experiment.model, experiment.transfer, params)
    optimizer = build_optimizer(chosen, layers, params, multipliers)
    return Steps(
        model=model,
        optimizer=optimizer,
        step=train_step.make_train_step(model, optimizer, schedule, train, mesh, chosen, layers),
        init=train_step.make_init(model, optimizer, batch_shapes, mesh, has_ema, multipliers),
        eval_step=train_step.make_eval_step(model, train, mesh, _has_answers(validated or experiment)),
        answer_step=train_step.make_answer_step(model, train, mesh),
        abstract_state=train_step.abstract_state(params, optimizer, mesh, has_ema),
        abstract_frozen=train_step.abstract_frozen(variables, mesh),
        attention_specs=attention_specs,
    )


def _has_answers(experiment: Experiment) -> bool:
    """Returns True if every row maps an input to a target (text pairs), so that sequence accuracy is meaningful."""
    is_encoder = experiment.model.family == "encoder"
    return not is_encoder and all(source.pairs for source in experiment.data.source.components())


def build_run(
    experiment: Experiment,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    peers: Watchdog,
    start: Start = FRESH,
    write: GenerateOutputs = no_generation,
) -> Run:
    """Builds a run from prepared data; call it inside `jax.set_mesh(mesh)`. Raises UserError as `build_steps` does.

    For a run with phases, returns the first phase's `Run`. Phases that differ only in their data share compiled steps.

    Args:
      start: provides the initial and the frozen parameters.
      write: generates the text that the validation of some tasks requires.
    """
    batch_slice = batch_share(mesh, jax.process_index())
    index_and_count = batch_slice.index, batch_slice.count
    valid_batches = batches_of(experiment, prepared, "valid", *index_and_count)
    programs, runs = current_programs(), []
    batches_of_phases = phase_batches(experiment, prepared, *index_and_count).phases
    for phase, train_batches in zip(phases_of(experiment), batches_of_phases, strict=True):
        e, rows, lengths = phase.experiment, phase.experiment.train.global_batch_size, train_batches.lengths
        # The first batch may belong to a short bucket, so traces use the longest rows.
        longest = collate([[train_batches.template]], lengths, pad=0)
        first_shapes, longest_shapes = (
            train_step.global_shapes(batch, rows) for batch in (train_batches[phase.start], longest)
        )
        schedule = e.schedule.build(e.optimizer.learning_rate, e.train.steps)
        key = update_key(e), _has_answers(experiment), mesh, tuple(sorted(longest_shapes.items()))
        with phase_in_errors(phase):
            build = functools.partial(build_steps, e, longest_shapes, mesh, experiment, start.model)
            steps = programs.get(key, build)
        run = Run(
            experiment=experiment,
            prepared=prepared,
            peers=peers,
            mesh=mesh,
            model=steps.model,
            optimizer=steps.optimizer,
            batch_shapes=first_shapes,
            train_batches=train_batches,
            step=dataclasses.replace(steps.step, numbers=numbers_of(schedule, e.train, e.optimizer)),
            init=steps.init,
            abstract_state=steps.abstract_state,
            abstract_frozen=steps.abstract_frozen,
            work=Work(
                e, steps.model, steps.attention_specs, train_batches.lengths, first_shapes, train_batches, mesh.size
            ),
            validation=Validation(experiment, valid_batches, steps.eval_step, steps.answer_step, mesh, peers),
            start=start,
            write=write,
            phase=phase if experiment.phases else None,
        )
        runs.append(run)
    for run in runs:
        run.phases = tuple(runs) if experiment.phases else ()
    return runs[0]


@contextlib.contextmanager
def open_run(
    experiment: Experiment,
    prepare_data: Callable[[Experiment], Prepared] = prepare,
    preemption: Optional[PreemptionHandler] = None,
    workdir: Optional[str] = None,
    start: Start = FRESH,
    write: GenerateOutputs = no_generation,
) -> Iterator[Run]:
    """Connects the processes, prepares the data, sets the mesh and yields the run; call it after `host.start_jax`.

    An exception in this context also ends the other processes of the run (see `Watchdog`).

    Args:
      prepare_data: called in process 0 first, then in the other processes, which reuse the files that it wrote.
      preemption: handles signals once the data is prepared; until then, a signal ends the process.
      workdir: the folder in which a deterministic run stores autotuning results and compiled programs.
      start, write: as in `build_run`.
    """
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(Watchdog(experiment.train.stuck_after))
        if experiment.train.deterministic:
            determinism.set_deterministic_flag()
        host.start_devices()  # in all processes at once: inside `zero_first` they would wait for each other
        if experiment.train.deterministic and workdir is not None:
            determinism.cache_programs_in(workdir)
        with peers.zero_first():
            prepared = prepare_data(experiment)
            batches_of(experiment, prepared, "valid")  # writes the row plan next to the corpus
            phase_batches(experiment, prepared)
        mesh = make_mesh(experiment.mesh)
        stack.enter_context(jax.set_mesh(mesh))
        check_same(
            "the text of config.data.source, or its tokens by config.tokenizer,",
            f"{prepared.tokenizer.fingerprint[:12]} and {', '.join(c.fingerprint[:12] for c in prepared.corpora)}",
            "give every host the same files, and name models and datasets of the hub by commit",
        )
        if preemption is not None:
            stack.enter_context(preemption)
        from pretrainax.training.budget import resolve_budget  # that module imports this module

        resolve_budget(experiment, lambda trial: build_run(trial, prepared, mesh, peers, start, write))
        yield build_run(experiment, prepared, mesh, peers, start, write)
