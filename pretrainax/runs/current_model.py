"""Provides the current model of a run in the form that inference uses after training."""

import dataclasses
from typing import Optional

from pretrainax import models
from pretrainax.adapt import Adapted
from pretrainax.checkpoints.params import Params
from pretrainax.inference.loaded import LoadedModel, without_capacity
from pretrainax.models import electra
from pretrainax.training.run import Run


def current_model(run: Run, params: Params) -> LoadedModel:
    """Returns the model of a run that predicts tokens, as `load` would from a checkpoint with these parameters.

    Adapters are merged, experts have no capacity, and an ELECTRA run gives its generator.
    """
    wrapped, params = run.plain(params)
    config = run.trained.model
    if config.generator is not None:
        config, params = electra.generator(config, params)
    config = without_capacity(config)
    model = models.build(config, wrapped.compute)
    if isinstance(wrapped, Adapted):
        model = dataclasses.replace(wrapped, model=model)
    experiment = dataclasses.replace(run.trained, model=config)
    tokenizer, progress = run.prepared.tokenizer, run.peers.progress
    return LoadedModel(experiment, model, params, tokenizer, run.mesh, "this run", progress=progress)


def keep_compiled(loaded: LoadedModel, previous: Optional[LoadedModel]) -> LoadedModel:
    """Reuses the compiled functions of `previous`; returns the model to pass next time, without parameters."""
    if previous is not None:
        loaded.share_compiled(previous)
    return dataclasses.replace(loaded, params=None).share_compiled(loaded)
