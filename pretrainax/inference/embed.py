"""Computes text embeddings by pooling the last hidden states of the tokens."""

from collections.abc import Callable, Sequence
from typing import Literal, Optional

import jax
import numpy as np

from pretrainax.config import Embed, UserError
from pretrainax.data.batch import Batch
from pretrainax.data.leading_tokens import is_imported
from pretrainax.inference.framing import checked_texts, frame_of, framed_rows, max_input_length, read_example
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import batches
from pretrainax.interop.sentence_transformers import Modules, read_modules
from pretrainax.models import AnyModel, electra
from pretrainax.models.encoder import Encoder
from pretrainax.sharding.param_paths import PyTree

Pooling = Literal["mean", "cls", "last", "max"]
# Functions from the hidden states of a text with its special tokens, [T, D], to a single vector [D].
_POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
    "max": lambda states: states.max(axis=0),
}


def embed(
    loaded: LoadedModel, texts: Sequence[str], pooling: Optional[Pooling] = None, truncate: bool = False
) -> np.ndarray:
    """Computes the embedding of each text: pooled hidden states after the final norm, float32 [n, d_model].

    An encoder-decoder reads a text with its encoder, and an ELECTRA run reads it with its discriminator. Each text gets
    the special tokens of training. Pooling includes the special tokens, as in sentence-transformers, but not padding.
    Therefore the embedding of a text does not depend on other rows of the batch.

    Args:
      pooling: "mean" and "max" pool over all tokens, in each dimension. "cls" takes the first token, which must be
        [CLS]. "last" takes the last token (in an encoder, the [SEP] or </s> after the text). If None, a model with an
        embedding head uses the head's pooling and, if set, its L2 normalization. An imported sentence-transformers
        model uses the pooling and normalization in its modules.json, and the maximum length and the lower case in its
        sentence_bert_config.json. Other models use "mean".
      truncate: whether to cut a text at the end if it is too long. If False, a text that is too long raises UserError.

    Raises:
      UserError: the pooling is unknown or does not fit the model, or a text has no tokens or too many tokens. If
        `pooling` is None, also if modules.json has a module that is not supported.
    """
    modules = _modules(loaded) if pooling is None else Modules(Embed(pooling=pooling, normalize=False))
    pooling, limit = modules.head.pooling, modules.max_length
    if pooling not in _POOLINGS:
        raise UserError(f"pooling is {pooling!r}, it must be one of {', '.join(_POOLINGS)}")
    family, before = loaded.experiment.model.family, frame_of(loaded).before
    if pooling == "cls" and (family == "decoder" or len(before) != 1):
        raise UserError(f"pooling is 'cls', {loaded.origin} reads no [CLS] before a text: take mean, last or max")
    if modules.lowercase:
        texts = ["".join(map(str.lower, text)) for text in checked_texts(texts)]  # as `tokenizers`: "Σ" has one form
    rows = framed_rows(loaded, texts, truncate, "shorten it, or set truncate=True", limit)
    vectors = pooled(loaded, rows, pooling)
    if not modules.head.normalize:
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _modules(loaded: LoadedModel) -> Modules:
    """Returns the settings of a retriever or of a sentence-transformers model; the mean for others."""
    head, folder = loaded.experiment.model.head, getattr(loaded.experiment.tokenizer, "path", None)
    found = read_modules(folder) if is_imported(loaded.experiment) and folder else None
    return found or Modules(head if isinstance(head, Embed) else Embed(pooling="mean", normalize=False))


def pooled(loaded: LoadedModel, rows: Sequence[np.ndarray], pooling: Pooling) -> np.ndarray:
    """Computes the embedding of each array of token ids, float32 [n, d_model].

    Args:
      rows: n arrays of token ids [t], including special tokens.
    """
    loaded.check_plain("give embeddings")
    vectors = np.empty((len(rows), loaded.experiment.model.stream_width), np.float32)
    examples = [read_example(loaded, row) for row in rows]
    for numbers, batch in batches(examples, loaded.mesh, max_input_length(loaded), loaded.tokenizer.vocabulary.pad):
        hidden = np.asarray(loaded.run(last_hidden, batch), np.float32)
        for number, states in zip(numbers, hidden, strict=False):  # `hidden` may have extra rows
            vectors[number] = _POOLINGS[pooling](states[: len(rows[number])])
    return vectors


def last_hidden(model: AnyModel, params: PyTree, batch: Batch) -> jax.Array:
    """Computes the hidden states [B, T, D] after the final norm of the stack that reads the text.

    This stack is the encoder of an encoder-decoder, or the discriminator of an ELECTRA model. DeBERTa's enhanced mask
    decoder is not applied, as in transformers, because it is used only in pretraining.
    """
    config, family = model.config, model.config.family
    if family == "encoder_decoder":
        return model.apply({"params": params}, batch, deterministic=True, method="encode").x
    if family == "encoder":
        config, params = electra.discriminator(config, params)  # returns other encoders unchanged
        model = Encoder(config, model.compute)
    _, state = model.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    return state["intermediates"][family]["output"][0]
