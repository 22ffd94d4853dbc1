"""Compares `tiled` attention in Pallas' interpreter with `xla`, and compiles its kernels for GPUs and TPUs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig, UserError
from pretrainax.layers import tiled_attention, tiled_kernels, tiled_layout
from pretrainax.layers.attention import Mask, attention
from pretrainax.layers.attention_spec import Weights
from pretrainax.layers.dropout import KeyedDropout
from pretrainax.layers.hashed_keys import hashed_key
from pretrainax.planning.topologies import _GPU_VALUES, Topology
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import make_mesh
from tests.support.attending import arrays, assert_close, packed_ids, segments

FEATURES = "causal", "window", "segments", "prefix", "cap", "sinks", "dropout", "bias", "row bias"
TOGETHER = "causal", "window", "segments", "cap", "sinks", "dropout", "bias"
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if pair != ("bias", "row bias")]
KEY = jax.random.key_data(hashed_key(jax.random.key(5)))


def inputs(features, batch=2, lengths=(40, 40), heads=(4, 2), widths=(8, 8), dtype=jnp.float32):
    """Returns the trained arrays of an attention call, and the arrays of its mask."""
    t, s = lengths
    q, k, v, bias = arrays(batch, t, s, *heads, widths[0], "bias" in features, dtype)
    trained = {"q": q, "k": k, "v": v[..., : widths[1]], "bias": bias}
    if "row bias" in features:
        trained["bias"] = jnp.sin(jnp.arange(batch * heads[0] * t * s, dtype=jnp.float32)).reshape(
            batch, heads[0], t, s
        )
    trained["sinks"] = jnp.linspace(-1.0, 1.0, heads[0]) if "sinks" in features else None
    ids = {"query_segment_ids": packed_ids(batch, t), "key_segment_ids": packed_ids(batch, s)}
    prefix = jnp.broadcast_to(jnp.arange(s) % 7 == 2, (batch, s)).astype(jnp.int32)
    return trained, (ids if "segments" in features else {}) | ({"prefix": prefix} if "prefix" in features else {})


def output_and_gradients(features, trained, mask_arrays, key=KEY, implementation="tiled"):
    causal = "causal" in features or "prefix" in features
    mask = Mask(causal, window=9 if "window" in features else None, **mask_arrays)
    drop = KeyedDropout(0.3, jax.random.wrap_key_data(key, impl=jax.random.key_impl(hashed_key(jax.random.key(0)))))

    def out(trained):
        arrays = dict(trained)
        weights = Weights(
            drop if "dropout" in features else None, arrays.pop("sinks"), 2.0 if "cap" in features else None
        )
        return attention(**arrays, mask=mask, scale=0.3, implementation=implementation, weights=weights)

    result, backward = jax.vjp(out, trained)
    return result, backward(jnp.cos(jnp.arange(result.size)).reshape(result.shape).astype(result.dtype))[0]


def assert_equals_xla(features, atol, **sizes):
    run = jax.jit(output_and_gradients, static_argnums=0, static_argnames="implementation")
    arrays = inputs(features, **sizes)
    assert_close(run(features, *arrays), run(features, *arrays, implementation="xla"), atol)


@pytest.mark.parametrize("features", [TOGETHER, ("prefix", "segments", "row bias")], ids=" and ".join)
def test_features_together_are_those_of_xla(features):
    assert_equals_xla(features, 1e-5, lengths=(29, 29), heads=(3, 1))  # float32 sums of 29 terms near 1, reordered


@pytest.mark.slow
@pytest.mark.parametrize(
    "features", [(), *((one,) for one in FEATURES), *PAIRS], ids=lambda x: " and ".join(x) or "none"
)
def test_values_and_gradients_are_those_of_xla(features):
    assert_equals_xla(features, 1e-5)  # float32 sums of 40 terms near 1, in another order


@pytest.mark.slow
@pytest.mark.parametrize("features", [(), ("segments", "dropout", "bias")], ids=["none", "features"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"lengths": (1, 1), "heads": (1, 1), "batch": 1},
        {"lengths": (1, 29)},
        {"lengths": (45, 29), "heads": (1, 1)},
        {"lengths": (29, 45), "heads": (3, 3)},
        {"lengths": (507, 507), "heads": (3, 1), "batch": 1},
        {"widths": (24, 16)},
    ],
    ids=str,
)
def test_odd_shapes_are_those_of_xla(features, sizes):
    assert_equals_xla(features, 5e-5, **sizes)  # float32 sums of up to 507 terms near 1, in another order


@pytest.mark.slow
@pytest.mark.parametrize("features", [TOGETHER, ("prefix", "segments", "row bias")], ids=" and ".join)
def test_blocks_of_a_tpu_give_what_xla_gives(features, interpreted, monkeypatch):
    for module in (tiled_attention, tiled_kernels, tiled_layout):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    # The row has three tiles of 128. float32 sums of 300 terms near 1 in another order.
    assert_equals_xla(features, 5e-5, lengths=(300, 300), heads=(4, 2), widths=(12, 8))


def test_a_query_without_a_key_has_the_output_0_and_no_gradient():
    trained, _ = inputs((), batch=1, lengths=(3, 3))
    ids = {"query_segment_ids": segments([1, 2, 3]), "key_segment_ids": segments([1, 1, 3])}
    out, gradients = jax.jit(output_and_gradients, static_argnums=0)((), trained, ids)
    assert np.isfinite(out).all() and not np.asarray(out)[:, 1].any()
    assert not np.asarray(gradients["q"])[:, 1].any() and np.asarray(gradients["v"]).any()


def test_products_of_bfloat16_are_summed_in_float32():
    trained, masks = inputs((), dtype=jnp.bfloat16)
    out, _ = jax.jit(output_and_gradients, static_argnums=0)((), trained, masks)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), trained)
    expected, _ = output_and_gradients((), exact, masks, implementation="xla")
    assert out.dtype == jnp.bfloat16
    # The weights and the output, which are below 2, are rounded to 8 bits.
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2**-7, rtol=0)


def test_eight_devices_drop_the_weights_that_one_does():
    features = "dropout", "sinks", "bias"
    arrays = inputs(features, batch=4)
    run = jax.jit(output_and_gradients, static_argnums=0)
    expected = jax.tree.map(np.asarray, run(features, *arrays))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        trained = arrays[0] | {
            name: jax.device_put(arrays[0][name], NamedSharding(mesh, P(BATCH_AXES, None, "tensor"))) for name in "qkv"
        }
        found = run(features, trained, arrays[1])
    assert_close(jax.tree.map(np.asarray, found), expected, 1e-5)  # float32 sums of 4 rows in another order


@pytest.mark.aot
@pytest.mark.parametrize(
    "features, sizes",
    [
        pytest.param(("causal", "dropout"), {}),
        *(pytest.param((one,), {}, marks=pytest.mark.slow) for one in FEATURES),
        pytest.param(TOGETHER, {"lengths": (507, 507)}, marks=pytest.mark.slow),
        pytest.param(("causal",), {"widths": (192, 128)}, marks=pytest.mark.slow),
        pytest.param(TOGETHER, {"widths": (256, 256), "heads": (4, 1)}, marks=pytest.mark.slow),
        pytest.param(("window",), {"dtype": jnp.float32, "widths": (256, 256)}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_h100(features, sizes):
    assert_compiles("h100:1", "__gpu$xla.gpu.triton", features, sizes)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("widths, dtype", [((128, 128), jnp.bfloat16), ((256, 256), jnp.float32)], ids=str)
def test_kernels_fit_the_shared_memory_of_an_l4(widths, dtype, monkeypatch):
    monkeypatch.setattr(tiled_attention, "gpu_capability", lambda: (8, 9))
    changed = {"capability": "major: 8 minor: 9", "cores": 58, "shared": 101_376, "shared_core": 102_400}
    monkeypatch.setitem(_GPU_VALUES, "a100", _GPU_VALUES["a100"] | changed)
    assert_compiles("a100:1", "__gpu$xla.gpu.triton", TOGETHER, {"widths": widths, "dtype": dtype})


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1", "tpu7x:1x1x1"])
@pytest.mark.parametrize(
    "features, sizes",
    [
        (TOGETHER, {"lengths": (507, 507)}),
        (("prefix", "segments", "row bias"), {}),
        (("causal", "dropout"), {"widths": (256, 256), "heads": (4, 1)}),
        (("causal",), {"widths": (192, 128)}),
    ],
)
def test_kernels_compile_for_tpus(topology, features, sizes):
    assert_compiles(topology, 'custom_call_target="tpu_custom_call"', features, sizes)


def assert_compiles(topology, call, features, sizes):
    try:
        devices = Topology.parse(topology).devices()[:1]
    except UserError as e:
        pytest.skip(str(e))
    sizes = {"batch": 2, "lengths": (256, 256), "widths": (64, 64), "dtype": jnp.bfloat16} | sizes
    with jax.set_mesh(make_mesh(MeshConfig(data=1), devices)):
        shapes = jax.eval_shape(lambda: (*inputs(features, **sizes), KEY))
        text = jax.jit(output_and_gradients, static_argnums=0).lower(features, *shapes).compile().as_text()
    # One kernel each for the output, the gradient of q, the gradients of k and v, and the gradient of a shared bias.
    assert text.count(call) == (4 if "bias" in features else 3)
