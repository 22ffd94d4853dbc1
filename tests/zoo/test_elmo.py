"""ELMo beside what its paper and its released options say, in torch: no class of transformers computes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.layers.compute import Compute
from pretrainax.models.outputs import hidden_states
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from pretrainax.zoo.__main__ import count
from pretrainax.zoo.elmo import elmo
from tests.golden.case import VOCABULARY, Case, batch, packed, weights

DIRECTIONS = ("forward", "backward")
SIZES = dict(vocab_size=VOCABULARY, num_layers=3, d_model=8, d_ff=12)
RECURRENT = dataclasses.replace(elmo("original").recurrent, character_dim=5, filters=(3, 4, 6))
CONFIG = dataclasses.replace(elmo("original"), **SIZES, recurrent=RECURRENT)
CONFIGS = {
    "as released": CONFIG,
    "clipped": dataclasses.replace(CONFIG, recurrent=dataclasses.replace(RECURRENT, clip=0.1)),  # which most are then
    "not clipped": dataclasses.replace(CONFIG, recurrent=dataclasses.replace(RECURRENT, clip=None)),
}


@pytest.mark.parametrize("variant, published", [("original", 93.6), ("medium", 28.0), ("small", 13.6)])
def test_parameters_are_those_of_the_released_table(variant, published):
    config = elmo(variant)
    of_softmax = (config.d_model + 1) * config.vocab_size
    assert round((count(zoo.preset(f"elmo_{variant}")) - of_softmax) / 1e6, 1) == published


# --- the reference --------------------------------------------------------------------------------------------------


def words_of(p, characters, config):
    """Characters [T, C] -> vectors of words [T, D] (bilm-tf: _build_word_char_embeddings)."""
    import torch

    x = p["character_embedding/embedding"][characters].transpose(1, 2)  # [T, E, C]
    found = []
    for size, _ in enumerate(config.recurrent.filters, start=1):
        name = f"character_embedding/convolution_{size}"
        kernel = p[f"{name}/kernel"].permute(2, 1, 0)  # [size, E, n] -> [n, E, size]
        found.append(torch.conv1d(x, kernel, p[f"{name}/bias"]).amax(dim=2))
    x = torch.relu(torch.cat(found, dim=1))
    for i in range(config.recurrent.highways):
        name = f"character_embedding/highway_{i}"
        carry = torch.sigmoid(x @ p[f"{name}/carry/kernel"] + p[f"{name}/carry/bias"])
        x = carry * torch.relu(x @ p[f"{name}/transform/kernel"] + p[f"{name}/transform/bias"]) + (1 - carry) * x
    return x @ p["character_embedding/projection/kernel"] + p["character_embedding/projection/bias"]


def lstm(p, name, layer, xs, config):
    """One LSTMCell of TensorFlow with a projection, over xs [T, D] in their order: gates i, j, f, o in one matrix."""
    import torch

    def of(path):
        return p[f"recurrent/blocks/{name}/{path}"][layer]

    width, limit = config.d_ff, config.recurrent.clip or float("inf")
    kernel = torch.cat([of("input/kernel"), of("cell/hidden/kernel")]).reshape(-1, 4 * width)
    memory, said, out = torch.zeros(width), torch.zeros(config.d_model), []
    for x in xs:
        i, j, f, o = (torch.cat([x, said]) @ kernel + of("input/bias").reshape(-1)).split(width)
        memory = torch.sigmoid(f + 1.0) * memory + torch.sigmoid(i) * torch.tanh(j)
        memory = memory.clamp(-limit, limit)
        said = (torch.sigmoid(o) * torch.tanh(memory)) @ of("cell/projection/kernel")
        said = said.clamp(-limit, limit)
        out.append(said)
    return torch.stack(out)


def reference(p, characters, config):
    """One text [T, C] -> logits of both directions [T, V], and the stream after each layer, [L, T, 2 D]."""
    import torch

    words = words_of(p, characters, config)
    streams = {name: [words] for name in DIRECTIONS}
    for name, layers in streams.items():
        for layer in range(config.num_layers):
            x = layers[-1]
            y = lstm(p, name, layer, x if name == "forward" else x.flip(0), config)
            y = y if name == "forward" else y.flip(0)
            layers.append(y + x if layer else y)  # skip connections, but from the characters to the first layer
    logits = [streams[name][-1] @ p["unembedding/kernel"] + p["unembedding/bias"] for name in DIRECTIONS]
    hidden = [torch.cat(pair, dim=1) for pair in zip(*streams.values(), strict=True)]
    return logits, hidden[1:]


def ours(config, arrays):
    model = models.build(config, Compute())

    def objective(params):
        outputs, kept = model.apply({"params": params}, arrays, deterministic=True, mutable=["intermediates"])
        value, _ = losses.objective(outputs, arrays, losses.counts(arrays))
        logits = [outputs.heads[name].logits() for name in ("lm", "backward_lm")]
        return value, (logits, hidden_states(kept["intermediates"])["recurrent"])

    with jax.default_matmul_precision("highest"):
        (loss, (logits, hidden)), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(weights(config))
    return loss, logits, hidden, dict(zip(parameter_names(gradients), jax.tree.leaves(gradients), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_as_written(name):
    torch = pytest.importorskip("torch")  # extra parity
    config = CONFIGS[name]
    arrays, tree = batch(Case(config, family=None)), weights(config)  # pyright: ignore[reportArgumentType]
    paths = parameter_names(tree)
    p = {
        path: torch.from_numpy(np.array(x)).requires_grad_()
        for path, x in zip(paths, jax.tree.leaves(tree), strict=True)
    }
    got_loss, got_logits, got_hidden, gradients = ours(config, jax.tree.map(jnp.asarray, arrays))
    sums, counted = [torch.zeros(()), torch.zeros(())], [0, 0]
    for row, length in enumerate(arrays["segment_ids"].sum(1)):
        logits, hidden = reference(p, torch.from_numpy(arrays["characters"][row, :length].astype(np.int64)), config)
        tokens = torch.from_numpy(arrays["tokens"][row, :length].astype(np.int64))
        told = (logits[0][:-1], tokens[1:]), (logits[1][1:], tokens[:-1])
        for side, (said, targets) in enumerate(told):
            sums[side] = sums[side] + torch.nn.functional.cross_entropy(said, targets, reduction="sum")
            counted[side] += len(targets)
            theirs = logits[side].detach().numpy()
            # float32 sums in another order
            np.testing.assert_allclose(np.asarray(got_logits[side])[row, :length], theirs, atol=2e-4)
        for mine, theirs in zip(got_hidden, hidden, strict=True):
            np.testing.assert_allclose(np.asarray(mine)[row, :length], theirs.detach().numpy(), atol=2e-4)
    loss = sums[0] / counted[0] + sums[1] / counted[1]
    loss.backward()
    np.testing.assert_allclose(float(got_loss), float(loss), rtol=1e-5)
    whole = np.sqrt(sum(float(x.grad.square().sum()) for x in p.values()))
    for path, x in p.items():
        theirs = x.grad.numpy()
        distance = np.linalg.norm(np.asarray(gradients[path]) - theirs)
        assert distance <= 1e-3 * max(np.linalg.norm(theirs), 1e-4 * whole), path


def test_packed_rows_give_the_logits_of_rows_of_their_own():
    arrays = batch(Case(CONFIG, family=None))  # pyright: ignore[reportArgumentType]
    _, alone, _, _ = ours(CONFIG, jax.tree.map(jnp.asarray, arrays))
    model = models.build(CONFIG, Compute())
    together = model.apply({"params": weights(CONFIG)}, packed(arrays), deterministic=True)
    for name, logits in zip(("lm", "backward_lm"), alone, strict=True):
        # the same sums, in products of another shape
        np.testing.assert_allclose(
            together.heads[name].logits()[0], np.asarray(logits)[arrays["segment_ids"] > 0], atol=1e-5
        )
