"""Compares attention on a mesh that splits the sequence with the reference on one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import MeshConfig, UserError
from pretrainax.layers.attention import Mask
from pretrainax.sharding.mesh import make_mesh
from tests.support.attending import arrays, assert_close, choose, output_and_gradients, packed_ids, segments

IDS = packed_ids(4, 64)
ONE_TEXT = jnp.asarray(np.arange(64) < np.array([[64], [30], [1], [50]]), jnp.int32)
PREFIX = jnp.asarray(np.random.default_rng(1).integers(0, 2, (4, 64)), jnp.int32)
CASES = {  # (lengths, rows of the bias, mask, logit cap)
    "causal": ((64, 64), 0, Mask(True), None),
    "packed": ((64, 64), 0, Mask(True, IDS, IDS), None),
    "one text a row": ((64, 64), 0, Mask(True, ONE_TEXT, ONE_TEXT, single_segment=True), None),
    "encoder with a window and a cap": ((64, 64), 0, Mask(False, IDS, IDS, window=12), 2.0),
    "windowed layer with a prefix": ((64, 64), 0, Mask(True, IDS, IDS, 12, jnp.asarray(True), PREFIX), None),
    "global layer with a prefix": ((64, 64), 0, Mask(True, IDS, IDS, 12, jnp.asarray(False), PREFIX), None),
    "relative positions": ((64, 64), 1, Mask(True, IDS, IDS), None),
    "disentangled positions": ((64, 64), 4, Mask(False, IDS, IDS), None),
    "cross": ((14, 64), 0, Mask(False, jnp.ones((4, 14), jnp.int32), jnp.minimum(IDS, 1)), None),
    "lengths that do not divide": ((30, 30), 1, Mask(True), None),
}
MESHES = {"2 sequence": dict(data=2, sequence=2, tensor=2), "4 sequence": dict(data=1, fsdp=2, sequence=4)}


def case(name):
    (t, s), bias_rows, mask, cap = CASES[name]
    args = arrays(4, t, s, 4, 2, 8, has_bias=bias_rows > 0)
    if bias_rows > 1:
        args = *args[:3], jnp.asarray(np.random.default_rng(2).normal(size=(bias_rows, 4, t, s)), jnp.float32)
    return args, mask, cap


@pytest.mark.first(6)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_the_ring_gives_the_output_and_gradients_of_one_device(name, mesh):
    args, mask, cap = case(name)
    expected = output_and_gradients(args, mask, logit_cap=cap)
    with jax.set_mesh(make_mesh(MeshConfig(**MESHES[mesh]))):
        got = output_and_gradients(args, mask, logit_cap=cap)
    assert_close(got, expected, 2e-6)  # float32 sums of <= 64 terms near 1, in another order


@pytest.mark.slow
def test_the_ring_of_bfloat16_is_near_that_of_one_device():
    args, mask = arrays(4, 64, 64, 4, 2, 8, dtype=jnp.bfloat16), Mask(True, IDS, IDS)
    expected = output_and_gradients(args, mask)
    with jax.set_mesh(make_mesh(MeshConfig(**MESHES["4 sequence"]))):
        got = output_and_gradients(args, mask)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
    # The largest values are near 4. Each side rounds them to 2^-9 at different places.
    assert_close(*jax.tree.map(lambda x: x.astype(jnp.float32), (got, expected)), 0.03)


def test_a_query_that_sees_no_key_is_finite_and_so_are_gradients():
    mask = Mask(False, segments([1] * 8 + [0] * 8), segments([1] * 16))
    with jax.set_mesh(make_mesh(MeshConfig(data=1, sequence=8))):
        got = output_and_gradients(arrays(1, 16, 16, 2, 2, 8), mask)
    chex.assert_tree_all_finite(got)


def test_keys_and_values_alone_go_around_the_ring():
    args, mask, _ = case("packed")
    with jax.set_mesh(make_mesh(MeshConfig(**MESHES["4 sequence"]))):
        trace = str(jax.make_jaxpr(functools.partial(output_and_gradients, mask=mask))(args))
    sent = [line.split(":")[1].split(" =")[0] for line in trace.splitlines() if "ppermute" in line]
    part = "f32[2,16,2,8]"  # shape of k or v on a device: half of the rows, a quarter of the sequence
    # The forward sends k, v and ids. The backward sends them again, and sends the gradients of k and v. At the end, the
    # gradients take one more hop to their own device.
    assert sorted(set(sent)) == [part, "i32[2,16]"]
    assert (sent.count(part), sent.count("i32[2,16]")) == (2 + 2 + 2 + 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, mask, has_bias",
    [
        ("tpu_splash", Mask(True, packed_ids(2, 256), packed_ids(2, 256)), False),
        ("tpu_splash", Mask(True, packed_ids(2, 256), packed_ids(2, 256), window=100), False),
        ("tpu_splash", Mask(False, packed_ids(2, 256), packed_ids(2, 256)), False),
        ("tpu_splash", Mask(True, *[jnp.ones((2, 256), jnp.int32)] * 2, single_segment=True), False),
        ("tpu_flash", Mask(False, packed_ids(2, 256), packed_ids(2, 256)), True),
    ],
    ids=["causal splash", "window", "splash", "one text a row", "flash with a bias"],
)
def test_kernels_of_tpus_get_all_keys_for_their_part_of_the_queries(interpreted, implementation, mask, has_bias):
    args = arrays(2, 256, 256, 2, 1, 64, has_bias)
    expected = output_and_gradients(args, mask)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, sequence=2), jax.devices()[:4])):
        got = output_and_gradients(args, mask, implementation)
    assert_close(got, expected, 3e-5)  # float32 sums of <= 256 terms near 1, in another order


@pytest.mark.parametrize("platform, name", [("tpu", "tpu_splash"), ("gpu", "tiled")])
def test_a_kernel_that_needs_whole_lengths_is_announced(platform, name):
    implementation, warning = choose("auto", platform, query_length=510, key_length=510, sequence=4)
    assert implementation == "xla" and f"{name!r} needs" in warning and "config.mesh.sequence" in warning


def test_a_kernel_that_cannot_run_is_refused():
    with pytest.raises(UserError, match="tpu_flash.* has no causal mask of a part of a row"):
        choose("tpu_flash", "tpu", query_length=512, key_length=512, sequence=4)


def test_splash_takes_lengths_of_whole_registers():
    assert choose("auto", "tpu", query_length=512, key_length=512, sequence=4) == ("tpu_splash", None)
