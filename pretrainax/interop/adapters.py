"""Imports and exports adapters of the peft library: the trained parameters of a tuning, without the base model.

A peft directory has adapter_config.json and adapter_model.safetensors. Low-rank updates and DoRA magnitudes are
supported for all families of the zoo. Prefixes are supported only for decoders with learned positions. For other
models, peft inserts prefixes at a different place than in the paper, or rotates them.

If a matrix of transformers consists of several matrices of this project (GPT-2's query | key | value), the rank of its
update is the sum of the ranks of their updates.
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
from pretrainax.adapt.patterns import found_in
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
_PREFIX = "base_model.model."  # prefix of the names of low-rank tensors
_PROMPT = "prompt_embeddings"
_TASKS = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM", "encoder": None}
# Unsupported fields of adapter_config.json -> values that disable the field.
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
Adapter: TypeAlias = tuple[JsonObject, dict[str, np.ndarray]]  # adapter_config.json and tensors


class _Place(NamedTuple):
    """The location of one layer of a matrix of this project in a linear module of transformers."""

    path: str  # of the matrix in this project
    layer: int
    part: FusedPart  # part of the outputs of the module


# --- low-rank updates ------------------------------------------------------------------------------------------------


def _modules(table: Sequence[NameRow], model: ModelConfig) -> dict[str, list[_Place]]:
    """Returns the matrices of this project that each linear module of transformers contains, by module name.

    Args:
      table: names of the parameters of `model` in transformers.
    """
    rows, found = rows_of(table, models.abstract_params(model)), {}
    for matrix in matrices_of(models.abstract_params(model)):
        row, shape = rows[f"{matrix.path}/kernel"]
        for name, index in tensor_locations(row, shape):
            place = _Place(matrix.path, *(index or (0,)), row.part)
            found.setdefault(name.removesuffix(".weight"), []).append(place)
    return found


def lora_to_peft(tuning: LoRA, trained: State, table: Sequence[NameRow], model: ModelConfig) -> Adapter:
    """Converts the trained arrays of a LoRA fine-tuning run to a PEFT adapter.

    Args:
      trained: trained arrays by parameter path.
      table: names of the parameters of `model` in transformers.

    Returns:
      adapter_config.json and the tensors by name.

    Raises:
      UserError: DoRA adapts only some of the matrices that transformers stores as one fused matrix.
    """
    tensors, ranks = {}, {}
    for module, all_places in _modules(table, model).items():
        adapted = [place for place in all_places if f"{place.path}/lora_a" in trained]
        if not adapted:
            continue
        rank = ranks[module] = tuning.rank * len(adapted)
        pairs = [(_matrix(trained, place, "lora_a", -1), _matrix(trained, place, "lora_b", 0)) for place in adapted]
        b = np.zeros((adapted[0].part.whole(pairs[0][1].shape[1]), rank), np.float32)
        for i, (place, (_, own)) in enumerate(zip(adapted, pairs, strict=True)):
            b[place.part.of(len(b)), i * tuning.rank : (i + 1) * tuning.rank] = own.T
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.concatenate([a.T for a, _ in pairs])
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = b
        if tuning.dora:
            if sum(place.part.count for place in adapted) < adapted[0].part.pieces:
                raise UserError(f"{module} of transformers is several matrices, DoRA must change all or none of them")
            magnitudes = [
                trained[f"{p.path}/magnitude"][p.layer].ravel() for p in sorted(adapted, key=lambda p: p.part)
            ]
            tensors[f"{_PREFIX}{module}.lora_magnitude_vector"] = np.concatenate(magnitudes)
    main_rank = max(set(ranks.values()), key=list(ranks.values()).count)
    others = {module: rank for module, rank in ranks.items() if rank != main_rank}
    is_linear = any(row.transposed for row in table if row.path.endswith("_attention/query/kernel"))
    described = {
        "peft_type": "LORA",
        "r": main_rank,
        "lora_alpha": tuning.scale * main_rank,
        "lora_dropout": tuning.dropout,
        "target_modules": list(ranks),
        "rank_pattern": {re.escape(module): rank for module, rank in others.items()},
        "alpha_pattern": {re.escape(module): tuning.scale * rank for module, rank in others.items()},
        "use_dora": tuning.dora,
        "fan_in_fan_out": not is_linear,
        "bias": "none",
    }
    return described, tensors


def _matrix(trained: State, place: _Place, name: str, rank_axis: int) -> np.ndarray:
    """Returns one layer of A [in, rank] or B [rank, out] of a low-rank update, with the heads in one axis.

    Args:
      name: "lora_a" or "lora_b".
      rank_axis: axis of the rank, -1 for A or 0 for B.
    """
    x = trained[f"{place.path}/{name}"][place.layer]
    return x.reshape(-1, x.shape[-1]) if rank_axis else x.reshape(x.shape[0], -1)


def lora_from_peft(described: JsonObject, tensors: State, table: Sequence[NameRow], model: ModelConfig) -> tuple:
    """Converts a peft adapter to a `LoRA` config and its trained arrays by parameter path.

    Updates with a smaller rank than the largest rank are padded with zeros.

    Args:
      described: contents of adapter_config.json.
      tensors: tensors of the adapter by name.
      table: names of the parameters of `model` in transformers.

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
    paths = dict.fromkeys(place.path for module in names for place in modules[module])
    tuning = LoRA(rank, scale * rank, float(described.get("lora_dropout", 0.0)), tuple(paths), is_dora)
    trained = {name: np.zeros(shape, np.float32) for path in paths for name, shape in _sizes(shapes[path], tuning)}
    for module, kinds in names.items():
        a, b = (np.asarray(tensors[kinds[kind]], np.float32) for kind in ("A.weight", "B.weight"))
        for place in modules[module]:
            own, rows = shapes[place.path], place.part.of(len(b))
            if a.shape[1] * (rows.stop - rows.start) != np.prod(own.inputs) * np.prod(own.outputs):
                raise UserError(
                    f"the update of {module} in {WEIGHTS} has shape {b.shape[0]} × {a.shape[1]}, unlike the model"
                )
            x = trained[f"{place.path}/lora_a"][place.layer]
            x[..., : len(a)] = a.T.reshape(*own.inputs, -1)
            x = trained[f"{place.path}/lora_b"][place.layer]
            x[: len(a)] = (b[rows].T * (scales[module] / scale)).reshape(-1, *own.outputs)
            if is_dora:
                magnitude = np.asarray(tensors[kinds["magnitude_vector"]], np.float32)[rows]
                trained[f"{place.path}/magnitude"][place.layer] = magnitude.reshape(own.outputs)
    missing = {m for m, of in modules.items() if m not in names and any(place.path in paths for place in of)}
    if missing:
        raise UserError(f"{WEIGHTS} changes only some layers, which is not supported: it lacks {', '.join(missing)}")
    return tuning, trained


