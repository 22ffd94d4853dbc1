import pytest

from pretrainax.sharding.param_paths import is_stacked, stack_of


@pytest.mark.parametrize(
    "path, stack",
    [
        ("encoder/blocks/mlp/up/kernel", "encoder/blocks"),
        ("generator/encoder/blocks/mlp_norm/scale", "generator/encoder/blocks"),
        ("blocks/gate", "blocks"),
        ("encoder/blocks", "encoder/blocks"),
        ("encoder/final_norm/scale", None),
        ("stumbling_blocks/kernel", None),
    ],
)
def test_a_path_tells_its_stack(path, stack):
    assert stack_of(path) == stack and is_stacked(path) == (stack is not None)
