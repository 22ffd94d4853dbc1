"""Computes the two sides of comparisons between task heads and transformers' classes."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax import models
from pretrainax.layers.compute import Compute
from pretrainax.models.heads import heads_of
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from pretrainax.zoo.convert import from_huggingface, to_huggingface
from tests.golden import make
from tests.golden.case import Case, weights

EOS = 2


def oracle(case: Case):
    """Returns the class of transformers for a case with a head, with the same weights."""
    import torch
    import transformers

    described = case.family.huggingface.write_config(case.config)
    theirs = transformers.AutoConfig.for_model(**described | {"pad_token_id": case.pad_id, "eos_token_id": EOS})
    theirs._attn_implementation = "eager"
    model = getattr(transformers, described["architectures"][0])(theirs)
    state = to_huggingface(case.family.huggingface.names(case.config), weights(case.config))
    if case.config.experts is not None:
        return make.read_from_file(model, state).eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    unused = re.compile("|".join(("embed_tokens", "pooler", *case.family.huggingface.ignored)))
    assert not unexpected and all(map(unused.search, missing)), missing
    model.tie_weights()
    return model.eval()


def gradients_of(model, case: Case):
    """Returns the gradients of all parameters after a backward, as a tree of our parameters."""
    named = model.named_parameters(remove_duplicate=False)
    found = {name: p.grad.numpy() for name, p in named if p.grad is not None}
    return from_huggingface(case.family.huggingface.names(case.config), found, case.config)


def ours_of(case: Case, arrays: dict[str, np.ndarray]):
    """Returns the logits of our head, its loss, and the gradients."""
    model, arrays = models.build(case.config, Compute()), jax.tree.map(jnp.asarray, arrays)
    (head,) = heads_of(case.config)

    def objective(params):
        outputs = model.apply({"params": params}, arrays, deterministic=True)
        loss, _ = losses.objective(outputs, arrays, losses.counts(arrays))
        return loss, outputs.heads[head.name].logits

    with jax.default_matmul_precision("highest"):
        (loss, logits), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(weights(case.config))
    return logits, loss, gradients


def assert_same_gradients(ours, theirs) -> None:
    whole = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(theirs)))
    for path, a, b in zip(parameter_names(ours), *map(jax.tree.leaves, (ours, theirs)), strict=True):
        # The gradient of a key's bias is exactly 0 in theory. In both programs, only rounding errors are left of it.
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-4 * whole), path
