import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pretrainax import models
from pretrainax.config import LearnedPositions, ModelConfig, Position, UserError
from pretrainax.layers.compute import Compute
from pretrainax.layers.positions import Positions, PositionTerms, base, positions_for, register_positions


@dataclasses.dataclass
class NoPositions(Position):
    """A kind of positions without registered behavior."""


def test_a_kind_without_a_behaviour_is_named():
    with pytest.raises(UserError, match="config.model.position is NoPositions, .* registered: .*LearnedPositions"):
        positions_for(ModelConfig(position=NoPositions()))


def test_a_kind_of_its_own_is_one_class(monkeypatch):
    monkeypatch.setattr(base, "_ENCODINGS", dict(base._ENCODINGS))

    @register_positions(NoPositions)
    class Nothing(Positions):
        pass

    config = ModelConfig(vocab_size=7, num_layers=1, d_model=8, d_ff=8, num_heads=2, position=NoPositions())
    assert "position_embedding" not in models.abstract_params(config)
    batch = {name: jnp.ones((1, 3), jnp.int32) for name in ("tokens", "segment_ids", "positions")}
    models.build(config, Compute()).init(jax.random.key(0), batch, deterministic=True)


def test_positions_that_only_embed_do_nothing_in_attention():
    config = ModelConfig(position=LearnedPositions(4))
    terms = positions_for(config).terms(None, causal=True, dtype=jnp.float32)
    assert type(terms) is PositionTerms and not jax.tree.leaves(terms)
    assert positions_for(config).flops(8, 8) == 0
