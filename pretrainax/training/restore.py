"""Claims a workdir for a run, and finds the state there that the run goes on from."""

import dataclasses
import os
from typing import Optional

import jax

from pretrainax import config as config_lib
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.params import load_params
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import Experiment, UserError
from pretrainax.config.atomic_files import write_atomically
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.interop import weights
from pretrainax.interop.architectures import is_huggingface_directory
from pretrainax.training import longer
from pretrainax.training.loop_state import LoopState
from pretrainax.training.setup import Run
from pretrainax.training.train_step import TrainState, state_from


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
        as_long = dataclasses.replace(old, train=dataclasses.replace(old.train, steps=experiment.train.steps))
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
        saved = os.path.join(workdir, "tokenizer")
        if not (os.path.exists(path) and os.path.isdir(saved)):  # that of the run stays, whatever the text is now
            prepared.tokenizer.save(saved)
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
    2. `config.checkpoint.init_from`: parameters of another run or a Hugging Face directory, a fresh optimizer.
    3. Fresh parameters.

    Raises:
      UserError: the checkpoint is of another model, optimizer, tokenizer or text.
    """
    fresh = LoopState(
        tokenizer=run.prepared.tokenizer.fingerprint,
        corpora=[corpus.fingerprint for corpus in (*run.prepared.train, *run.prepared.valid)],
    )
    restored = checkpoints.restore_newest(run.abstract_state, up_to)
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
    if run.experiment.checkpoint.init_from:
        directory, abstract = os.path.expanduser(run.experiment.checkpoint.init_from), run.abstract_state.params
        if is_huggingface_directory(directory):
            params = weights.load_params(directory, run.experiment.model, abstract)
        else:
            params = load_params(directory, abstract)
        return state_from(params, run.optimizer, run.mesh), fresh
    return run.fresh_state(), fresh
