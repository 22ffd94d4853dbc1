"""Imports and exports PEFT adapters: the trained parameters of parameter-efficient tuning, without the base model.

A PEFT directory contains adapter_config.json and adapter_model.safetensors. LoRA and DoRA are supported for all model
families in the zoo. Prefix tuning is supported only for decoders with learned positions. For other models, PEFT differs
from the paper: it rotates the prefixes or inserts them at a different point.

transformers fuses some matrices that are separate in PretrainAX, such as query, key and value in GPT-2. The rank of a
fused matrix's update is the sum of the ranks of the PretrainAX updates.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np

from pretrainax import config, models
from pretrainax.adapt import LoRA, PrefixTuning
from pretrainax.adapt.matrices import Matrix, matrices_of
from pretrainax.adapt.patterns import match_patterns
from pretrainax.checkpoints.params import EMA, TRAINED, read_params, write_params
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import step_of
from pretrainax.config import Experiment, LearnedPositions, ModelConfig, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.files.paths import hub_name
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.directories import describe_export, evaluation_of
from pretrainax.interop.origin import AS_TRAINED, Origin, find_origin
from pretrainax.interop.safetensors_files import Reader, Writer
from pretrainax.interop.start import experiment_of, load_recorded_start, record_start
from pretrainax.interop.weights import DirectoryWeights
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.sharding.param_paths import nested
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.zoo.convert import rows_of, tensor_locations
from pretrainax.zoo.family import FusedPart, HuggingFace, NameRow

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of the names of LoRA tensors
_PROMPT = "prompt_embeddings"
_TASKS = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM", "encoder": None}
# Unsupported fields of adapter_config.json -> the supported values, which disable the field.
_UNSUPPORTED: dict[str, tuple] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "prefix_projection": (False, None),
}

State: TypeAlias = Mapping[str, np.ndarray]
Adapter: TypeAlias = tuple[JsonObject, dict[str, np.ndarray]]  # contents of adapter_config.json, tensors by name


class _MatrixLocation(NamedTuple):
    """One layer of a PretrainAX matrix, and its location within a linear module in transformers."""

    path: str  # path of the PretrainAX matrix
    layer: int
    part: FusedPart  # outputs of the module that belong to the matrix


# --- low-rank updates ------------------------------------------------------------------------------------------------


def _modules(table: Sequence[NameRow], model: ModelConfig) -> dict[str, list[_MatrixLocation]]:
    """Maps the name of each linear module in transformers to the PretrainAX matrices that it contains.

    Args:
      table: transformers names of the parameters of `model`.
    """
    rows, matrices = rows_of(table, models.abstract_params(model)), {}
    for matrix in matrices_of(models.abstract_params(model)):
        row, shape = rows[f"{matrix.path}/kernel"]
        for name, index in tensor_locations(row, shape):
            location = _MatrixLocation(matrix.path, *(index or (0,)), row.part)
            matrices.setdefault(name.removesuffix(".weight"), []).append(location)
    return matrices


def lora_to_peft(tuning: LoRA, trained: State, table: Sequence[NameRow], model: ModelConfig) -> Adapter:
    """Converts the trained arrays of a LoRA fine-tuning run to a PEFT adapter.

    Args:
      trained: trained arrays by parameter path.
      table: transformers names of the parameters of `model`.

    Returns:
      The contents of adapter_config.json, and the tensors by name.

    Raises:
      UserError: DoRA adapts only some of the matrices that transformers stores as one fused matrix.
    """
    tensors, ranks = {}, {}
    for module, locations in _modules(table, model).items():
        adapted = [location for location in locations if f"{location.path}/lora_a" in trained]
        if not adapted:
            continue
        rank = ranks[module] = tuning.rank * len(adapted)
        pairs = [
            (_layer_matrix(trained, location, "lora_a", -1), _layer_matrix(trained, location, "lora_b", 0))
            for location in adapted
        ]
        b = np.zeros((adapted[0].part.fused_size(pairs[0][1].shape[1]), rank), np.float32)
        for i, (location, (_, matrix_b)) in enumerate(zip(adapted, pairs, strict=True)):
            b[location.part.our_slice(len(b)), i * tuning.rank : (i + 1) * tuning.rank] = matrix_b.T
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.concatenate([a.T for a, _ in pairs])
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = b
        if tuning.dora:
            if sum(location.part.count for location in adapted) < adapted[0].part.pieces:
                raise UserError(f"{module} of transformers is several matrices, DoRA must change all or none of them")
            magnitudes = [
                trained[f"{location.path}/magnitude"][location.layer].ravel()
                for location in sorted(adapted, key=lambda location: location.part)
            ]
            tensors[f"{_PREFIX}{module}.lora_magnitude_vector"] = np.concatenate(magnitudes)
    main_rank = max(set(ranks.values()), key=list(ranks.values()).count)
    other_ranks = {module: rank for module, rank in ranks.items() if rank != main_rank}
    is_linear = any(row.transposed for row in table if row.path.endswith("_attention/query/kernel"))
    adapter_config = {
        "peft_type": "LORA",
        "r": main_rank,
        "lora_alpha": tuning.scale * main_rank,
        "lora_dropout": tuning.dropout,
        "target_modules": list(ranks),
        "rank_pattern": {re.escape(module): rank for module, rank in other_ranks.items()},
        "alpha_pattern": {re.escape(module): tuning.scale * rank for module, rank in other_ranks.items()},
        "use_dora": tuning.dora,
        "fan_in_fan_out": not is_linear,
        "bias": "none",
    }
    return adapter_config, tensors


def _layer_matrix(trained: State, location: _MatrixLocation, name: str, rank_axis: int) -> np.ndarray:
    """Returns one layer of a LoRA matrix, A [in, rank] or B [rank, out], with the head axes flattened.

    Args:
      name: "lora_a" or "lora_b".
      rank_axis: index of the rank axis: -1 for A, 0 for B.
    """
    x = trained[f"{location.path}/{name}"][location.layer]
    return x.reshape(-1, x.shape[-1]) if rank_axis else x.reshape(x.shape[0], -1)


def lora_from_peft(described: JsonObject, tensors: State, table: Sequence[NameRow], model: ModelConfig) -> tuple:
    """Converts a PEFT adapter to a `LoRA` config and its trained arrays by parameter path.

    If the ranks of the modules differ, smaller updates are padded with zeros to the largest rank.

    Args:
      described: contents of adapter_config.json.
      tensors: tensors of the adapter by name.
      table: transformers names of the parameters of `model`.

    Raises:
      UserError: the tensors do not match the model.
    """
    modules, names, problems = _modules(table, model), {}, []
    for name in tensors:
        module, _, kind = name.removeprefix(_PREFIX).partition(".lora_")
        matches = [m for m in modules if m == module or m.endswith(f".{module}") or module.endswith(f".{m}")]
        if len(matches) == 1 and kind in ("A.weight", "B.weight", "magnitude_vector"):
            names.setdefault(matches[0], {})[kind] = name
        else:
            problems.append(name)
    is_dora = bool(described.get("use_dora"))
    expected = {"A.weight", "B.weight"} | ({"magnitude_vector"} if is_dora else set())
    problems += [f"no {kind} of {m}" for m, kinds in names.items() for kind in sorted(expected ^ kinds.keys())]
    if problems or not names:
        raise UserError(f"{WEIGHTS} does not hold updates of this model: {', '.join(problems) or 'it is empty'}")
    ranks = {m: tensors[kinds["A.weight"]].shape[0] for m, kinds in names.items()}
    rank = max(ranks.values())
    alphas = _alphas(described, [*ranks])
    scales = {m: alphas[m] / (r**0.5 if described.get("use_rslora") else r) for m, r in ranks.items()}
    scale = next(iter(scales.values()))
    shapes = {matrix.path: matrix for matrix in matrices_of(models.abstract_params(model))}
    paths = dict.fromkeys(location.path for module in names for location in modules[module])
    tuning = LoRA(rank, scale * rank, float(described.get("lora_dropout", 0.0)), tuple(paths), is_dora)
    trained = {
        name: np.zeros(shape, np.float32) for path in paths for name, shape in _array_shapes(shapes[path], tuning)
    }
    for module, kinds in names.items():
        a, b = (np.asarray(tensors[kinds[kind]], np.float32) for kind in ("A.weight", "B.weight"))
        for location in modules[module]:
            matrix, rows = shapes[location.path], location.part.our_slice(len(b))
            if a.shape[1] * (rows.stop - rows.start) != np.prod(matrix.inputs) * np.prod(matrix.outputs):
                raise UserError(
                    f"the update of {module} in {WEIGHTS} has shape {b.shape[0]} × {a.shape[1]}, unlike the model"
                )
            x = trained[f"{location.path}/lora_a"][location.layer]
            x[..., : len(a)] = a.T.reshape(*matrix.inputs, -1)
            x = trained[f"{location.path}/lora_b"][location.layer]
            x[: len(a)] = (b[rows].T * (scales[module] / scale)).reshape(-1, *matrix.outputs)
            if is_dora:
                magnitude = np.asarray(tensors[kinds["magnitude_vector"]], np.float32)[rows]
                trained[f"{location.path}/magnitude"][location.layer] = magnitude.reshape(matrix.outputs)
    missing = {
        m
        for m, locations in modules.items()
        if m not in names and any(location.path in paths for location in locations)
    }
    if missing:
        raise UserError(f"{WEIGHTS} changes only some layers, which is not supported: it lacks {', '.join(missing)}")
    return tuning, trained


def _array_shapes(matrix: Matrix, tuning: LoRA) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the paths and shapes of the arrays that a LoRA config trains for a matrix."""
    magnitude = [(f"{matrix.path}/magnitude", (matrix.layers, *matrix.outputs))] if tuning.dora else []
    return [
        (f"{matrix.path}/lora_a", (matrix.layers, *matrix.inputs, tuning.rank)),
        (f"{matrix.path}/lora_b", (matrix.layers, tuning.rank, *matrix.outputs)),
        *magnitude,
    ]


