import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import ModelConfig, MultiTokenPrediction, NoPositions, RotaryPositions
from pretrainax.config.validation import validate
from pretrainax.layers.compute import Compute
from pretrainax.models.flops import attentions
from pretrainax.models.heads.multi_token import MultiTokenTargets, block_of, shifted_targets
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from tests.golden import CASES, make
from tests.golden.case import batch, needs_transformers, weights
from tests.support.tiny import get_config

WEIGHT = 0.3
NORMS = {"enorm": "token_norm_1", "hnorm": "hidden_norm_1"}  # name in transformers -> our name


def asked(tokens, weights):
    return MultiTokenTargets(jnp.array([tokens]), jnp.array([weights], jnp.float32))


def furthest(first, segments, depth):
    found = first
    for i in range(1, depth + 1):
        found = shifted_targets(found, first, jnp.array([segments]), i)
    return [int(t) if w else None for t, w in zip(found.targets[0], found.weights[0], strict=True)]


def test_tokens_further_on_are_those_of_the_same_text():
    # The row has two documents, a b c d e and f g h, and padding. The target of each token is the next token.
    first = asked([2, 3, 4, 5, 7, 8, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0])  # The targets are b c d e | g h.
    segments = [1, 1, 1, 1, 2, 2, 0, 0]
    assert furthest(first, segments, 1) == [3, 4, 5, None, 8, None, None, None]
    assert furthest(first, segments, 2) == [4, 5, None, None, None, None, None, None]


def test_no_token_is_asked_for_where_one_on_the_way_is_not():
    """Tests targets inside a prefix, which attends to later tokens, and across the end of a document."""
    first = asked([2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1])
    assert furthest(first, [1] * 6, 1) == [None, None, 5, None, None, None]


def case():
    """Returns DeepSeek-V3 with its multi-token module at a tiny size.

    Every expert has enough capacity, and the bias of the router has no effect.
    """
    found = CASES["deepseek_v3"]
    return found._replace(config=dataclasses.replace(found.config, multi_token=MultiTokenPrediction(weight=WEIGHT)))


def ours(config, params, arrays):
    model = models.build(config, Compute())

    def objective(params, arrays):
        outputs = model.apply({"params": params}, arrays, deterministic=True)
        value, sums = losses.objective(outputs, arrays, losses.counts(arrays))
        return value, (outputs.heads["multi_token"].outputs[0].logits(), sums)

    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.value_and_grad(objective, has_aux=True))(params, jax.tree.map(jnp.asarray, arrays))


