"""Searches for the fastest mesh, and for changes that make a run fit in memory, by estimating every candidate."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Optional, get_args

from pretrainax.config import Experiment, MeshConfig, RunPhase, UserError, phase_in_errors, phases_of
from pretrainax.config.experiment import PipelineSchedule, Remat
from pretrainax.planning import memory, roofline, traffic
from pretrainax.planning.memory import Memory
from pretrainax.planning.roofline import Roofline
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.sharding.axes import (
    AXES,
    DATA_AXIS,
    EXPERT_AXIS,
    FSDP_AXIS,
    LENGTH_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
)
from pretrainax.sharding.mesh import mesh_sizes
from pretrainax.sharding.stages import stages_obstacle

POLICIES, _SCHEDULES = get_args(Remat), get_args(PipelineSchedule)  # fastest first
_MIN_SPLIT_LENGTH = 8192  # minimum tokens per sequence for meshes that split the sequence


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run on a mesh of a topology, with its estimated memory, communication, time and price."""

    experiment: Experiment
    sizes: dict[str, int]  # mesh axis -> size
    memory: Memory
    collectives: list[Collective]  # of one step
    roofline: Roofline
    fits: bool  # whether the run fits in the memory of the devices
    phases: tuple[tuple[RunPhase, "Candidate"], ...] = ()  # each phase with its own estimates; () without phases

    @property
    def largest(self) -> "Candidate":
        """Returns the candidate of the phase that needs the most memory, or this candidate if the run has no phases."""
        return _largest(self.phases) if self.phases else self

    def flags(self, before: Experiment) -> str:
        """Returns the command-line flags that turn the config `before` into this candidate's config, or "" if equal."""
        return changed_flags(before, self.experiment)


def changed_flags(before: Experiment, after: Experiment) -> str:
    """Returns the flags that change the fields of `before` that the planner may change to those of `after`."""
    changed = []
    train_fields = "train.remat", "train.accumulate", "train.pipeline_schedule", "train.ema_decay"
    for field_path in (*train_fields, *(f"mesh.{axis}" for axis in (*AXES, "slices"))):
        group, field = field_path.split(".")
        new, old = (getattr(getattr(e, group), field) for e in (after, before))
        changed += [f"--config.{field_path}={new}"] if new != old else []
    return " ".join(changed)


def resolve_remat(experiment: Experiment, topology: Topology) -> None:
    """Replaces `train.remat="auto"` with the policy that `estimate_run` selects, in place; keeps any other value."""
    if experiment.train.remat == "auto":
        experiment.train = estimate_run(experiment, topology).experiment.train


def estimate_run(experiment: Experiment, topology: Topology) -> Candidate:
    """Estimates memory, communication, time and price of `experiment` on the mesh in its config.

    `train.remat="auto"` becomes the fastest policy with which the run fits in memory. If it fits with none of them,
    "auto" becomes the policy that needs the least memory.

    For a run with training phases, the memory, collectives and step time are those of the phase that needs the most
    memory. The hours and price are summed over all phases.

    Raises:
      UserError: the mesh does not have the topology's number of devices, or the batch size or a model dimension is not
        divisible by the mesh.
    """
    if experiment.train.remat == "auto":
        assessed = None
        for policy in POLICIES:
            assessed = estimate_run(with_changes(experiment, experiment.mesh, remat=policy), topology)
            if assessed.fits:
                break
        return assessed
    if not experiment.phases:
        return _assess(experiment, topology, experiment.train.steps)
    assessed = []
    for phase in phases_of(experiment):
        with phase_in_errors(phase):
            assessed.append((phase, _assess(phase.experiment, topology, phase.steps)))
    times = [candidate.roofline for _, candidate in assessed]
    prices = [time.price for time in times]
    largest = _largest(assessed)
    time = dataclasses.replace(
        largest.roofline,
        hours=sum(time.hours for time in times),
        price=None if None in prices else sum(filter(None, prices)),
    )
    return dataclasses.replace(largest, experiment=experiment, roofline=time, phases=tuple(assessed))


def _largest(phases: Sequence[tuple[RunPhase, Candidate]]) -> Candidate:
    return max((candidate for _, candidate in phases), key=lambda candidate: candidate.memory.total)