def _alphas(adapter_config: JsonObject, modules: Sequence[str]) -> dict[str, float]:
    """Returns the LoRA alpha of each module.

    As in PEFT, alpha comes from the first entry of alpha_pattern that matches the end of the module's path. If no
    entry matches, alpha is lora_alpha.
    """
    patterns = cast(dict[str, float], adapter_config.get("alpha_pattern") or {})
    try:
        matches = (
            match_patterns(tuple(rf"^(.*\.)?({pattern})$" for pattern in patterns), tuple(modules)) if patterns else []
        )
    except (UserError, ValueError) as e:
        raise UserError(f"{CONFIG} has an alpha_pattern which {e}") from e
    alphas_by_module = {
        m: [a for a, is_match in zip(patterns.values(), matches, strict=True) if is_match[i]]
        for i, m in enumerate(modules)
    }
    return {
        module: float(alphas[0] if alphas else adapter_config["lora_alpha"])
        for module, alphas in alphas_by_module.items()
    }


# --- prefixes --------------------------------------------------------------------------------------------------------


def prefix_to_peft(tuning: PrefixTuning, trained: State, model: ModelConfig) -> Adapter:
    """Converts the trained arrays of a prefix-tuning run to a PEFT adapter.

    Args:
      trained: trained arrays by parameter path.

    Returns:
      The contents of adapter_config.json, and the tensors by name.
    """
    _check_prefix(model)
    params = tuning.expanded(dict(trained))
    prefixes = [np.asarray(params[f"decoder/blocks/self_attention/{name}/prefix"]) for name in ("key", "value")]
    # 2 × [L, P, H, K] -> [P, L, 2, H, K] -> [P, L · 2 · H · K]
    vectors = np.stack(prefixes, axis=2).transpose(1, 0, 2, 3, 4).reshape(tuning.length, -1)
    adapter_config = {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": tuning.length,
        "token_dim": model.num_heads * model.dim_per_head,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_transformer_submodules": 1,
        "encoder_hidden_size": model.d_model,
        "prefix_projection": False,
    }
    return adapter_config, {_PROMPT: np.ascontiguousarray(vectors)}


