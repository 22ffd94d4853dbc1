"""Imports PEFT directories as runs with `config.tuning`, and exports such runs as PEFT directories."""

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import cast

import jax
import numpy as np

from pretrainax import config
from pretrainax.adapt import IA3, LoRA, PrefixTuning, PromptTuning
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import EMA, TRAINED, read_params, write_params
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import step_of
from pretrainax.config import Classify, Experiment, Tag, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.files.paths import hub_name
from pretrainax.interop.adapters.base_model import BaseModel, read_base_model, task_fields
from pretrainax.interop.adapters.fields import CONFIG, WEIGHTS, check_fields, check_targets
from pretrainax.interop.adapters.lora import lora_from_peft, lora_to_peft
from pretrainax.interop.adapters.modules import Adapter, State, TheirModel, base_reader, split_tensors
from pretrainax.interop.adapters.rescaling import ia3_from_peft, ia3_to_peft
from pretrainax.interop.adapters.saved import check_complete, whole_from_peft, whole_to_peft
from pretrainax.interop.adapters.virtual_tokens import (
    prefix_from_peft,
    prefix_to_peft,
    prompt_from_peft,
    prompt_to_peft,
)
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.directories import describe_export
from pretrainax.interop.export_folder import new_directory, run_to_export
from pretrainax.interop.origin import AS_TRAINED, Origin, find_origin
from pretrainax.interop.safetensors_files import Reader, Writer
from pretrainax.interop.start import load_recorded_start, record_start
from pretrainax.interop.weights import verify_files
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.sharding.param_paths import nested
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.zoo.family import HuggingFace

# Paths of the parameters that the tunings add.
_ADDED = re.compile(r"/(lora_a|lora_b|magnitude|ia3|prefix|prompt)$|^prefix/")


# --- export ----------------------------------------------------------------------------------------------------------


def export_adapter(
    workdir: str, to: str, step: str, folder: str = TRAINED, finish: Callable[[str], None] = lambda staging: None
) -> str:
    """Exports the trained parameters of a run with `config.tuning` as a PEFT directory; returns a summary line.

    Args:
      workdir: folder of the run.
      to: the new directory; it must be empty or missing.
      step: folder of the checkpoint.
      folder: folder in the checkpoint: TRAINED or EMA parameters.
      finish: called with the path of the temporary directory before it is renamed to `to`; may add files to it.
    """
    experiment = config.load(run_to_export(workdir, to))
    start = load_recorded_start(workdir)
    adapter_config, tensors = _to_peft(workdir, experiment, start, _read_trained(step, folder))
    adapter_config |= {"inference_mode": True, "base_model_name_or_path": None if start.steps else start.directory}
    if start.hub and (name := hub_name(start.hub)):
        adapter_config |= {"base_model_name_or_path": name.repository, "revision": name.revision}
    with new_directory(to) as staging:
        files = Writer(staging, {name: (x.dtype, x.shape) for name, x in tensors.items()}, 1 << 62, WEIGHTS)
        for name, x in tensors.items():
            files[name][...] = x
        write_atomically(os.path.join(staging, CONFIG), json.dumps(adapter_config, indent=2, sort_keys=True) + "\n")
        manifest.write_manifest(staging)
        finish(staging)
    base = start.description
    if len(start.steps) == 1:
        run = f"{start.directory}@{AS_TRAINED if start.folder == TRAINED else EMA}{step_of(start.steps[0])}"
        base = f"the output of python -m pretrainax.huggingface export {shlex.quote(f'--workdir={run}')} --to=DIR"
    arguments = label_arguments(experiment)
    note = f"; the format has no labels, so load the base model with {arguments}" if arguments else ""
    return f"{len(tensors):,} tensors exported to {to} for peft; base model: {base}{note}"


