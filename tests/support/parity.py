"""Runs our models on the weights and batches of tests/golden, and measures the difference to the references."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pretrainax
from pretrainax import models
from pretrainax.layers.compute import Compute
from pretrainax.models.outputs import hidden_states
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from tests.golden import CASES
from tests.golden.case import batch, weights
from tests.support import written

ALL = CASES | written.CASES
RECORD = Path(pretrainax.__file__).parent / "zoo" / "parity.json"


@functools.cache
def ours(name: str) -> dict[str, np.ndarray]:
    """Returns the keys of `tests.golden.make.reference`, and "output <side>", the hidden state after the last norm."""
    case = (ALL | written.OF_ELMO)[name]
    config, arrays = case.config, batch(case)
    model = models.build(config, Compute())

    def objective(params, arrays):
        outputs, kept = model.apply({"params": params}, arrays, deterministic=True, mutable=["intermediates"])
        value, _ = losses.objective(outputs, arrays, losses.counts(arrays))
        return value, (outputs, kept["intermediates"])

    with jax.default_matmul_precision("highest"):
        step = jax.jit(jax.value_and_grad(objective, has_aux=True))
        (loss, (outputs, kept)), gradients = step(weights(config), jax.tree.map(jnp.asarray, arrays))
    heads, found = outputs.heads, {"loss": loss, "pair_logits": outputs.heads.get("pair")}
    found["replaced_logits"] = heads["replaced"].logits if "replaced" in heads else None
    found["logits"] = heads["lm"].logits() if "lm" in heads else None
    found["backward_logits"] = heads["backward_lm"].logits() if "backward_lm" in heads else None
    for side, hidden in hidden_states(kept).items():
        found |= {f"hidden {side}": hidden, f"output {side}": kept[side]["output"][0]}
    names = [f"gradient {path}" for path in parameter_names(gradients)]
    found |= dict(zip(names, jax.tree.leaves(gradients), strict=True))
    return {key: np.asarray(value) for key, value in found.items() if value is not None}


def differences(name: str, reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the largest difference of each kind: {"logits", "hidden", "gradient", "loss"}.

    Logits and hidden states: absolute, at real tokens. Loss: relative. Gradients: the norm of the difference over the
    norm of the parameter's gradient, or over 1e-4 of the norm of the whole gradient if that is larger. The gradient of
    a key's bias is exactly 0 in theory, and the cancellation in float32 leaves rounding errors in both programs.
    """
    got, arrays = ours(name), batch((ALL | written.OF_ELMO)[name])
    tokens = arrays["segment_ids"] > 0
    real = dict.fromkeys(("decoder", "encoder", "recurrent"), tokens)
    if "encoder_tokens" in arrays:
        real["encoder"] = arrays["encoder_segment_ids"] > 0
    assert {key for key in got if not key.startswith("output")} == set(reference)

    def largest(a, b, where=None):
        return float(np.abs(a - b)[... if where is None else where].max())

    masks = {"logits": tokens, "backward_logits": tokens, "replaced_logits": tokens, "pair_logits": None}
    logits = [largest(got[key], reference[key], masks[key]) for key in masks if key in got]
    hidden = []
    for side, where in real.items():
        if f"hidden {side}" in got:
            mine, theirs = got[f"hidden {side}"], reference[f"hidden {side}"]
            hidden += [largest(a, b, where) for a, b in zip(mine[:-1], theirs[:-1], strict=True)]
            # transformers returns the last hidden state before or after the last norm, depending on the family.
            hidden += [min(largest(x, theirs[-1], where) for x in (mine[-1], got[f"output {side}"]))]
    paths = [key for key in reference if key.startswith("gradient")]
    whole = np.sqrt(sum(np.sum(np.square(reference[key])) for key in paths))
    gradient = [
        np.linalg.norm(got[key] - reference[key]) / max(np.linalg.norm(reference[key]), 1e-4 * whole) for key in paths
    ]
    loss = abs(got["loss"] / reference["loss"] - 1)
    return {"logits": max(logits), "hidden": max(hidden), "gradient": float(max(gradient)), "loss": float(loss)}


def check(found: dict[str, float]) -> None:
    """Asserts the tolerances of all parity tests."""
    # The float32 sums have another order. With weights as large as these, hidden states reach 10 and logits 30.
    assert found["logits"] <= 2e-4, found
    assert found["hidden"] <= 2e-4, found
    assert found["gradient"] <= 1e-3, found
    assert found["loss"] <= 1e-5, found


def write_differences(names: Iterable[str]) -> None:
    """Records the largest difference of each family in `names` for `python -m pretrainax.zoo`."""
    from tests.golden.make import golden

    largest: dict[str, dict[str, float]] = json.loads(RECORD.read_text())
    written_anew = {ALL[name].family.name for name in names}
    largest |= {family: {} for family in written_anew}
    for name, case in ALL.items():
        if case.family.name not in written_anew:
            continue
        family = largest[case.family.name]
        for kind, value in differences(name, golden(name)).items():
            family[kind] = max(family.get(kind, 0.0), float(f"{value:.1g}"))
    RECORD.write_text(json.dumps(largest, indent=1, sort_keys=True) + "\n")