def prefix_from_peft(described: JsonObject, tensors: State, model: ModelConfig) -> tuple:
    """Converts a PEFT adapter to a `PrefixTuning` config and its trained arrays by parameter path.

    Raises:
      UserError: the tensors do not match the model, or the model is not supported.
    """
    _check_prefix(model)
    length, heads = described.get("num_virtual_tokens"), (model.num_heads, model.dim_per_head)
    shape = (length, model.num_layers * 2 * heads[0] * heads[1])
    if set(tensors) != {_PROMPT} or tensors[_PROMPT].shape != shape:
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        raise UserError(f"{WEIGHTS} holds {shapes}, but the prefix of this model is {_PROMPT} {list(shape)}")
    vectors = np.asarray(tensors[_PROMPT], np.float32).reshape(length, model.num_layers, 2, *heads)
    path = "decoder/blocks/self_attention"
    trained = {f"{path}/{name}/prefix": vectors[:, :, i].swapaxes(0, 1) for i, name in enumerate(("key", "value"))}
    return PrefixTuning(cast(int, length)), trained


def _check_prefix(model: ModelConfig) -> None:
    """Raises UserError unless PEFT applies prefixes to this model in the same way as PretrainAX."""
    fits = model.family == "decoder" and isinstance(model.position, LearnedPositions)
    if not fits or model.kv_heads != model.num_heads or "local" in model.layer_pattern:
        raise UserError(
            "prefixes for peft need a decoder with learned positions, such as GPT-2: others place them elsewhere"
        )