def _to_peft(workdir: str, experiment: Experiment, start: Origin, trained: State) -> Adapter:
    """Converts the trained parameters of a run to a PEFT adapter.

    Args:
      start: location of the base model.
      trained: trained arrays by parameter path.

    Raises:
      UserError: PEFT does not support the tuning, or other trained parameters.
    """
    tuning, model = experiment.tuning, experiment.model
    whole = {path: x for path, x in trained.items() if not _ADDED.search(path)}
    if model.generator is None and isinstance(tuning, (LoRA, IA3)):
        their = TheirModel(_family_of(start, experiment, load_tokenizer(os.path.join(workdir, "tokenizer"))), model)
        fields, tensors = (
            lora_to_peft(tuning, trained, their) if isinstance(tuning, LoRA) else ia3_to_peft(trained, their)
        )
        task = task_fields(their.family, model)
        saved_fields, saved = whole_to_peft(whole, fields["target_modules"], task["task_type"], their)
        return fields | task | saved_fields, tensors | saved
    is_virtual = isinstance(tuning, (PrefixTuning, PromptTuning))
    if model.generator is None and is_virtual and not whole:
        is_prefix = isinstance(tuning, PrefixTuning)
        fields, tensors = (
            prefix_to_peft(tuning, trained, model) if is_prefix else prompt_to_peft(tuning, trained, model)
        )
        return fields | {"task_type": "CAUSAL_LM" if model.family == "decoder" else "SEQ_2_SEQ_LM"}, tensors
    others = f", which also trains {', '.join(whole)}" if whole else ""
    whole_export = "" if is_virtual else ". Leave out --adapter to export the whole model"
    raise UserError(
        f"{workdir} has config.tuning {tuning}{others}: the peft format supports LoRA and IA3, and PrefixTuning and "
        f"PromptTuning without other trained parameters{whole_export}"
    )


def label_arguments(experiment: Experiment) -> str:
    """Returns the arguments with which from_pretrained loads the base model for the labels of a run, or "".

    A PEFT directory does not contain the labels.
    """
    head, labels = experiment.model.head, getattr(experiment.objective, "labels", ())
    if not isinstance(head, (Classify, Tag)) or head.kind == "choice":
        return ""
    return f"num_labels={head.num_labels}" + (f", id2label={dict(enumerate(labels))}" if labels else "")


def _read_trained(step: str, folder: str) -> dict[str, np.ndarray]:
    """Reads the trained arrays of a checkpoint, by parameter path."""
    arrays = {name.removeprefix(f"{folder}/"): entry for name, entry in read_run_json(step)["arrays"].items()}
    blocks: dict[str, list[np.ndarray]] = {}
    for path, _, block in read_params(step, folder=folder):
        blocks.setdefault(path, []).append(block)
    return {path: np.concatenate(arrays_of_path) for path, arrays_of_path in blocks.items() if path in arrays}


def _family_of(base: Origin, experiment: Experiment, tokenizer: Tokenizer) -> HuggingFace:
    """Returns the transformers family of the base model, which determines the module names in an adapter.

    Several families may compute the same model (Phi-3 and LLaMA, for example) but name their modules differently.
    """
    if base.steps:
        return describe_export(experiment, tokenizer.vocabulary)[0]
    return described_model(read_config_json(base.directory))[0]


# --- import ----------------------------------------------------------------------------------------------------------


def is_adapter(directory: str) -> bool:
    """Returns True if a folder is a PEFT directory, that is, if it contains adapter_config.json."""
    return os.path.exists(os.path.join(directory, CONFIG))