def _assess(experiment: Experiment, topology: Topology, steps: int) -> Candidate:
    """Estimates memory, communication, time and price of `steps` steps, for a config without phases.

    Raises:
      UserError: the mesh has a different number of slices or devices than the topology, or the batch size or a model
        dimension is not divisible by the mesh.
    """
    if experiment.mesh.slices != topology.slices:
        raise UserError(
            f"config.mesh.slices is {experiment.mesh.slices}, but {topology} has {topology.slices}; set it to that"
        )
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    needed = memory.estimate(experiment, sizes, topology.chip)
    sent = traffic.collectives(experiment, sizes, topology)
    time = roofline.estimate_time(experiment, sizes, topology, needed, sent, steps)
    return Candidate(experiment, sizes, needed, sent, time, needed.fits(topology.chip))


def best(experiment: Experiment, topology: Topology) -> list[Candidate]:
    """Returns the best candidate for each mesh that divides the batch and the model, sorted from best to worst.

    On each mesh, the candidate has the fastest rematerialization policy and accumulation with which the run fits.
    Candidates that fit come first, sorted by time. All other candidates follow, sorted by memory.
    """
    return sorted(
        filter(None, (_best_on(experiment, topology, mesh) for mesh in _meshes(experiment, topology))), key=_rank
    )


def _best_on(experiment: Experiment, topology: Topology, mesh: MeshConfig) -> Optional[Candidate]:
    """Returns the best candidate on a mesh, or None if the mesh does not divide the batch or the model."""
    fitting = (
        _first_that_fits(experiment, topology, mesh, fields, accumulations(experiment))
        for fields in (_train_field_choices(mesh) if _can_fit(experiment, topology, mesh) else ())
    )
    unchanged_candidate = try_estimate(with_changes(experiment, mesh), topology)
    return min(filter(None, (unchanged_candidate, *fitting)), key=_rank, default=None)


