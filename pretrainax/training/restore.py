"""Claims a workdir for a run, and finds the state there that the run goes on from."""

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
    """Writes config.json and the tokenizer, or refuses a workdir where another config has been at work.

    Args:
      extend: more steps than the run there was planned for are wanted, whatever else they change.

    Returns:
      A line about the run that goes on past its end; empty for others.
    """
    path, extended = os.path.join(workdir, "config.json"), ""
    if extend and not os.path.exists(path):
        raise UserError(f"--extend is for a run that is there, and --workdir={workdir} holds none")
    if os.path.exists(path):
        old = config_lib.load(path)
        train = dataclasses.replace(old.train, steps=experiment.train.steps)
        as_long = dataclasses.replace(old, train=train, phases=experiment.phases)
        changed = config_lib.differences(as_long, experiment)
        if not changed and old.train.steps != experiment.train.steps:
            extended = longer.extend(old, experiment, _steps_done(workdir), extend)
        changed = [] if extended else config_lib.differences(old, experiment)
        if changed:
            raise UserError(
                f"--workdir={workdir} holds a run of another config: {', '.join(changed)}; "
                "take another --workdir, or set these fields back to resume"
            )
    if jax.process_index() == 0:
        os.makedirs(workdir, exist_ok=True)
        remove_leftovers(workdir)
        saved = os.path.join(workdir, "tokenizer")
        if not (os.path.exists(path) and os.path.isdir(saved)):  # that of the run stays, whatever the text is now
            prepared.tokenizer.save(saved)
            experiment.objective.save_beside(saved)
        write_atomically(path, config_lib.dump(experiment))  # a run that is killed here leaves no half-written config
    elif not os.path.exists(path):  # process 0 was here before
        raise UserError(
            f"--workdir={workdir}: process {jax.process_index()} does not find what process 0 wrote there; "
            "give a folder that all hosts see (NFS, Filestore, a mounted bucket)"
        )
    return extended


def _steps_done(workdir: str) -> int:
    """Returns the newest step that is saved, whether it verifies or not; 0 where none is."""
    directory = os.path.join(workdir, "checkpoints")
    return max(list_steps(directory), default=0) if os.path.isdir(directory) else 0


def restore_or_init(run: Run, checkpoints: Checkpoints, up_to: Optional[int] = None) -> tuple[TrainState, LoopState]:
    """Returns the state to train from, and what the loop remembers beside it.

    1. The newest checkpoint of the workdir that verifies (`up_to`: as in `Checkpoints.restore_newest`).
    2. Parameters that the run's start gives (`config.checkpoint.init_from`), a fresh optimizer.
    3. Fresh parameters.

    Raises:
      UserError: the checkpoint is of another model, optimizer, tokenizer or text.
    """
    fresh = LoopState(
        tokenizer=run.prepared.tokenizer.fingerprint,
        corpora=[corpus.fingerprint for corpus in run.prepared.corpora],
    )
    check_room_for_ema(run.abstract_state, (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
    restored, workdir = checkpoints.restore_newest(run.abstract_state, up_to), os.path.dirname(checkpoints.directory)
    if run.frozen is None:  # after a rollback they are there
        run.start.read_frozen(run, workdir, is_new=restored is None)
    if restored is not None:
        _, state, extra = restored
        loop_state = LoopState.from_json(extra, fresh)
        if loop_state.tokenizer != fresh.tokenizer:
            raise UserError(
                f"the checkpoint was trained with tokenizer {loop_state.tokenizer[:12]}, the data is now tokenized "
                f"with {fresh.tokenizer[:12]}: set config.tokenizer.path to the workdir's tokenizer/ folder"
            )
        if loop_state.corpora != fresh.corpora:
            raise UserError(
                "the text of config.data.source is not the one that this run was trained on: put its files back to "
                "resume, or take another --workdir, with config.checkpoint.init_from for its parameters"
            )
        return state, loop_state
    if (params := run.start.params(run, workdir)) is not None:
        return run.state_of(params), fresh
    return run.fresh_state(), fresh


def check_room_for_ema(state: TrainState, room: Optional[int]) -> None:
    """Raises UserError where a moving average of the parameters leaves no room for what a step must have.

    Args:
      state: shapes, dtypes and shardings.
      room: bytes of memory of a device; None: it does not say, as a CPU does not.
    """

    def size(tree: PyTree) -> int:  # of a device's part
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    ema, gradients = size(state.ema), size(state.params)
    needed = size(state) + gradients
    if room is not None and ema and needed > room:
        raise UserError(
            f"config.train.ema_decay keeps another copy of the parameters, {byte_size(ema)} of a device, and there is "
            f"no memory for it: parameters, optimizer, gradients and it take {byte_size(needed)} of {byte_size(room)}; "
            "set it to None, or split the parameters by config.mesh.fsdp"
        )
