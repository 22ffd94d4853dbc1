"""Converts LoRA and DoRA between PretrainAX and PEFT.

The rank of an update of a fused matrix in transformers is the sum of the ranks of the PretrainAX updates.

PiSSA and OLoRA start from a part of the weights: PEFT subtracts the initial update from the weight of the base model,
each time it loads the adapter. The import adds this subtraction to the update. The rank of the result is the sum of
both ranks.
"""

import re
from typing import NamedTuple

import numpy as np

from pretrainax.adapt import LoRA
from pretrainax.adapt.matrices import Matrix
from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.interop.adapters.fields import CONFIG, WEIGHTS, number, numbers_by_module
from pretrainax.interop.adapters.modules import (
    Adapter,
    AdapterTensors,
    MatrixLocation,
    ReadBase,
    State,
    TheirModel,
    tensor_name,
)

# Below this difference, relative to the largest value, float32 does not determine the initial update of PiSSA or OLoRA.
# The value is the error of a float32 decomposition, about ten units in the last place.
_AMBIGUOUS = 1e-6


def lora_to_peft(tuning: LoRA, trained: State, their: TheirModel) -> Adapter:
    """Converts the trained arrays of a LoRA fine-tuning run to a PEFT adapter.

    The adapter omits layers whose update is zero in both matrices, because the gradient of these layers is also zero.

    Args:
      trained: trained arrays by parameter path.

    Returns:
      The contents of adapter_config.json, and the tensors by name.

    Raises:
      UserError: DoRA adapts only some of the matrices that transformers stores as one fused matrix.
    """
    tensors, ranks = {}, {}
    for module, locations in their.modules.items():
        adapted = [location for location in locations if f"{location.path}/lora_a" in trained]
        pairs = [
            (_layer_matrix(trained, location, "lora_a", -1), _layer_matrix(trained, location, "lora_b", 0))
            for location in adapted
        ]
        if not adapted or not (tuning.dora or any(x.any() for pair in pairs for x in pair)):
            continue
        rank = ranks[module] = tuning.rank * len(adapted)
        b = np.zeros((adapted[0].part.fused_size(pairs[0][1].shape[1]), rank), np.float32)
        for i, (location, (_, matrix_b)) in enumerate(zip(adapted, pairs, strict=True)):
            b[location.part.our_slice(len(b)), i * tuning.rank : (i + 1) * tuning.rank] = matrix_b.T
        tensors[tensor_name(module, "lora_A.weight")] = np.concatenate([a.T for a, _ in pairs])
        tensors[tensor_name(module, "lora_B.weight")] = b
        if tuning.dora:
            if sum(location.part.count for location in adapted) < adapted[0].part.pieces:
                raise UserError(f"{module} of transformers is several matrices, DoRA must change all or none of them")
            magnitudes = [
                trained[f"{location.path}/magnitude"][location.layer].ravel()
                for location in sorted(adapted, key=lambda location: location.part)
            ]
            tensors[tensor_name(module, "lora_magnitude_vector")] = np.concatenate(magnitudes)
    if not ranks:
        raise UserError("every update of the run is zero, and the peft format needs one: train for at least one step")
    main_rank = max(set(ranks.values()), key=list(ranks.values()).count)
    other_ranks = {module: rank for module, rank in ranks.items() if rank != main_rank}
    adapter_config = {
        "peft_type": "LORA",
        "r": main_rank,
        "lora_alpha": tuning.scale * main_rank,
        "lora_dropout": tuning.dropout,
        "target_modules": list(ranks),
        "rank_pattern": {re.escape(module): rank for module, rank in other_ranks.items()},
        "alpha_pattern": {re.escape(module): tuning.scale * rank for module, rank in other_ranks.items()},
        "use_dora": tuning.dora,
        "fan_in_fan_out": not their.is_linear(next(iter(ranks))),
        "bias": "none",
    }
    return adapter_config, tensors