def theirs(found, params, arrays):
    """Returns transformers' loss, gradients and logits.

    The multi-token module is a layer of MtpModel and a DeepSeek-V3 of one block, which share the model's embeddings and
    output matrix.
    """
    import torch
    from transformers.modeling_layers import MtpLayer

    plain = found._replace(config=dataclasses.replace(found.config, multi_token=None))
    one = plain._replace(config=dataclasses.replace(block_of(plain.config), num_layers=1))
    own, main = params["multi_token"], {name: x for name, x in params.items() if name != "multi_token"}
    state = {name: params[name] for name in ("token_embedding", "unembedding")} | {"decoder": own["ahead_1"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "weights", lambda config: state if config is one.config else main)
        model, block = make.oracle(plain), make.oracle(one)
    block.lm_head, block.model.embed_tokens = model.lm_head, model.model.embed_tokens

    class Nothing(torch.nn.Module):
        def __init__(self, config, number):
            super().__init__()

        def forward(self, x, **kwargs):
            return x

    join = MtpLayer(model.config, Nothing, type(model.model.norm), 0, use_post_norm=False)
    tensors = {f"{name}.weight": torch.from_numpy(own[path]["scale"]) for name, path in NORMS.items()}
    tensors["eh_proj.weight"] = torch.from_numpy(own["join_1"]["kernel"].T.copy())
    join.load_state_dict(tensors)

    t = {key: torch.from_numpy(value.astype(np.int64)) for key, value in arrays.items()}
    out = model.model(input_ids=t["tokens"], attention_mask=t["segment_ids"])
    read = model.model.embed_tokens(t["targets"])
    joined = join(read, out.last_hidden_state, None, None, None, None)
    said = block(inputs_embeds=joined, attention_mask=t["segment_ids"]).logits
    counted = t["loss_weights"] > 0
    entropy = torch.nn.functional.cross_entropy
    next_one = entropy(model.lm_head(out.last_hidden_state)[counted], t["targets"][counted])
    after = torch.nn.functional.pad(t["targets"][:, 1:], (0, 1))
    both = counted & torch.nn.functional.pad(counted[:, 1:], (0, 1))
    further_on = entropy(said[both], after[both], reduction="sum") / counted.sum()
    loss = next_one + WEIGHT * further_on
    loss.backward()
    gradients = make.state_of(plain, model, gradients=True)
    of_block = make.state_of(one, block, gradients=True)["decoder"]
    of_join = {path: {"scale": join.get_submodule(name).weight.grad.numpy()} for name, path in NORMS.items()}
    of_join["join_1"] = {"kernel": join.eh_proj.weight.grad.numpy().T}
    gradients |= {"multi_token": {"ahead_1": of_block, **of_join}}
    return loss.item(), gradients, said.detach().numpy(), both.numpy()


@needs_transformers
def test_loss_logits_and_gradients_are_those_of_deepseek():
    found = case()
    params, arrays = weights(found.config), batch(found)
    (loss, (logits, sums)), gradients = ours(found.config, params, arrays)
    their_loss, their_gradients, their_logits, both = theirs(found, params, arrays)
    # The tests of all families have this tolerance.
    np.testing.assert_allclose(np.asarray(logits)[both], their_logits[both], atol=2e-4)
    of_blocks = sum(float(total / count) for name, (total, count) in sums.items() if name == "balance_loss")
    np.testing.assert_allclose(float(loss) - of_blocks, their_loss, rtol=1e-5)  # float32 sums in another order
    assert jax.tree.structure(gradients) == jax.tree.structure(their_gradients)
    assert float(sums["multi_token_loss"][1]) == both.sum()
    whole = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(their_gradients)))
    names = parameter_names(gradients)
    for name, a, b in zip(names, jax.tree.leaves(gradients), jax.tree.leaves(their_gradients), strict=True):
        # The tests of all families have this tolerance. The error is relative to the norm of the parameter's gradient,
        # or to 1e-4 of the norm of the whole gradient.
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-4 * whole), name


def test_a_text_that_is_written_asks_for_none():
    config = dataclasses.replace(get_config("gpt").model, multi_token=MultiTokenPrediction())
    arrays = {name: np.ones((1, 4), np.int32) for name in ("tokens", "positions", "segment_ids")}
    model = models.build(config, Compute())
    outputs = model.apply({"params": weights(config)}, arrays, deterministic=True)
    assert outputs.heads["multi_token"] is None and outputs.logits.shape == (1, 4, 512)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(multi_token=MultiTokenPrediction(depth=0)), "config.model.multi_token.depth is 0, it must be at least 1"),
        (dict(multi_token=MultiTokenPrediction(weight=0.0)), "weight is 0.0, it must be greater than 0"),
        (dict(multi_token=MultiTokenPrediction(), share_layers=True), "config.model.share_layers shares one: set"),
        (
            dict(multi_token=MultiTokenPrediction(), masked_lm_head=True),
            "without a masked_lm_head, and config.model.masked_lm_head is True: set it to False",
        ),
    ],
)
def test_what_cannot_be_is_said(change, said):
    experiment = get_config("gpt")
    experiment.model = dataclasses.replace(experiment.model, **change)
    with pytest.raises(Exception, match=said):
        validate(experiment)


@pytest.mark.slow
def test_it_is_of_decoders():
    experiment = get_config("bert")
    experiment.model.multi_token = MultiTokenPrediction()
    with pytest.raises(
        Exception, match="multi_token requires a decoder, config.model.family is 'encoder': set it to None"
    ):
        validate(experiment)


def test_its_block_is_of_the_kind_of_the_last_block():
    rotary = RotaryPositions(no_rotation_every=4)
    config = ModelConfig(
        num_layers=6, layer_pattern=("local", "global"), window=8, norm_starts_stream=True, position=rotary
    )
    config = dataclasses.replace(config, multi_token=MultiTokenPrediction(depth=2))
    block = block_of(config)
    assert (block.layer_pattern, block.window, block.norm_starts_stream) == (("global",), None, False)
    assert block.position == RotaryPositions()
    assert [(group.layers, group.window) for group in attentions(config, 16, 16)] == [
        (3, 8),
        (3, None),
        *[(1, None)] * 2,
    ]
    block = block_of(dataclasses.replace(config, num_layers=5))
    assert (block.layer_pattern, block.window) == (("local",), 8)
    assert block_of(dataclasses.replace(config, num_layers=4)).position == NoPositions()