def _sizes(matrix: Matrix, tuning: LoRA) -> list[tuple[str, tuple[int, ...]]]:
    magnitude = [(f"{matrix.path}/magnitude", (matrix.layers, *matrix.outputs))] if tuning.dora else []
    return [
        (f"{matrix.path}/lora_a", (matrix.layers, *matrix.inputs, tuning.rank)),
        (f"{matrix.path}/lora_b", (matrix.layers, tuning.rank, *matrix.outputs)),
        *magnitude,
    ]


def _alphas(described: JsonObject, modules: Sequence[str]) -> dict[str, float]:
    """Returns the alpha of each module.

    As in peft, the first pattern of alpha_pattern that matches the end of the module's path determines alpha. The
    default is lora_alpha.
    """
    patterns = cast(dict[str, float], described.get("alpha_pattern") or {})
    try:
        matches = found_in(tuple(rf"^(.*\.)?({pattern})$" for pattern in patterns), tuple(modules)) if patterns else []
    except (UserError, ValueError) as e:
        raise UserError(f"{CONFIG} has an alpha_pattern which {e}") from e
    own = {m: [a for a, of in zip(patterns.values(), matches, strict=True) if of[i]] for i, m in enumerate(modules)}
    return {module: float(alphas[0] if alphas else described["lora_alpha"]) for module, alphas in own.items()}


# --- prefixes --------------------------------------------------------------------------------------------------------


