"""Loads the tiny models of tests/golden with their weights and a tokenizer of letters."""

import functools
import pathlib
import tempfile

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import MeshConfig
from pretrainax.inference.loaded import LoadedModel
from pretrainax.interop.directories import evaluation_of
from pretrainax.layers.compute import Compute
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.rules import tree_shardings
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden import CASES
from tests.golden.case import weights
from tests.support.huggingface_weights import without_frame, write_tokenizer

SENTINELS = 10  # <extra_id_0> to <extra_id_9>, for encoder-decoders


@functools.cache
def loaded_case(name: str, **mesh: int) -> LoadedModel:
    """Returns the model of a case, on one device or on the mesh of the given sizes: `loaded_case("gpt2", tensor=2)`.

    Its tokenizer has the letters a to z, space, full stop and comma; other characters are <unk>.
    """
    config = CASES[name].config
    tokenizer = letters(CASES[name].pad_id, SENTINELS if config.family == "encoder_decoder" else 0)
    sizes = MeshConfig(**{"data": 1, **mesh})
    devices = jax.devices()[: int(np.prod([getattr(sizes, axis) for axis in ("data", "fsdp", "sequence", "tensor")]))]
    on = make_mesh(sizes, devices)
    params = weights(config)
    return LoadedModel(
        experiment=evaluation_of(config, tokenizer.vocabulary, ""),
        model=models.build(config, Compute()),
        params=jax.device_put(params, tree_shardings(on, params)),
        tokenizer=tokenizer,
        mesh=on,
        origin=f"tests/golden, {name}",
    )


@functools.cache
def letters(pad_id: int = 0, sentinels: int = 0) -> Tokenizer:
    """Returns a tokenizer with a token for each letter; see `write_tokenizer`."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(pathlib.Path(directory), pad_id, sentinels)
        return without_frame(read_tokenizer(directory))
