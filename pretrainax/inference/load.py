"""Loads trained models for inference: `load("runs/mine")` returns a `LanguageModel`."""

import dataclasses
import os
import typing
from collections.abc import Sequence
from typing import Literal, Optional, cast

import jax

from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.adapt import Tuning
from pretrainax.checkpoints.run_json import check_tokenizer
from pretrainax.config import Experiment, MeshConfig, ModelConfig, UserError, nearest
from pretrainax.data.sources import NoSource
from pretrainax.inference.language_model import LanguageModel
from pretrainax.inference.loaded import without_capacity
from pretrainax.interop import start
from pretrainax.interop.directories import check_rows, evaluation_of
from pretrainax.interop.generation import end_tokens, read_generation_file
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.weights import open_model, verify_files
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.models import electra
from pretrainax.sharding.device_memory import check_parameters_fit
from pretrainax.sharding.mesh import Device, make_mesh
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import tree_shardings, with_shardings
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer

DType = Literal["float32", "bfloat16"]
_MAX_FRACTION = 0.5  # replicated parameters may use at most this fraction of the memory of a device


def load(
    directory: str | os.PathLike[str], dtype: Optional[DType] = None, mesh: Optional[jax.sharding.Mesh] = None
) -> LanguageModel:
    """Loads a trained model for inference.

    For an ELECTRA run, the result is the discriminator. The field `generator` of the result is the masked LM.

    Args:
      directory: a run, an export, a Hugging Face directory, or a model of the Hugging Face Hub ("hf:org/name",
        "hf:org/name@revision"). "runs/mine" is the newest valid checkpoint of a run, with the parameters that
        validation uses. "runs/mine@2000" is the checkpoint of step 2000. "runs/mine@best" is the checkpoint with the
        best validation metric. "runs/mine@average" is the mean of the last saved checkpoints. "runs/mine@ema" selects
        the moving average of the parameters, and "runs/mine@trained" the trained parameters. The module
        `interop.origin` documents the complete syntax.
      dtype: dtype of activations and matrix multiplications. If None, the run's dtype is used, by default float32 on
        CPU and bfloat16 on other devices. Parameters are always float32.
      mesh: the device mesh for the parameters, from `sharding.mesh.make_mesh`. If None, `default_mesh` is used.

    Raises:
      UserError: the directory cannot be used; the message gives the reason.
    """
    return load_origin(find_origin(os.fspath(directory)), dtype, mesh)


def load_origin(
    origin: Origin, dtype: Optional[DType] = None, mesh: Optional[jax.sharding.Mesh] = None
) -> LanguageModel:
    """Loads the model at a resolved location for inference; `dtype` and `mesh` are as in `load`."""
    if dtype is not None and dtype not in typing.get_args(DType):
        raise UserError(f"dtype is {dtype!r}, {nearest(str(dtype), typing.get_args(DType))}")
    experiment, tokenizer, params, mesh = (_load_run if origin.steps else _load_huggingface)(origin, mesh)
    compute = _compute(experiment, dtype, mesh)
    ends, generation = None, None
    if isinstance(experiment.data.source, NoSource):  # an imported model that was not trained further
        ends = end_tokens(origin.directory, experiment.model.vocab_size)
        generation = read_generation_file(origin.directory)

    def model(config: ModelConfig, params: PyTree, generator: Optional[LanguageModel] = None) -> LanguageModel:
        config = without_capacity(config)
        model_experiment = dataclasses.replace(experiment, model=config)
        built = models.build(config, compute)
        if experiment.tuning is not None:
            built = cast(Tuning, experiment.tuning).adapted(built, experiment)
        return LanguageModel(
            model_experiment,
            built,
            params,
            tokenizer,
            mesh,
            origin.description,
            ends,
            generation,
            generator=generator,
        )

    if experiment.model.generator is None:
        return model(experiment.model, params)
    generator = model(*electra.generator(experiment.model, params))
    return model(*electra.discriminator(experiment.model, params), generator)


