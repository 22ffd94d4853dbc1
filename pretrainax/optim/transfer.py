"""Transfers hyperparameters across width and depth: multipliers of initial values and updates of each parameter.

Width: Yang et al. 2022, arXiv 2203.03466, table 3. Depth: CompleteP with alpha = 1, Dey et al. 2025, arXiv 2505.01618.
`SOURCES` has the released code of each rule. With m, the width divided by the base width, and l, the depth divided by
the base depth:

| kind of parameter | inputs | outputs | initial values | Adam's update |
| --- | --- | --- | --- | --- |
| hidden: matrix of a block, of a hidden layer of a head | grow | grow | 1 / sqrt(m) | 1 / m |
| output: untied output matrix, router, last layer of a head | grow | fixed | 1 / m | 1 / m |
| input: embedding tables, projection of ALBERT's embeddings | fixed | grow | 1 | 1 |
| vector: norm gains, biases, relative biases | | any | 1 | 1 |

Factors of the forward pass are folded into parameters: a factor c in y = c W x has the same effect as initial values
and updates of W that are multiplied by c. These are 1 / l of each branch, in the last matrix or norm of the branch,
1 / m of tied logits, in the norm before them, and `Transfer.output_scale`, in this norm or the output matrix. The
model, its checkpoints and its exports do not change.

The gradient of a parameter is multiplied by the inverse of its own scale, so that Adam's epsilon has the same effect in
all sizes. Weight decay has no factor: rate · decay is the same for all sizes (nanoGPT-mup divides the decay by the
factor of the rate, which is equal).
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pretrainax import models
from pretrainax.config import ModelConfig, Transfer
from pretrainax.models.electra import component_configs
from pretrainax.models.heads import heads_of
from pretrainax.optim.matrices import STACKED, first_output
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names
from pretrainax.sharding.rules import axes_of_leaves

_MUP = "microsoft/mup@19814971934ef91dd546f88e913fc963e096d11c:mup/"
_COMPLETE_P = "EleutherAI/nanoGPT-mup@6f8bc3bdc744556141255f810a22387b2255b6c1:model.py"
# kind of parameter -> (its rule, released file, quote of this file); `pretrainax recipe` shows them
SOURCES = {
    "hidden": ("updates × 1 / m", f"{_MUP}optim.py", "group['lr'] /= width_mult"),
    "hidden.init": ("× 1 / sqrt(m)", f"{_MUP}init.py", "sampler_(tensor, scale=tensor.infshape.width_mult()**-0.5)"),
    "output": ("initial values and updates × 1 / m", f"{_MUP}layer.py", "self.output_mult * x / self.width_mult())"),
    "input": ("× 1", f"{_MUP}optim.py", "new_param_groups.extend(list(matrix_like_p.values()) + [vector_like_p])"),
    "vector": ("× 1", f"{_MUP}optim.py", "vector_like_p['params'].append(p)"),
    "branch": ("× 1 / l", _COMPLETE_P, "1/(config.depth_multiplier ** config.depth_alpha_exp)"),
    "epsilon": ("relative to the gradient's scale", _COMPLETE_P, "adam_eps *= (1 / self.config.mup_width_multiplier)"),
}
Factor = float | np.ndarray  # of a whole parameter, or [L, 1, …] with one factor per layer


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """The factors of one parameter, relative to the base model; all are 1 for a model of the base sizes."""

    kind: str  # hidden | output | input | vector; "vector" also if no axis grows
    init: Factor  # of the values that the model's initializer draws
    update: Factor  # of an update whose size does not depend on the parameter, such as Adam's
    spread: Factor  # RMS of the initial values, compared with the base model; 1 if they are 0
    gradient: Factor  # of the gradient before the optimizer reads it
    folded: Factor  # part of `update`: the factors of the forward pass
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    is_plus_one: bool = False  # `init` and `spread` apply to 1 + the parameter (`rms_plus_one`)

    @property
    def relative_update(self) -> Factor:
        """Returns the factor of an update that is proportional to the parameter's RMS or norm."""
        return self.update / self.spread