def _layer_matrix(trained: State, location: MatrixLocation, name: str, rank_axis: int) -> np.ndarray:
    """Returns one layer of a LoRA matrix, A [in, rank] or B [rank, out], with the head axes flattened.

    Args:
      name: "lora_a" or "lora_b".
      rank_axis: index of the rank axis: -1 for A, 0 for B.
    """
    x = trained[f"{location.path}/{name}"][location.layer]
    return x.reshape(-1, x.shape[-1]) if rank_axis else x.reshape(x.shape[0], -1)


class _Update(NamedTuple):
    """The update scale · B A of a module's weight [out, in]."""

    a: np.ndarray  # [rank, in]
    b: np.ndarray  # [out, rank]
    scale: float
    magnitude: np.ndarray | None  # [out], of DoRA


def lora_from_peft(described: JsonObject, tensors: AdapterTensors, their: TheirModel, read: ReadBase) -> tuple:
    """Converts a PEFT adapter to a `LoRA` config and its trained arrays by parameter path.

    If the ranks of the modules differ, smaller updates are padded with zeros to the largest rank. The updates of layers
    that the adapter does not change are zero.

    Args:
      described: contents of adapter_config.json.
      read: reads the base model, for PiSSA, OLoRA, and DoRA of some layers.

    Raises:
      UserError: the tensors do not match the model.
    """
    updates = _updates(described, tensors, their)
    initialization = described.get("init_lora_weights", True)
    if isinstance(initialization, str) and initialization in ("pissa", "olora"):
        updates = {
            module: _relative_to_base(update, their.weight(module, read), module, initialization, their)
            for module, update in updates.items()
        }
    rank, scale = max(len(update.a) for update in updates.values()), next(iter(updates.values())).scale
    is_dora = bool(described.get("use_dora"))
    paths = tuple(dict.fromkeys(location.path for module in updates for location in their.modules[module]))
    tuning = LoRA(rank, scale * rank, number(described, "lora_dropout", 0.0), paths, is_dora)
    arrays = [array for path in paths for array in array_shapes(their.matrices[path], tuning)]
    trained = {name: np.zeros(shape, np.float32) for name, shape in arrays}
    unchanged = [x for module, locations in their.modules.items() if module not in updates for x in locations]
    for path, layer, _ in [x for x in unchanged if is_dora and x.path in paths]:
        norm = np.linalg.norm(their.flat_matrix(path, read(f"{path}/kernel", layer)), axis=0)
        trained[f"{path}/magnitude"][layer] = norm.reshape(their.matrices[path].outputs)
    for module, (a, b, module_scale, magnitude) in updates.items():
        for location in their.modules[module]:
            matrix, rows = their.matrices[location.path], location.part.our_slice(len(b))
            x = trained[f"{location.path}/lora_a"][location.layer]
            x[..., : len(a)] = a.T.reshape(*matrix.inputs, -1)
            x = trained[f"{location.path}/lora_b"][location.layer]
            x[: len(a)] = (b[rows].T * (module_scale / scale)).reshape(-1, *matrix.outputs)
            if magnitude is not None:
                trained[f"{location.path}/magnitude"][location.layer] = magnitude[rows].reshape(matrix.outputs)
    return tuning, trained


