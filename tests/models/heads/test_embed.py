"""Compares a retriever's loss with a computation by hand, and one device with eight."""

import jax
import numpy as np
import pytest

from pretrainax.config import Embed, MeshConfig
from pretrainax.models.heads.embed import Embedder, EmbedOutput
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((8, 3, 6)).astype(np.float32)  # [B, S, D]
TEXTS = np.array([3] * 6 + [0] * 2, np.int32)  # The last rows are empty.


def by_hand(head: Embed, vectors: np.ndarray) -> tuple[float, float]:
    """Returns the loss and the number of correct rows, without the empty rows."""
    vectors, total = vectors[:6].astype(np.float64), 0.0
    for n in (*head.dimensions, 6):
        cut = vectors[..., :n]
        cut = cut / np.linalg.norm(cut, axis=-1, keepdims=True) if head.normalize else cut
        scores = cut[:, 0] @ cut[:, 1:].reshape(-1, n).T / head.temperature  # [6, 12]
        own = scores[np.arange(6), np.arange(6) * 2]
        loss = np.log(np.exp(scores).sum(1)) - own
        if head.symmetric:
            loss = (loss + np.log(np.exp(scores[:, ::2]).sum(0)) - own) / 2
        total += loss.sum()
    return total, float((scores.argmax(1) == np.arange(6) * 2).sum())


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "fields", [{}, {"normalize": False, "temperature": 1.0}, {"symmetric": True}, {"dimensions": (2, 4)}]
)
def test_the_negatives_are_the_passages_of_the_whole_batch_on_any_mesh(fields):
    head, found = Embed(3, **{"temperature": 0.2} | fields), []

    def objective(batch):
        loss, sums = Embedder().sums(EmbedOutput(batch["vectors"], head), batch)
        return loss, sums["label_accuracy"]

    for devices in (1, 8):
        mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
        with jax.set_mesh(mesh):
            batch = put_batch({"vectors": VECTORS, "texts": TEXTS}, mesh)
            found.append(jax.device_get(jax.jit(jax.value_and_grad(lambda v, b=batch: objective({**b, "vectors": v}),
                                                                   has_aux=True))(batch["vectors"])))  # fmt: skip
    (loss, (right, count)), gradient = found[0]
    assert (float(loss), float(right)) == pytest.approx(by_hand(head, VECTORS), rel=1e-5) and count == 6
    np.testing.assert_allclose(found[1][0][0], loss, rtol=1e-6)
    np.testing.assert_allclose(found[1][1], gradient, atol=1e-5)
    assert np.abs(gradient[:6]).max() > 0.01 and not gradient[6:].any()
