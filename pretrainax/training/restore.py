"""What a run finds in its workdir: whether it may work there, and the state that it goes on from."""

import os
from typing import Optional

import jax

from pretrainax import config as config_lib
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.params import load_params
from pretrainax.config import Experiment, UserError
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.interop import weights
from pretrainax.interop.architectures import is_huggingface_directory
from pretrainax.training.setup import Run
from pretrainax.training.train_step import TrainState, state_from


def claim_workdir(workdir: str, experiment: Experiment, prepared: Prepared) -> None:
    """Writes config.json and the tokenizer, or refuses a workdir where another config has been at work."""
    path = os.path.join(workdir, "config.json")
    if os.path.exists(path):
        changed = config_lib.differences(config_lib.load(path), experiment)
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
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            f.write(config_lib.dump(experiment))
        os.replace(path + ".tmp", path)  # a run that is killed here leaves no half-written config
    elif not os.path.exists(path):  # process 0 was here before
        raise UserError(
            f"--workdir={workdir}: process {jax.process_index()} does not find what process 0 wrote there; "
            "give a folder that all hosts see (NFS, Filestore, a mounted bucket)"
        )


def restore_or_init(job: Run, checkpoints: Checkpoints, up_to: Optional[int] = None) -> tuple[TrainState, dict]:
    """The state to train from, and what the loop remembers beside it.

    1. The newest checkpoint of the workdir that verifies (`up_to`: as in `Checkpoints.restore_newest`).
    2. `config.checkpoint.init_from`: parameters of another run or a Hugging Face directory, a fresh optimizer.
    3. Fresh parameters.
    """
    fingerprint = job.prepared.tokenizer.fingerprint
    fresh = {
        "step": 0,
        "tokenizer": fingerprint,
        "corpora": [corpus.fingerprint for corpus in (*job.prepared.train, *job.prepared.valid)],
        "skipped_updates": 0,  # whose loss or gradient was not finite
        "best_loss": None,
        "evaluations_since_best": 0,
        "rollbacks": [],  # what `loss_spikes.plan_rollback` gave, in the order of time
        "recent": [],  # what `loss_spikes.observe_step` remembers
    }
    restored = checkpoints.restore_newest(job.abstract_state, up_to)
    if restored is not None:
        _, state, notes = restored
        if notes["tokenizer"] != fingerprint:
            raise UserError(
                f"the checkpoint was trained with tokenizer {notes['tokenizer'][:12]}, the data is now tokenized with "
                f"{fingerprint[:12]}: set config.tokenizer.path to the workdir's tokenizer/ folder"
            )
        if notes.get("corpora", fresh["corpora"]) != fresh["corpora"]:
            raise UserError(
                "the text of config.data.source is not the one that this run was trained on: put its files back to "
                "resume, or take another --workdir, with config.checkpoint.init_from for its parameters"
            )
        return state, fresh | notes
    if job.experiment.checkpoint.init_from:
        directory, abstract = os.path.expanduser(job.experiment.checkpoint.init_from), job.abstract_state.params
        if is_huggingface_directory(directory):
            params = weights.load_params(directory, job.experiment.model, abstract)
        else:
            params = load_params(directory, abstract)
        state = state_from(params, job.optimizer, job.mesh)
    else:
        state = job.fresh_state()
    return state, fresh
