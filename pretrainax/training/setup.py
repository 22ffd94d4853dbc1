"""A run, put together from its config: what training, evaluation, the planner and the benchmarks share.

`open_run` is the whole way from a config to a `Run`. `build_run` is its last part, for data that is prepared and a mesh
that is set, and `build_steps` that of it which needs no data.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional, cast

import jax
import numpy as np
import optax

from pretrainax import adapt, models
from pretrainax.config import Experiment, ModelConfig, RunPhase, UserError, naming, phase_at, phases_of
from pretrainax.data.batch import HostBatch, Lengths, tokens_read
from pretrainax.data.collate import collate
from pretrainax.data.parts import parts_of_streams
from pretrainax.data.pipeline import Batches, PhaseBatches, batches_of, phase_batches
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.data.sources.base import Note
from pretrainax.distill import Distilled
from pretrainax.distill.distilled import without_maps
from pretrainax.inference.decoding import Generated, write
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.layers.attention_spec import AttentionSpec, collect_attention_specs
from pretrainax.layers.compute import for_this_machine
from pretrainax.layers.sums import Sums
from pretrainax.models import flops
from pretrainax.optim.layers import by_layer
from pretrainax.runtime import determinism, host
from pretrainax.runtime.agreement import check_same
from pretrainax.runtime.chips import peak_flops
from pretrainax.runtime.signals import PreemptionHandler
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.arrays import check_mesh, put_batch
from pretrainax.sharding.mesh import make_mesh, platform, share_of
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tasks import Task, WritingTask
from pretrainax.training import train_step
from pretrainax.training.metrics import add_up, summarize, summarize_parts
from pretrainax.training.train_step import Frozen, Params
from pretrainax.training.trained import plain, trained_model


@dataclasses.dataclass
class Run:
    """The data, the model and the jitted steps of a config. Nothing is allocated on a device yet.

    A run in phases is one of these a phase, each with its own model, batches and steps; `at` gives that of a step. What
    is validated is the same for all: `experiment`, `prepared` and `valid_batches` are of the config without its phases.
    """

    experiment: Experiment
    prepared: Prepared
    peers: Watchdog  # the processes of the run
    mesh: jax.sharding.Mesh
    model: models.AnyModel
    optimizer: optax.GradientTransformationExtraArgs
    lengths: Lengths
    batch_shapes: dict[str, jax.ShapeDtypeStruct]  # of the global batch
    train_batches: Batches
    valid_batches: Batches
    step: train_step.Update
    eval_step: jax.stages.Wrapped  # (params, batch, frozen) -> {name: (sum, count)}
    answer_step: jax.stages.Wrapped  # of a task: (params, batch, frozen) -> ({name: (sum, count)}, answers [B, …])
    abstract_state: train_step.TrainState  # shapes, dtypes and shardings
    abstract_frozen: Frozen  # likewise
    attention_specs: list[AttentionSpec]  # of all that the model computes, in its order
    phase: Optional[RunPhase] = None  # which of the run this is; None: it has no phases
    phases: tuple["Run", ...] = dataclasses.field(default=(), repr=False)  # all of them, this one too
    frozen: Frozen = dataclasses.field(default=None, repr=False)  # arrays, once `restore` has read them

    @property
    def trained(self) -> Experiment:
        """Returns the config as this phase trains it."""
        return self.phase.experiment if self.phase else self.experiment

    @property
    def parts(self) -> tuple["Run", ...]:
        """Returns the phases of the run; without any, the run itself."""
        return self.phases or (self,)

    @property
    def stop(self) -> int:
        """Returns the updates at the end of the phase."""
        return self.phase.stop if self.phase else self.experiment.train.steps

    @property
    def steps(self) -> int:
        """Returns how many updates the phase has."""
        return self.phase.steps if self.phase else self.experiment.train.steps

    def at(self, step: int) -> "Run":
        """Returns the phase of the update after `step` updates."""
        return phase_at(self.parts, step)

    def steps_left(self, step: int) -> float:
        """Counts the updates after `step`, one of another phase as so many of this one's as its FLOPs are worth."""
        left = [(part.flops_per_step, part.stop - max(step, part.stop - part.steps)) for part in self.parts]
        return sum(flops * steps for flops, steps in left if steps > 0) / self.flops_per_step

    @property
    def batches(self) -> PhaseBatches:
        """Returns the batches of all phases."""
        return PhaseBatches([part.train_batches for part in self.parts])

    @property
    def is_primary(self) -> bool:
        """Tells whether this is the process that writes and prints for all."""
        return jax.process_index() == 0

    def fresh_state(self) -> train_step.TrainState:
        """Returns parameters drawn from `train.init_seed` and moments of zero, born in their shards."""
        train = self.experiment.train
        seed, has_ema = train.seed_of("init"), train.ema_decay is not None
        return train_step.init_state(self.model, self.optimizer, self.batch_shapes, self.mesh, seed, has_ema)

    def validated(self, state: train_step.TrainState) -> Params:
        """Returns the parameters that `evaluate.parameters` names."""
        if self.experiment.evaluate.parameters == "trained":
            return state.params
        assert state.ema is not None  # config/validation.py
        return state.ema

    def plain(self, params: Params) -> tuple[models.AnyModel, Params]:
        """Returns the model and the parameters for what asks a trained model: a tuning is merged into them, a student
        is without its teacher."""
        if isinstance(self.model, Distilled):
            return plain(self.model), without_maps(params)
        if self.frozen is None:
            return self.model, params
        return cast(adapt.Adapted, self.model).merged(params, self.frozen[adapt.FROZEN])

    def fresh_params(self, paths: list[str]) -> dict[str, jax.Array]:
        """Returns the parameters of these paths as `fresh_state` has them."""
        seed = self.experiment.train.seed_of("init")
        return train_step.fresh_params(plain(self.model), self.batch_shapes, self.mesh, seed, paths)

    @functools.cached_property
    def parameters(self) -> int:
        """Counts the numbers of the model, trained or not; not those of a teacher, nor of the maps to its states."""
        frozen = (self.abstract_frozen or {}).get(adapt.FROZEN)
        return sum(p.size for p in jax.tree.leaves((without_maps(self.abstract_state.params), frozen)))

    @functools.cached_property
    def trained_parameters(self) -> int:
        """Counts those that an update changes."""
        return sum(p.size for p in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def tokens_per_step(self) -> int:
        """Counts the tokens that enter the model in one update, padding included; encoder's and decoder's."""
        return tokens_read(self.batch_shapes)

    @functools.cached_property
    def flops_per_step(self) -> float:
        """Counts the FLOPs of one update over all devices, as `flops.flops_per_step` does."""
        return self._flops(self.lengths)

    @functools.cached_property
    def flops_done_per_step(self) -> float:
        """Counts those of them that are done on these devices, as `flops.flops_done` does."""
        return self._flops_done(self.lengths)

    def flops_of(self, step: int) -> float:
        """Counts those of one step, whose batch may be of a shorter bucket."""
        return self._flops(self.train_batches.lengths_of(step))

    def flops_done_of(self, step: int) -> float:
        """Counts those of one step that are done."""
        return self._flops_done(self.train_batches.lengths_of(step))

    def mfu(self, flops: float, seconds: float) -> Optional[float]:
        """Returns the model FLOPs utilisation; None where the chip's peak is unknown."""
        peak = peak_flops(jax.devices()[0].device_kind)
        return peak and flops / (seconds * peak * self.mesh.size)

    def least_seconds(self, mfu: float) -> Optional[float]:
        """Returns the seconds of a step that reaches `mfu`; None where the chip's peak is unknown."""
        of_a_second = self.mfu(self.flops_done_per_step, 1.0)
        return of_a_second and of_a_second / mfu

    def _flops(self, lengths: Lengths) -> float:
        step = self.experiment.model, self.trained.rows_per_update, lengths.inputs, lengths.targets
        return flops.flops_per_step(*step, teacher=self.teacher, passes=self.experiment.passes)

    def _flops_done(self, lengths: Lengths) -> float:
        work = flops.work_of(self.attention_specs, self.model.compute.attention, platform())
        step = self.experiment.model, self.trained.rows_per_update, lengths.inputs, lengths.targets
        return flops.flops_done(*step, work, teacher=self.teacher, passes=self.experiment.passes)

    @property
    def teacher(self) -> Optional[ModelConfig]:
        """Returns the model of the teacher; None: there is none."""
        return self.model.teacher.config if isinstance(self.model, Distilled) else None

    def validation_batches(self, batches: Optional[Batches] = None) -> Iterator[HostBatch]:
        """Yields the validation split, always with the same masks: this process's rows, or those of `batches`."""
        batches, size = batches or self.valid_batches, self.experiment.train.global_batch_size
        for i in range(self.validation_sizes[0]):
            self.peers.progress()
            if self.task is None:
                yield batches[i]
            else:  # each record once, and empty rows after the last
                yield batches.of_stream(0, range(i * size, min((i + 1) * size, batches.rows_per_epoch)))

    @property
    def validation_sizes(self) -> tuple[int, int]:
        """Returns how many batches a validation takes, and how many the split has."""
        rows, size = self.valid_batches.rows_per_epoch, self.experiment.train.global_batch_size
        whole = max(rows // size, 1) if self.task is None else -(-rows // size)
        return min(self.experiment.evaluate.batches or whole, whole), whole

    @functools.cached_property
    def validation_parts(self) -> list[tuple[str, ...]]:
        """Names the parts that each stream of `valid_batches` is of, as `parts_of_streams` does."""
        experiment = self.experiment
        return parts_of_streams(experiment.data.source.components(), experiment.validation_objective)

    @functools.cached_property
    def validation_rows(self) -> list[int]:
        """Counts the rows that a validation takes of each stream."""
        rows = self.validation_sizes[0] * self.experiment.train.global_batch_size
        return self.valid_batches.schedule.before(rows).tolist()

    def validation_by_part(self) -> Iterator[tuple[tuple[str, ...], HostBatch]]:
        """Yields the rows of `validation_batches`, those of each stream in batches of their own, with its parts."""
        if not any(self.validation_parts):
            yield from (((), batch) for batch in self.validation_batches())
            return
        for number, (parts, count) in enumerate(zip(self.validation_parts, self.validation_rows, strict=True)):
            for first in range(0, count, self.experiment.train.global_batch_size):
                yield parts, self.valid_batches.of_stream(number, range(first, count))

    def validate(self, params: Params) -> dict[str, float]:
        """Returns the metrics of the validation batches: sums and counts added over all of them, then divided once.

        Beside them, where there are several sources or objectives, those of each, {"loss/source=wiki": …}; of a task,
        its figures.
        """
        if isinstance(self.task, WritingTask):
            return self._validate_writing(self.task, params)
        if self.task is not None:
            return self._validate_task(self.task, params)
        parts, sums = [], []
        for of_batch, batch in self.validation_by_part():
            parts.append(of_batch)
            sums.append(self.eval_step(params, put_batch(batch, self.mesh), self.frozen))
        sums = jax.device_get(sums)
        return summarize(add_up(sums)) | summarize_parts(parts, sums)

    @property
    def task(self) -> Optional[Task]:
        """Returns what validation asks, where it is a task."""
        asked = self.experiment.validation_objective
        return asked if isinstance(asked, Task) else None

    def answers(self, params: Params) -> tuple[list[Sums], PyTree, list[Note]]:
        """Returns what the model answers to the records of the validation split, in their order.

        Returns:
          The sums of each batch; the answers, NumPy arrays [n, …]; the n notes.
        """
        found = [
            self.answer_step(params, put_batch(batch, self.mesh), self.frozen) for batch in self.validation_batches()
        ]
        sums, answers = zip(*jax.device_get(found), strict=True)
        (stream,) = self.valid_batches.streams
        count = min(len(found) * self.experiment.train.global_batch_size, self.valid_batches.rows_per_epoch)
        whole = jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *answers)
        return list(sums), whole, [stream.note(n) for n in range(count)]

    def written(self, params: Params, task: WritingTask) -> tuple[list[Generated], list[Note]]:
        """Returns what the model writes for as many records of the validation split as `task.answers` says, evenly
        over it, with their notes."""
        (stream,) = self.valid_batches.streams
        bound, rows = stream.objective, self.valid_batches.rows_per_epoch
        assert isinstance(bound, WritingTask)
        count = rows if task.answers is None else min(task.answers, rows)
        numbers = [i * rows // count for i in range(count)]
        stream.hold(numbers)
        prompts = [bound.asked(stream.record(n), stream.vocabulary) for n in numbers]
        loaded = dataclasses.replace(self._writer, params=self.plain(params)[1]).compiled_as(self._writer)
        sampling = Sampling(max_new_tokens=bound.room_for_answer, num_beams=task.num_beams)
        said = write(loaded, prompts, sampling)
        loaded.forget()
        return said, [stream.note(n) for n in numbers]

    @functools.cached_property
    def _writer(self) -> LoadedModel:
        """Holds what is compiled to write, for all validations."""
        return LoadedModel(self.experiment, plain(self.model), None, self.prepared.tokenizer, self.mesh, "this run")

    def _validate_writing(self, task: WritingTask, params: Params) -> dict[str, float]:
        found = [
            self.eval_step(params, put_batch(batch, self.mesh), self.frozen) for batch in self.validation_batches()
        ]
        figures = summarize(add_up(jax.device_get(found)))
        if task.answers == 0:
            return figures
        said, notes = self.written(params, task)
        return figures | task.metrics([each.text for each in said], notes)

    def _validate_task(self, task: Task, params: Params) -> dict[str, float]:
        sums, answers, notes = self.answers(params)
        return summarize(add_up(sums)) | task.metrics(answers, notes)


class Steps(NamedTuple):
    """The part of a run that needs no data: model, optimizer and the jitted steps. The fields are those of Run."""

    model: models.AnyModel
    optimizer: optax.GradientTransformationExtraArgs
    step: train_step.Update
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
) -> Steps:
    """Builds the model, its optimizer and the steps, inside `jax.set_mesh(mesh)`, whose devices may be absent.

    Args:
      experiment: without phases.
      validated: the config whose rows the evaluation is of; None: the same.

    Raises:
      UserError: a mesh that does not divide the batch or the model, or that its attention cannot run on.
    """
    check_mesh(experiment, mesh)
    train = for_this_machine(experiment.train)
    model = trained_model(experiment, train)
    with collect_attention_specs() as attention_specs:
        variables = train_step.abstract_variables(model, batch_shapes)
    params = variables["params"]
    schedule = experiment.schedule.build(experiment.optimizer.learning_rate, experiment.train.steps)
    chosen, layers = experiment.optimizer, experiment.layers
    optimizer = by_layer(layers, chosen, chosen.build(schedule, params), params)
    return Steps(
        model=model,
        optimizer=optimizer,
        step=train_step.make_train_step(model, optimizer, schedule, train, mesh, chosen, layers),
        eval_step=train_step.make_eval_step(model, train, mesh, _has_answers(validated or experiment)),
        answer_step=train_step.make_answer_step(model, train, mesh),
        abstract_state=train_step.abstract_state(params, optimizer, mesh, train.ema_decay is not None),
        abstract_frozen=train_step.abstract_frozen(variables, mesh),
        attention_specs=attention_specs,
    )


def _has_answers(experiment: Experiment) -> bool:
    """Returns whether all targets are answers, of which people ask how many are right as a whole."""
    is_encoder = experiment.model.family == "encoder"
    return not is_encoder and all(source.pairs for source in experiment.data.source.components())


def build_run(experiment: Experiment, prepared: Prepared, mesh: jax.sharding.Mesh, peers: Watchdog) -> Run:
    """Builds a run on data that is prepared, inside `jax.set_mesh(mesh)`; raises as `build_steps`.

    Of one in phases it returns the first. Phases that differ in their text alone share their steps.
    """
    check_answers(experiment)
    share = share_of(mesh, jax.process_index())
    processes = share.index, share.count
    valid_batches = batches_of(experiment, prepared, "valid", *processes)
    made: list[tuple[tuple, Steps]] = []
    runs = []
    batches_of_phases = phase_batches(experiment, prepared, *processes).phases
    for phase, train_batches in zip(phases_of(experiment), batches_of_phases, strict=True):
        e, rows = phase.experiment, phase.experiment.train.global_batch_size
        # The first batch may be of a short bucket. What needs a trace, and what is said of it, is of the longest rows.
        longest = collate([[train_batches.template]], train_batches.lengths, pad=0)
        first_shapes, longest_shapes = (
            train_step.global_shapes(batch, rows) for batch in (train_batches[phase.start], longest)
        )
        key = (e.model, e.train, e.optimizer, e.schedule, longest_shapes)
        if (steps := next((steps for known, steps in made if known == key), None)) is None:
            with naming(phase):
                steps = build_steps(e, longest_shapes, mesh, validated=experiment)
            made.append((key, steps))
        run = Run(
            experiment=experiment,
            prepared=prepared,
            peers=peers,
            mesh=mesh,
            lengths=train_batches.lengths,
            batch_shapes=first_shapes,
            train_batches=train_batches,
            valid_batches=valid_batches,
            phase=phase if experiment.phases else None,
            **steps._asdict(),
        )
        runs.append(run)
    for run in runs:
        run.phases = tuple(runs) if experiment.phases else ()
    return runs[0]


def check_answers(experiment: Experiment) -> None:
    """Raises UserError where a validation is to write answers and cannot."""
    asked, tuning = experiment.validation_objective, experiment.tuning
    if not isinstance(asked, WritingTask) or asked.answers == 0:
        return
    if jax.process_count() > 1:
        raise UserError(
            f"config.objective.answers is {asked.answers}, and one process writes answers: set it to 0, and let "
            "python -m pretrainax.evaluate write them in a process by itself"
        )
    if tuning is not None and not cast(adapt.Tuning, tuning).is_mergeable:
        raise UserError(
            f"config.objective.answers is {asked.answers}, and a model with {tuning} writes no text: set it to 0, or "
            "tune by LoRA"
        )


@contextlib.contextmanager
def open_run(
    experiment: Experiment,
    prepare_data: Callable[[Experiment], Prepared] = prepare,
    preemption: Optional[PreemptionHandler] = None,
    workdir: Optional[str] = None,
) -> Iterator[Run]:
    """Joins the processes, prepares the data, sets the mesh and builds the run, right after `host.start_jax`.

    Left by an exception, it ends the other processes of the run too (see `Watchdog`).

    Args:
      prepare_data: is called in process 0 first, and then in all others, which find done what it did.
      preemption: is entered once the data is there; until then a signal ends the process.
      workdir: where a deterministic run keeps what the compiler has chosen.
    """
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(Watchdog(experiment.train.stuck_after))
        if experiment.train.deterministic:
            determinism.ask_for_same_bits(workdir)
        host.start_devices()  # in all processes together: within `zero_first` they would wait for each other
        if experiment.train.deterministic and workdir is not None:
            determinism.keep_programs(workdir)
        with peers.zero_first():
            prepared = prepare_data(experiment)
            batches_of(experiment, prepared, "valid")  # which puts the plan of its rows beside the corpus
            phase_batches(experiment, prepared)
        mesh = make_mesh(experiment.mesh)
        stack.enter_context(jax.set_mesh(mesh))
        check_same(
            "the text of config.data.source, or what config.tokenizer makes of it,",
            f"{prepared.tokenizer.fingerprint[:12]} and {', '.join(c.fingerprint[:12] for c in prepared.corpora)}",
            "give every host the same files, and models and data sets of the hub by their commits",
        )
        if preemption is not None:
            stack.enter_context(preemption)
        yield build_run(experiment, prepared, mesh, peers)
