"""Converts whole parameters of an adapter, which PEFT lists in `modules_to_save` and `bias`.

These are the parameters of the task head, and with LoRA also of embeddings, norms, biases and output layers.
"""

import re
from collections.abc import Container
from typing import cast

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.interop.adapters.fields import CONFIG, WEIGHTS
from pretrainax.interop.adapters.modules import AdapterTensors, ReadBase, State, TheirModel, tensor_name
from pretrainax.zoo.convert import as_ours, their_shape

# task_type of PEFT -> names of modules that PEFT saves without naming them in modules_to_save.
TASK_MODULES = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


def check_complete(described: JsonObject, tensors: AdapterTensors, their: TheirModel) -> None:
    """Raises UserError if an adapter lacks a tensor that `modules_to_save` or `bias` names."""
    modules, bias = described.get("modules_to_save") or [], described.get("bias")
    if not isinstance(modules, list) or not all(isinstance(name, str) and name for name in modules):
        raise UserError(f"{CONFIG} has modules_to_save {modules!r}, it must be a list of names")
    known = " ".join(f"{name}." for name in (*their.tensors, *their.family.tied(their.model)))
    implied = TASK_MODULES.get(cast(str, described.get("task_type")), ())
    if absent := [name for name in modules if name not in implied and f"{name}." not in known]:
        raise UserError(f"{CONFIG} has modules_to_save {absent}, but the model has no such modules")
    patterns = [rf".*{re.escape(name)}\..*" for name in modules]  # PEFT compares the ends of the names of modules
    patterns += [r".*\.bias"] if bias == "all" else []
    patterns += [rf"{re.escape(module)}\.bias" for module in tensors.updates] if bias == "lora_only" else []
    expected = re.compile("|".join(patterns) or "(?!)")
    if missing := [name for name in their.tensors if expected.fullmatch(name) and name not in tensors.whole]:
        raise UserError(f"{WEIGHTS} lacks {', '.join(missing)}, which modules_to_save or bias in {CONFIG} names")


def whole_from_peft(tensors: State, their: TheirModel, read: ReadBase) -> dict[str, np.ndarray]:
    """Converts whole tensors of an adapter to parameters by path.

    Layers and head parameters that the adapter lacks come from the base model.

    Args:
      tensors: tensors by their names in transformers.
      read: reads the base model.

    Raises:
      UserError: a tensor has a different shape in the model, or is tied to a tensor with different values.
    """
    _check_tied(tensors, their, read)
    tied = their.family.tied(their.model)
    tensors = {name: x for name, x in tensors.items() if tied.get(name, name) == name}
    paths = dict.fromkeys([path for name in tensors for path, _ in their.tensors[name]] + their.head_paths)
    params = {}
    for path in paths:
        row, shape = their.rows[path]
        pieces = {name: index for name in tensors for other, index in their.tensors[name] if other == path}
        is_complete = len(pieces) == int(np.prod(shape[: len(next(iter(pieces.values()), ()))])) and pieces
        params[path] = np.zeros(shape, np.float32) if is_complete else np.array(read(path, None))
        for name, index in pieces.items():
            expected = their_shape(row, shape[len(index) :])
            if tensors[name].shape != expected:
                raise UserError(
                    f"{WEIGHTS} holds {name} {list(tensors[name].shape)}, and the model has {list(expected)}: give the "
                    "base model that the adapter was trained with, such as one with additional tokens, as --base=DIR"
                )
            params[path][index] = as_ours(row, tensors[name], shape[len(index) :])
    return params


def _check_tied(tensors: State, their: TheirModel, read: ReadBase) -> None:
    """Raises UserError if an adapter changes only one of two tied tensors, which unties them in PEFT."""
    for copy, original in their.family.tied(their.model).items():
        if copy not in tensors and original not in tensors:
            continue
        ((path, _),) = their.tensors[original]
        row, shape = their.rows[path]
        pair = [tensors.get(name) for name in (copy, original)]
        first, second = (read(path, None) if x is None else as_ours(row, x, shape) for x in pair)
        if not np.array_equal(first, second):
            raise UserError(
                f"{WEIGHTS} holds {' and '.join(name for name in (copy, original) if name in tensors)}, but the base "
                f"model ties {copy} to {original}, and the adapter gives them different values: train it with "
                "ensure_weight_tying, or give a base model with tie_word_embeddings false"
            )


def whole_to_peft(params: State, targets: Container[str], task: str | None, their: TheirModel) -> tuple:
    """Converts whole parameters to the fields `modules_to_save` and `bias`, and tensors by name.

    Args:
      params: parameters by path.
      targets: names of the modules with updates or rescaling vectors.
      task: task_type of PEFT.

    Raises:
      UserError: PEFT cannot save the parameters.
    """
    tensors = their.to_theirs(params)
    groups: dict[str, list[str]] = {}  # module -> names of its tensors
    for name in tensors:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    all_names = {module: [x for x in their.tensors if x.rpartition(".")[0] == module] for module in groups}
    biased = [module for module, names in groups.items() if names == [f"{module}.bias"] != all_names[module]]
    modules = [module for module in groups if module not in biased]
    if partial := [module for module in modules if module in targets or len(groups[module]) < len(all_names[module])]:
        raise UserError(
            f"the run has trained {', '.join(groups[partial[0]])} of {partial[0]}, which the peft format supports only "
            "with all other tensors of a module that has no update: leave out --adapter to export the whole model"
        )
    fields: JsonObject = {}
    ties = their.family.tied(their.model)
    if tied := [copy for copy, original in ties.items() if original in tensors]:
        modules += dict.fromkeys(copy.rpartition(".")[0] for copy in tied)
        if lacking := [copy for copy in ties if copy.rpartition(".")[0] in modules and copy not in tied]:
            raise UserError(
                f"the run has trained {ties[tied[0]]}, to which {tied[0]} is tied, but not {ties[lacking[0]]}: leave "
                "out --adapter to export the whole model"
            )
        tensors |= {copy: tensors[ties[copy]] for copy in tied}
        fields["ensure_weight_tying"] = True
    implied = re.compile(rf"^(.*\.)?\w*({'|'.join(TASK_MODULES.get(task or '', ('(?!)',)))})(\.|$)")
    named = sorted(module for module in modules if not implied.search(module))
    fields |= {"modules_to_save": [*TASK_MODULES.get(task or "", ()), *named] or None}
    if biased:
        fields["bias"] = "lora_only" if all(module in targets for module in biased) else "all"
    wrapped = {module: f"{module}.base_layer" for module in biased if module in targets}
    names = {name: name.rpartition(".") for name in tensors}
    return fields, {
        tensor_name(wrapped.get(module, module), part): tensors[name] for name, (module, _, part) in names.items()
    }
