"""Implements the tagging head, which predicts a tag for each word of a row, with a softmax or a CRF (`chain`)."""

from typing import Optional, Unpack

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import ModelConfig, Tag, UserError
from pretrainax.data.batch import has_word_labels
from pretrainax.layers.sums import Sums
from pretrainax.models.heads import chain
from pretrainax.models.heads.base import Answers, Batch, Head, flat_answers, register_head, sampled
from pretrainax.models.heads.classify import label_logits
from pretrainax.models.heads.vocabulary_loss import LossOptions
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec


@flax.struct.dataclass
class TaggerOutput:
    logits: jax.Array  # [B, W, L] float32, for the words of each row in order, then padding; W = T
    transitions: Optional[chain.Transitions]  # None if the head has a softmax instead of a CRF
    allowed: Optional[jax.Array]  # constraints of a CRF, see chain.best_tags; None if there are none


@register_head
class Tagger(Head):
    """The tagging head. `predictions` returns the predicted tag of each word and its probability.

    "tags" is [B, W] int32, with -1 after the last word. "probabilities" is [B, W] float32, with 0 after the last word.
    """

    name, loss_name = "tag", "label_loss"
    partition_rules = (
        (r"tagger/dense/kernel", "d_model features"),
        (r"tagger/norm/(scale|bias)", "features"),
        (r"tagger/output/kernel", "d_model labels"),
        (r"tagger/(dense|output)/bias", "features"),
        (r"tagger/transitions", "features labels"),
        (r"tagger/(start|end)", "labels"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return isinstance(config.head, Tag)

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"tagger": TaggerHead(config)}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> TaggerOutput:
        return model.tagger(x, _word_numbers(batch), deterministic)

    def predictions(self, output: TaggerOutput, batch: Batch) -> dict[str, jax.Array]:
        real, tags = real_words(batch), _predicted_tags(output, batch)
        if output.transitions is None:
            probabilities = jax.nn.softmax(output.logits)
        else:
            probabilities = chain.marginals(output.logits, real, output.transitions)
        # [B, W, L] -> [B, W]
        tag_probabilities = jnp.take_along_axis(probabilities, tags[..., None], axis=2).squeeze(2)
        return {"tags": jnp.where(real, tags, -1), "probabilities": jnp.where(real, tag_probabilities, 0.0)}

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return _word_numbers(batch).max(1).sum() if has_word_labels(batch) else None

    def check(self, output: Optional[TaggerOutput], batch: Batch) -> None:
        if (output is None) == has_word_labels(batch):
            mismatch = (
                "labels of words have no head" if has_word_labels(batch) else "the head has no words to learn from"
            )
            raise UserError(f"config.model.head and config.objective do not fit: {mismatch}")

    def sums(self, output: TaggerOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        logits, labels, real = output.logits, batch["word_labels"], real_words(batch)
        chex.assert_shape(labels, logits.shape[:2], custom_message="logits are [B, W, L], word_labels [B, W]")
        if output.transitions is None:
            target_logits = jnp.take_along_axis(logits, labels[..., None], axis=2).squeeze(2)  # [B, W, L] -> [B, W]
            loss = jnp.where(real, jax.nn.logsumexp(logits, axis=-1) - target_logits, 0.0).sum()
        else:
            log_partition = chain.log_partition(logits, real, output.transitions)
            loss = (log_partition - chain.score(logits, labels, real, output.transitions)).sum()
        correct, count = (_predicted_tags(output, batch) == labels) & real, real.sum().astype(jnp.float32)
        sums = {"label_loss": (jax.lax.stop_gradient(loss), count)}
        return loss, sums | {"label_accuracy": (correct.sum().astype(jnp.float32), count)}

    def answers(self, output: TaggerOutput, batch: Batch) -> Answers:
        arrays = _predicted_tags(output, batch), batch["word_labels"], real_words(batch)
        return flat_answers(*map(sampled, arrays))

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        assert isinstance(config.head, Tag)
        hidden = 0 if config.head.hidden == "none" else config.d_model
        return 2 * targets * config.stream_width * (targets + hidden + config.head.num_labels)


def _word_numbers(batch: Batch) -> jax.Array:
    """Returns the word number of each token, [B, T]: 1, 2, …, and 0 for tokens outside words, such as padding.

    If the batch has no "words", each token is a word.
    """
    segments = batch["segment_ids"]
    return batch["words"] if "words" in batch else jnp.cumsum(segments > 0, axis=1) * (segments > 0)


def real_words(batch: Batch) -> jax.Array:
    """Computes the word mask, [B, W] bool with W = T: a row with n words has n True values, followed by False."""
    words = _word_numbers(batch)
    return jnp.arange(words.shape[1])[None] < words.max(1, keepdims=True)


def _predicted_tags(output: TaggerOutput, batch: Batch) -> jax.Array:
    """Predicts the tag of each word, [B, W]: the tag with the largest logit or, with a CRF, the best sequence."""
    if output.transitions is None:
        return output.logits.argmax(-1)
    logits, transitions = jax.lax.stop_gradient((output.logits, output.transitions))
    return chain.best_tags(logits, real_words(batch), transitions, output.allowed)


class TaggerHead(nn.Module):
    """Projects hidden states of tokens to logits of words, [B, T, D] -> [B, W, L] float32, with W = T.

    `words` [B, T] is the word number of each token. The state of a word is the mean of the states of its tokens.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, words: jax.Array, deterministic: bool) -> TaggerOutput:
        head = self.config.head
        assert isinstance(head, Tag)
        # A matmul instead of a gather, because the length axis may be sharded.
        weights = words[:, None, :] == jnp.arange(1, words.shape[1] + 1)[None, :, None]  # [B, W, T]
        weights = weights.astype(jnp.float32)
        weights = weights / jnp.maximum(weights.sum(2, keepdims=True), 1.0)
        x = constrain(jnp.einsum("BWT,BTD->BWD", weights.astype(x.dtype), x), logical_spec("batch"))
        logits = label_logits(self.config, x, deterministic)
        if head.kind == "softmax":
            return TaggerOutput(logits, None, None)
        shapes = {"transitions": (head.num_labels, head.num_labels), "start": (head.num_labels,)}
        shapes |= {"end": shapes["start"]}
        params = [self.param(name, nn.initializers.zeros, shape, jnp.float32) for name, shape in shapes.items()]
        return TaggerOutput(logits, chain.Transitions(*params), _allowed_transitions(head))


def _allowed_transitions(head: Tag) -> Optional[jax.Array]:
    """Builds the mask of allowed transitions for `chain.best_tags`, [L + 1, L] bool; returns None if all are allowed.

    `head.follows` lists, for each tag, the tags that may precede this tag. A tag with an empty list may follow any tag,
    and may be the first tag of a row.
    """
    if not head.follows:
        return None
    allowed = np.ones((head.num_labels + 1, head.num_labels), bool)
    for tag, previous_tags in enumerate(head.follows):
        if previous_tags:
            allowed[:, tag] = False
            allowed[list(previous_tags), tag] = True
    return jnp.asarray(allowed)