def multipliers_of(model: ModelConfig, transfer: Transfer, params: PyTree) -> PyTree:
    """Returns the `Multipliers` of each parameter.

    Args:
      model: the config of the model to train.
      params: the parameters of `model`, as arrays or shapes.

    Raises:
      UserError: the base model has sizes that are not whole numbers.
    """
    base = transfer.base(model)
    base_params = models.abstract_params(base)
    names = parameter_names(params)
    assert names == parameter_names(base_params), "the base model has the same parameters in other sizes"
    leaves = zip(names, axes_of_leaves(params), jax.tree.leaves(params), jax.tree.leaves(base_params), strict=True)
    scale = transfer.output_scale
    found = [_multipliers(_Sizes(model, base, scale, path, axes, x.shape, y.shape)) for path, axes, x, y in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), found)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """A parameter of the model and of the base model."""

    model: ModelConfig
    base: ModelConfig
    output_scale: float
    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]

    @property
    def is_kernel(self) -> bool:
        return self.path.endswith("kernel")

    @property
    def width(self) -> float:
        """Returns m, the width divided by the base width."""
        return self.model.d_model / self.base.d_model

    @property
    def depth(self) -> float:
        """Returns l, the depth of the parameter's stack divided by its base depth; 1 outside of stacks."""
        # The blocks of a multi-token head are as many in every model.
        is_repeated = is_stacked(self.path) and not self.path.startswith("multi_token/")
        return self.model.num_layers / self.base.num_layers if is_repeated else 1.0

    @property
    def inputs(self) -> float:
        """Returns the number of inputs of a matrix divided by the number in the base model; 1 for other parameters."""
        return self._growth(range(first_output(self.axes))) if self.is_kernel else 1.0

    @property
    def outputs(self) -> float:
        """Returns the number of outputs of a matrix, or of elements of a vector, relative to the base model."""
        return self._growth(range(first_output(self.axes) if self.is_kernel else 0, len(self.axes)))

    def _growth(self, indices: range) -> float:
        kept = [i for i in indices if self.axes[i] not in STACKED]
        return math.prod(self.shape[i] / self.base_shape[i] for i in kept)


def _multipliers(p: _Sizes) -> Multipliers:
    folded = _branch_factor(p) * _embedding_factor(p) * _logit_factor(p)
    inputs, outputs, kind = p.inputs, p.outputs, _kind(p)
    stddev = inputs**-0.5 if kind == "hidden" else 1 / inputs
    is_plus_one = p.model.norm == "rms_plus_one" and p.path.endswith("scale")
    is_zero = is_plus_one or re.search(r"bias$|balance$|tagger/|embedding_difference/", p.path) is not None
    return Multipliers(
        kind=kind,
        init=stddev * folded / _drawn(p),
        update=folded / inputs,
        spread=1.0 if is_zero else stddev * folded,
        gradient=outputs * p.depth * folded,
        folded=folded,
        shape=p.shape,
        base_shape=p.base_shape,
        is_plus_one=is_plus_one,
    )


def _kind(p: _Sizes) -> str:
    """Returns the kind of a parameter: see the table of this module."""
    if p.inputs != 1:
        return "hidden" if p.outputs != 1 else "output"
    is_table = p.path.endswith("embedding") and not p.path.endswith("relative_bias/embedding")
    return "input" if p.outputs != 1 and (p.is_kernel or is_table) else "vector"


def _drawn(p: _Sizes) -> float:
    """Returns the standard deviation that `layers.linear.normal_init` draws, relative to the base model."""
    config = p.model
    is_residual = config.scale_residual_init and _writes_to_stream(p) and p.is_kernel
    stddev = p.depth**-0.5 if is_residual else 1.0
    if config.init_stddev is None:  # T5: 1 / sqrt(inputs), where a relative bias counts as a matrix with D inputs
        stddev /= (p.width if p.path.endswith("relative_bias/embedding") else p.inputs) ** 0.5
    return stddev


