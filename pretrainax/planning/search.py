"""The best mesh, and what would make a run fit: all are tried, on paper."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Optional, get_args

from pretrainax.config import Experiment, MeshConfig, RunPhase, UserError, naming, phases_of
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

_POLICIES, _SCHEDULES = get_args(Remat), get_args(PipelineSchedule)  # the fastest first
_LONG = 8192  # tokens of a row from which splitting it is tried


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run on a topology, with what it is expected to take."""

    experiment: Experiment
    sizes: dict[str, int]
    memory: Memory
    collectives: list[Collective]
    roofline: Roofline
    fits: bool
    phases: tuple[tuple[RunPhase, "Candidate"], ...] = ()  # of a run that has some, each by itself

    @property
    def largest(self) -> "Candidate":
        """Returns the phase that takes the most memory; of a run without phases, the run."""
        return _largest(self.phases) if self.phases else self

    def flags(self, before: Experiment) -> str:
        """Returns the flags that turn `before` into this."""
        changed = []
        of_training = "train.remat", "train.accumulate", "train.pipeline_schedule"
        for part in (*of_training, *(f"mesh.{axis}" for axis in (*AXES, "slices"))):
            group, field = part.split(".")
            new, old = (getattr(getattr(e, group), field) for e in (self.experiment, before))
            changed += [f"--config.{part}={new}"] if new != old else []
        return " ".join(changed)


def settle_remat(experiment: Experiment, topology: Topology) -> None:
    """Sets a `train.remat` of "auto" to the policy that `assess` takes."""
    if experiment.train.remat == "auto":
        experiment.train = assess(experiment, topology).experiment.train


def assess(experiment: Experiment, topology: Topology) -> Candidate:
    """Estimates what `experiment` takes on its own mesh.

    A `train.remat` of "auto" is the first policy with which the run fits; where none does, the last.

    Of a run in phases, memory, collectives and the time of a step are those of the phase that takes the most memory,
    hours and price the sum over all.

    Raises:
      UserError: a mesh that is not of so many devices, or that does not divide the batch or the model.
    """
    if experiment.train.remat == "auto":
        found = None
        for policy in _POLICIES:
            found = assess(_changed(experiment, experiment.mesh, remat=policy), topology)
            if found.fits:
                break
        return found
    if not experiment.phases:
        return _assess(experiment, topology, experiment.train.steps)
    found = []
    for phase in phases_of(experiment):
        with naming(phase):
            found.append((phase, _assess(phase.experiment, topology, phase.steps)))
    times = [one.roofline for _, one in found]
    prices = [time.price for time in times]
    largest = _largest(found)
    time = dataclasses.replace(
        largest.roofline,
        hours=sum(time.hours for time in times),
        price=None if None in prices else sum(filter(None, prices)),
    )
    return dataclasses.replace(largest, experiment=experiment, roofline=time, phases=tuple(found))


def _largest(phases: Sequence[tuple[RunPhase, Candidate]]) -> Candidate:
    return max((one for _, one in phases), key=lambda one: one.memory.total)


def _assess(experiment: Experiment, topology: Topology, steps: int) -> Candidate:
    """Estimates what so many steps of a config without phases take."""
    if experiment.mesh.slices != topology.slices:
        raise UserError(
            f"config.mesh.slices is {experiment.mesh.slices}, and {topology} has {topology.slices}: set it to that"
        )
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    needed = memory.estimate(experiment, sizes, topology.chip)
    sent = traffic.collectives(experiment, sizes, topology)
    time = roofline.expect(experiment, sizes, topology, needed, sent, steps)
    return Candidate(experiment, sizes, needed, sent, time, needed.fits(topology.chip))


def best(experiment: Experiment, topology: Topology) -> list[Candidate]:
    """Returns every mesh that divides batch and model, each with the policy and the accumulation that make it fit and
    fastest: those that fit first, the fastest of them first."""
    return sorted(
        filter(None, (_best_on(experiment, topology, mesh) for mesh in _meshes(experiment, topology))), key=_rank
    )


