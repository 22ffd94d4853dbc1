"""Embeds texts: pools the last hidden states of their tokens."""

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
# take the hidden states [T, D] of a text with its special tokens
_POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
    "max": lambda states: states.max(axis=0),
}


def embed(
    loaded: LoadedModel, texts: Sequence[str], pooling: Optional[Pooling] = None, truncate: bool = False
) -> np.ndarray:
    """Returns a vector for each text, [n, d_model] float32, from the hidden states after the last block and its norm.

    An encoder-decoder reads the texts with its encoder, a run of ELECTRA with its discriminator. Texts get the special
    tokens of training, which are pooled too, as in sentence-transformers. Padding is not pooled, so a vector does not
    depend on the other texts.

    Args:
      pooling: "mean" over all tokens, "max" of each dimension over all tokens, "cls" for the first token if it is
        [CLS], or "last" for the last token (in an encoder, the [SEP] or </s> after the text). None: the pooling and
        normalization to length 1 of a model trained for retrieval; otherwise mean.
      truncate: cuts long texts; otherwise a long text is an error.

    Raises:
      UserError: the pooling is unknown or does not fit the model, or a text has no tokens or too many.
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
    """Returns a vector for each row of ids with special tokens: n arrays [t] -> [n, d_model] float32."""
    loaded.check_plain("give embeddings")
    vectors = np.empty((len(rows), loaded.experiment.model.stream_width), np.float32)
    examples = [read_example(loaded, row) for row in rows]
    for numbers, batch in batches(examples, loaded.mesh, longest(loaded), loaded.tokenizer.vocabulary.pad):
        hidden = np.asarray(loaded.run(last_hidden, batch), np.float32)
        for number, states in zip(numbers, hidden, strict=False):  # extra rows repeat the last example
            vectors[number] = _POOLINGS[pooling](states[: len(rows[number])])
    return vectors


def last_hidden(model: AnyModel, params: PyTree, batch: Batch) -> jax.Array:
    """Returns the hidden states [B, T, D] after the last block and its norm, from the stack that reads the text.

    The mask decoder of DeBERTa is for pretraining only and is skipped, as in transformers.
    """
    config, family = model.config, model.config.family
    if family == "encoder_decoder":
        return model.apply({"params": params}, batch, deterministic=True, method="encode").x
    if family == "encoder":
        config, params = electra.discriminator(config, params)  # returns other encoders unchanged
        model = Encoder(config, model.compute)
    _, state = model.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    return state["intermediates"][family]["output"][0]
