"""Hugging Face directories become workdirs and workdirs Hugging Face directories, a block of a parameter at a time."""

import json
import os
import shutil
import time
from collections.abc import Callable
from typing import Optional

import jax
import ml_dtypes
import numpy as np

from pretrainax import config, models
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import read_params, write_params
from pretrainax.checkpoints.run_json import check_tokenizer, read_run_json
from pretrainax.checkpoints.steps import find_checkpoint
from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    ModelConfig,
    RunFailed,
    TrainConfig,
    UserError,
)
from pretrainax.config.atomic_files import write_atomically
from pretrainax.data.objectives import (
    CausalLM,
    MaskedLM,
    NextSentencePrediction,
    ReplacedTokenDetection,
    SentenceOrderPrediction,
    SpanCorruption,
)
from pretrainax.data.sources import NoSource
from pretrainax.interop.architectures import describe_model
from pretrainax.interop.safetensors_files import Tensors, Writer
from pretrainax.interop.weights import DirectoryWeights
from pretrainax.models import electra
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.base import Vocabulary, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from pretrainax.zoo.convert import Rows, places, rows_of, their_shape, view
from pretrainax.zoo.family import ConfigJson, HuggingFace

_DIFFERENCE = "embedding_difference/"  # paths of what a discriminator adds to the generator's embeddings
ORIGINAL = "huggingface"  # folder of an imported workdir: what the directory said, for the way back
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def import_directory(directory: str, workdir: str) -> str:
    """Makes a workdir of a Hugging Face directory; returns a line about it."""
    started = time.perf_counter()
    if os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(f"--workdir={workdir} holds a run already: take another one")
    if os.path.exists(os.path.join(workdir, "checkpoints", "0")):
        raise UserError(f"--workdir={workdir} holds an import that was cut short: remove it, or take another one")
    source = DirectoryWeights(directory)
    tokenizer = read_tokenizer(directory)
    tokenizer.save(os.path.join(workdir, "tokenizer"))
    write_params(workdir, source.abstract, source.read, {"tokenizer": tokenizer.fingerprint})
    os.makedirs(os.path.join(workdir, ORIGINAL), exist_ok=True)
    shutil.copyfile(os.path.join(directory, "config.json"), os.path.join(workdir, ORIGINAL, "config.json"))
    _write_json(os.path.join(workdir, ORIGINAL, "dtypes.json"), source.dtypes)
    experiment = _evaluation_of(source.config, os.path.abspath(os.path.join(workdir, "tokenizer")))
    write_atomically(os.path.join(workdir, "config.json"), config.dump(experiment))
    count = sum(x.size for x in jax.tree.leaves(source.abstract))
    return f"{count:,} parameters imported to {workdir} in {time.perf_counter() - started:.1f} s"