def _best_on(experiment: Experiment, topology: Topology, mesh: MeshConfig) -> Optional[Candidate]:
    every = (_first_that_fits(experiment, topology, mesh, way, _counts(experiment)) for way in _ways(mesh))
    own = attempt(_changed(experiment, mesh), topology)
    return min(filter(None, (own, *every)), key=_rank, default=None)


def _ways(mesh: MeshConfig) -> Iterator[dict[str, str]]:
    """Yields the fields of `config.train` that are tried on a mesh."""
    for policy in _POLICIES:
        if mesh.pipeline == 1:
            yield {"remat": policy}
        else:
            yield from ({"remat": policy, "pipeline_schedule": schedule} for schedule in _SCHEDULES)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, candidate.roofline.hours if candidate.fits else candidate.memory.total


def _counts(experiment: Experiment) -> list[int]:
    """Lists the numbers of micro-batches to try."""
    rows, least = experiment.train.global_batch_size, experiment.train.accumulate
    return [least * 2**i for i in range(12) if rows % (least * 2**i) == 0]


def remedies(experiment: Experiment, topology: Topology) -> list[Candidate]:
    """Finds what makes a run fit, the cheapest kind of change first; each later one is faster than those before it.

    Kinds, each with what the kinds before it may change: the rematerialisation policy; accumulation; fsdp; tensor,
    sequence and pipeline, tried only where nothing before them fits.
    """
    own, least, counts = experiment.mesh, experiment.train.accumulate, _counts(experiment)
    meshes = list(_meshes(experiment, topology))
    of_layers = (PIPELINE_AXIS, LENGTH_AXIS, TENSOR_AXIS)
    flat = [mesh for mesh in meshes if all(getattr(mesh, axis) == getattr(own, axis) for axis in of_layers)]
    found: list[Candidate] = []
    for choices, accumulations in (([own], [least]), ([own], counts), (flat, counts), (meshes, counts)):
        if choices is meshes and found:
            break
        fitting = [
            candidate
            for mesh in choices
            for way in _ways(mesh)
            if (candidate := _first_that_fits(experiment, topology, mesh, way, accumulations)) is not None
        ]
        fastest = min(fitting, key=lambda c: c.roofline.hours, default=None)
        if fastest and (not found or fastest.roofline.hours < 0.98 * found[-1].roofline.hours):
            found.append(fastest)
    return found


def enough(experiment: Experiment, topology: Topology) -> tuple[Topology, list[Candidate]]:
    """Finds the remedies on the topology, or on the first of up to 16 times its size that has any."""
    for _ in range(5):
        if found := remedies(experiment, topology):
            return topology, found
        larger, topology = topology, topology.doubled()
    return larger, []


def _first_that_fits(
    experiment: Experiment, topology: Topology, mesh: MeshConfig, way: dict[str, str], accumulations: list[int]
) -> Optional[Candidate]:
    """Finds the fewest micro-batches with which the run fits: more of them only send more."""
    for count in accumulations:
        candidate = attempt(_changed(experiment, mesh, **way, accumulate=count), topology)
        if candidate is None or candidate.fits:
            return candidate  # what does not divide so does not with more micro-batches
    return None


def _changed(experiment: Experiment, mesh: MeshConfig, **train: str | int) -> Experiment:
    return dataclasses.replace(experiment, mesh=mesh, train=dataclasses.replace(experiment.train, **train))


def attempt(experiment: Experiment, topology: Topology) -> Optional[Candidate]:
    """Returns what `assess` does; None where the mesh does not divide."""
    try:
        return assess(experiment, topology)
    except UserError:
        return None


def _meshes(experiment: Experiment, topology: Topology) -> Iterator[MeshConfig]:
    """Yields meshes of all devices: along `tensor` no more than a host has, along `sequence` only of long rows, along
    `expert` as many as divide the experts, along `pipeline` as many as divide the layers of a dense decoder."""
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
