"""The head of a retriever: pooled texts, and the loss of a batch by hand; the same on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import Embed, MeshConfig
from pretrainax.models.heads.embed import Embedder, EmbedOutput, pooled_texts
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((8, 3, 6)).astype(np.float32)  # [B, S, D]
TEXTS = np.array([3] * 6 + [0] * 2, np.int32)  # the last rows are empty


def test_each_text_of_a_row_is_pooled_by_itself(variant):
    x = RNG.standard_normal((2, 6, 4)).astype(np.float32)
    ids = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 0, 0, 0]], np.int32)
    parts = [[x[0, :2], x[0, 2:5]], [x[1, :1], x[1, 1:3]]]
    by_hand = {"cls": lambda a: a[0], "last": lambda a: a[-1], "mean": lambda a: a.mean(0), "max": lambda a: a.max(0)}
    for pooling, of_text in by_hand.items():
        found = variant(lambda x, ids, p=pooling: pooled_texts(x, ids, 2, p))(x, ids)
        wanted = np.array([[of_text(text) for text in row] for row in parts])
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        assert np.isfinite(pooled_texts(jnp.asarray(x), jnp.zeros_like(ids), 2, pooling)).all()  # an empty row


def by_hand(head: Embed, vectors: np.ndarray) -> tuple[float, float]:
    """The loss and how many are right, of the rows that are not empty."""
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
