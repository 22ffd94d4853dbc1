"""Defines tiny models of published families, with the weights and the batch that our model and the reference get."""

import dataclasses
import importlib.util
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import jax
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import (
    NUM_CHARACTERS,
    WORD_LENGTH,
    LearnedPositions,
    MixtureOfExperts,
    ModelConfig,
    RotaryPositions,
    YarnScaling,
)
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.zoo.family import Family

needs_transformers = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch or transformers is not installed (extra parity)",
)
VOCABULARY = 99
LENGTHS = (14, 9, 5)  # real tokens of each row; the rest is padding
ENCODER_LENGTHS = (11, 15, 4)


class Case(NamedTuple):
    config: ModelConfig
    family: Family
    # () -> the model in transformers; None: the model by the config.json of `family`.
    oracle: Optional[Callable[[], Any]] = None
    pad_id: int = 0  # RoBERTa and BART derive positions from it


def shrunk(family: Family) -> Case:
    """Returns the first preset of a family at test size, with all its components.

    The number of layers exceeds the pattern of layers, so that the pattern repeats.
    """
    config = next(iter(map(family.preset, family.sizes)))
    scaling = config.position.scaling if isinstance(config.position, RotaryPositions) else None
    # This scaling leaves one frequency unchanged, and scales one almost fully.
    if isinstance(scaling, YarnScaling):
        scaling = dataclasses.replace(scaling, factor=4.0, fast=4.0, slow=0.5, original_length=30)
    if isinstance(config.position, RotaryPositions):
        local = (
            None if config.position.local_theta is None else 40.0 * config.position.local_theta / config.position.theta
        )
        position = dataclasses.replace(config.position, max_length=20, theta=40.0, local_theta=local, scaling=scaling)
    else:
        position = config.position if config.position.max_length is None else LearnedPositions(20)
    return Case(
        dataclasses.replace(
            config,
            vocab_size=VOCABULARY,
            num_layers=2 if len(config.layer_pattern) == 1 else len(config.layer_pattern) + 1,
            d_model=16,
            d_ff=48,
            num_heads=4,
            num_kv_heads=2,
            head_dim=config.head_dim and 8,
            window=config.window and 4,
            position=position,
            experts=config.experts and mixture(family, next(iter(family.sizes)), num_experts=6, top_k=3),
        ),
        family,
    )


def mixture(family: Family, variant: str, **changes: Any) -> MixtureOfExperts:
    """Returns the experts of a preset at test size."""
    settings = family.preset(variant).experts
    assert settings is not None
    return dataclasses.replace(settings, d_ff=settings.d_ff and 24, balance_weight=0.0, **changes)


def weights(config: ModelConfig) -> Any:
    """Returns parameters so large that each term affects the logits, from RandomState, whose stream is frozen."""
    shapes = models.abstract_params(config)

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
        if name.endswith("scale"):
            return 0.2 * noise + (0.0 if config.norm == "rms_plus_one" else 1.0)
        return 0.2 * noise

    leaves = [one(name, x.shape) for name, x in zip(parameter_names(shapes), jax.tree.leaves(shapes), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def batch(case: Case) -> dict[str, np.ndarray]:
    """Returns right-padded rows with the keys of the design's table of batch fields, with a loss on some tokens."""
    rng, config = np.random.RandomState(0), case.config

    def rows(lengths):
        shape = (len(lengths), max(lengths))
        real = np.arange(shape[1])[None] < np.array(lengths)[:, None]
        return {
            "tokens": np.where(real, rng.randint(3, VOCABULARY, shape), case.pad_id).astype(np.int32),
            "segment_ids": real.astype(np.int32),
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        }

    out = rows(LENGTHS)
    real = out["segment_ids"] > 0
    if config.family in ("decoder", "recurrent"):
        out["targets"] = np.pad(out["tokens"][:, 1:], ((0, 0), (0, 1)))
        out["loss_weights"] = np.pad(real[:, 1:], ((0, 0), (0, 1))).astype(np.float32)
    else:
        out["targets"] = rng.randint(3, VOCABULARY, real.shape).astype(np.int32)
        out["loss_weights"] = (real & (rng.random_sample(real.shape) < 0.6)).astype(np.float32)
    if config.family == "recurrent":
        out["previous"] = np.pad(out["tokens"][:, :-1], ((0, 0), (1, 0)))
        out["previous_weights"] = (real & (out["positions"] > 0)).astype(np.float32)
        out["characters"] = rng.randint(1, NUM_CHARACTERS, (*real.shape, WORD_LENGTH)).astype(np.int32)
    if config.num_token_types > 1:
        out["token_types"] = rng.randint(0, config.num_token_types, real.shape).astype(np.int32)
    if config.pair_head:
        out["pair_labels"] = np.array([1, 0, 1], np.int32)
    if config.replaced_token_head:
        out["replaced"] = rng.randint(0, 2, real.shape).astype(np.int32)
    if config.family == "encoder_decoder":
        out |= {f"encoder_{key}": value for key, value in rows(ENCODER_LENGTHS).items()}
    return out


def packed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the same rows without padding, as segments 1, 2, 3 of one row."""
    out = {}
    for name in (
        "tokens",
        "positions",
        "segment_ids",
        "token_types",
        "encoder_tokens",
        "encoder_positions",
        "characters",
    ):
        if name in arrays:
            real = arrays["encoder_segment_ids" if name.startswith("encoder_") else "segment_ids"] > 0
            out[name] = arrays[name][real][None]
    for name in ("segment_ids", "encoder_segment_ids"):
        if name in arrays:
            out[name] = np.repeat(np.arange(1, 4, dtype=np.int32), arrays[name].sum(1))[None]
    return out