def _writes_to_stream(p: _Sizes) -> bool:
    """Returns True for the matrices whose output a block adds to the stream, and for their biases."""
    if not is_stacked(p.path):
        return False
    return re.search(r"/(out|(shared_|experts_)?down)/(kernel|bias)$", p.path) is not None or (
        p.is_kernel and p.axes[-1] == "d_model"
    )


def _branch_factor(p: _Sizes) -> float:
    """Returns 1 / l for the last matrix of a branch, or for the norm after it, else 1 (CompleteP, alpha = 1)."""
    if p.model.norm_at in ("pre", "post"):
        is_last = _writes_to_stream(p)
    else:
        name = "post_norm" if p.model.norm_at == "both" else "norm"
        is_last = re.search(rf"blocks/[a-z]+(_attention|_after)?_{name}/(scale|bias)$", p.path) is not None
    return 1 / p.depth if is_last else 1.0


def _embedding_factor(p: _Sizes) -> float:
    """Returns 1 / sqrt(m) for token embeddings that the model multiplies by sqrt(D), which keeps the product."""
    is_scaled = p.model.scale_embeddings and re.search(r"(^|/|decoder_)token_embedding/embedding$", p.path)
    return p.width**-0.5 if is_scaled else 1.0


def _logit_factor(p: _Sizes) -> Factor:
    """Returns the factor of the output matrix, or of the norm before tied logits: 1 / m for it, times `output_scale`.

    mup/layer.py, MuSharedReadout, has this factor in the forward pass.
    """
    config = p.model
    components = {"generator/": component_configs(config)[0]} if config.generator else {"": config}
    for prefix, component in components.items():
        has_logits = any(head.name == "lm" for head in heads_of(component.last_stack))
        scaled = _norm_before_logits(component) if component.tie_embeddings else "unembedding/kernel"
        if not has_logits or not re.fullmatch(prefix + scaled, p.path):
            continue
        if not component.tie_embeddings:
            return p.output_scale
        growth = p.width if config.embedding_dim is None else 1.0  # of the table's width, which ALBERT does not scale
        if config.scale_embeddings:
            growth *= p.width**-0.5
        if config.scale_tied_logits:
            growth *= p.width**-0.5
        if component.norm_at == "post" and not component.masked_lm_head:  # the norm of the last block
            factors = np.ones((p.shape[0], 1))
            factors[-1] = p.output_scale / growth
            return factors
        return p.output_scale / growth
    return 1.0


def _norm_before_logits(config: ModelConfig) -> str:
    """Returns a regular expression for the paths of the norm before the output matrix."""
    if config.masked_lm_head:
        return r"masked_lm_head/norm/(scale|bias)"
    stack = list(config.stacks)[-1]
    if config.norm_at == "post":
        after = "_after" if config.experts is not None and config.experts.dense_after is not None else ""
        return rf"{stack}/blocks/mlp{after}_norm/(scale|bias)"
    return rf"({stack}|multi_token/ahead_\d+)/final_norm/(scale|bias)"


def scaled_initially(params: PyTree, multipliers: PyTree) -> PyTree:
    """Multiplies the values that initializers drew by the `init` of `multipliers`."""

    def scale(x: jax.Array, m: Multipliers) -> jax.Array:
        return (1.0 + x) * m.init - 1.0 if m.is_plus_one else x * jnp.asarray(m.init, x.dtype)

    return jax.tree.map(scale, params, multipliers)


def scale_by(factors: PyTree) -> optax.GradientTransformation:
    """Builds the transformation that multiplies the update of each parameter by its `Factor`."""

    def scale(update: jax.Array, factor: Factor) -> jax.Array:
        return update * jnp.asarray(factor, update.dtype)

    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates, factors))
