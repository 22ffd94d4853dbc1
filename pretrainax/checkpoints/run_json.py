"""run.json of a checkpoint: its step, its validation metrics, the shapes of its arrays, what the loop remembers."""

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
    """Writes the file; parts: what is saved, arrays or their shapes; extra: anything JSON can hold."""
    content = {"step": step, "metrics": _finite(metrics or {}), "arrays": signatures(parts), "extra": extra}
    write_atomically(path, json.dumps(content, indent=1))


def read_run_json(step_directory: str) -> dict:
    """Returns "metrics", "arrays" and "extra" of a checkpoint's folder; UserError where they are not there."""
    path = os.path.join(step_directory, RUN_JSON)
    content = read_object(path)
    if lost := [name for name in ("arrays", "metrics", "extra") if not isinstance(content.get(name), dict)]:
        raise UserError(f"{path} is not what a checkpoint has: no {', '.join(lost)}")
    return content


def check_tokenizer(step_directory: str, fingerprint: str, tokenizer: str) -> None:
    """Raises UserError where the parameters of a checkpoint were trained with another tokenizer than this one.

    Args:
      fingerprint: of the tokenizer.
      tokenizer: the folder that it is in.
    """
    trained = read_run_json(step_directory)["extra"].get("tokenizer", fingerprint)
    if trained != fingerprint:
        raise UserError(
            f"checkpoint {step_directory} was trained with tokenizer {str(trained)[:12]}, and {tokenizer} is "
            f"{fingerprint[:12]}, whose ids mean other text: put the run's own tokenizer/ folder back"
        )


def signatures(tree: PyTree) -> dict[str, str]:
    """Returns dtype and shape of each array: {"params/decoder/…/kernel": "float32[4,256,8,32]"}."""
    texts = [signature_of(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    return dict(zip(parameter_names(tree), texts, strict=True))


def signature_of(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> str:
    """Returns dtype and shape of one array: "float32[4,256,8,32]"."""
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def stored_shapes(step_directory: str, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of each array of a part of a checkpoint, by its path within that."""
    found = {}
    for name, signature in read_run_json(step_directory)["arrays"].items():
        if name.startswith(f"{part}/"):
            dtype, _, sizes = signature.removesuffix("]").partition("[")
            shape = tuple(int(size) for size in sizes.split(",") if size)
            found[name.removeprefix(f"{part}/")] = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    return found


def _finite(metrics: dict) -> dict:
    """Returns the metrics with None for each that is no number: such a loss cannot be the best one."""
    return {name: float(x) if x is not None and math.isfinite(x) else None for name, x in metrics.items()}
