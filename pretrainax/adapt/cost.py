"""Computes the matmuls of an update with a parameter-efficient tuning, from the shapes of its parameters."""

import math
from typing import TYPE_CHECKING

import jax

from pretrainax.config import Experiment
from pretrainax.models.flops import UpdateCost
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import flat, is_stacked

if TYPE_CHECKING:  # circular: `tuning` calls `cost_of`
    from pretrainax.adapt.tuning import Tuning

_PER_TOKEN = ("lora_a", "lora_b")  # added matrices that read every token of their layer


def cost_of(tuning: "Tuning", experiment: Experiment, params) -> UpdateCost:
    """Computes the cost of an update; `params` are the shapes of the model's parameters.

    A frozen matrix costs two matmuls, the forward pass and the gradient of its input. Trained matrices need the
    gradient of the matrix, too, and an added matrix costs three matmuls. Stacks without trained parameters above them
    or in them need no backward pass.
    """
    model, heads = experiment.model, head_modules(experiment.model)
    is_split = model.family == "encoder_decoder"
    has_trained_heads = experiment.initializes_missing_heads
    is_head = lambda path: path.partition("/")[0] in heads  # noqa: E731
    is_trained = lambda path: tuning.trains(path, heads) or (has_trained_heads and is_head(path))  # noqa: E731
    trained = {path: x for path, x in flat(params).items() if is_trained(path)}
    added = flat(jax.eval_shape(lambda p: tuning.added(p, jax.random.key(0)), params))
    per_token, per_update = {"inputs": 0.0, "targets": 0.0}, 0.0
    for path, x in {**trained, **added}.items():
        name, size, length = path.rpartition("/")[2], math.prod(x.shape), _tokens_of(path, is_split)
        if name in _PER_TOKEN:
            per_token[length] += 6 * size
        elif path in trained and is_stacked(path) and name == "kernel":
            per_token[length] += 2 * size
        elif path.startswith("prefix/") and len(x.shape) > 1:  # the layer that generates prefixes
            per_update += 6 * tuning.tokens * size * (name != "vectors")
    per_update += 2 * tuning.merged_elements(params)
    below_heads = [path for path in (*trained, *added) if not is_head(path)]
    in_or_below_encoder = [path for path in below_heads if not path.startswith(("decoder/", "prefix/decoder"))]
    blocks = 2 if below_heads else 1
    return UpdateCost(
        blocks=blocks,
        encoder=2 if in_or_below_encoder else 1,
        heads=_head_passes(trained, params, model, bool(below_heads)),
        per_input=per_token["inputs"],
        per_target=per_token["targets"],
        per_update=experiment.train.accumulate * per_update,
        virtual=tuning.virtual_tokens(model),
    )


def _head_passes(trained, params, model, is_below: bool) -> float:
    """Returns the mean number of matmuls per element of the heads' matrices.

    The output matrix is the token embedding if no head has it.
    """
    heads = head_modules(model)
    kernels = {p: math.prod(x.shape) for p, x in flat(params).items() if p.rpartition("/")[2] == "kernel"}
    of_heads = {path: size for path, size in kernels.items() if path.partition("/")[0] in heads}
    total = sum(of_heads.values())
    if "unembedding" in heads and "unembedding/kernel" not in kernels:
        total += math.prod(flat(params)["token_embedding/embedding"].shape)
    fraction = sum(size for path, size in of_heads.items() if path in trained) / max(total, 1)
    return 2 + fraction if is_below else 2.0


def _tokens_of(path: str, is_split: bool) -> str:
    """Names the tokens of an example that the matrix at `path` reads, "inputs" or "targets"."""
    reads_targets = is_split and path.startswith("decoder/")
    is_cross = "cross_attention/key" in path or "cross_attention/value" in path
    return "targets" if reads_targets and not is_cross else "inputs"
