"""Tests the stages of a pipeline by hand, and the one-line errors for settings that stages do not support."""

import pytest

from pretrainax.adapt import LoRA
from pretrainax.config import Classify, DisentangledPositions, MixtureOfExperts, MultiTokenPrediction, UserError
from pretrainax.optim import Sophia
from pretrainax.sharding.arrays import check_mesh
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.stages import Stages, describe_stages, pipeline_stages
from tests.support import tiny

ONE = dict.fromkeys(AXES, 1)


def config(rows=32, accumulate=1, parts=0, schedule="gpipe", **model):
    """Returns the config of a decoder with 4 layers."""
    experiment = tiny.get_config("gpt")
    for name, value in ({"num_layers": 4} | model).items():
        setattr(experiment.model, name, value)
    train = experiment.train
    train.global_batch_size, train.accumulate, train.pipeline_microbatches = rows, accumulate, parts
    train.pipeline_schedule = schedule
    return experiment


def test_without_a_pipeline_there_is_one_part_of_all_rows_of_a_device():
    stages = pipeline_stages(config(accumulate=2), ONE | {"data": 2, "fsdp": 2})
    assert stages == Stages(1, 1, 4) and stages.relative_layer_time == 1 and stages.bubble == 0
    assert describe_stages(config(), ONE) == ""


def test_parts_are_of_the_rows_that_the_stages_share():
    sizes = ONE | {"data": 2, "pipeline": 4}
    assert pipeline_stages(config(), sizes) == Stages(4, 16, 1)
    stages = pipeline_stages(config(parts=8), sizes)
    assert stages == Stages(4, 8, 2) and stages.ticks == 11
    assert stages.bubble == pytest.approx(3 / 11) and stages.relative_layer_time == pytest.approx(11 / 8)
    assert describe_stages(config(parts=8), sizes) == (
        "4 stages of 1 of 4 layers, 8 parts of 2 rows per device; the bubble is 27% of the time of the layers"
    )


@pytest.mark.parametrize("remat, forwards", [("none", 1), ("dots", 1), ("block", 2)])
def test_parts_that_go_back_one_by_one_have_the_same_bubble_and_one_forward_more(remat, forwards):
    sizes, experiment = ONE | {"data": 2, "pipeline": 4}, config(parts=8, schedule="1f1b")
    experiment.train.remat = remat
    stages = pipeline_stages(experiment, sizes)
    assert (stages.ticks, stages.bubble, stages.compute_factor) == (11, 3 / 11, 11 / 8)
    assert stages.relative_layer_time == pytest.approx(11 / 8 * (forwards + 1 + 2) / (forwards + 2))
    assert describe_stages(experiment, sizes) == (
        "4 stages of 1 of 4 layers, 8 parts of 2 rows per device, 1F1B schedule; "
        "the bubble is 27% of the time of the layers"
    )
    assert pipeline_stages(experiment, ONE | {"data": 8}).relative_layer_time == 1


def test_an_optimizer_that_differentiates_gradients_is_named():
    experiment = config(schedule="1f1b")
    experiment.optimizer = Sophia()
    with pytest.raises(UserError, match="is '1f1b', and config.optimizer is Sophia, .*: set it to 'gpipe'"):
        check_mesh(experiment, abstract_mesh(ONE | {"pipeline": 2}, "cpu"))


@pytest.mark.parametrize(
    "changes, sizes, said",
    [
        (
            {"num_layers": 6},
            {"pipeline": 4},
            "config.mesh.pipeline is 4, and does not divide .*num_layers 6: set it to",
        ),
        ({"family": "encoder"}, {"pipeline": 2}, "is 2, and config.model.family is 'encoder'; .* set it to 1, and con"),
        ({"share_layers": True}, {"pipeline": 2}, "config.model.share_layers is set; the stages of a pipeline are"),
        ({"experts": MixtureOfExperts(num_experts=4, top_k=2)}, {"pipeline": 2}, "config.model.experts is set; the"),
        ({"position": DisentangledPositions()}, {"pipeline": 2}, "config.model.position is DisentangledPositions; the"),
        ({"multi_token": MultiTokenPrediction()}, {"pipeline": 2}, "config.model.multi_token is set; the stages"),
        (
            {"parts": 5},
            {"pipeline": 2, "data": 2},
            "config.train.pipeline_microbatches is 5, and 16 rows .* set it to a div",
        ),
        (
            {"schedule": "1f1b"},
            {"pipeline": 2, "sequence": 2},
            "config.train.pipeline_schedule is '1f1b', and config.mesh.sequence is 2, .* to 'gpipe', or config.mesh",
        ),
        (
            {"schedule": "1f1b", "head": Classify()},
            {"pipeline": 2},
            "config.train.pipeline_schedule is '1f1b', and config.model.head is set, .*: set it to 'gpipe'",
        ),
        ({"rows": 6}, {"pipeline": 4}, "config.train.global_batch_size 6 is not a multiple of 4: .*config.mesh.pipeli"),
    ],
)
def test_what_cannot_be_on_stages_is_named(changes, sizes, said):
    with pytest.raises(UserError, match=said):
        check_mesh(config(**changes), abstract_mesh(ONE | sizes, "cpu"))


def test_a_tuning_is_named():
    experiment = config()
    experiment.tuning = LoRA()
    with pytest.raises(UserError, match="config.mesh.pipeline is 2, and config.tuning is set"):
        check_mesh(experiment, abstract_mesh(ONE | {"pipeline": 2}, "cpu"))


def test_8_bit_products_are_named():
    experiment = config()
    experiment.train.products = "fp8"
    with pytest.raises(UserError, match="config.mesh.pipeline is 2, and config.train.products is 'fp8', which a pipel"):
        check_mesh(experiment, abstract_mesh(ONE | {"pipeline": 2}, "cpu"))