def prefix_to_peft(tuning: PrefixTuning, trained: State, model: ModelConfig) -> Adapter:
    """Converts the trained arrays of prefix tuning, by parameter path, to a peft adapter.

    Returns:
      adapter_config.json and the tensors by name.
    """
    _check_prefix(model)
    params = tuning.expanded(dict(trained))
    prefixes = [np.asarray(params[f"decoder/blocks/self_attention/{name}/prefix"]) for name in ("key", "value")]
    # 2 × [L, P, H, K] -> [P, L, 2, H, K] -> [P, L · 2 · H · K]
    vectors = np.stack(prefixes, axis=2).transpose(1, 0, 2, 3, 4).reshape(tuning.length, -1)
    described = {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": tuning.length,
        "token_dim": model.num_heads * model.dim_per_head,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_transformer_submodules": 1,
        "encoder_hidden_size": model.d_model,
        "prefix_projection": False,
    }
    return described, {_PROMPT: np.ascontiguousarray(vectors)}


def prefix_from_peft(described: JsonObject, tensors: State, model: ModelConfig) -> tuple:
    """Converts a peft adapter to a `PrefixTuning` config and its trained arrays by parameter path.

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
    fits = model.family == "decoder" and isinstance(model.position, LearnedPositions)
    if not fits or model.kv_heads != model.num_heads or "local" in model.layer_pattern:
        raise UserError(
            "prefixes for peft need a decoder with learned positions, such as GPT-2: others place them elsewhere"
        )


# --- directories -----------------------------------------------------------------------------------------------------


def export_adapter(
    workdir: str, to: str, step: str, folder: str = TRAINED, finish: Callable[[str], None] = lambda staging: None
) -> str:
    """Exports the trained parameters of a tuned run as a peft directory; returns a summary line.

    Args:
      to: the new directory; it must be empty or missing.
      step: folder of the checkpoint.
      folder: folder in the checkpoint: TRAINED or EMA parameters.
      finish: writes further files to the directory before its rename.
    """
    experiment = config.load(os.path.join(workdir, "config.json"))
    tuning, model = experiment.tuning, experiment.model
    if not isinstance(tuning, (LoRA, PrefixTuning)) or model.generator is not None:
        raise UserError(f"{workdir} has config.tuning {tuning}: the peft format supports LoRA and PrefixTuning")
    if os.path.isdir(to) and os.listdir(to):
        raise UserError(f"--to={to} is not empty: set another directory")
    trained = _read(step, folder)
    known = re.compile(r"/(lora_a|lora_b|magnitude|prefix)$|^prefix/")
    if other_paths := [path for path in trained if not known.search(path)]:
        raise UserError(
            f"{workdir} has trained {', '.join(other_paths)} in addition to its {type(tuning).__name__}, which the "
            "peft format does not support: leave out --adapter to export the whole model"
        )
    tokenizer = load_tokenizer(os.path.join(workdir, "tokenizer"))
    start = load_recorded_start(workdir)
    family = _family_of(start, experiment, tokenizer)
    if isinstance(tuning, LoRA):
        described, tensors = lora_to_peft(tuning, trained, family.names(model), model)
    else:
        described, tensors = prefix_to_peft(tuning, trained, model)
    described |= {"task_type": _TASKS[model.family], "inference_mode": True}
    described["base_model_name_or_path"] = None if start.steps else start.directory
    if start.hub and (name := hub_name(start.hub)):
        described |= {"base_model_name_or_path": name.repository, "revision": name.revision}
    staging = f"{os.path.abspath(to)}.exporting"
    shutil.rmtree(staging, ignore_errors=True)
    os.makedirs(staging)
    files = Writer(staging, {name: (x.dtype, x.shape) for name, x in tensors.items()}, 1 << 62, WEIGHTS)
    for name, x in tensors.items():
        files[name][...] = x
    write_atomically(os.path.join(staging, CONFIG), json.dumps(described, indent=2, sort_keys=True) + "\n")
    finish(staging)
    if os.path.isdir(to):
        os.rmdir(to)
    os.rename(staging, to)
    base = start.description
    if len(start.steps) == 1:
        which = f"{start.directory}@{AS_TRAINED if start.folder == TRAINED else EMA}{step_of(start.steps[0])}"
        base = f"the output of python -m pretrainax.huggingface export --workdir={which} --to=DIR"
    return f"{len(tensors):,} tensors exported to {to} for peft; base model: {base}"


def _read(step: str, folder: str) -> dict[str, np.ndarray]:
    arrays = {name.removeprefix(f"{folder}/"): text for name, text in read_run_json(step)["arrays"].items()}
    blocks: dict[str, list[np.ndarray]] = {}
    for path, _, block in read_params(step, folder=folder):
        blocks.setdefault(path, []).append(block)
    return {path: np.concatenate(found) for path, found in blocks.items() if path in arrays}


def _family_of(base: Origin, experiment: Experiment, tokenizer: Tokenizer) -> HuggingFace:
    """Returns the transformers family that defines the module names of a base model.

    Several families may be able to compute the same model (Phi-3, LLaMA), but their module names differ.
    """
    if base.steps:
        return describe_export(experiment, tokenizer.vocabulary)[0]
    return described_model(read_config_json(base.directory))[0]


def is_adapter(directory: str) -> bool:
    """Returns True if a folder is a peft directory: it contains adapter_config.json."""
    return os.path.exists(os.path.join(directory, CONFIG))


def import_adapter(directory: str, base: str | None, workdir: str) -> str:
    """Imports a peft directory as a run with `config.tuning`; returns a summary line.

    Args:
      base: name of the base model: a run, a Hugging Face directory or a hub model; None: the directory that is named in
        adapter_config.json.
      workdir: folder of the new run.
    """
    directory = local_path(directory)
    described = read_object(os.path.join(directory, CONFIG))
    named = cast("str | None", described.get("base_model_name_or_path"))
    if base is None and not (named and os.path.isdir(named)):
        on_hub = f", or --base=hf:{named}" if named and hub_name(f"hf:{named}") else ""
        raise UserError(
            f"{directory} is an adapter of {named or 'a model that it does not name'}: give it as --base=DIR{on_hub}"
        )
    given = os.path.expanduser(cast(str, base or named))
    origin = find_origin(given)
    for field, disabled in _UNSUPPORTED.items():
        if described.get(field, disabled[0]) not in disabled:
            raise UserError(f"{directory}: {CONFIG} has {field} {described[field]!r}, which is not supported")
    with WorkdirLock(workdir):
        if os.path.exists(os.path.join(workdir, "config.json")):
            raise UserError(f"--workdir={workdir} holds a run already: set another --workdir")
        experiment, tokenizer = _base(origin, workdir)
        tensors = Reader(directory, WEIGHTS)
        state = {name: tensors[name] for name in tensors.shapes}
        kind = described.get("peft_type")
        if kind == "LORA":
            table = _family_of(origin, experiment, tokenizer).names(experiment.model)
            experiment.tuning, trained = lora_from_peft(described, state, table, experiment.model)
        elif kind == "PREFIX_TUNING":
            experiment.tuning, trained = prefix_from_peft(described, state, experiment.model)
        else:
            raise UserError(f"{directory}: {CONFIG} has peft_type {kind!r}, it must be 'LORA' or 'PREFIX_TUNING'")
        experiment.checkpoint.init_from = given if origin.hub else os.path.abspath(given)
        abstract = nested({path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in trained.items()})
        tokenizer.save(os.path.join(workdir, "tokenizer"))
        extra = {"tokenizer": tokenizer.fingerprint}
        write_params(workdir, abstract, lambda path, index: trained[path][index], extra)
        record_start(workdir, origin)
        write_atomically(os.path.join(workdir, "config.json"), config.dump(experiment))
    count = sum(x.size for x in trained.values())
    return f"{count:,} parameters of {experiment.tuning} imported to {workdir}, for {origin.description}"


def _base(origin: Origin, workdir: str) -> tuple[Experiment, Tokenizer]:
    """Returns the config of the base model, without the tuning, and its tokenizer."""
    base = origin.directory
    if origin.steps:
        return experiment_of(origin), load_tokenizer(os.path.join(base, "tokenizer"))
    tokenizer = read_tokenizer(base)
    path = os.path.abspath(os.path.join(workdir, "tokenizer"))
    return evaluation_of(DirectoryWeights(base).config, tokenizer.vocabulary, path), tokenizer
