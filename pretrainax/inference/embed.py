"""Turns texts into vectors: the last hidden state of their tokens, pooled."""

from collections.abc import Callable, Sequence
from typing import Literal, Optional

import jax
import numpy as np

from pretrainax.config import Embed, UserError
from pretrainax.data.batch import Batch
from pretrainax.inference.framing import frame_of, framed_rows, longest, read_example
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches
from pretrainax.models import AnyModel, electra
from pretrainax.models.encoder import Encoder
from pretrainax.sharding.param_paths import PyTree

Pooling = Literal["mean", "cls", "last", "max"]
# of the hidden states [T, D] of a text, its special tokens among them
_POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
    "max": lambda states: states.max(axis=0),
}


def embed(
    loaded: LoadedModel, texts: Sequence[str], pooling: Optional[Pooling] = None, truncate: bool = False
) -> np.ndarray:
    """Returns a vector of each text, [n, d_model] float32, from the hidden states after the last block and its norm.

    Of an encoder-decoder the encoder reads the texts, of a run of ELECTRA the discriminator. Special tokens stand
    around a text as in training and are pooled with it, as in sentence-transformers. Padding is not: a vector does not
    depend on the other texts.

    Args:
      pooling: what the vector is: the mean over all tokens; the first one, where that is a [CLS]; the last one (of an
        encoder the [SEP] or </s> after the text); or the largest of each number over all tokens. None: that of a model
        trained for retrieval, with the length 1 that it was trained with; of others the mean.
      truncate: reads of a text that is too long the first part; else it is an error.

    Raises:
      UserError: an unknown pooling, or one that the model cannot give; a text without tokens, or with too many.
    """
    head = loaded.experiment.model.head
    if pooling is None and isinstance(head, Embed):
        vectors = embed(loaded, texts, head.pooling, truncate)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True) if head.normalize else 1.0
        return vectors / np.maximum(lengths, 1e-12)
    pooling = pooling or "mean"
    if pooling not in _POOLINGS:
        raise UserError(f"pooling is {pooling!r}, it must be one of {', '.join(_POOLINGS)}")
    if pooling == "cls" and frame_of(loaded).before != (loaded.tokenizer.vocabulary.cls,):
        raise UserError(f"pooling is 'cls', {loaded.origin} reads no [CLS] before a text: take mean, last or max")
    return pooled(loaded, framed_rows(loaded, texts, truncate, "shorten it, or set truncate=True"), pooling)


def pooled(loaded: LoadedModel, rows: Sequence[np.ndarray], pooling: Pooling) -> np.ndarray:
    """Returns a vector of each row of ids, special ones included: n times [t] -> [n, d_model] float32."""
    loaded.check_plain("give embeddings")
    vectors = np.empty((len(rows), loaded.experiment.model.stream_width), np.float32)
    examples = [read_example(loaded, row) for row in rows]
    for numbers, batch in batches(examples, loaded.mesh, longest(loaded), loaded.tokenizer.vocabulary.pad):
        hidden = np.asarray(loaded.run(last_hidden, batch), np.float32)
        for number, states in zip(numbers, hidden, strict=False):  # rows after these repeat the last one
            vectors[number] = _POOLINGS[pooling](states[: len(rows[number])])
    return vectors


def last_hidden(model: AnyModel, params: PyTree, batch: Batch) -> jax.Array:
    """Returns the hidden states after the last block and its norm, [B, T, D], of the stack that reads a text.

    A mask decoder, which DeBERTa has in pretraining alone, is left out, as in transformers.
    """
    config, family = model.config, model.config.family
    if family == "encoder_decoder":
        return model.apply({"params": params}, batch, deterministic=True, method="encode").x
    if family == "encoder":
        config, params = electra.discriminator(config, params)  # of other encoders config and params themselves
        model = Encoder(config, model.compute)
    _, kept = model.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    return kept["intermediates"][family]["output"][0]
