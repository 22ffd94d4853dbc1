"""Imports Hugging Face directories as runs, and exports runs as Hugging Face directories, block by block."""

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax import config, models
from pretrainax.adapt.tuning import has_plain_model
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import TRAINED, read_params, write_params
from pretrainax.checkpoints.paths import exact_path
from pretrainax.checkpoints.run_json import check_tokenizer, read_run_json
from pretrainax.checkpoints.steps import find_checkpoint, step_of
from pretrainax.config import (
    CheckpointConfig,
    Choice,
    Classify,
    DataConfig,
    Embed,
    EvaluateConfig,
    Experiment,
    Extract,
    ModelConfig,
    Tag,
    TrainConfig,
    UserError,
)
from pretrainax.data.leading_tokens import decoder_frame
from pretrainax.data.objectives import (
    CausalLM,
    Denoising,
    MaskedLM,
    NextSentencePrediction,
    Objective,
    ReplacedTokenDetection,
    SentenceOrderPrediction,
    SpanCorruption,
)
from pretrainax.data.sources import NoSource
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.paths import is_hub
from pretrainax.interop.architectures import describe_model
from pretrainax.interop.dropout_rates import unused_rates
from pretrainax.interop.elmo_files import ElmoFiles, is_elmo
from pretrainax.interop.export_dtypes import EXPORT_DTYPES
from pretrainax.interop.export_folder import new_directory, run_to_export
from pretrainax.interop.generation import GENERATION, ORIGINAL, read_generation_file
from pretrainax.interop.origin import find_origin
from pretrainax.interop.safetensors_files import Tensors, Writer
from pretrainax.interop.sentence_transformers import copy_modules, write_modules
from pretrainax.interop.start import load_run, record_start
from pretrainax.interop.weights import DirectoryWeights, label_names, verify_files
from pretrainax.models import electra
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import flat
from pretrainax.storage.places import local_path
from pretrainax.tasks import (
    Classification,
    ExtractiveQA,
    Instructions,
    MultipleChoice,
    Regression,
    Retrieval,
    TokenClassification,
)
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.base import Tokenizer, Vocabulary, load_tokenizer
from pretrainax.tokenization.chat import copy_templates, read_templates
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import loader, write_tokenizer
from pretrainax.zoo.convert import Rows, as_ours, rows_of, stacked_axes, tensor_locations, their_shape
from pretrainax.zoo.family import ConfigJson, HuggingFace, differences
from pretrainax.zoo.task_heads import default_label_names

_DIFFERENCE = "embedding_difference/"  # path prefix of the difference between discriminator and generator embeddings
DTYPES = {name: np.dtype(name) for name in EXPORT_DTYPES}


def import_directory(directory: str, workdir: str) -> str:
    """Imports a Hugging Face directory, a Hub model or ELMo's files to a new workdir; returns a summary line."""
    exact_path(workdir)
    with WorkdirLock(workdir):
        return _import(directory, workdir)


def _import(source_name: str, workdir: str) -> str:
    """Imports a model as in `import_directory`; the caller must hold the workdir's lock."""
    started = time.perf_counter()
    if os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(f"--workdir={workdir} holds a run already: set another --workdir")
    if os.path.exists(os.path.join(workdir, "checkpoints", "0")):
        raise UserError(f"--workdir={workdir} holds an import that was cut short: remove it, or set another --workdir")
    directory = local_path(source_name)
    if is_elmo(directory):
        source = ElmoFiles(directory)
        tokenizer = source.tokenizer
    else:
        verify_files(directory)
        source = DirectoryWeights(directory)
        source.verify()
        tokenizer = read_tokenizer(directory)
        check_rows(directory, tokenizer.vocabulary, source.config)
    tokenizer.save(os.path.join(workdir, "tokenizer"))
    write_params(workdir, source.abstract, source.read, {"tokenizer": tokenizer.fingerprint})
    if isinstance(source, DirectoryWeights):
        _save_original(source, workdir)
    if is_hub(source_name):
        record_start(workdir, find_origin(source_name))
    folder = os.path.abspath(f"{workdir}/tokenizer")
    experiment = evaluation_of(source.config, tokenizer.vocabulary, folder, source.labels)
    write_atomically(os.path.join(workdir, "config.json"), config.dump(experiment))
    count = sum(x.size for x in jax.tree.leaves(source.abstract))
    notes = "".join(f"; {note}" for note in source.notes())
    return f"{count:,} parameters imported to {workdir} in {time.perf_counter() - started:.1f} s{notes}"


