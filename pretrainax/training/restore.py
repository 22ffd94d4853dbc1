"""Prepares a run's workdir and restores the state from which the run continues."""

import dataclasses
import math
import os
from typing import Optional

import jax

from pretrainax import config as config_lib
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import Experiment, UserError
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.files.atomic_files import remove_leftovers, write_atomically
from pretrainax.reporting.units import byte_size
from pretrainax.sharding.param_paths import PyTree
from pretrainax.training import longer
from pretrainax.training.loop_state import LoopState
from pretrainax.training.run import Run
from pretrainax.training.train_step import TrainState


def claim_workdir(workdir: str, experiment: Experiment, prepared: Prepared, extend: bool = False) -> str:
    """Checks that an existing run in the workdir has the same config, then writes config.json and the tokenizer.

    Args:
      extend: allows more steps even if the completed steps would differ in a run of the new length (`longer.extend`).

    Returns:
      A message if an existing run is extended to more steps, otherwise "".

    Raises:
      UserError: the workdir has a run of a different config or no run to extend, or the hosts do not share the workdir.
    """
    path, extension = os.path.join(workdir, "config.json"), ""
    if extend and not os.path.exists(path):
        raise UserError(f"--extend requires an existing run, but --workdir={workdir} has none")
    if os.path.exists(path):
        old_config = config_lib.load(path)
        train = dataclasses.replace(old_config.train, steps=experiment.train.steps)
        resized = dataclasses.replace(old_config, train=train, phases=experiment.phases)
        changed_fields = config_lib.differences(resized, experiment)
        if not changed_fields and old_config.train.steps != experiment.train.steps:
            extension = longer.extend(old_config, experiment, _steps_done(workdir), extend)
        changed_fields = [] if extension else config_lib.differences(old_config, experiment)
        if changed_fields:
            raise UserError(
                f"--workdir={workdir} holds a run of another config: {', '.join(changed_fields)}; "
                "choose another --workdir, or set these fields back to resume"
            )
    if jax.process_index() == 0:
        os.makedirs(workdir, exist_ok=True)
        remove_leftovers(workdir)
        tokenizer_dir = os.path.join(workdir, "tokenizer")
        # An existing run keeps its tokenizer, even if the training data has changed.
        if not (os.path.exists(path) and os.path.isdir(tokenizer_dir)):
            prepared.tokenizer.save(tokenizer_dir)
            experiment.objective.save_assets(tokenizer_dir)
        write_atomically(path, config_lib.dump(experiment))  # atomic: a killed process leaves no partial config
    elif not os.path.exists(path):  # process 0 has written it
        raise UserError(
            f"--workdir={workdir}: process {jax.process_index()} does not find the files that process 0 wrote there; "
            "set --workdir to a folder that all hosts share (NFS, Filestore, a mounted bucket)"
        )
    return extension


def _steps_done(workdir: str) -> int:
    """Returns the step of the newest checkpoint, which may be damaged, or 0 if there is no checkpoint."""
    directory = os.path.join(workdir, "checkpoints")
    return max(list_steps(directory), default=0) if os.path.isdir(directory) else 0


def restore_or_init(run: Run, checkpoints: Checkpoints, up_to: Optional[int] = None) -> tuple[TrainState, LoopState]:
    """Returns the training state and the loop state from which a run continues, from the first available source:

    1. The newest valid checkpoint of the workdir (`up_to`: as in `Checkpoints.restore_newest`).
    2. The pretrained parameters of `config.checkpoint.init_from`, with a new optimizer state.
    3. Randomly initialized parameters.

    Raises:
      UserError: the checkpoint has a different model, optimizer, tokenizer or training data than the run.
    """
    initial = LoopState(
        tokenizer=run.prepared.tokenizer.fingerprint,
        corpora=[corpus.fingerprint for corpus in run.prepared.corpora],
    )
    check_room_for_ema(run.abstract_state, (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
    checkpoint, workdir = checkpoints.restore_newest(run.abstract_state, up_to), os.path.dirname(checkpoints.directory)
    if run.frozen is None:  # after a rollback, the run still has its frozen parameters
        run.start.read_frozen(run, workdir, is_new=checkpoint is None)
    if checkpoint is not None:
        _, state, extra = checkpoint
        loop_state = LoopState.from_json(extra, initial)
        if loop_state.tokenizer != initial.tokenizer:
            raise UserError(
                f"the checkpoint was trained with tokenizer {loop_state.tokenizer[:12]}, but the data is tokenized "
                f"with {initial.tokenizer[:12]}: set config.tokenizer.path to the workdir's tokenizer/ folder"
            )
        if loop_state.corpora != initial.corpora:
            raise UserError(
                "the text of config.data.source differs from the text that this run was trained on: restore its files "
                "to resume, or choose another --workdir and set config.checkpoint.init_from to reuse its parameters"
            )
        return state, loop_state
    if (params := run.start.params(run, workdir)) is not None:
        return run.state_of(params), initial
    return run.fresh_state(), initial


def check_room_for_ema(state: TrainState, room: Optional[int]) -> None:
    """Raises UserError if the parameters' moving average makes a training step exceed a device's memory.

    Args:
      state: the training state as jax.ShapeDtypeStructs with shardings.
      room: memory of a device in bytes, or None if unknown, as on CPUs.
    """

    def size(tree: PyTree) -> int:  # bytes on one device
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    ema, gradients = size(state.ema), size(state.params)
    required = size(state) + gradients
    if room is not None and ema and required > room:
        raise UserError(
            f"config.train.ema_decay adds a copy of the parameters, {byte_size(ema)} per device, which does not fit in "
            f"memory: with it, parameters, optimizer and gradients take {byte_size(required)} of {byte_size(room)}; "
            "set it to None, or shard the parameters with config.mesh.fsdp"
        )