def import_adapter(directory: str, base: str | None, workdir: str) -> str:
    """Imports a PEFT directory as a run with `config.tuning`; returns a summary line.

    Args:
      directory: the PEFT directory.
      base: name of the base model: a run, a Hugging Face directory or a Hub model. If None, the base model is the local
        directory that adapter_config.json names.
      workdir: folder of the new run.

    Raises:
      UserError: the adapter is not supported, does not match its manifest or the base model, or names no local base
        model.
    """
    directory = local_path(directory)
    adapter_config = read_object(os.path.join(directory, CONFIG))
    recorded_base = cast("str | None", adapter_config.get("base_model_name_or_path"))
    if base is None and not (recorded_base and os.path.isdir(recorded_base)):
        hub_hint = f", or --base=hf:{recorded_base}" if recorded_base and hub_name(f"hf:{recorded_base}") else ""
        raise UserError(
            f"{directory} is an adapter of {recorded_base or 'a model that it does not name'}: give it as "
            f"--base=DIR{hub_hint}"
        )
    base_name = os.path.expanduser(cast(str, base or recorded_base))
    origin = find_origin(base_name)
    kind = check_fields(directory, adapter_config)
    with WorkdirLock(workdir):
        if os.path.exists(os.path.join(workdir, "config.json")):
            raise UserError(f"--workdir={workdir} holds a run already: set another --workdir")
        verify_files(directory)
        reader = Reader(directory, WEIGHTS)
        state = {name: np.asarray(reader[name], np.float32) for name in reader.shapes}
        if broken := [name for name, x in state.items() if not np.isfinite(x).all()]:
            raise UserError(f"{directory}: {', '.join(broken)} in {WEIGHTS} holds numbers that are not finite")
        base_model = read_base_model(origin, workdir, adapter_config, reader.shapes)
        experiment, trained = _from_peft(kind, adapter_config, state, base_model, origin)
        experiment.checkpoint.init_from = base_name if origin.hub else os.path.abspath(base_name)
        abstract = nested({path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in trained.items()})
        base_model.tokenizer.save(os.path.join(workdir, "tokenizer"))
        extra = {"tokenizer": base_model.tokenizer.fingerprint}
        write_params(workdir, abstract, lambda path, index: trained[path][index], extra)
        record_start(workdir, origin)
        write_atomically(os.path.join(workdir, "config.json"), config.dump(experiment))
    count = sum(x.size for x in trained.values())
    notes = "".join(f"; {note}" for note in _notes(directory, experiment))
    return f"{count:,} parameters of {experiment.tuning} imported to {workdir}, for {origin.description}{notes}"


def _from_peft(kind: str, described: JsonObject, tensors: State, base: BaseModel, origin: Origin) -> tuple:
    """Converts an adapter to a run's config and its trained arrays by parameter path.

    Args:
      kind: peft_type of the adapter.
      described: contents of adapter_config.json.
      tensors: tensors of the adapter by name.
      base: the base model, at `origin`.
    """
    experiment, model = base.experiment, base.their.model
    if kind in ("PREFIX_TUNING", "PROMPT_TUNING"):
        convert = prefix_from_peft if kind == "PREFIX_TUNING" else prompt_from_peft
        experiment.tuning, trained = convert(described, tensors, model)
        return experiment, trained
    split, read = split_tensors(tensors, base.their), base_reader(origin, model)
    check_targets(described, [*split.names.values()])
    check_complete(described, split, base.their)
    whole = whole_from_peft(split.whole, base.their, read)
    others = tuple(path for path in whole if path not in base.their.head_paths)
    if kind == "IA3":
        experiment.tuning, trained = ia3_from_peft(split, base.their)
        if others:
            raise UserError(f"{WEIGHTS} holds {', '.join(others)} whole, which is supported for LoRA, not for IA3")
    else:
        tuning, trained = lora_from_peft(described, split, base.their, read)
        experiment.tuning = dataclasses.replace(tuning, fully_trained=others)
    return experiment, trained | whole


def _notes(directory: str, experiment: Experiment) -> Iterator[str]:
    """Yields messages about data that the import did not read from the directory, or that the directory lacks."""
    if ignored := sorted(
        set(os.listdir(directory)) - {CONFIG, WEIGHTS, manifest.MANIFEST, "README.md", ".gitattributes"}
    ):
        yield f"not read: {', '.join(ignored)} (the tokenizer is that of the base model)"
    head = experiment.model.head
    if isinstance(head, Classify) and head.kind == "single":
        yield "peft does not record whether a document has several labels; one was assumed: config.model.head.kind"