# --- directories -----------------------------------------------------------------------------------------------------


def export_adapter(
    workdir: str, to: str, step: str, folder: str = TRAINED, finish: Callable[[str], None] = lambda staging: None
) -> str:
    """Exports the trained parameters of a run with LoRA or prefix tuning as a PEFT directory; returns a summary line.

    Args:
      workdir: folder of the run.
      to: the new directory; it must be empty or missing.
      step: folder of the checkpoint.
      folder: folder in the checkpoint: TRAINED or EMA parameters.
      finish: called with the path of the temporary directory before it is renamed to `to`; may add files to it.
    """
    experiment = config.load(os.path.join(workdir, "config.json"))
    tuning, model = experiment.tuning, experiment.model
    if not isinstance(tuning, (LoRA, PrefixTuning)) or model.generator is not None:
        raise UserError(f"{workdir} has config.tuning {tuning}: the peft format supports LoRA and PrefixTuning")
    if os.path.isdir(to) and os.listdir(to):
        raise UserError(f"--to={to} is not empty: set another directory")
    trained = _read_trained(step, folder)
    supported = re.compile(r"/(lora_a|lora_b|magnitude|prefix)$|^prefix/")
    if other_paths := [path for path in trained if not supported.search(path)]:
        raise UserError(
            f"{workdir} has trained {', '.join(other_paths)} in addition to its {type(tuning).__name__}, which the "
            "peft format does not support: leave out --adapter to export the whole model"
        )
    tokenizer = load_tokenizer(os.path.join(workdir, "tokenizer"))
    start = load_recorded_start(workdir)
    family = _family_of(start, experiment, tokenizer)
    if isinstance(tuning, LoRA):
        adapter_config, tensors = lora_to_peft(tuning, trained, family.names(model), model)
    else:
        adapter_config, tensors = prefix_to_peft(tuning, trained, model)
    adapter_config |= {"task_type": _TASKS[model.family], "inference_mode": True}
    adapter_config["base_model_name_or_path"] = None if start.steps else start.directory
    if start.hub and (name := hub_name(start.hub)):
        adapter_config |= {"base_model_name_or_path": name.repository, "revision": name.revision}
    staging = f"{os.path.abspath(to)}.exporting"
    shutil.rmtree(staging, ignore_errors=True)
    os.makedirs(staging)
    files = Writer(staging, {name: (x.dtype, x.shape) for name, x in tensors.items()}, 1 << 62, WEIGHTS)
    for name, x in tensors.items():
        files[name][...] = x
    write_atomically(os.path.join(staging, CONFIG), json.dumps(adapter_config, indent=2, sort_keys=True) + "\n")
    finish(staging)
    if os.path.isdir(to):
        os.rmdir(to)
    os.rename(staging, to)
    base = start.description
    if len(start.steps) == 1:
        run = f"{start.directory}@{AS_TRAINED if start.folder == TRAINED else EMA}{step_of(start.steps[0])}"
        base = f"the output of python -m pretrainax.huggingface export --workdir={run} --to=DIR"
    return f"{len(tensors):,} tensors exported to {to} for peft; base model: {base}"


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
      UserError: the adapter is not supported, does not match the base model, or names no local base model.
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
    for field, disabled in _UNSUPPORTED.items():
        if adapter_config.get(field, disabled[0]) not in disabled:
            raise UserError(f"{directory}: {CONFIG} has {field} {adapter_config[field]!r}, which is not supported")
    with WorkdirLock(workdir):
        if os.path.exists(os.path.join(workdir, "config.json")):
            raise UserError(f"--workdir={workdir} holds a run already: set another --workdir")
        experiment, tokenizer = _load_base(origin, workdir)
        tensors = Reader(directory, WEIGHTS)
        state = {name: tensors[name] for name in tensors.shapes}
        kind = adapter_config.get("peft_type")
        if kind == "LORA":
            table = _family_of(origin, experiment, tokenizer).names(experiment.model)
            experiment.tuning, trained = lora_from_peft(adapter_config, state, table, experiment.model)
        elif kind == "PREFIX_TUNING":
            experiment.tuning, trained = prefix_from_peft(adapter_config, state, experiment.model)
        else:
            raise UserError(f"{directory}: {CONFIG} has peft_type {kind!r}, it must be 'LORA' or 'PREFIX_TUNING'")
        experiment.checkpoint.init_from = base_name if origin.hub else os.path.abspath(base_name)
        abstract = nested({path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in trained.items()})
        tokenizer.save(os.path.join(workdir, "tokenizer"))
        extra = {"tokenizer": tokenizer.fingerprint}
        write_params(workdir, abstract, lambda path, index: trained[path][index], extra)
        record_start(workdir, origin)
        write_atomically(os.path.join(workdir, "config.json"), config.dump(experiment))
    count = sum(x.size for x in trained.values())
    return f"{count:,} parameters of {experiment.tuning} imported to {workdir}, for {origin.description}"


def _load_base(origin: Origin, workdir: str) -> tuple[Experiment, Tokenizer]:
    """Loads the run config and the tokenizer of the base model.

    Args:
      origin: location of the base model.
      workdir: folder of the new run, which will contain the tokenizer.
    """
    base = origin.directory
    if origin.steps:
        return experiment_of(origin), load_tokenizer(os.path.join(base, "tokenizer"))
    tokenizer = read_tokenizer(base)
    path = os.path.abspath(os.path.join(workdir, "tokenizer"))
    return evaluation_of(DirectoryWeights(base).config, tokenizer.vocabulary, path), tokenizer
