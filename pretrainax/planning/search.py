"""Searches for the fastest mesh, and for changes that make a run fit, by estimating each candidate."""

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

_POLICIES, _SCHEDULES = get_args(Remat), get_args(PipelineSchedule)  # fastest first
_LONG = 8192  # tokens of a row from which the search splits the sequence


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run on a topology, with its estimated memory, communication, time and price."""

    experiment: Experiment
    sizes: dict[str, int]
    memory: Memory
    collectives: list[Collective]
    roofline: Roofline
    fits: bool
    phases: tuple[tuple[RunPhase, "Candidate"], ...] = ()  # each phase of a run with phases, assessed alone

    @property
    def largest(self) -> "Candidate":
        """Returns the phase with the largest memory, or the run itself without phases."""
        return _largest(self.phases) if self.phases else self

    def flags(self, before: Experiment) -> str:
        """Returns the flags that change the experiment `before` into this candidate."""
        changed = []
        train_fields = "train.remat", "train.accumulate", "train.pipeline_schedule"
        for field_path in (*train_fields, *(f"mesh.{axis}" for axis in (*AXES, "slices"))):
            group, field = field_path.split(".")
            new, old = (getattr(getattr(e, group), field) for e in (self.experiment, before))
            changed += [f"--config.{field_path}={new}"] if new != old else []
        return " ".join(changed)


def resolve_remat(experiment: Experiment, topology: Topology) -> None:
    """Resolves `train.remat="auto"` to the policy that `estimate_run` selects."""
    if experiment.train.remat == "auto":
        experiment.train = estimate_run(experiment, topology).experiment.train


def estimate_run(experiment: Experiment, topology: Topology) -> Candidate:
    """Estimates memory, communication, time and price of `experiment` on its own mesh.

    `train.remat="auto"` becomes the first policy with which the run fits, or the last policy if none fits.

    For a run with phases, memory, collectives and step time are those of the phase with the largest memory; hours and
    price are sums over all phases.

    Raises:
      UserError: the mesh does not have the topology's number of devices, or does not divide the batch or the model.
    """
    if experiment.train.remat == "auto":
        assessed = None
        for policy in _POLICIES:
            assessed = estimate_run(_changed(experiment, experiment.mesh, remat=policy), topology)
            if assessed.fits:
                break
        return assessed
    if not experiment.phases:
        return _assess(experiment, topology, experiment.train.steps)
    assessed = []
    for phase in phases_of(experiment):
        with phase_in_errors(phase):
            assessed.append((phase, _assess(phase.experiment, topology, phase.steps)))
    times = [one.roofline for _, one in assessed]
    prices = [time.price for time in times]
    largest = _largest(assessed)
    time = dataclasses.replace(
        largest.roofline,
        hours=sum(time.hours for time in times),
        price=None if None in prices else sum(filter(None, prices)),
    )
    return dataclasses.replace(largest, experiment=experiment, roofline=time, phases=tuple(assessed))


def _largest(phases: Sequence[tuple[RunPhase, Candidate]]) -> Candidate:
    return max((one for _, one in phases), key=lambda one: one.memory.total)


def _assess(experiment: Experiment, topology: Topology, steps: int) -> Candidate:
    """Estimates `steps` steps of a config without phases."""
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
    """Returns every mesh that divides batch and model, with the fastest policy and accumulation that fit on it.

    Meshes that fit come first, the fastest first; the others follow, the smallest memory first.
    """
    return sorted(
        filter(None, (_best_on(experiment, topology, mesh) for mesh in _meshes(experiment, topology))), key=_rank
    )


def _best_on(experiment: Experiment, topology: Topology, mesh: MeshConfig) -> Optional[Candidate]:
    fitting = (_first_that_fits(experiment, topology, mesh, fields, _counts(experiment)) for fields in _ways(mesh))
    unchanged = try_estimate(_changed(experiment, mesh), topology)
    return min(filter(None, (unchanged, *fitting)), key=_rank, default=None)


def _ways(mesh: MeshConfig) -> Iterator[dict[str, str]]:
    """Yields the values of `config.train` to try on a mesh."""
    for policy in _POLICIES:
        if mesh.pipeline == 1:
            yield {"remat": policy}
        else:
            yield from ({"remat": policy, "pipeline_schedule": schedule} for schedule in _SCHEDULES)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, candidate.roofline.hours if candidate.fits else candidate.memory.total


def _counts(experiment: Experiment) -> list[int]:
    """Returns the numbers of microbatches to try."""
    rows, least = experiment.train.global_batch_size, experiment.train.accumulate
    return [least * 2**i for i in range(12) if rows % (least * 2**i) == 0]


def remedies(experiment: Experiment, topology: Topology) -> list[Candidate]:
    """Returns changes that make a run fit, the simplest change first; each later change is faster.

    The search tries four sets of fields, each including the previous set: the rematerialization policy; accumulation;
    data, fsdp and expert; tensor, sequence and pipeline. It tries the last set only if nothing before it fits.
    """
    own, least, counts = experiment.mesh, experiment.train.accumulate, _counts(experiment)
    meshes = list(_meshes(experiment, topology))
    layer_axes = (PIPELINE_AXIS, LENGTH_AXIS, TENSOR_AXIS)
    flat = [mesh for mesh in meshes if all(getattr(mesh, axis) == getattr(own, axis) for axis in layer_axes)]
    found: list[Candidate] = []
    for choices, accumulations in (([own], [least]), ([own], counts), (flat, counts), (meshes, counts)):
        if choices is meshes and found:
            break
        fitting = [
            candidate
            for mesh in choices
            for fields in _ways(mesh)
            if (candidate := _first_that_fits(experiment, topology, mesh, fields, accumulations)) is not None
        ]
        fastest = min(fitting, key=lambda c: c.roofline.hours, default=None)
        if fastest and (not found or fastest.roofline.hours < 0.98 * found[-1].roofline.hours):
            found.append(fastest)
    return found


def remedies_on_larger_topology(experiment: Experiment, topology: Topology) -> tuple[Topology, list[Candidate]]:
    """Returns (topology, remedies): the first topology with remedies, from the given one to 16 times its size."""
    for _ in range(5):
        if found := remedies(experiment, topology):
            return topology, found
        larger, topology = topology, topology.doubled()
    return larger, []


def _first_that_fits(
    experiment: Experiment, topology: Topology, mesh: MeshConfig, fields: dict[str, str], accumulations: list[int]
) -> Optional[Candidate]:
    """Returns the candidate with the fewest microbatches that fits: more microbatches only send more."""
    for count in accumulations:
        candidate = try_estimate(_changed(experiment, mesh, **fields, accumulate=count), topology)
        if candidate is None or candidate.fits:
            return candidate  # more microbatches do not help if this number does not divide
    return None


def _changed(experiment: Experiment, mesh: MeshConfig, **train: str | int) -> Experiment:
    return dataclasses.replace(experiment, mesh=mesh, train=dataclasses.replace(experiment.train, **train))


def try_estimate(experiment: Experiment, topology: Topology) -> Optional[Candidate]:
    """Returns the result of `estimate_run`, or None if the mesh does not divide the batch or the model."""
    try:
        return estimate_run(experiment, topology)
    except UserError:
        return None


def _meshes(experiment: Experiment, topology: Topology) -> Iterator[MeshConfig]:
    """Yields meshes of all devices.

    `tensor` is at most 8, and at most the number of GPUs per host. `sequence` is above 1 only for long rows. `expert`
    divides the number of experts, and `pipeline` the number of layers of a dense decoder.
    """
    devices, most = topology.num_devices, 8 if topology.chip.is_tpu else topology.chip.devices_per_host
    longest = max(phase.experiment.data.sequence_length for phase in phases_of(experiment))
    lengths = (1, 2, 4, 8) if longest >= _LONG else (1,)
    settings = experiment.model.experts
    experts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or settings and settings.num_experts % n == 0]
    layers = experiment.model.num_layers if stages_obstacle(experiment.model) is None else 1
    stages = [n for n in (1, 2, 4, 8, 16) if layers % n == 0]
    for tensor, sequence, expert, pipeline in itertools.product((1, 2, 4, 8), lengths, experts, stages):
        inner = tensor * sequence * expert * pipeline
        left = devices // inner
        if tensor > most or left * inner != devices or left % topology.slices:
            continue
        for fsdp in (n for n in range(1, left // topology.slices + 1) if left % n == 0):
            if (left // fsdp) % topology.slices == 0 and math.prod((tensor, sequence)) <= left * most:
                sizes = {DATA_AXIS: left // fsdp, PIPELINE_AXIS: pipeline, FSDP_AXIS: fsdp, EXPERT_AXIS: expert}
                yield MeshConfig(**sizes, **{LENGTH_AXIS: sequence, TENSOR_AXIS: tensor}, slices=topology.slices)
