"""What every family's config.json goes through, on a family made up here."""

import pytest

from pretrainax.config import LearnedPositions, ModelConfig, UserError
from pretrainax.zoo.family import HuggingFace

FAMILY = HuggingFace(
    model_type="made-up",
    architecture=lambda config: "MadeUpLM" if config.masked_lm_head else "MadeUp",
    base=lambda: ModelConfig(d_model=64, d_ff=128, num_heads=4, dropout_rate=0.1, position=LearnedPositions(32)),
    fields={
        "hidden_size": "d_model",
        "act": "activation",
        "max_positions": "position.max_length",
        "heads": "num_heads",
        "key_heads": "num_kv_heads",
    },
    names=lambda config: [],
    constants={"use_cache_of_old": False},
    read=lambda json, config: setattr(config, "masked_lm_head", json["architectures"] == ["MadeUpLM"]),
)
JSON = {"model_type": "made-up", "architectures": ["MadeUp"], "hidden_size": 32, "act": "gelu_new", "max_positions": 9}


def test_fields_are_read_and_the_rest_is_the_base():
    config = FAMILY.read_config(JSON)
    assert (config.d_model, config.activation, config.position.max_length) == (32, "gelu_tanh", 9)
    assert (config.d_ff, config.dropout_rate) == (128, 0.1)
    assert FAMILY.read_config({"architectures": []}).position.max_length == 32  # the base is a fresh one


def test_what_is_written_is_read_back():
    config = ModelConfig(
        d_model=48, d_ff=128, num_heads=4, activation="relu", masked_lm_head=True, position=LearnedPositions(7)
    )
    json = FAMILY.write_config(config)
    assert json == {
        "model_type": "made-up",
        "architectures": ["MadeUpLM"],
        "use_cache_of_old": False,
        "hidden_size": 48,
        "act": "relu",
        "max_positions": 7,
        "heads": 4,
        "key_heads": None,
    }


def test_key_heads_that_are_all_heads_may_be_written_either_way():
    config = ModelConfig(d_model=64, d_ff=128, num_heads=4, num_kv_heads=4, position=LearnedPositions(32))
    assert FAMILY.write_config(config)["key_heads"] == 4


def test_what_would_compute_something_else_is_refused():
    with pytest.raises(UserError, match="use_cache_of_old True; only False is known for 'made-up'"):
        FAMILY.read_config(JSON | {"use_cache_of_old": True})
    with pytest.raises(UserError, match="act 'swoosh'; known: gelu, gelu_fast"):
        FAMILY.read_config(JSON | {"act": "swoosh"})


def test_what_theirs_cannot_say_is_refused_by_name():
    config = ModelConfig(d_model=64, d_ff=256, num_heads=4, norm="rms", position=LearnedPositions(32))
    with pytest.raises(UserError, match=r"no way to say config.model.d_ff=256, config.model.norm='rms'"):
        FAMILY.write_config(config)


def test_training_fields_may_differ():
    config = ModelConfig(d_model=64, d_ff=128, num_heads=4, dropout_rate=0.0, position=LearnedPositions(32))
    assert FAMILY.write_config(config)
