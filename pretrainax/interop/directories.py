"""Workdirs of Hugging Face directories and Hugging Face directories of workdirs, a block of a parameter at a time."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, Optional

import jax
import ml_dtypes
import numpy as np

from pretrainax import config, models
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import read_params, write_params
from pretrainax.checkpoints.run_json import read_run_json
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
from pretrainax.data.sources import PythonDocs
from pretrainax.interop.safetensors_files import Writer
from pretrainax.interop.weights import Pretrained, families
from pretrainax.models import electra
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.base import Vocabulary, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from pretrainax.zoo.convert import places, rows_of, their_shape, view
from pretrainax.zoo.family import HuggingFace

_DIFFERENCE = "embedding_difference/"
ORIGINAL = "huggingface"  # folder of an imported workdir: what the directory said, for the way back
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def import_directory(directory: str, workdir: str) -> str:
    """Makes a workdir of a Hugging Face directory; returns a line about it."""
    started = time.perf_counter()
    if os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(f"--workdir={workdir} holds a run already: take another one")
    if os.path.exists(os.path.join(workdir, "checkpoints", "0")):
        raise UserError(f"--workdir={workdir} holds an import that was cut short: remove it, or take another one")
    source = Pretrained(directory)
    tokenizer = read_tokenizer(directory)
    tokenizer.save(os.path.join(workdir, "tokenizer"))
    write_params(workdir, source.abstract, source.read, {"tokenizer": tokenizer.fingerprint})
    os.makedirs(os.path.join(workdir, ORIGINAL), exist_ok=True)
    shutil.copyfile(os.path.join(directory, "config.json"), os.path.join(workdir, ORIGINAL, "config.json"))
    _write_json(os.path.join(workdir, ORIGINAL, "dtypes.json"), source.dtypes)
    experiment = _experiment(source.config, os.path.abspath(os.path.join(workdir, "tokenizer")))
    write_atomically(os.path.join(workdir, "config.json"), config.dump(experiment))
    return f"{_count(source.abstract):,} parameters imported to {workdir} in {time.perf_counter() - started:.1f} s"


def export_workdir(
    workdir: str,
    to: str,
    step: Optional[int] = None,
    dtype: Optional[str] = None,
    part: Optional[str] = "discriminator",
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
    model, tokenizer = config.load(run).model, load_tokenizer(os.path.join(workdir, "tokenizer"))
    if model.generator is not None:
        model = {"discriminator": electra.discriminator_config, "generator": electra.generator_config}[part](model)
    else:
        part = None
    family, described = _family_for(model, os.path.join(workdir, ORIGINAL, "config.json"))
    described |= _token_ids(described, tokenizer.vocabulary)
    rows = rows_of(family.names(model), models.abstract_params(model))
    dtypes = _export_dtypes(workdir, dtype)
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for row, shape in rows.values():
        for name, layer in places(row, shape):
            tensors[name] = dtypes(name), their_shape(row, shape if layer is None else shape[1:])
    for name, shape in family.zeros(model).items():
        tensors[name] = dtypes(name), shape
    first, _ = next(iter(tensors.values()))
    described["dtype"] = described["torch_dtype"] = first.name  # as new and as old versions call it
    staging = f"{os.path.abspath(to)}.exporting"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        os.makedirs(staging)
        files = Writer(staging, tensors, shard_bytes)
        _fill(files, rows, find_checkpoint(workdir, step), part)
        _write_json(os.path.join(staging, "config.json"), described)
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
    return f"{len(tensors):,} tensors exported to {to} as {described['architectures'][0]} in {seconds:.1f} s"


def _fill(files: Writer, rows: Mapping[str, Any], step_directory: str, part: Optional[str]) -> None:
    """Copies each parameter to its places. One `part` of two has paths of its own, as models.electra says."""
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


def _family_for(model: ModelConfig, original: str) -> tuple[HuggingFace, dict[str, Any]]:
    """The family of transformers that computes `model`, and its config.json: that of the import, else the first."""
    first = None
    if os.path.exists(original):
        with open(original, encoding="utf-8") as f:
            first = json.load(f).get("model_type")
    reasons = []
    for family in sorted(families(), key=lambda family: family.model_type != first):
        try:
            return family, family.write_config(model)
        except UserError as e:
            reasons.append(str(e))
        except (AttributeError, KeyError, TypeError):  # a position of another kind has not the fields that it looks for
            continue
    nearest = min((reason for reason in reasons if "no way to say" in reason), key=len, default="none")
    raise UserError(f"no architecture of transformers computes this config.model; the nearest: {nearest}")


# --- what goes with the weights --------------------------------------------------------------------------------------


def _experiment(model: ModelConfig, tokenizer: str) -> Experiment:
    """A run of an imported model: what evaluates it, and a start for a config of one's own."""
    objective = {"decoder": CausalLM, "encoder": MaskedLM, "encoder_decoder": SpanCorruption}[model.family]()
    if model.replaced_token_head:
        objective = ReplacedTokenDetection()
    elif model.pair_head:  # ALBERT's, which shares its layers, says whether sentences are in order
        objective = SentenceOrderPrediction() if model.share_layers else NextSentencePrediction()
    return Experiment(
        model=model,
        tokenizer=PretrainedTokenizer(path=tokenizer),
        data=DataConfig(source=PythonDocs(), sequence_length=min(512, model.position.max_length or 512)),
        objective=objective,
        optimizer=AdamW(learning_rate=1e-4),
        schedule=WarmupCosine(),
        train=TrainConfig(),
        evaluate=EvaluateConfig(),
        checkpoint=CheckpointConfig(),
    )


def _token_ids(described: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, int]:
    """Which ids transformers pads with, begins and ends with; UserError where an architecture counts on another one."""
    ids = {f"{name}_token_id": getattr(vocabulary, name) for name in ("pad", "bos", "eos")}
    ids = {name: i for name, i in ids.items() if i is not None}
    fixed = described.get("pad_token_id")
    if fixed is not None and ids.get("pad_token_id", fixed) != fixed:
        raise UserError(
            f"the tokenizer's padding is id {ids['pad_token_id']}, and {described['architectures'][0]} of transformers "
            f"computes with padding of id {fixed}: only a model with such a tokenizer can be exported"
        )
    return ids


def _export_dtypes(workdir: str, dtype: Optional[str]) -> Any:
    """The dtype of each tensor: `dtype`, else that of the import, else float32."""
    if dtype is not None:
        return lambda name: np.dtype(DTYPES[dtype])
    try:
        with open(os.path.join(workdir, ORIGINAL, "dtypes.json"), encoding="utf-8") as f:
            imported = json.load(f)
    except FileNotFoundError:
        imported = {}
    return lambda name: np.dtype(DTYPES.get(imported.get(name), np.float32))


def _count(abstract: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(abstract))


def _write_json(path: str, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