def _updates(described: JsonObject, tensors: AdapterTensors, their: TheirModel) -> dict[str, _Update]:
    """Returns the update of each module in an adapter; raises UserError if a tensor is missing or has a wrong shape."""
    is_dora = bool(described.get("use_dora"))
    expected = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if is_dora else set())
    if problems := [
        f"{'no ' if kind in expected else ''}{kind} of {module}"
        for module, kinds in tensors.updates.items()
        for kind in sorted(expected ^ kinds.keys())
    ]:
        raise UserError(f"{WEIGHTS} does not hold updates of this model: {', '.join(problems)}")
    names = list(tensors.names.values())
    ranks = numbers_by_module(described, "r", "rank_pattern", names)
    alphas = numbers_by_module(described, "lora_alpha", "alpha_pattern", names)
    # The initialization truncates the rank to the size of a weight that is smaller than the rank.
    is_cut = described.get("init_lora_weights") in ("pissa", "olora")
    updates = {}
    for module, kinds in tensors.updates.items():
        a, b, rank, alpha = (
            kinds["lora_A"],
            kinds["lora_B"],
            ranks[tensors.names[module]],
            alphas[tensors.names[module]],
        )
        matrices = [(their.matrices[x.path], x.part) for x in their.modules[module]]
        inputs, outputs = matrices[0][0].size
        outputs = matrices[0][1].fused_size(outputs)
        if a.shape != (len(a), inputs) or b.shape != (outputs, len(a)) or not len(a):
            raise UserError(
                f"the update of {module} in {WEIGHTS} is {list(b.shape)} × {list(a.shape)}, but the weight of the base "
                f"model is [{outputs}, {inputs}]"
            )
        if len(a) != (min(rank, inputs, outputs) if is_cut else rank):
            raise UserError(f"the update of {module} in {WEIGHTS} has rank {len(a)}, but {CONFIG} has rank {rank:g}")
        magnitude = kinds.get("lora_magnitude_vector")
        if magnitude is not None and magnitude.shape != (outputs,):
            raise UserError(f"lora_magnitude_vector of {module} in {WEIGHTS} is {list(magnitude.shape)}, not {outputs}")
        updates[module] = _Update(a, b, alpha / (rank**0.5 if described.get("use_rslora") else rank), magnitude)
    return updates


def _relative_to_base(
    update: _Update, weight: np.ndarray, module: str, initialization: str, their: TheirModel
) -> _Update:
    """Converts an update of the changed base model of PiSSA or OLoRA to an update of the base model.

    Args:
      weight: weight [out, in] of the base model.
      module: name of the module.
      initialization: "pissa" or "olora".

    Raises:
      UserError: rounding errors would determine the initial update.
    """
    rank = len(update.a)
    if initialization == "pissa":  # Meng et al. 2024 (arXiv 2404.02948), section 3: the largest singular values
        u, s, vh = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
        b, a = u[:, :rank] * s[:rank] / update.scale, vh[:rank]
        next_value = s[rank] if rank < len(s) else 0.0
        gap, size = s[rank - 1] - next_value, s[rank - 1]
        is_unique = rank == len(s) or gap > _AMBIGUOUS * s[0] or size <= _AMBIGUOUS * s[0]
    else:  # Büyükakyüz 2024 (arXiv 2406.01775): the first columns of Q and rows of R
        # NOTE PEFT decomposes the tensor as it is stored, which Conv1D transposes.
        stored = weight if their.is_linear(module) else weight.T
        q, r = np.linalg.qr(stored.astype(np.float64))
        b, a = q[:, :rank], r[:rank]
        if not their.is_linear(module):
            a, b = b.T, a.T
        diagonal = np.abs(np.diag(r)[:rank])
        is_unique = diagonal.min() > _AMBIGUOUS * max(np.abs(r).max(), 1e-30)
    if not is_unique:
        raise UserError(
            f"the initial update ({initialization}) of {module} is not unique for this base model, so PEFT gives "
            "different results on different machines: save it with path_initial_model_for_weight_conversion"
        )
    a, b = (np.concatenate(x, axis=i, dtype=np.float32) for i, x in enumerate(((update.a, a), (update.b, -b))))
    return update._replace(a=a, b=b)


def array_shapes(matrix: Matrix, tuning: LoRA) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the paths and shapes of the arrays that a LoRA config trains for a matrix."""
    magnitude = [(f"{matrix.path}/magnitude", (matrix.layers, *matrix.outputs))] if tuning.dora else []
    return [
        (f"{matrix.path}/lora_a", (matrix.layers, *matrix.inputs, tuning.rank)),
        (f"{matrix.path}/lora_b", (matrix.layers, tuning.rank, *matrix.outputs)),
        *magnitude,
    ]