def _train_field_choices(mesh: MeshConfig) -> Iterator[dict[str, str]]:
    """Yields the rematerialization policies and pipeline schedules to try on a mesh, as fields of `TrainConfig`."""
    for policy in POLICIES:
        if mesh.pipeline == 1:
            yield {"remat": policy}
        else:
            yield from ({"remat": policy, "pipeline_schedule": schedule} for schedule in _SCHEDULES)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Returns a sort key: candidates that fit come first, ordered by hours, and the rest follow, ordered by memory."""
    return not candidate.fits, candidate.roofline.hours if candidate.fits else candidate.memory.total


def accumulations(experiment: Experiment) -> list[int]:
    """Returns the values of `train.accumulate` to try: the current value and its doublings that divide the batch."""
    rows, configured = experiment.train.global_batch_size, experiment.train.accumulate
    return [configured * 2**i for i in range(12) if rows % (configured * 2**i) == 0]


def remedies(experiment: Experiment, topology: Topology) -> list[Candidate]:
    """Finds config changes that make a run fit, simplest first; each change gives a faster run than the one before.

    The search tries four sets of fields. Each set includes the previous sets: (1) the rematerialization policy and the
    pipeline schedule; (2) the accumulation; (3) the mesh axes data, fsdp and expert; (4) the mesh axes tensor, sequence
    and pipeline. The search tries set 4 only if the run does not fit with sets 1 to 3.
    """
    current_mesh, accumulate, all_accumulations = (
        experiment.mesh,
        experiment.train.accumulate,
        accumulations(experiment),
    )
    meshes = [mesh for mesh in _meshes(experiment, topology) if _can_fit(experiment, topology, mesh)]
    current_meshes = [current_mesh] if _can_fit(experiment, topology, current_mesh) else []
    layer_axes = (PIPELINE_AXIS, LENGTH_AXIS, TENSOR_AXIS)
    meshes_with_same_layer_axes = [
        mesh for mesh in meshes if all(getattr(mesh, axis) == getattr(current_mesh, axis) for axis in layer_axes)
    ]
    changes: list[Candidate] = []
    for choices, counts in (
        (current_meshes, [accumulate]),
        (current_meshes, all_accumulations),
        (meshes_with_same_layer_axes, all_accumulations),
        (meshes, all_accumulations),
    ):
        if choices is meshes and changes:
            break
        fitting = [
            candidate
            for mesh in choices
            for fields in _train_field_choices(mesh)
            if (candidate := _first_that_fits(experiment, topology, mesh, fields, counts)) is not None
        ]
        fastest = min(fitting, key=lambda item: item.roofline.hours, default=None)
        if fastest and (not changes or fastest.roofline.hours < 0.98 * changes[-1].roofline.hours):
            changes.append(fastest)
    return changes


def remedies_on_larger_topology(experiment: Experiment, topology: Topology) -> tuple[Topology, list[Candidate]]:
    """Doubles the topology until `remedies` finds changes; returns (topology, changes).

    Stops at 16 times the devices. If there are no changes for that topology either, returns it and [].
    """
    for _ in range(5):
        if changes := remedies(experiment, topology):
            return topology, changes
        larger, topology = topology, topology.doubled()
    return larger, []


def _can_fit(experiment: Experiment, topology: Topology, mesh: MeshConfig) -> bool:
    """Returns False if a mesh is invalid, or too small for the train state and a gradient with any `train` settings."""
    last = phases_of(with_changes(experiment, mesh))[-1].experiment
    try:
        sizes = mesh_sizes(mesh, topology.num_devices, processes=topology.hosts)
        return memory.least_bytes(last, sizes) <= memory.MARGIN * topology.chip.memory_bytes
    except UserError:
        return False


def _first_that_fits(
    experiment: Experiment, topology: Topology, mesh: MeshConfig, fields: dict[str, str], accumulations: list[int]
) -> Optional[Candidate]:
    """Returns the candidate with the fewest microbatches that fits in memory, or None if no candidate fits.

    More microbatches than necessary would only increase the communication.

    Args:
      fields: new values for fields of `experiment.train`.
      accumulations: numbers of microbatches to try, in ascending order.
    """
    for count in accumulations:
        candidate = try_estimate(with_changes(experiment, mesh, **fields, accumulate=count), topology)
        if candidate is None or candidate.fits:
            return candidate  # None: larger numbers of microbatches do not divide the batch either
    return None


def with_changes(experiment: Experiment, mesh: MeshConfig, **train: Optional[str | int]) -> Experiment:
    """Returns a copy of the experiment with the given mesh and the given fields of `experiment.train` replaced."""
    return dataclasses.replace(experiment, mesh=mesh, train=dataclasses.replace(experiment.train, **train))


def try_estimate(experiment: Experiment, topology: Topology) -> Optional[Candidate]:
    """Returns the result of `estimate_run`, or None if `estimate_run` raises UserError for this mesh."""
    try:
        return estimate_run(experiment, topology)
    except UserError:
        return None


def _meshes(experiment: Experiment, topology: Topology) -> Iterator[MeshConfig]:
    """Yields the meshes to try; each uses all devices of the topology.

    `tensor` is at most 8, and at most the number of GPUs per host. `sequence` is above 1 only for sequences of at least
    _MIN_SPLIT_LENGTH tokens. `expert` divides the number of experts. `pipeline` divides the number of layers, and is 1
    for models that do not support pipelines.
    """
    devices, max_tensor = topology.num_devices, 8 if topology.chip.is_tpu else topology.chip.devices_per_host
    max_length = max(phase.experiment.data.sequence_length for phase in phases_of(experiment))
    lengths = (1, 2, 4, 8) if max_length >= _MIN_SPLIT_LENGTH else (1,)
    settings = experiment.model.experts
    experts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or settings and settings.num_experts % n == 0]
    layers = experiment.model.num_layers if stages_obstacle(experiment.model) is None else 1
    stages = [n for n in (1, 2, 4, 8, 16) if layers % n == 0]
    for tensor, sequence, expert, pipeline in itertools.product((1, 2, 4, 8), lengths, experts, stages):
        inner_devices = tensor * sequence * expert * pipeline
        outer_devices = devices // inner_devices
        if tensor > max_tensor or outer_devices * inner_devices != devices or outer_devices % topology.slices:
            continue
        for fsdp in (n for n in range(1, outer_devices // topology.slices + 1) if outer_devices % n == 0):
            if (outer_devices // fsdp) % topology.slices == 0 and math.prod(
                (tensor, sequence)
            ) <= outer_devices * max_tensor:
                sizes = {
                    DATA_AXIS: outer_devices // fsdp,
                    PIPELINE_AXIS: pipeline,
                    FSDP_AXIS: fsdp,
                    EXPERT_AXIS: expert,
                }
                yield MeshConfig(**sizes, **{LENGTH_AXIS: sequence, TENSOR_AXIS: tensor}, slices=topology.slices)
