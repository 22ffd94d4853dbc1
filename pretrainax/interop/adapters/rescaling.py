"""Converts IA3 between PretrainAX and PEFT.

PEFT rescales the outputs of any linear layer, or the inputs of `feedforward_modules`. PretrainAX rescales keys, values
and the inputs of `down`. If each query head has a separate key and value, two other defaults of PEFT are equivalent:
factors of queries (GPT-2) become factors of the keys, and factors of the attention's outputs (BERT) become factors of
the values.
"""

import jax
import numpy as np

from pretrainax import models
from pretrainax.adapt import IA3
from pretrainax.config import ModelConfig, RotaryPositions, UserError
from pretrainax.config.positions import DisentangledPositions
from pretrainax.interop.adapters.fields import WEIGHTS
from pretrainax.interop.adapters.modules import Adapter, AdapterTensors, State, TheirModel, tensor_name


def ia3_to_peft(trained: State, their: TheirModel) -> Adapter:
    """Converts the trained vectors of an IA3 run to a PEFT adapter.

    Args:
      trained: trained arrays by parameter path.

    Returns:
      The contents of adapter_config.json, and the tensors by name.
    """
    tensors, feedforward, targets = {}, [], []
    for module, locations in their.modules.items():
        if not any(f"{location.path}/ia3" in trained for location in locations):
            continue
        is_feedforward = locations[0].path.endswith("/down")
        inputs, outputs = their.matrices[locations[0].path].size
        vector = np.ones(inputs if is_feedforward else locations[0].part.fused_size(outputs), np.float32)
        for path, layer, part in locations:
            if f"{path}/ia3" in trained:
                vector[... if is_feedforward else part.our_slice(len(vector))] = trained[f"{path}/ia3"][layer].ravel()
        targets.append(module)
        feedforward += [module] if is_feedforward else []
        tensors[tensor_name(module, "ia3_l")] = vector[None] if is_feedforward else vector[:, None]
    adapter_config = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": not their.is_linear(targets[0]),
    }
    return adapter_config, tensors


def ia3_from_peft(tensors: AdapterTensors, their: TheirModel) -> tuple:
    """Converts a PEFT adapter to an `IA3` config and its trained arrays by parameter path.

    Vectors that the adapter lacks are ones.

    Raises:
      UserError: the tensors do not match the model, or no vector of PretrainAX has the same effect.
    """
    added = IA3().added(models.abstract_params(their.model), jax.random.key(0))
    trained = {path: np.array(ones) for path, ones in added.items()}
    for module, kinds in tensors.updates.items():
        vector = kinds.get("ia3_l")
        inputs, outputs = their.matrices[their.modules[module][0].path].size
        outputs = their.modules[module][0].part.fused_size(outputs)
        if vector is None or vector.shape not in ((1, inputs), (outputs, 1)) or len(kinds) > 1:
            shapes = {kind: list(x.shape) for kind, x in kinds.items()}
            raise UserError(f"{WEIGHTS} holds {shapes} of {module}, expected ia3_l [1, {inputs}] or [{outputs}, 1]")
        for path, layer, part in their.modules[module]:
            of_inputs = vector.shape == (1, inputs)
            factors = vector.ravel() if of_inputs else vector.ravel()[part.our_slice(outputs)]
            target = _target(path, of_inputs, their.model)
            if f"{target}/ia3" in trained:
                trained[f"{target}/ia3"][layer] *= factors.reshape(trained[f"{target}/ia3"].shape[1:])
            elif (factors != 1).any():
                side = "inputs" if of_inputs else "outputs"
                raise UserError(
                    f"{WEIGHTS} rescales the {side} of {module}, and IA3 of PretrainAX the keys, the values and the "
                    "inputs of the last layer of a feed-forward: merge it in peft with merge_and_unload()"
                )
    return IA3(), trained


def _target(path: str, of_inputs: bool, model: ModelConfig) -> str:
    """Returns the path of the matrix whose vector has the same effect as factors of the inputs or outputs of `path`.

    The result is "" if there is no such matrix.
    """
    attention, _, name = path.rpartition("/")
    stack = model.stacks[path.partition("/")[0]]
    every_head = stack.kv_heads == stack.num_heads and not (stack.latent_attention or stack.sparse_attention)
    if of_inputs:
        return path if name == "down" else f"{attention}/value" if name == "out" and every_head else ""
    is_dot_product = not stack.qk_norm and not isinstance(stack.position, (RotaryPositions, DisentangledPositions))
    if name == "query" and every_head and is_dot_product:
        return f"{attention}/key"
    return path if name in ("key", "value") else ""