def export_workdir(
    workdir: str,
    to: str,
    steps: Sequence[str] = (),
    dtype: Optional[str] = None,
    part: Optional[str] = None,
    shard_bytes: int = 5 * 10**9,
    folder: str = TRAINED,
    finish: Callable[[str], None] = lambda staging: None,
) -> str:
    """Exports a checkpoint, or the mean of several checkpoints, as a Hugging Face directory; returns a summary line.

    Args:
      to: the new directory; it must be empty or missing.
      steps: checkpoint folders of the run, averaged if there are several; () means the newest valid checkpoint.
      dtype: dtype of all tensors. None keeps the dtypes of an imported model, and means float32 for other runs.
      part: the exported model of an ELECTRA run, "generator" or, by default, "discriminator".
      shard_bytes: maximum size in bytes of the tensors in one file.
      folder: folder in each checkpoint: TRAINED or EMA parameters.
      finish: called with the path of the temporary directory before it is renamed to `to`; may add files to it.
    """
    started = time.perf_counter()
    config_path = run_to_export(workdir, to)
    tokenizer, steps = load_tokenizer(os.path.join(workdir, "tokenizer")), steps or (find_checkpoint(workdir),)
    experiment = config.config_at_checkpoint(config.load(config_path), list(map(step_of, steps)))
    for step in steps:
        check_tokenizer(step, tokenizer.fingerprint, os.path.join(workdir, "tokenizer"))
    check_rows(workdir, tokenizer.vocabulary, experiment.model)
    imported = _read_imported(workdir, "config.json")
    family, config_json, model = describe_export(experiment, tokenizer.vocabulary, part, imported)
    rows = rows_of(family.names(model), models.abstract_params(model))
    tensors = _exported_tensors(family, model, rows, _export_dtypes(workdir, dtype))
    dtypes = {dtype.name for dtype, _ in tensors.values()}
    # New and old name of the field. transformers loads all tensors in one dtype; float32 can represent all others.
    config_json["dtype"] = config_json["torch_dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    with new_directory(to) as staging:
        templates = read_templates(os.path.join(workdir, "tokenizer"))
        frame = decoder_frame(experiment, tokenizer.vocabulary)
        write_tokenizer(tokenizer, staging, model, templates.get("default"), frame)
        if templates.keys() - {"default"}:  # tokenizer_config.json can contain only the default template
            copy_templates(os.path.join(workdir, "tokenizer"), staging)
        files = Writer(staging, tensors, shard_bytes)
        _write_tensors(files, rows, _parameters(workdir, experiment, steps, folder), part)
        _write_json(os.path.join(staging, "config.json"), config_json)
        if model.family != "encoder":  # encoders do not generate
            generation = _generation_config(workdir, config_json, tokenizer, experiment.objective)
            _write_json(os.path.join(staging, GENERATION), generation)
        write_modules(staging, model)
        copy_modules(os.path.join(workdir, "tokenizer"), staging)  # for an imported embedding model
        manifest.write_manifest(staging)
        finish(staging)
    left_out = "" if experiment.model.multi_token is None else ", without config.model.multi_token"
    summary = f"{to} as {config_json['architectures'][0]}{left_out} in {time.perf_counter() - started:.1f} s"
    if (tokenizer_class := loader(to)) != "AutoTokenizer":
        summary += f"; load its tokenizer with {tokenizer_class}: AutoTokenizer of transformers 5 splits text as Qwen 2"
    return f"{len(tensors):,} tensors exported to {summary}"


def describe_export(
    experiment: Experiment, vocabulary: Vocabulary, part: Optional[str] = None, imported: Optional[ConfigJson] = None
) -> tuple[HuggingFace, ConfigJson, ModelConfig]:
    """Returns the transformers family, config.json and model config of an exported model.

    These are the results of `describe_model`, with the special token ids and the labels added to the config.json.

    Args:
      experiment: config of the run.
      vocabulary: vocabulary of the run's tokenizer.
      part: as in `export_workdir`.
      imported: original config.json of an imported model, or None if the model was not imported.

    Raises:
      UserError: transformers cannot compute the model, it has no such part, or its tuning cannot be merged into it; the
        message gives the reason.
    """
    if not has_plain_model(experiment):
        raise UserError(
            f"{experiment.tuning} cannot be merged into a plain model: only export --adapter may write it, for peft"
        )
    model, imported = experiment.model, imported or {}
    if part and model.generator is None:
        raise UserError(f"--part={part} is for ELECTRA models, and this model has no generator: leave it out")
    if model.generator is not None:
        model = (electra.generator_config if part == "generator" else electra.discriminator_config)(model)
    model = dataclasses.replace(model, multi_token=None)  # used only in training
    family, config_json, model = describe_model(model, imported.get("model_type"))
    start = experiment.objective.components()[0][1].decoder_start(vocabulary)
    if model.family == "decoder":  # a text ends with [SEP] if the vocabulary has no EOS
        vocabulary = dataclasses.replace(vocabulary, eos=vocabulary.separator)
    config_json |= _vocabulary_ids(config_json, vocabulary, start) | _special_ids(imported)
    if imported.get("model_type") == family.model_type:
        config_json = _unread_settings(imported) | config_json | unused_rates(imported, family)
    config_json = _without_new_forced_ids(config_json, imported)
    if config_json.get("is_encoder_decoder") and config_json["decoder_start_token_id"] is None:
        config_json["decoder_start_token_id"] = start  # the imported file has null, and generation_config.json an id
    names = getattr(experiment.objective, "labels", ()) or label_names(imported)  # a regression has no labels
    if names and len(names) == len(config_json.get("id2label", ())):
        config_json["id2label"] = {str(i): name for i, name in enumerate(names)}
        config_json["label2id"] = {name: i for i, name in enumerate(names)}
    _check_padding(family, config_json, model)
    return family, config_json, model


def _exported_tensors(
    family: HuggingFace, model: ModelConfig, rows: Rows, dtype_of: Callable[[str], np.dtype]
) -> Tensors:
    """Returns the dtype and shape of each exported tensor, by tensor name.

    Args:
      rows: tensor names of the parameters, by parameter path.
      dtype_of: returns the dtype of a tensor, given its name.
    """
    tensors = {}
    for row, shape in rows.values():
        for name, index in tensor_locations(row, shape):
            tensors[name] = dtype_of(name), their_shape(row, shape[len(index) :])
    for name, shape in family.zeros(model).items() if model.head is None else ():
        tensors[name] = dtype_of(name), shape
    return tensors


class _Parameters(NamedTuple):
    """The exported parameters: their paths, and an iterator that reads their values block by block."""

    paths: list[str]
    blocks: Iterator[tuple[str, int, np.ndarray]]  # parameter path, offset along the first axis, values


def _parameters(workdir: str, experiment: Experiment, steps: Sequence[str], folder: str) -> _Parameters:
    """Returns the parameters of a checkpoint, or the mean of several checkpoints.

    The parameters are read block by block. With `config.tuning`, the whole model is merged in memory first.
    """
    if experiment.tuning is None:
        arrays = read_run_json(steps[0])["arrays"]
        paths = [name.removeprefix(f"{folder}/") for name in arrays]
        return _Parameters(paths, read_params(*steps, folder=folder))
    merged = flat(load_run(workdir, experiment, steps, make_mesh(config.MeshConfig()), folder))
    return _Parameters(list(merged), ((path, 0, np.asarray(x)) for path, x in merged.items()))


def _write_tensors(files: Writer, rows: Rows, parameters: _Parameters, part: Optional[str]) -> None:
    """Writes each parameter to its tensors.

    Biases that exist only in the transformers model remain zero.

    Args:
      files: the tensors to write.
      rows: tensor names of the parameters, by parameter path.
      parameters: parameters of the run. `models.electra` describes the paths of an ELECTRA run.
      part: as in `export_workdir`.
    """
    paths = parameters.paths
    generator_paths = {path.removeprefix("generator/") for path in paths if path.startswith("generator/")}
    difference_paths = {path.removeprefix(_DIFFERENCE) for path in paths if path.startswith(_DIFFERENCE)}
    for path, start, block in parameters.blocks:
        if part == "generator" and (path in generator_paths or path.startswith(_DIFFERENCE)):
            continue  # belongs to the discriminator
        path = path.removeprefix("generator/" if part == "generator" else _DIFFERENCE)
        if path not in rows:
            continue
        row, shape = rows[path]
        if stacked_axes(row):
            for name, (layer, *rest) in tensor_locations(row, shape):
                if start <= layer < start + len(block):
                    values = block[(layer - start, *rest)]
                    _assign(as_ours(row, files[name], shape[1 + len(rest) :]), values, name)
        else:
            target = as_ours(row, files[row.name], shape)[start : start + len(block)]
            # The discriminator's table is the sum of two parameters, which are read in any order. The tensor is
            # initially zero.
            is_sum = part != "generator" and path in difference_paths
            _assign(target, target + block if is_sum else block, row.name)


def _assign(target: np.ndarray, values: np.ndarray, name: str) -> None:
    """Writes values to the tensor `name`; raises UserError if the dtype of `target` cannot represent them."""
    with np.errstate(over="ignore"):
        target[...] = values
    if not np.isfinite(target).all():
        raise UserError(
            f"{name} has values up to {np.abs(values).max():g}, which are not finite in {target.dtype}: set "
            "--dtype=bfloat16 or float32, or export another checkpoint"
        )


def _save_original(source: DirectoryWeights, workdir: str) -> None:
    """Saves the templates, JSON configs and tensor dtypes of an imported directory."""
    copy_modules(source.directory, os.path.join(workdir, "tokenizer"))
    copy_templates(source.directory, os.path.join(workdir, "tokenizer"))
    os.makedirs(os.path.join(workdir, ORIGINAL), exist_ok=True)
    for name in ("config.json", GENERATION):
        if os.path.exists(os.path.join(source.directory, name)):
            content = read_object(os.path.join(source.directory, name))
            _write_json(os.path.join(workdir, ORIGINAL, name), content)
    _write_json(os.path.join(workdir, ORIGINAL, "dtypes.json"), source.dtypes)


# --- configs ---------------------------------------------------------------------------------------------------------


def evaluation_of(model: ModelConfig, vocabulary: Vocabulary, tokenizer: str, labels: Sequence[str] = ()) -> Experiment:
    """Builds the run config of an imported model, for evaluation and as a template for other configs.

    The objective is the pretraining objective of the architecture, or the task of the model's task head.

    Args:
      tokenizer: folder of the tokenizer.
      labels: label names of a classifier. If empty, the labels have transformers' default names, LABEL_0, LABEL_1, …
    """
    objectives = {"decoder": CausalLM, "encoder": MaskedLM, "encoder_decoder": SpanCorruption}
    objective = objectives[model.family]() if model.own_model is None else Choice.named(model.own_model.objective)()
    if isinstance(model.head, (Classify, Tag)):
        labels = tuple(labels) or tuple(default_label_names(int(model.head.num_labels)))
    if isinstance(model.head, Classify):
        by_kind = {"regression": Regression(), "choice": MultipleChoice(choices=len(labels))}
        classification = Classification(labels=tuple(labels), multi_label=model.head.kind == "multi")
        objective = by_kind.get(model.head.kind, classification)
    elif isinstance(model.head, Tag):
        objective = TokenClassification(labels=tuple(labels))
    elif isinstance(model.head, Extract):
        objective = ExtractiveQA()
    elif isinstance(model.head, Embed):
        objective = Retrieval()
    elif model.family == "encoder_decoder" and vocabulary.mask is not None and not vocabulary.sentinels:  # BART
        objective = Denoising()
    elif model.replaced_token_head:
        objective = ReplacedTokenDetection()
    elif model.pair_head:  # ALBERT, the model with shared layers, predicts the order of sentences
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


def _vocabulary_ids(config_json: ConfigJson, vocabulary: Vocabulary, start: Optional[int]) -> dict[str, Optional[int]]:
    """Returns the PAD, BOS and EOS ids for config.json, and the decoder start id of an encoder-decoder.

    An id is null if neither the vocabulary nor the family's config.json defines it. If the field were
    missing, transformers would use the class's default id, which belongs to a different vocabulary.

    Args:
      config_json: the config.json that the family writes.
      start: decoder start id, or None if the model has no decoder start token.
    """
    ids = {f"{name}_token_id": getattr(vocabulary, name) for name in ("pad", "bos", "eos")}
    if config_json.get("is_encoder_decoder"):
        ids["decoder_start_token_id"] = start
    if "forced_eos_token_id" in config_json:
        ids["forced_eos_token_id"] = vocabulary.eos
    return {name: i for name, i in ids.items() if i is not None or name not in config_json}


def _special_ids(config_json: ConfigJson) -> ConfigJson:
    """Returns the special token ids in a config.json by field name; each is a number, null or a list like [1, 106]."""
    return {name: ids for name, ids in config_json.items() if name.endswith("_token_id")}


# Keys of config.json that affect only training, or only a task head that the model lacks, and the maximum length of
# Marian, whose positions are computed.
_UNREAD = re.compile(
    r"\w*(dropout\w*|pdrop|layerdrop)|classifier_pooling|initializer_\w+|router_jitter_noise|max_position_embeddings"
)


def _unread_settings(config_json: ConfigJson) -> ConfigJson:
    """Returns the settings of an imported config.json that this package does not read, for its export."""
    return {name: value for name, value in config_json.items() if _UNREAD.fullmatch(name)}


def _without_new_forced_ids(settings: ConfigJson, imported: ConfigJson) -> ConfigJson:
    """Removes the fields forced_bos_token_id and forced_eos_token_id if an imported file exists and lacks them.

    generate() of transformers forces only tokens that a file names.
    """
    return {
        name: x for name, x in settings.items() if not name.startswith("forced_") or not imported or name in imported
    }


def _generation_config(workdir: str, config_json: ConfigJson, tokenizer: Tokenizer, objective: Objective) -> ConfigJson:
    """Returns an export's generation_config.json: the imported settings, with missing ids from `config_json`.

    The token that ends an answer of a chat model also ends a text.
    """
    imported = _read_imported(workdir, GENERATION)
    if not imported and (file := read_generation_file(os.path.join(workdir, ORIGINAL))) is not None:
        imported = file.fields  # from config.json; transformers ignores them if there is a generation_config.json
    ids = _without_new_forced_ids(_special_ids(config_json), imported)
    generation = {"_from_model_config": True, **ids} | imported
    if config_json.get("is_encoder_decoder") and tokenizer.vocabulary.decoder_start is not None:
        generation["decoder_start_token_id"] = tokenizer.vocabulary.decoder_start
    task = objective.bind(tokenizer)
    if isinstance(task, Instructions) and task.end_id is not None:
        ids = generation.get("eos_token_id")
        others = ids if isinstance(ids, list) else [] if ids is None else [ids]
        generation["eos_token_id"] = list(dict.fromkeys([task.end_id, *others]))
    return generation


def _check_padding(family: HuggingFace, config_json: ConfigJson, model: ModelConfig) -> None:
    """Raises UserError if the padding id would make transformers compute a different model.

    RoBERTa, for example, counts positions from the padding id.
    """
    if differences(family.read_as(config_json, model), model):
        (architecture,) = config_json["architectures"]
        raise UserError(
            f"the tokenizer's padding is id {config_json['pad_token_id']}, and {architecture} of transformers counts "
            "positions from this id, unlike this model: train the model with a tokenizer that has the expected id"
        )


def check_rows(directory: str, vocabulary: Vocabulary, model: ModelConfig) -> None:
    """Raises UserError if the model lacks an embedding row for a token id or for the decoder start token."""
    start = vocabulary.decoder_start
    if model.family == "encoder_decoder" and start is not None and start >= model.vocab_size:
        raise UserError(
            f"{directory}: decoder_start_token_id (or bos_token_id) is {start:,}, and the model has only "
            f"{model.vocab_size:,} rows of embeddings: correct generation_config.json or config.json"
        )
    if vocabulary.size > model.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {vocabulary.size:,} ids, and the model {model.vocab_size:,} rows of "
            "embeddings: use the tokenizer of its training, or add rows in transformers with "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def _read_imported(workdir: str, name: str) -> ConfigJson:
    """Reads a JSON file that the import saved in a workdir; returns {} if the file does not exist."""
    path = os.path.join(workdir, ORIGINAL, name)
    return read_object(path) if os.path.exists(path) else {}


def _export_dtypes(workdir: str, dtype: Optional[str]) -> Callable[[str], np.dtype]:
    """Returns a function that maps the name of an exported tensor to its dtype.

    Args:
      dtype: dtype of all tensors. None keeps the dtypes of an imported model, and means float32 for other runs.
    """
    if dtype is not None:
        return lambda name: DTYPES[dtype]
    imported = _read_imported(workdir, "dtypes.json")
    return lambda name: np.dtype(DTYPES.get(imported.get(name), np.float32))


def _write_json(path: str, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
