"""The feed-forward of a block, a class each kind; `config.model` says which of them a model has."""

from pretrainax.layers.feed_forward.base import (
    ACTIVATIONS,
    FEED_FORWARDS,
    FeedForward,
    feed_forward_of,
    register_feed_forward,
)
from pretrainax.layers.feed_forward.dense import Gated, Plain
from pretrainax.layers.feed_forward.mixture import Mixture, announced  # after those that a model without experts has

__all__ = [
    "ACTIVATIONS",
    "FEED_FORWARDS",
    "FeedForward",
    "Gated",
    "Mixture",
    "Plain",
    "announced",
    "feed_forward_of",
    "register_feed_forward",
]