def export_workdir(
    workdir: str,
    to: str,
    step: Optional[int] = None,
    dtype: Optional[str] = None,
    part: str = "discriminator",
    shard_bytes: int = 5 * 10**9,
) -> str:
    """Writes a checkpoint as a Hugging Face directory; returns a line about it.

    Args:
      step: None: the newest that verifies.
      dtype: of the tensors; None: as they were imported, else float32.
      part: of a model with a generator, which transformers has no class for: discriminator | generator.
      shard_bytes: of a file, at most.
    """
    started = time.perf_counter()
    run = os.path.join(workdir, "config.json")
    if not os.path.exists(run):
        raise UserError(f"--workdir={workdir} holds no config.json: give the run directory of pretrainax.main")
    if os.path.isdir(to) and os.listdir(to):
        raise UserError(f"--to={to} is not empty: take another directory")
    model = config.load(run).model
    tokenizer, step_directory = load_tokenizer(os.path.join(workdir, "tokenizer")), find_checkpoint(workdir, step)
    check_tokenizer(step_directory, tokenizer.fingerprint, os.path.join(workdir, "tokenizer"))
    exported_part = None if model.generator is None else part
    if exported_part is not None:
        model = {"discriminator": electra.discriminator_config, "generator": electra.generator_config}[part](model)
    family, config_json = describe_model(model, os.path.join(workdir, ORIGINAL, "config.json"))
    config_json |= _token_ids(config_json, tokenizer.vocabulary)
    rows = rows_of(family.names(model), models.abstract_params(model))
    tensors = _tensors(family, model, rows, _export_dtypes(workdir, dtype))
    first, _ = next(iter(tensors.values()))
    config_json["dtype"] = config_json["torch_dtype"] = first.name  # as new and as old versions call it
    staging = f"{os.path.abspath(to)}.exporting"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        os.makedirs(staging)
        files = Writer(staging, tensors, shard_bytes)
        _fill(files, rows, step_directory, exported_part)
        _write_json(os.path.join(staging, "config.json"), config_json)
        write_tokenizer(tokenizer, staging, model)
        manifest.seal(staging)
        if os.path.isdir(to):
            os.rmdir(to)
        os.rename(staging, to)
    except OSError as e:
        raise RunFailed(f"could not write --to={to}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    seconds = time.perf_counter() - started
    return f"{len(tensors):,} tensors exported to {to} as {config_json['architectures'][0]} in {seconds:.1f} s"


def _tensors(family: HuggingFace, model: ModelConfig, rows: Rows, dtype_of: Callable[[str], np.dtype]) -> Tensors:
    """Returns the dtype and the shape of each tensor of an export, by name."""
    tensors = {}
    for row, shape in rows.values():
        for name, layer in places(row, shape):
            tensors[name] = dtype_of(name), their_shape(row, shape if layer is None else shape[1:])
    for name, shape in family.zeros(model).items():
        tensors[name] = dtype_of(name), shape
    return tensors


def _fill(files: Writer, rows: Rows, step_directory: str, part: Optional[str]) -> None:
    """Copies each parameter to its places.

    Args:
      part: of a model with a generator, whose paths are as `models.electra` says; else None.
    """
    stored = [name.removeprefix("params/") for name in read_run_json(step_directory)["arrays"]]
    generated = {path.removeprefix("generator/") for path in stored if path.startswith("generator/")}
    disentangled = {path.removeprefix(_DIFFERENCE) for path in stored if path.startswith(_DIFFERENCE)}
    for path, start, block in read_params(step_directory):
        if part == "generator" and (path in generated or path.startswith(_DIFFERENCE)):
            continue  # the discriminator's own
        path = path.removeprefix("generator/" if part == "generator" else _DIFFERENCE)
        if path not in rows:
            continue
        row, shape = rows[path]
        if "{layer}" in row.name:
            for layer, (name, _) in enumerate(list(places(row, shape))[start : start + len(block)]):
                view(row, files[name], shape[1:])[...] = block[layer]
        else:
            place = view(row, files[row.name], shape)[start : start + len(block)]
            # of the discriminator's table two parts come, in any order: it starts as zeros
            place[...] = place + block if part == "discriminator" and path in disentangled else block


# --- what goes with the weights --------------------------------------------------------------------------------------


def _evaluation_of(model: ModelConfig, tokenizer: str) -> Experiment:
    """Returns a run of an imported model: it evaluates it, and is a start for a config of one's own."""
    objective = {"decoder": CausalLM, "encoder": MaskedLM, "encoder_decoder": SpanCorruption}[model.family]()
    if model.replaced_token_head:
        objective = ReplacedTokenDetection()
    elif model.pair_head:  # ALBERT's, which shares its layers, says whether sentences are in order
        objective = SentenceOrderPrediction() if model.share_layers else NextSentencePrediction()
    return Experiment(
        model=model,
        tokenizer=PretrainedTokenizer(path=tokenizer),
        data=DataConfig(source=NoSource(), sequence_length=min(512, model.position.max_length or 512)),
        objective=objective,
        optimizer=AdamW(learning_rate=1e-4),
        schedule=WarmupCosine(),
        train=TrainConfig(),
        evaluate=EvaluateConfig(),
        checkpoint=CheckpointConfig(),
    )


def _token_ids(config_json: ConfigJson, vocabulary: Vocabulary) -> dict[str, int]:
    """Returns the ids of padding, begin and end for config.json.

    Raises:
      UserError: the architecture computes with another id of padding.
    """
    ids = {f"{name}_token_id": getattr(vocabulary, name) for name in ("pad", "bos", "eos")}
    ids = {name: i for name, i in ids.items() if i is not None}
    fixed = config_json.get("pad_token_id")
    if fixed is not None and ids.get("pad_token_id", fixed) != fixed:
        (architecture,) = config_json["architectures"]
        raise UserError(
            f"the tokenizer's padding is id {ids['pad_token_id']}, and {architecture} of transformers "
            f"computes with padding of id {fixed}: only a model with such a tokenizer can be exported"
        )
    return ids


def _export_dtypes(workdir: str, dtype: Optional[str]) -> Callable[[str], np.dtype]:
    """Returns the dtype of each tensor by its name: `dtype`, else that of the import, else float32."""
    if dtype is not None:
        return lambda name: np.dtype(DTYPES[dtype])
    try:
        with open(os.path.join(workdir, ORIGINAL, "dtypes.json"), encoding="utf-8") as f:
            imported = json.load(f)
    except FileNotFoundError:
        imported = {}
    return lambda name: np.dtype(DTYPES.get(imported.get(name), np.float32))


def _write_json(path: str, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
