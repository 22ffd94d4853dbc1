"""Heads of whole rows compute what transformers' classes for sequence classification do: logits, gradients, names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.layers.compute import Compute
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from pretrainax.zoo.convert import from_huggingface, to_huggingface
from tests.golden.case import Case, batch, needs_transformers, weights
from tests.support.classifiers import with_head

NAMES = [
    *("bert", "distilbert", "roberta", "electra_small", "albert", "deberta", "modernbert"),
    *("gpt2", "llama3", "bart", "t5_1_1"),
]
EOS = 2


def rows(case: Case) -> dict[str, np.ndarray]:
    """A batch with labels, whose two sides are alike, one token apart, in an encoder-decoder."""
    names = ("tokens", "segment_ids", "positions", "token_types")
    found = {name: x for name, x in batch(case._replace(config=encoder_of(case))).items() if name in names}
    if case.config.family == "encoder_decoder":
        lengths = found["segment_ids"].sum(1)
        found["tokens"][np.arange(len(lengths)), lengths - 1] = EOS
        shifted = np.roll(found["tokens"], 1, axis=1)
        shifted[:, 0] = EOS if case.family.name == "BART" else case.pad_id
        found |= {f"encoder_{name}": x for name, x in found.items()} | {"tokens": shifted}
    return found | {"labels": np.array([2, 0, 1], np.int32)}


def encoder_of(case: Case):
    config = dataclasses.replace(case.config, head=None, masked_lm_head=True)
    return dataclasses.replace(config, family="encoder") if config.family == "encoder_decoder" else config


def oracle(case: Case):
    import torch
    import transformers

    described = case.family.huggingface.write_config(case.config)
    theirs = transformers.AutoConfig.for_model(**described | {"pad_token_id": case.pad_id, "eos_token_id": EOS})
    theirs._attn_implementation = "eager"
    model = getattr(transformers, described["architectures"][0])(theirs)
    state = to_huggingface(case.family.huggingface.names(case.config), weights(case.config))
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    assert not unexpected and all("embed_tokens" in name or "pooler" in name for name in missing), missing
    model.tie_weights()
    return model.eval()


def theirs_of(case: Case, model, arrays):
    import torch

    t = {name: torch.from_numpy(x.astype(np.int64)) for name, x in arrays.items()}
    side = "encoder_" if case.config.family == "encoder_decoder" else ""
    given = {"input_ids": t[f"{side}tokens"], "attention_mask": t[f"{side}segment_ids"]}
    given |= {"token_type_ids": t["token_types"]} if "token_types" in t else {}
    out = model(**given, labels=t["labels"])
    out.loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: p.grad.numpy() for name, p in named if p.grad is not None}
    table = case.family.huggingface.names(case.config)
    return out.logits.detach().numpy(), out.loss.item(), from_huggingface(table, gradients, case.config)


def ours_of(case: Case, arrays):
    model, arrays = models.build(case.config, Compute()), jax.tree.map(jnp.asarray, arrays)

    def objective(params):
        outputs = model.apply({"params": params}, arrays, deterministic=True)
        loss, _ = losses.objective(outputs, arrays, losses.counts(arrays))
        return loss, outputs.heads["classify"].logits

    with jax.default_matmul_precision("highest"):
        (loss, logits), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(weights(case.config))
    return logits, loss, gradients


@needs_transformers
@pytest.mark.parametrize("name", NAMES)
def test_as_transformers(name):
    case = with_head(name)
    arrays = rows(case)
    logits, loss, gradients = ours_of(case, arrays)
    their_logits, their_loss, theirs = theirs_of(case, oracle(case), arrays)
    np.testing.assert_allclose(logits, their_logits, atol=2e-4, rtol=0)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    whole = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(theirs)))
    for path, a, b in zip(parameter_names(gradients), *map(jax.tree.leaves, (gradients, theirs)), strict=True):
        # of a key's bias the gradient is exactly 0 on paper, and rounding in both programs
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-4 * whole), path
