"""Compares the outputs of transformers for an export with the outputs of the exported model."""

import json
import pathlib
import re

import jax
import numpy as np

from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.checkpoints.params import write_params
from pretrainax.interop import directories
from pretrainax.interop.architectures import described_model
from pretrainax.layers.compute import Compute
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden.case import Case, batch
from tests.support.huggingface_weights import write_tokenizer


def write_workdir(workdir: pathlib.Path, config, params, pad_id: int = 0) -> None:
    """Writes a workdir with these parameters, and with a tokenizer of letters."""
    workdir.mkdir()
    write_tokenizer(workdir, pad_id)
    write_run(workdir, config, params, read_tokenizer(str(workdir)))


def write_run(workdir: pathlib.Path, config, params, tokenizer) -> None:
    """Writes a workdir with these parameters and this tokenizer."""
    tokenizer.save(str(workdir / "tokenizer"))
    by_path = dict(zip(parameter_names(params), jax.tree.leaves(params), strict=True))
    write_params(str(workdir), models.abstract_params(config), lambda path, index: by_path[path][index], {})
    experiment = directories.evaluation_of(config, tokenizer.vocabulary, str(workdir / "tokenizer"))
    (workdir / "config.json").write_text(config_lib.dump(experiment))


def our_logits(config, params, arrays) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        model = models.build(config, Compute())
        return np.asarray(model.apply({"params": params}, arrays, deterministic=True).heads["lm"].logits())


def assert_all_taken(info, directory: pathlib.Path) -> None:
    """Asserts that the tensors of a directory and the weights of its class in transformers match.

    Weights that nothing reads, as BigBird's pooler, may be missing. `info` is the loading info of `from_pretrained`.
    """
    family, _ = described_model(json.loads((directory / "config.json").read_text()))
    unread = re.compile("|".join((*family.ignored, "(?!)")))
    missing = [name for name in info["missing_keys"] if not unread.fullmatch(name)]
    assert not any((missing, info["unexpected_keys"], info["mismatched_keys"])), info


def assert_transformers_computes_the_same(directory: pathlib.Path, config, params, pad_id: int = 0) -> None:
    """Asserts that the class in config.json loads every tensor and computes the same logits as our model."""
    import torch
    import transformers

    from tests.golden.make import forward

    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    # The eager implementation supports any width.
    experts = {} if config.experts is None else {"experts_implementation": "eager"}
    theirs, info = getattr(transformers, name).from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager", dtype=torch.float32, **experts
    )
    assert_all_taken(info, directory)
    case = Case(config, None, pad_id=pad_id)
    arrays = batch(case)
    with torch.no_grad():
        expected = forward(case, theirs.eval(), arrays)["logits"].numpy()
    real = arrays["segment_ids"] > 0
    got = our_logits(config, params, arrays)
    np.testing.assert_allclose(got[real], expected[real], atol=2e-4, rtol=0)  # the tolerance of all parity tests
