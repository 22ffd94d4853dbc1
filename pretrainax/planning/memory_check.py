"""Compares the estimated memory of a run with the memory of this machine, before the run allocates anything.

A run is refused if its estimate exceeds the memory of a device. The header warns if the estimate exceeds a share of the
memory, because estimates have errors: MARGIN on accelerators and CPU_MARGIN on CPUs.
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import AUTO, Experiment, UserError, phases_of, resolve_auto
from pretrainax.planning import memory
from pretrainax.planning.activations import resolved_train_config
from pretrainax.planning.memory import MARGIN, MEM_FRACTION, Memory
from pretrainax.planning.search import POLICIES, accumulations, changed_flags, with_changes
from pretrainax.reporting.units import byte_size
from pretrainax.runtime.chips import CHIPS, Chip, chip_of
from pretrainax.sharding.axes import DATA_AXIS, FSDP_AXIS
from pretrainax.sharding.device_memory import available_memory, device_memory
from pretrainax.sharding.mesh import mesh_sizes
from pretrainax.training.callbacks import Callback, describe_error
from pretrainax.training.run import Run
from pretrainax.training.start import Row

# The peak memory of six runs on a CPU was 0.5 to 1.6 times the estimate, without compiler and runtime.
CPU_MARGIN = 0.6
_DEFAULT_FRACTION, _FRACTION = 0.75, float(MEM_FRACTION.partition("=")[2])  # share of a GPU's memory that JAX uses
_FRACTION_NAMES = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}  # JAX accepts both, but not together
_MAX_DOUBLINGS = 12  # the search for a sufficient number of devices ends at 2^12 times the devices of the run


class MemoryCheck(Callback):
    """Callback that refuses a run whose estimated memory exceeds a device's, and adds the estimate to the header."""

    part = "starting"

    def __init__(self, refuses: bool = True):
        """Initializes the callback; if `refuses` is False, a run that does not fit gets a warning instead."""
        self._refuses = refuses
        self._rows: Optional[list[Row]] = None  # None: the size of the model was unknown before data preparation

    def resolve_fields(self, experiment: Experiment) -> None:
        if (sized := _with_sizes(experiment)) is not None:
            self._rows = _compare(sized, self._refuses)

    def rows(self, run: Run) -> list[Row]:
        return _compare(run.experiment, self._refuses) if self._rows is None else self._rows


def _with_sizes(experiment: Experiment) -> Optional[Experiment]:
    """Returns a copy of the config without "auto" sizes, or None if only the prepared data determines the sizes."""
    tokenizer, model = experiment.tokenizer, dataclasses.replace(experiment.model)
    experiment = dataclasses.replace(experiment, model=model)
    ids = None
    if model.vocab_size == AUTO:
        try:
            ids = tokenizer.size if tokenizer.path is None else tokenizer.load().vocabulary.size
        except UserError:  # data preparation reports it
            return None
    if model.vocab_size == AUTO and ids is None:
        return None
    resolve_auto(experiment, ids)
    return experiment


class _Plan:
    """The devices of this process, for estimates of changed configs on them."""

    def __init__(self):
        self.device, self.devices, self.processes = jax.local_devices()[0], jax.device_count(), jax.process_count()
        self.is_cpu, self.memory = self.device.platform == "cpu", device_memory()
        self.margin = CPU_MARGIN if self.is_cpu else MARGIN

    @property
    def chip(self) -> Optional[Chip]:
        """Returns the chip of the devices; for an unknown accelerator one of the same kind, and None for a CPU."""
        if self.is_cpu:
            return None
        return chip_of(self.device.device_kind) or CHIPS["v5p" if self.device.platform == "tpu" else "a100"]

    def largest(
        self, experiment: Experiment, devices: Optional[int] = None, single: bool = False
    ) -> tuple[str, Memory]:
        """Estimates the memory of one device in the phase that needs most, by default on this run's devices.

        Returns:
          The name of the phase, and its memory.
        """
        sizes = mesh_sizes(experiment.mesh, devices or self.devices, 1 if devices else self.processes)
        phases = [(x.name, memory.estimate(x.experiment, sizes, self.chip, single)) for x in phases_of(experiment)]
        return max(phases, key=lambda phase: phase[1].total)

    def estimate(self, experiment: Experiment, devices: Optional[int] = None) -> Memory:
        """Returns the estimate of `largest`."""
        return self.largest(experiment, devices)[1]

    def least_accumulation(self, experiment: Experiment, devices: Optional[int] = None) -> Optional[Experiment]:
        """Returns the config with the fewest microbatches that leaves the margin free, or None if there is none."""
        configs = [with_changes(experiment, experiment.mesh, accumulate=count) for count in accumulations(experiment)]
        most = next((config for config in reversed(configs) if self.total(config, devices) < math.inf), None)
        if most is None or not any(self.fits(config, devices) for config in (most, configs[0])):
            return None  # more microbatches need less memory, except that a single one needs no second gradient
        return next(config for config in configs if self.fits(config, devices))

    def fits(self, experiment: Experiment, devices: Optional[int] = None) -> bool:
        """Checks whether the estimate leaves the margin free."""
        assert self.memory is not None
        return self.total(experiment, devices) <= self.margin * self.memory

    def total(self, experiment: Experiment, devices: Optional[int] = None) -> float:
        """Returns the estimate in bytes, or infinity if the mesh does not divide the batch or the model."""
        try:
            return self.estimate(experiment, devices).total
        except UserError:
            return math.inf


