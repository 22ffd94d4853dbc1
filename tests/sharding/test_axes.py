"""Tests that one file names the mesh axes, and that kernels have equal axes in their layer and in PARTITION_RULES."""

import ast
import pathlib

import flax.linen as nn
import pytest
from jax.sharding import PartitionSpec as P

import pretrainax
from pretrainax import models, zoo
from pretrainax.layers.embedding import Embedding
from pretrainax.layers.linear import Linear
from pretrainax.sharding.axes import AXES, AXIS_RULES, logical_spec
from pretrainax.sharding.param_paths import match_rules, parameter_names
from pretrainax.sharding.rules import PARTITION_RULES
from tests.support import tables

PACKAGE = pathlib.Path(pretrainax.__file__).parent
# These strings are not mesh axes: the name of a row in the run's header, Matplotlib's coordinates, and an axis of
# stacked weights.
OTHER_WORDS = {("runs/description.py", "data"), ("reporting/curves.py", "data"), ("data/sources/squad.py", "data")}
OTHER_WORDS |= {("zoo/convert.py", "expert")}
# "data" is also a path of a URL, a key of JSON, and an extra of setup.cfg.
OTHER_WORDS |= {(f"reporting/{name}.py", "data") for name in ("live_server", "runs_page")}
OTHER_WORDS |= {(f"data/{name}.py", "data") for name in ("files", "sources/hugging_face", "sources/parquet")}


# The modules of these arrays are neither Linear nor Embedding.
OTHER_ARRAYS = ("unembedding/kernel", "relative_bias/embedding", "relative_embedding/embedding", "convolution/kernel")
OTHER_ARRAYS += ("router/kernel", *(f"experts_{name}/kernel" for name in ("up", "gate", "down")))


def axes_of(preset):
    """Returns {path of a parameter: names of its axes}, as the Linear and Embedding modules declare them."""
    found = {}

    def note(call, args, kwargs, context):
        module = context.module
        if isinstance(module, (Linear, Embedding)):
            name = "kernel" if isinstance(module, Linear) else "embedding"
            found["/".join((*module.path, name))] = module.axes
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        names = parameter_names(models.abstract_params(zoo.preset(preset)))
    matrices = [name for name in names if name.endswith(("kernel", "embedding")) and not name.endswith(OTHER_ARRAYS)]
    # A generator is a separate model, and its paths do not begin with its name.
    return {name: found.get(name) or found[name.partition("/")[2]] for name in matrices}


@pytest.mark.first(4)
@pytest.mark.parametrize("preset", tables.PRESETS)
def test_a_matrix_is_made_with_the_axes_of_its_row(preset, monkeypatch):
    monkeypatch.setattr(models, "_abstract_params", {})  # The shapes from another test would prevent a new trace.
    found = axes_of(preset)
    rows = match_rules(PARTITION_RULES, dict.fromkeys(found, 0), "PARTITION_RULES")
    for name, axes in found.items():
        assert rows[name].split() == [*(["layers"] if "/blocks/" in name else []), *axes], name


def test_the_rows_name_axes_that_the_rules_know():
    assert {name for _, row in PARTITION_RULES for name in row.split()} <= AXIS_RULES.keys()


def test_a_spec_follows_the_rules():
    assert logical_spec("batch", "length") == P(("data", "pipeline", "fsdp", "expert"), "sequence")
    parameters = ("fsdp", "expert")
    assert logical_spec("layers", "d_model", "num_heads", "head_dim") == P("pipeline", parameters, "tensor", None)
    assert logical_spec(None, "vocab_size") == P(None, "tensor")


def test_a_mesh_axis_splits_one_axis_of_an_array():
    assert logical_spec("experts", "d_model", "d_ff") == P("expert", "fsdp", "tensor")


def test_an_axis_of_the_mesh_is_named_in_one_file():
    named = {
        (str(file.relative_to(PACKAGE)), node.value)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in AXES
    }
    assert {place for place, _ in named - OTHER_WORDS} == {"sharding/axes.py"}
