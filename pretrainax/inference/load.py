"""Loads a trained model from where it lies: `load("runs/mine")` gives its config, parameters and tokenizer."""

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
from pretrainax.inference.language_model import LanguageModel
from pretrainax.interop import start
from pretrainax.interop.directories import check_rows, evaluation_of
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.weights import DirectoryWeights, verify_files
from pretrainax.layers.compute import Compute, for_this_machine
from pretrainax.models import electra
from pretrainax.sharding.mesh import Device, make_mesh
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import tree_shardings, with_shardings
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer

DType = Literal["float32", "bfloat16"]
_SHARE = 0.5  # of a device's memory that parameters may take if each device is to hold all of them


def load(
    directory: str | os.PathLike[str], dtype: Optional[DType] = None, mesh: Optional[jax.sharding.Mesh] = None
) -> LanguageModel:
    """Returns the model that a directory holds, ready to be asked.

    Of a run of ELECTRA it is the discriminator, whose `generator` is the other of the two.

    Args:
      directory: a run ("runs/mine": its newest checkpoint that verifies, with the parameters that it validates;
        "runs/mine@2000": that of a step; "runs/mine@best": by validation loss; "runs/mine@average": the mean of all
        that are kept; "runs/mine@ema": the moving average of the parameters; "runs/mine@trained": as they were
        trained), an export, a Hugging Face directory, or a model of the Hugging Face Hub ("hf:org/name",
        "hf:org/name@revision").
      dtype: of activations and matrix products; None: the run's own, which is float32 on a CPU and bfloat16 elsewhere
        unless its config says otherwise. Parameters are float32.
      mesh: the devices that share the parameters, as `sharding.mesh.make_mesh` makes it; None: see `default_mesh`.

    Raises:
      UserError: in one line, whatever keeps the directory from being used.
    """
    return load_origin(find_origin(os.fspath(directory)), dtype, mesh)


def load_origin(
    origin: Origin, dtype: Optional[DType] = None, mesh: Optional[jax.sharding.Mesh] = None
) -> LanguageModel:
    """Returns what `load` does, of what a directory was found to stand for."""
    if dtype is not None and dtype not in typing.get_args(DType):
        raise UserError(f"dtype is {dtype!r}, {nearest(str(dtype), typing.get_args(DType))}")
    experiment, tokenizer, params, mesh = (_of_run if origin.steps else _of_huggingface)(origin, mesh)
    compute = _compute(experiment, dtype, mesh)

    def model(config: ModelConfig, params: PyTree, generator: Optional[LanguageModel] = None) -> LanguageModel:
        if config.experts is not None:  # what is said of a text is not to depend on others that want the same expert
            config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity=None))
        described = dataclasses.replace(experiment, model=config)
        built = models.build(config, compute)
        if experiment.tuning is not None:
            built = cast(Tuning, experiment.tuning).adapted(built, experiment)
        return LanguageModel(described, built, params, tokenizer, mesh, origin.description, generator)

    if experiment.model.generator is None:
        return model(experiment.model, params)
    generator = model(*electra.generator(experiment.model, params))
    return model(*electra.discriminator(experiment.model, params), generator)


def experiment_of(origin: Origin) -> Experiment:
    """Returns the config of what a directory was found to stand for, whose parameters are not read.

    Raises:
      UserError: a Hugging Face directory that cannot be used.
    """
    if origin.steps:
        experiment = config_lib.load(os.path.join(origin.directory, "config.json"))
        experiment.tokenizer.path = os.path.join(os.path.abspath(origin.directory), "tokenizer")
        return experiment
    source, folder = DirectoryWeights(origin.directory), os.path.abspath(origin.directory)
    return evaluation_of(source.config, read_tokenizer(origin.directory).vocabulary, folder, source.labels)


def _of_run(
    origin: Origin, mesh: Optional[jax.sharding.Mesh]
) -> tuple[Experiment, Tokenizer, PyTree, jax.sharding.Mesh]:
    folder = os.path.join(os.path.abspath(origin.directory), "tokenizer")
    experiment = start.experiment_of(origin)
    experiment.tokenizer.path = folder
    tokenizer = load_tokenizer(folder)
    for step in origin.steps:
        check_tokenizer(step, tokenizer.fingerprint, folder)
    mesh = mesh or default_mesh(models.abstract_params(experiment.model), jax.devices())
    params = start.load_run(origin.directory, experiment, origin.steps, mesh, origin.folder)
    experiment.distill = None
    if experiment.tuning is not None and cast(Tuning, experiment.tuning).is_mergeable:
        experiment.tuning = None  # the parameters are those of a plain model
    return experiment, tokenizer, params, mesh


def _of_huggingface(
    origin: Origin, mesh: Optional[jax.sharding.Mesh]
) -> tuple[Experiment, Tokenizer, PyTree, jax.sharding.Mesh]:
    verify_files(origin.directory)
    source = DirectoryWeights(origin.directory)
    source.verify()
    tokenizer = read_tokenizer(origin.directory)
    check_rows(origin.directory, tokenizer.vocabulary, source.config)
    experiment = evaluation_of(source.config, tokenizer.vocabulary, os.path.abspath(origin.directory), source.labels)
    mesh = mesh or default_mesh(source.abstract, jax.devices())
    abstract = with_shardings(source.abstract, tree_shardings(mesh, source.abstract))
    return experiment, tokenizer, source.params(abstract), mesh


def default_mesh(params: PyTree, devices: Sequence[Device], room: Optional[int] = None) -> jax.sharding.Mesh:
    """Returns the mesh that a model is loaded on unless a user gives one.

    Each device has all parameters where they fit into half of its memory, and its share of the rows of a batch. A
    larger model is split over all devices: along `tensor`, where its sizes allow that, else along `fsdp`.

    Args:
      params: arrays or shapes.
      room: bytes of memory of a device; None: what it says, and where it says nothing (a CPU), enough.

    Raises:
      UserError: too large for one device, and sizes that these devices do not divide; names the fields.
    """
    if room is None:
        room = (devices[0].memory_stats() or {}).get("bytes_limit")
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    if room is None or size <= _SHARE * room or len(devices) == 1:
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
    """Returns how the model runs here, whatever machine it was trained on."""
    with jax.set_mesh(mesh):
        train = for_this_machine(experiment.train)
    return Compute(dtype=dtype or train.dtype, scan_unroll=train.scan_unroll)
