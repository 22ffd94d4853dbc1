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

_POLICIES, _SCHEDULES = get_args(Remat), get_args(PipelineSchedule)  # fastest first
_LONG = 8192  # minimum tokens per row for meshes that split the sequence


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run on a mesh of a topology, with its estimated memory, communication, time and price."""

    experiment: Experiment
    sizes: dict[str, int]  # mesh axis -> size
    memory: Memory
    collectives: list[Collective]  # of one step
    roofline: Roofline
    fits: bool  # the run fits in the memory of the devices
    phases: tuple[tuple[RunPhase, "Candidate"], ...] = ()  # each phase with its own estimates; () without phases

    @property
    def largest(self) -> "Candidate":
        """Returns the estimates of the phase that needs the most memory; this candidate itself without phases."""
        return _largest(self.phases) if self.phases else self

    def flags(self, before: Experiment) -> str:
        """Returns the command-line flags that change the config `before` into this candidate; "" if they are equal."""
        changed = []
        train_fields = "train.remat", "train.accumulate", "train.pipeline_schedule"
        for field_path in (*train_fields, *(f"mesh.{axis}" for axis in (*AXES, "slices"))):
            group, field = field_path.split(".")
            new, old = (getattr(getattr(e, group), field) for e in (self.experiment, before))
            changed += [f"--config.{field_path}={new}"] if new != old else []
        return " ".join(changed)


def resolve_remat(experiment: Experiment, topology: Topology) -> None:
    """Replaces `train.remat="auto"` by the policy that `estimate_run` selects, in place. Other values stay."""
    if experiment.train.remat == "auto":
        experiment.train = estimate_run(experiment, topology).experiment.train


def estimate_run(experiment: Experiment, topology: Topology) -> Candidate:
    """Estimates memory, communication, time and price of `experiment` on the mesh in its config.

    `train.remat="auto"` becomes the fastest policy with which the run fits, or the policy with the least memory if the
    run fits with none.

    For a run with phases, memory, collectives and step time are of the phase that needs the most memory. Hours and
    price are sums over all phases.

    Raises:
      UserError: the mesh does not have the topology's number of devices, or the batch size or a size of the model is
        not divisible by the mesh.
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
    """Estimates memory, communication, time and price of `steps` steps, for a config without phases.

    Raises:
      UserError: for the same reasons as `estimate_run`.
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
    """Returns a candidate for every mesh that the batch and the model are divisible by, best first.

    Each candidate has the rematerialization policy and the accumulation with which the run is fastest among those that
    fit on the mesh. Candidates that fit come first, sorted by time. Candidates that do not fit follow, sorted by
    memory.
    """
    return sorted(
        filter(None, (_best_on(experiment, topology, mesh) for mesh in _meshes(experiment, topology))), key=_rank
    )


def _best_on(experiment: Experiment, topology: Topology, mesh: MeshConfig) -> Optional[Candidate]:
    fitting = (_first_that_fits(experiment, topology, mesh, fields, _counts(experiment)) for fields in _ways(mesh))
    unchanged = try_estimate(_changed(experiment, mesh), topology)
    return min(filter(None, (unchanged, *fitting)), key=_rank, default=None)


def _ways(mesh: MeshConfig) -> Iterator[dict[str, str]]:
    """Yields the combinations of rematerialization policy and pipeline schedule to try on a mesh, as train fields."""
    for policy in _POLICIES:
        if mesh.pipeline == 1:
            yield {"remat": policy}
        else:
            yield from ({"remat": policy, "pipeline_schedule": schedule} for schedule in _SCHEDULES)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, candidate.roofline.hours if candidate.fits else candidate.memory.total


def _counts(experiment: Experiment) -> list[int]:
    """Returns the values of `train.accumulate` to try: the configured value times powers of 2 that divide the batch."""
    rows, least = experiment.train.global_batch_size, experiment.train.accumulate
    return [least * 2**i for i in range(12) if rows % (least * 2**i) == 0]


def remedies(experiment: Experiment, topology: Topology) -> list[Candidate]:
    """Returns changes of the config that make a run fit, the simplest first. Each is faster than the previous change.

    The search tries four sets of fields. Each set includes the previous sets: (1) the rematerialization policy; (2) the
    accumulation; (3) the mesh axes data, fsdp and expert; (4) the mesh axes tensor, sequence and pipeline. It tries set
    4 only if the run does not fit with sets 1 to 3.
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
    """Returns (the first topology on which `remedies` finds changes, these changes).

    The function doubles the topology until `remedies` finds changes, up to 16 times the devices. If it finds none, it
    returns the largest topology and [].
    """
    for _ in range(5):
        if found := remedies(experiment, topology):
            return topology, found
        larger, topology = topology, topology.doubled()
    return larger, []


def _first_that_fits(
    experiment: Experiment, topology: Topology, mesh: MeshConfig, fields: dict[str, str], accumulations: list[int]
) -> Optional[Candidate]:
    """Returns the candidate with the fewest microbatches that fits; None if none fits.

    More microbatches than necessary would only increase the communication.

    Args:
      fields: fields of `experiment.train` to change.
      accumulations: numbers of microbatches to try, in ascending order.
    """
    for count in accumulations:
        candidate = try_estimate(_changed(experiment, mesh, **fields, accumulate=count), topology)
        if candidate is None or candidate.fits:
            return candidate  # None: larger numbers of microbatches do not divide the batch either
    return None


def _changed(experiment: Experiment, mesh: MeshConfig, **train: str | int) -> Experiment:
    return dataclasses.replace(experiment, mesh=mesh, train=dataclasses.replace(experiment.train, **train))


def try_estimate(experiment: Experiment, topology: Topology) -> Optional[Candidate]:
    """Returns the result of `estimate_run`, or None if `estimate_run` raises UserError for this mesh."""
    try:
        return estimate_run(experiment, topology)
    except UserError:
        return None


def _meshes(experiment: Experiment, topology: Topology) -> Iterator[MeshConfig]:
    """Yields the meshes to try; each uses all devices of the topology.

    `tensor` is at most 8, and at most the number of GPUs per host. `sequence` is above 1 only for rows of at least
    _LONG tokens. `expert` divides the number of experts. `pipeline` divides the number of layers, and is 1 for models
    that do not support pipelines.
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
