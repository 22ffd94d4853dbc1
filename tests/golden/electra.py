"""Defines ELECTRA's two encoders as separate classes of transformers, and as one model with a batch."""

import copy
import dataclasses

import numpy as np

from pretrainax.config import Generator, LearnedPositions
from pretrainax.models.electra import discriminator_config, generator_config
from pretrainax.zoo.electra import FAMILY, electra
from tests.golden.case import VOCABULARY, Case


def tiny(variant: str = "small", **changes):
    """Returns a preset at test size, with its generator."""
    sizes = dict(vocab_size=VOCABULARY, num_layers=2, d_model=32, d_ff=64, num_heads=4, position=LearnedPositions(20))
    generator = Generator(num_layers=2, d_model=12, d_ff=24, num_heads=2)
    config = dataclasses.replace(copy.deepcopy(electra(variant)), **sizes, generator=generator)
    config.embedding_dim = config.embedding_dim and 16
    return dataclasses.replace(config, **changes)


CASES = {
    "electra_small": Case(discriminator_config(tiny("small")), FAMILY),
    "electra_base": Case(discriminator_config(tiny("base")), FAMILY),
    "electra_small_generator": Case(generator_config(tiny("small")), FAMILY),
}


MASK, ROWS, LENGTH, SLOTS = 2, 8, 12, 4


def joint(sharing: str = "all", **changes):
    """Returns a tiny model of both encoders, without dropout."""
    config = tiny("small", **{"dropout_rate": 0.0, "attention_dropout_rate": 0.0} | changes)
    config.generator.share_embeddings = sharing
    return config


def masked_batch(rows: int = ROWS) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the originals, and rows of different lengths with 1 to 4 targets; one target is unchanged, one random."""
    rng = np.random.default_rng(0)
    originals = rng.integers(5, VOCABULARY, (rows, LENGTH)).astype(np.int32)
    lengths = np.arange(rows) % 5 + LENGTH - 4
    real = np.arange(LENGTH)[None] < lengths[:, None]
    originals = np.where(real, originals, 0)
    batch = {
        "tokens": originals.copy(),
        "segment_ids": real.astype(np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), real.shape),
        "token_types": rng.integers(0, 2, real.shape, dtype=np.int32),
        "masked_positions": np.zeros((rows, SLOTS), np.int32),
        "targets": np.zeros((rows, SLOTS), np.int32),
        "loss_weights": np.zeros((rows, SLOTS), np.float32),
    }
    for row in range(rows):
        places = np.sort(rng.choice(np.arange(1, lengths[row]), row % SLOTS + 1, replace=False))
        used = np.arange(len(places))
        batch["masked_positions"][row, used], batch["loss_weights"][row, used] = places, 1.0
        batch["targets"][row, used] = originals[row, places]
        seen = np.where(used == 1, originals[row, places], np.where(used == 2, 5, MASK))
        batch["tokens"][row, places] = seen
    return originals, batch


def everywhere(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the batch with targets and loss weights at each token, and without masked_positions."""
    spread = {name: np.zeros(batch["tokens"].shape, batch[name].dtype) for name in ("targets", "loss_weights")}
    for row, (places, used) in enumerate(zip(batch["masked_positions"], batch["loss_weights"] > 0, strict=True)):
        for name in spread:
            spread[name][row, places[used]] = batch[name][row, used]
    return {name: x for name, x in batch.items() if name != "masked_positions"} | spread
