"""What a device keeps for the backward, by the attention that its layers choose."""

import pytest

from pretrainax.config import LearnedPositions, UserError
from pretrainax.planning.activations import saved_residuals
from pretrainax.sharding.mesh import AXES
from tests.support import tiny

ONE = dict.fromkeys(AXES, 1)


def windowed_t5(attention="auto"):
    """An encoder-decoder whose decoder cuDNN takes, and whose encoder, with its windows of two sides, it does not."""
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


@pytest.mark.parametrize("attention, reason", [("cudnn", "has causal windows only"), ("tpu_flash", "needs a TPU")])
def test_a_plan_with_an_attention_that_cannot_run_is_refused(attention, reason):
    with pytest.raises(UserError, match=reason):
        saved_residuals(windowed_t5(attention), ONE, "gpu")
