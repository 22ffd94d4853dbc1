"""run.json of a checkpoint: step, validation metrics, shapes of the arrays, state of the training loop."""

import json
import math
import os
from typing import Optional

import jax
import numpy as np

from pretrainax.config import UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.sharding.param_paths import PyTree, parameter_names

RUN_JSON = "run.json"


def write_run_json(path: str, step: int, parts: PyTree, extra: dict, metrics: Optional[dict] = None) -> None:
    """Writes run.json; parts: saved arrays or their shapes; extra: any JSON value."""
    content = {"step": step, "metrics": _finite(metrics or {}), "arrays": signatures(parts), "extra": extra}
    write_atomically(path, json.dumps(content, indent=1))


def read_run_json(step_directory: str) -> dict:
    """Returns run.json of a checkpoint folder; raises UserError without "metrics", "arrays" and "extra"."""
    path = os.path.join(step_directory, RUN_JSON)
    content = read_object(path)
    if lost := [name for name in ("arrays", "metrics", "extra") if not isinstance(content.get(name), dict)]:
        raise UserError(f"{path} is not valid for a checkpoint: it lacks {', '.join(lost)}")
    return content


def check_tokenizer(step_directory: str, fingerprint: str, tokenizer: str) -> None:
    """Raises UserError if a checkpoint was trained with another tokenizer.

    Args:
      fingerprint: of the expected tokenizer.
      tokenizer: its folder.
    """
    trained = read_run_json(step_directory)["extra"].get("tokenizer", fingerprint)
    if trained != fingerprint:
        raise UserError(
            f"checkpoint {step_directory} was trained with tokenizer {str(trained)[:12]}, and {tokenizer} is "
            f"{fingerprint[:12]}, whose ids mean other text: restore the run's own tokenizer/ folder"
        )


def signatures(tree: PyTree) -> dict[str, str]:
    """Returns the dtype and shape of each array: {"params/decoder/…/kernel": "float32[4,256,8,32]"}."""
    values = [signature_of(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    return dict(zip(parameter_names(tree), values, strict=True))


def signature_of(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> str:
    """Returns the dtype and shape of an array: "float32[4,256,8,32]"."""
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def stored_shapes(step_directory: str, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array in a part of a checkpoint, by its path in the part."""
    shapes = {}
    for name, signature in read_run_json(step_directory)["arrays"].items():
        if name.startswith(f"{part}/"):
            dtype, _, sizes = signature.removesuffix("]").partition("[")
            shape = tuple(int(size) for size in sizes.split(",") if size)
            shapes[name.removeprefix(f"{part}/")] = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    return shapes


def _finite(metrics: dict) -> dict:
    """Replaces metrics that are not finite by None: they cannot be the best value."""
    return {name: float(x) if x is not None and math.isfinite(x) else None for name, x in metrics.items()}
