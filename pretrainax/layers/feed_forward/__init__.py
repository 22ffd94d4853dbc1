"""The feed-forward variants of a block, one class each; `config.model` selects the variant."""

from pretrainax.layers.feed_forward.base import (
    ACTIVATIONS,
    FEED_FORWARDS,
    FeedForward,
    Kind,
    feed_forwards_of,
    kinds_of_layers,
    register_feed_forward,
)
from pretrainax.layers.feed_forward.dense import Dense
from pretrainax.layers.feed_forward.mixture import Mixture, announced

__all__ = [
    "ACTIVATIONS",
    "Dense",
    "FEED_FORWARDS",
    "FeedForward",
    "Kind",
    "Mixture",
    "announced",
    "feed_forwards_of",
    "kinds_of_layers",
    "register_feed_forward",
]