def _compare(experiment: Experiment, refuses: bool) -> list[Row]:
    """Returns the header rows of a run's memory.

    Raises:
      UserError: `refuses` is True, and the estimate exceeds the memory of a device.
    """
    plan = _Plan()
    try:
        phase, estimate = plan.largest(experiment, single=True)
    except Exception as error:  # such as a user's component that needs real arrays; the run itself may be valid
        return [("memory", f"not estimated: {describe_error(error)}")]
    size, place = byte_size(estimate.total), f"a {plan.device.device_kind}"
    kind = f"estimate, {phase}" if experiment.phases else "estimate"
    if plan.memory is None:
        return [("memory", f"{size} per device ({kind}); the memory of {place} is unknown")]
    rows = [("memory", f"{size} of {byte_size(plan.memory)} per device ({kind})")]
    if estimate.total > plan.memory:
        place = "this machine" if plan.is_cpu else place
        message = (
            f"the run needs about {size} of memory per device, but {place} has {byte_size(plan.memory)}"
            f"{' per device' if plan.is_cpu and plan.devices > 1 else ''}: {_advice(experiment, estimate, plan)}"
        )
        if refuses:
            raise UserError(f"{message}; --nocheck_memory starts the run anyway")
        rows.append(("WARNING", f"TOO LITTLE MEMORY: {message}"))
    elif estimate.total > plan.margin * plan.memory:
        rows.append(
            (
                "WARNING",
                f"THE MEMORY MAY NOT SUFFICE: the estimate is above {plan.margin:.0%} of the memory, and the actual "
                "peak may be higher; if the run is killed, raise config.train.accumulate or set config.train.remat",
            )
        )
    return [*rows, *([] if plan.is_cpu else _host_rows(estimate))]


def _host_rows(estimate: Memory) -> Iterator[Row]:
    """Yields a warning if the host's memory cannot hold the copy of the training state that a save makes."""
    copied, available = estimate.parameters + estimate.optimizer + estimate.ema, available_memory()
    copied *= jax.local_device_count()
    if available is not None and copied > available:
        yield (
            "WARNING",
            f"LITTLE HOST MEMORY: saving copies {byte_size(copied)} to the host, which has {byte_size(available)}",
        )


def _advice(experiment: Experiment, estimate: Memory, plan: _Plan) -> str:
    """Returns the cheapest change with which the run fits, or the number of devices with which it would."""
    if plan.device.platform == "gpu" and not _FRACTION_NAMES & set(os.environ):
        assert plan.memory is not None
        if estimate.total <= plan.memory / _DEFAULT_FRACTION * _FRACTION:
            return f"set the environment variable {MEM_FRACTION}"
    for changed in map(plan.least_accumulation, _changes(experiment, plan)):
        if changed is not None:
            flags = changed_flags(experiment, changed)
            return f"add {flags}, with which it needs {byte_size(plan.estimate(changed).total)}"
    reason = (
        "no accumulation, rematerialization or sharding makes it fit: choose a smaller model or a shorter "
        "config.data.sequence_length"
    )
    for devices in (plan.devices * 2**doublings for doublings in range(1, _MAX_DOUBLINGS + 1)):
        changed = plan.least_accumulation(_sharded(experiment, "block"), devices)
        if changed is not None:
            return f"{reason}, or add devices: {devices:,} suffice with {changed_flags(experiment, changed)}"
    return f"{reason}; {plan.devices * 2**_MAX_DOUBLINGS:,} such devices would not suffice either"


def _changes(experiment: Experiment, plan: _Plan) -> Iterator[Experiment]:
    """Yields configs to try with more accumulation, cheapest first: unchanged, rematerialized, sharded, no average."""
    remat = resolved_train_config(experiment, plan.chip.platform if plan.chip else "cpu").remat
    policies = (experiment.train.remat, *POLICIES[POLICIES.index(remat) + 1 :])
    yield from (with_changes(experiment, experiment.mesh, remat=policy) for policy in policies)
    if plan.devices > 1:
        yield from (_sharded(experiment, policy) for policy in policies)
    if experiment.train.ema_decay is not None:
        yield from _changes(with_changes(experiment, experiment.mesh, ema_decay=None), plan)


def _sharded(experiment: Experiment, remat: str) -> Experiment:
    """Returns a copy of the config that shards the parameters and moments over all data-parallel devices."""
    axes = {DATA_AXIS: experiment.mesh.slices, FSDP_AXIS: -1}
    return with_changes(experiment, dataclasses.replace(experiment.mesh, **axes), remat=remat)
