"""Prepares a run's workdir and restores the state from which the run continues."""

import os
import shutil
from typing import Optional

import jax

from pretrainax import config as config_lib
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.workdir import check_workdir, has_steps
from pretrainax.config import Experiment, UserError
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.files.atomic_files import remove_leftovers, write_atomically
from pretrainax.files.regular_files import read_bytes
from pretrainax.training.loop_state import LoopState
from pretrainax.training.run import Run
from pretrainax.training.start import Row
from pretrainax.training.train_step import TrainState


def claim_workdir(workdir: str, experiment: Experiment, prepared: Prepared, extend: bool = False) -> list[Row]:
    """Checks the workdir as `check_workdir` does, then writes config.json and the tokenizer.

    If the workdir has a run that made no step, its config and tokenizer are replaced.

    Returns:
      Header rows: whether a run is extended to more steps, or replaced.

    Raises:
      UserError: as in `check_workdir`, or the hosts do not share the workdir.
    """
    path, tokenizer_dir = os.path.join(workdir, "config.json"), os.path.join(workdir, "tokenizer")
    extension = check_workdir(workdir, experiment, extend)
    rows = [("steps", extension)] if extension else []
    if jax.process_index() == 0:
        os.makedirs(workdir, exist_ok=True)
        remove_leftovers(workdir)
        content = config_lib.dump(experiment)
        # A run with steps keeps its tokenizer, even if the training data has changed.
        if not (has_steps(workdir) and os.path.exists(path) and os.path.isdir(tokenizer_dir)):
            if os.path.exists(path):
                if read_bytes(path) != content.encode():
                    rows.append(("replaced", f"{path} and tokenizer/, of an earlier run that made no step"))
                shutil.rmtree(tokenizer_dir, ignore_errors=True)
            prepared.tokenizer.save(tokenizer_dir)
            experiment.objective.save_assets(tokenizer_dir)
        write_atomically(path, content)  # atomic: a killed process leaves no partial config
    elif not os.path.exists(path):  # process 0 has written it
        raise UserError(
            f"--workdir={workdir}: process {jax.process_index()} does not find the files that process 0 wrote there; "
            "set --workdir to a folder that all hosts share (NFS, Filestore, a mounted bucket)"
        )
    return rows


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
