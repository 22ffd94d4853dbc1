"""Models that transformers does not have, beside what tests.support.written.py says of them in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.layers.compute import Compute
from pretrainax.models.outputs import hidden_states
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import losses
from tests.golden.case import Case, batch, weights
from tests.support.written import CONFIGS, FORWARDS

pytest.importorskip("torch")  # extra parity


def ours(config, arrays):
    model = models.build(config, Compute())

    def objective(params):
        outputs, kept = model.apply({"params": params}, arrays, deterministic=True, mutable=["intermediates"])
        value, _ = losses.objective(outputs, arrays, losses.counts(arrays))
        return value, (outputs.logits, hidden_states(kept["intermediates"]))

    with jax.default_matmul_precision("highest"):
        (loss, (logits, hidden)), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(weights(config))
    named = dict(zip(parameter_names(gradients), jax.tree.leaves(gradients), strict=True))
    return loss, logits, hidden, named


@pytest.mark.parametrize("name", CONFIGS)
def test_as_written(name):
    import torch

    config = CONFIGS[name]
    arrays = batch(Case(config, family=None))  # pyright: ignore[reportArgumentType]
    tree = weights(config)
    params = {
        path: torch.from_numpy(np.array(x)).requires_grad_()
        for path, x in zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
    }
    texts = [arrays[side] for side in ("tokens", "encoder_tokens") if side in arrays]
    logits, hidden = FORWARDS[name](params, *(torch.from_numpy(text.astype(np.int64)) for text in texts))
    counted = torch.from_numpy(arrays["loss_weights"] > 0)
    targets = torch.from_numpy(arrays["targets"].astype(np.int64))
    loss = torch.nn.functional.cross_entropy(logits[counted], targets[counted])
    loss.backward()
    got_loss, got_logits, got_hidden, gradients = ours(config, jax.tree.map(jnp.asarray, arrays))
    of_text = arrays["segment_ids"] > 0
    real = {"decoder": of_text, "encoder": arrays.get("encoder_segment_ids", arrays["segment_ids"]) > 0}
    # float32 sums in another order; hidden states reach 10 and logits 30 with weights as large as these
    np.testing.assert_allclose(float(got_loss), float(loss), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got_logits)[of_text], logits.detach().numpy()[of_text], atol=2e-4)
    assert got_hidden.keys() == hidden.keys()
    for side, states in hidden.items():
        for mine, theirs in zip(got_hidden[side], states, strict=True):
            np.testing.assert_allclose(np.asarray(mine)[real[side]], theirs.detach().numpy()[real[side]], atol=2e-4)
    whole = np.sqrt(sum(float(p.grad.square().sum()) for p in params.values()))
    for path, p in params.items():
        theirs = p.grad.numpy()
        distance = np.linalg.norm(np.asarray(gradients[path]) - theirs)
        assert distance <= 1e-3 * max(np.linalg.norm(theirs), 1e-4 * whole), path
