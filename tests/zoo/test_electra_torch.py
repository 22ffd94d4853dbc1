"""Compares ELECTRA with transformers: the joint loss of its two classes, their sizes, their config.json."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import UserError
from pretrainax.layers.compute import Compute
from pretrainax.models import electra
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from pretrainax.zoo.convert import from_huggingface
from pretrainax.zoo.electra import FAMILY, HUGGINGFACE, SIZES
from pretrainax.zoo.electra import electra as preset
from tests.golden import make
from tests.golden.case import Case, needs_transformers, weights
from tests.golden.electra import everywhere, joint, masked_batch

# --- the joint loss ------------------------------------------------------------------------------------------------

TABLES = {  # name in transformers -> ours
    "electra.embeddings.word_embeddings.weight": "token_embedding",
    "electra.embeddings.position_embeddings.weight": "position_embedding",
}


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("form", ["gathered", "everywhere"])
@pytest.mark.parametrize("sharing", electra.SHARED)
def test_the_joint_loss_and_its_gradients_are_torchs(sharing, form):
    config, (_, gathered) = joint(sharing), masked_batch()
    cases = [Case(part(config), FAMILY) for part in (electra.discriminator_config, electra.generator_config)]
    params = weights(config)
    params["generator"] = {name: x for name, x in weights(cases[1].config).items() if name in params["generator"]}
    batch = gathered if form == "gathered" else everywhere(gathered)
    with jax.default_matmul_precision("highest"):
        step = jax.jit(jax.value_and_grad(functools.partial(objective, config, batch), has_aux=True))
        (loss, sums), mine = step(params)
        tokens, replaced = jax.jit(functools.partial(corrupted, config, batch))(params)

    # We draw the replaced tokens, so that both discriminators get the same tokens.
    judged = everywhere(gathered) | {"tokens": np.asarray(tokens), "replaced": np.asarray(replaced)}
    masked, told, theirs = torch_step(cases, params, sharing, everywhere(gathered), judged)
    np.testing.assert_allclose(sums["loss"][0] / sums["loss"][1], masked, rtol=1e-5)
    np.testing.assert_allclose(sums["replaced_loss"][0] / sums["replaced_loss"][1], told, rtol=1e-5)
    np.testing.assert_allclose(loss, masked + 50 * told, rtol=1e-5)
    assert parameter_names(mine) == parameter_names(theirs)
    whole = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(theirs)))
    for name, a, b in zip(parameter_names(mine), *map(jax.tree.leaves, (mine, theirs)), strict=True):
        # The gradient of a key's bias is exactly 0 in theory. In both programs, only rounding errors are left of it.
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-4 * whole), name


def objective(config, batch, params):
    batch = jax.tree.map(jnp.asarray, batch)
    outputs = models.build(config, Compute()).apply({"params": params}, batch, deterministic=True)
    return losses.objective(outputs, batch, losses.counts(batch))


def corrupted(config, batch, params):
    plain, own = electra.generator(config, params)
    batch = jax.tree.map(jnp.asarray, batch)
    outputs = models.build(plain, Compute()).apply({"params": own}, batch, deterministic=True)
    return electra.sample_replacements(outputs.heads["lm"], batch)


def torch_step(cases, params, sharing, batch, judged):
    """Returns both losses, and the gradients of their sum as our combined tree.

    Embeddings are shared as in torch: both models use one module, or the discriminator uses the detached tables of the
    generator plus its own parameters.
    """
    import torch

    kept, generator = map(make.oracle, cases)
    judge, differences = kept, {}
    if sharing == "all":
        kept.electra.embeddings = generator.electra.embeddings
    else:
        ours = {path: params["embedding_difference"][name]["embedding"] for path, name in TABLES.items()}
        differences = {path: torch.tensor(x, requires_grad=True) for path, x in ours.items()}
        tables = {path: generator.get_parameter(path).detach() + x for path, x in differences.items()}
        judge = lambda **inputs: torch.func.functional_call(kept, tables, (), inputs)  # noqa: E731
    masked = make.forward(cases[1], generator, batch)["loss"]
    told = make.forward(cases[0], judge, judged)["loss"]
    (masked + 50 * told).backward()

    def gradients(case, model):
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        state = {name: x.numpy() for name, x in found.items()}
        return from_huggingface(HUGGINGFACE.names(case.config), state, case.config)

    tree, own = (gradients(case, model) for case, model in zip(cases, (kept, generator), strict=True))
    tree |= {name: own[name] for name in electra.SHARED[sharing]}
    tree["generator"] = {name: own[name] for name in params["generator"]}
    if differences:
        found = {name: {"embedding": differences[path].grad.numpy()} for path, name in TABLES.items()}
        tree["embedding_difference"] = found
    return masked.item(), told.item(), tree


# --- sizes and config.json -----------------------------------------------------------------------------------------


def count(config):
    return sum(x.size for x in jax.tree.leaves(models.abstract_params(config)))


# Sizes of the discriminator from Clark et al. 2020, table 1, and the README of its code: 14M, 110M, 335M.
@pytest.mark.parametrize("variant, published", [("small", 14e6), ("base", 110e6), ("large", 335e6)])
def test_parameter_counts(variant, published):
    assert abs(count(electra.discriminator_config(preset(variant))) / published - 1) < 0.035


@needs_transformers
@pytest.mark.parametrize("variant", SIZES)
def test_both_have_the_parameters_of_transformers(variant):
    import torch
    import transformers

    for config in (electra.discriminator_config(preset(variant)), electra.generator_config(preset(variant))):
        json = HUGGINGFACE.write_config(config)
        with torch.device("meta"):
            cls = getattr(transformers, json["architectures"][0])
            theirs = cls(transformers.AutoConfig.for_model(**json))
        theirs.tie_weights()
        assert count(config) == sum(p.numel() for p in theirs.parameters())


# config.json as released with the weights.
SMALL = {
    "architectures": ["ElectraForPreTraining"],
    "attention_probs_dropout_prob": 0.1,
    "embedding_size": 128,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "electra",
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
    "summary_type": "first",
    "summary_use_proj": True,
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}


@pytest.mark.parametrize("json", [SMALL, {"model_type": "electra"}], ids=["released", "silent"])
def test_the_released_small_discriminator_is_the_preset(json):
    assert HUGGINGFACE.read_config(json) == electra.discriminator_config(preset("small"))


def test_the_released_base_generator_is_the_presets():
    json = SMALL | {"architectures": ["ElectraForMaskedLM"], "embedding_size": 768}
    assert HUGGINGFACE.read_config(json) == electra.generator_config(preset("base"))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"architectures": ["ElectraForCausalLM"]},
            "supported for 'electra': ElectraForPreTraining, ElectraForMaskedLM, ElectraModel",
        ),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"architectures": ["ElectraForMaskedLM"], "hidden_act": "relu"}, "hidden_act 'relu'.* supports only 'gelu'"),
    ],
)
def test_what_computes_something_else_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        HUGGINGFACE.read_config(SMALL | change)


def test_both_at_once_have_no_class_there():
    with pytest.raises(UserError, match="config.model.generator"):
        HUGGINGFACE.write_config(preset("small"))
