"""Tests the residuals that a device saves for the backward, depending on the attention kernel of the layers."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pretrainax.config import DisentangledPositions, LearnedPositions, UserError
from pretrainax.config.config_file import config_names, read_config_file
from pretrainax.config.validation import complete
from pretrainax.planning import activations
from pretrainax.planning.activations import saved_residuals
from pretrainax.planning.search import estimate_run
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import AXES
from tests.support import tiny

ONE = dict.fromkeys(AXES, 1)


def windowed_t5(attention="auto"):
    """Returns an encoder-decoder: cuDNN supports the decoder, but not the two-sided windows of the encoder."""
    experiment = tiny.get_config("t5")
    model = experiment.model
    model.num_layers, model.head_dim, model.layer_pattern, model.window = 1, 64, ("local",), 128
    model.position, experiment.data.sequence_length = LearnedPositions(512), 512
    experiment.train.attention = attention
    return experiment


@pytest.mark.parametrize("attention, logits", [("auto", False), ("xla", True)])
def test_logits_of_attention_are_counted_where_no_layer_runs_cudnn(attention, logits):
    shapes = [x.shape for x in saved_residuals(windowed_t5(attention), ONE, "gpu")]
    assert any(shape[-2:] == (512, 512) for shape in shapes) == logits


def test_a_block_of_deberta_keeps_its_relative_logits_but_not_the_products_before_them():
    experiment = tiny.get_config("bert")
    model, length = experiment.model, experiment.data.sequence_length
    model.num_layers, model.position = 1, DisentangledPositions(num_buckets=8, max_distance=32)
    residuals = [x for x in saved_residuals(experiment, ONE, "gpu") if x.module.endswith("self_attention")]
    (rows,) = [x.shape[1] for x in residuals if x.shape[-3:] == (model.num_heads, length, length)]
    # These shapes would be the products of a block of `length` queries with the distances in its window.
    assert not [x for x in residuals if x.shape[-2:] == (rows * length, 2 * length)]


@pytest.mark.parametrize("attention, reason", [("cudnn", "has causal windows only"), ("tpu_flash", "needs a TPU")])
def test_a_plan_with_an_attention_that_cannot_run_is_refused(attention, reason):
    with pytest.raises(UserError, match=reason):
        saved_residuals(windowed_t5(attention), ONE, "gpu")


@pytest.fixture
def no_cudnn(monkeypatch):
    """Simulates the plain wheel, which installs no GPU plugin."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)
    activations._trace.cache_clear()
    activations._attention_specs.cache_clear()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_plan_for_a_gpu_needs_no_cudnn(dropout, no_cudnn):
    """Tests dropout too, because training then uses a different attention kernel than the initialization."""
    experiment = tiny.get_config("bert")
    experiment.model.head_dim, experiment.data.sequence_length = 64, 128
    experiment.model.position = LearnedPositions(128)
    experiment.model.attention_dropout_rate = dropout
    assert saved_residuals(experiment, ONE, "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", config_names())
def test_each_config_is_planned_without_cudnn(name, no_cudnn):
    experiment = read_config_file(name)
    complete(experiment)
    assert estimate_run(experiment, Topology.parse("h100:8")).roofline.seconds > 0