def experiment_of(origin: Origin) -> Experiment:
    """Returns the config of a run or of a model in a Hugging Face directory, without reading parameters.

    Raises:
      UserError: the Hugging Face directory has an unsupported model or invalid files.
    """
    if origin.steps:
        experiment = config_lib.load(os.path.join(origin.directory, "config.json"))
        experiment.tokenizer.path = os.path.join(os.path.abspath(origin.directory), "tokenizer")
        return experiment
    source, folder = open_model(origin.directory), os.path.abspath(origin.directory)
    return evaluation_of(source.config, read_tokenizer(origin.directory).vocabulary, folder, source.labels)


def _load_run(
    origin: Origin, mesh: Optional[jax.sharding.Mesh]
) -> tuple[Experiment, Tokenizer, PyTree, jax.sharding.Mesh]:
    """Loads the config, tokenizer and parameters of a run; also returns the mesh.

    If the run's tuning can be merged into the base model, it is merged and removed from the config.
    """
    folder = os.path.join(os.path.abspath(origin.directory), "tokenizer")
    experiment = start.experiment_of(origin)
    experiment.tokenizer.path = folder
    tokenizer = load_tokenizer(folder)
    for step in origin.steps:
        check_tokenizer(step, tokenizer.fingerprint, folder)
    abstract = models.abstract_params(experiment.model)
    mesh = mesh or default_mesh(abstract, jax.devices())
    check_parameters_fit(start.placed_start(abstract, mesh), origin.description)
    params = start.load_run(origin.directory, experiment, origin.steps, mesh, origin.folder)
    experiment.distill = None
    if experiment.tuning is not None and cast(Tuning, experiment.tuning).is_mergeable:
        experiment.tuning = None  # `load_run` has merged the tuned parameters into a plain model
    return experiment, tokenizer, params, mesh


def _load_huggingface(
    origin: Origin, mesh: Optional[jax.sharding.Mesh]
) -> tuple[Experiment, Tokenizer, PyTree, jax.sharding.Mesh]:
    """Loads the config, tokenizer and parameters of a Hugging Face directory; also returns the mesh."""
    verify_files(origin.directory)
    source = open_model(origin.directory)
    source.verify()
    tokenizer = read_tokenizer(origin.directory)
    check_rows(origin.directory, tokenizer.vocabulary, source.config)
    experiment = evaluation_of(source.config, tokenizer.vocabulary, os.path.abspath(origin.directory), source.labels)
    mesh = mesh or default_mesh(source.abstract, jax.devices())
    abstract = with_shardings(source.abstract, tree_shardings(mesh, source.abstract))
    check_parameters_fit(abstract, origin.description)
    return experiment, tokenizer, source.params(abstract), mesh


def default_mesh(params: PyTree, devices: Sequence[Device], room: Optional[int] = None) -> jax.sharding.Mesh:
    """Chooses a mesh for loading a model on the given devices.

    If the parameters fit into half of a device's memory, they are replicated, and each batch is sharded over the
    devices. Otherwise the parameters are sharded over all devices: along `tensor` if the number of devices divides
    the dimensions of the model, or else along `fsdp`.

    Args:
      params: arrays or shapes.
      room: memory of one device in bytes. If None, it is the size that the device reports, or unlimited if the device
        reports none (CPU).

    Raises:
      UserError: the parameters must be sharded, but the number of devices does not divide the dimensions of the model.
        The message lists the config fields.
    """
    if room is None:
        room = (devices[0].memory_stats() or {}).get("bytes_limit")
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    if room is None or size <= _MAX_FRACTION * room or len(devices) == 1:
        return make_mesh(MeshConfig(), devices)
    by_tensor = make_mesh(MeshConfig(data=1, tensor=len(devices)), devices)
    try:
        tree_shardings(by_tensor, params)
        return by_tensor
    except UserError:
        by_fsdp = make_mesh(MeshConfig(data=1, fsdp=len(devices)), devices)
        tree_shardings(by_fsdp, params)
        return by_fsdp


def _compute(experiment: Experiment, dtype: Optional[DType], mesh: jax.sharding.Mesh) -> Compute:
    """Resolves the compute settings for the current devices, which may differ from the devices of training.

    Args:
      dtype: dtype of activations, or None for the dtype of the run.
    """
    with jax.set_mesh(mesh):
        train = resolve_auto(experiment.train)
    return Compute(dtype=dtype or train.dtype, scan_unroll=train.scan_unroll)
