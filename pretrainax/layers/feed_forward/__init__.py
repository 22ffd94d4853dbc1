"""The feed-forward layers that a block can use; `config.model` selects among them."""

from pretrainax.layers.feed_forward.base import (
    ACTIVATIONS,
    FEED_FORWARDS,
    FeedForward,
    LayerGroup,
    feed_forwards_of,
    layer_groups,
    register_feed_forward,
)
from pretrainax.layers.feed_forward.dense import Dense
from pretrainax.layers.feed_forward.mixture import Mixture, describe_routing

__all__ = [
    "ACTIVATIONS",
    "Dense",
    "FEED_FORWARDS",
    "FeedForward",
    "LayerGroup",
    "Mixture",
    "describe_routing",
    "feed_forwards_of",
    "layer_groups",
    "register_feed_forward",
]
