"""Reads and writes a checkpoint's run.json: step, validation metrics, array shapes and training-loop state."""

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
    """Writes a checkpoint's run.json to `path`.

    Args:
      path: path of the file.
      step: number of updates before the checkpoint.
      parts: {name of a part ("params"): tree of the saved arrays, or of their shapes and dtypes}.
      extra: state of the training loop; any JSON object.
      metrics: validation metrics of this step, or None if it was not validated.
    """
    content = {"step": step, "metrics": _finite(metrics or {}), "arrays": signatures(parts), "extra": extra}
    write_atomically(path, json.dumps(content, indent=1))


def read_run_json(step_directory: str) -> dict:
    """Reads run.json from a checkpoint folder.

    Raises:
      UserError: the file is missing or invalid, or lacks one of the objects "metrics", "arrays" and "extra".
    """
    path = os.path.join(step_directory, RUN_JSON)
    content = read_object(path)
    if missing := [name for name in ("arrays", "metrics", "extra") if not isinstance(content.get(name), dict)]:
        raise UserError(f"{path} is not valid for a checkpoint: it lacks {', '.join(missing)}")
    return content


def check_tokenizer(step_directory: str, fingerprint: str, tokenizer: str) -> None:
    """Raises UserError if a checkpoint was trained with a different tokenizer.

    Args:
      step_directory: folder of the checkpoint.
      fingerprint: fingerprint of the expected tokenizer.
      tokenizer: folder of the expected tokenizer, for the message.
    """
    actual = read_run_json(step_directory)["extra"].get("tokenizer", fingerprint)
    if actual != fingerprint:
        raise UserError(
            f"checkpoint {step_directory} was trained with tokenizer {str(actual)[:12]}, and {tokenizer} is "
            f"{fingerprint[:12]}, whose ids mean other text: restore the run's own tokenizer/ folder"
        )


def signatures(tree: PyTree) -> dict[str, str]:
    """Formats each array's dtype and shape, by path: {"params/decoder/…/kernel": "float32[4,256,8,32]"}."""
    values = [signature_of(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    return dict(zip(parameter_names(tree), values, strict=True))


def signature_of(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> str:
    """Formats an array's dtype and shape as run.json stores them, for example "float32[4,256,8,32]"."""
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def stored_shapes(step_directory: str, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads the shapes and dtypes of the arrays in one part of a checkpoint from run.json.

    The keys are the paths of the arrays within the part.

    Args:
      part: name of the part (a subfolder of the checkpoint): "params", "ema" or "optimizer".
    """
    shapes = {}
    for name, signature in read_run_json(step_directory)["arrays"].items():
        if name.startswith(f"{part}/"):
            dtype, _, sizes = signature.removesuffix("]").partition("[")
            shape = tuple(int(size) for size in sizes.split(",") if size)
            shapes[name.removeprefix(f"{part}/")] = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    return shapes


def _finite(metrics: dict) -> dict:
    """Replaces non-finite metrics with None, so that a non-finite value never counts as the best."""
    return {name: float(x) if x is not None and math.isfinite(x) else None for name, x in metrics.items()}
