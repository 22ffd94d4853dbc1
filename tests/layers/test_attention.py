import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax import models
from pretrainax.config import MeshConfig, ModelConfig, RotaryPositions, UserError
from pretrainax.layers.attention import Mask, choose_implementation
from pretrainax.layers.compute import Compute
from pretrainax.sharding.mesh import make_mesh
from tests.support.attending import arrays, output_and_gradients, packed_ids, run, segments

# --- the mask ------------------------------------------------------------------------------------------------------


def test_causal_mask_by_hand():
    assert Mask(causal=True).array(3, 4).astype(int).tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]]


def test_segment_mask_by_hand():
    mask = Mask(False, segments([1, 1, 2, 0]), segments([1, 2, 2, 0, 0]))
    assert mask.array(4, 5).astype(int).tolist() == [
        [[[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]
    ]


def test_causal_segment_mask_by_hand():
    ids = segments([1, 1, 2, 2], [1, 1, 1, 0])
    assert Mask(True, ids, ids).array(4, 4).astype(int).tolist() == [
        [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]],
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]],
    ]


def test_causal_window_by_hand():
    allowed = [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]]]
    assert Mask(True, window=2).array(4, 4).astype(int).tolist() == allowed


def test_two_sided_window_by_hand():
    allowed = [[[[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]]]
    assert Mask(False, window=2).array(4, 4).astype(int).tolist() == allowed


def test_a_window_may_hold_or_not():
    for holds in (True, False):
        mask = Mask(True, window=2, windowed=jnp.asarray(holds))
        np.testing.assert_array_equal(mask.array(4, 4), Mask(True, window=2 if holds else None).array(4, 4))


PACKED = dict(query_segment_ids=segments([1, 1, 1, 2, 2, 0]), key_segment_ids=segments([1, 1, 1, 2, 2, 0]))


def test_prefix_mask_by_hand():
    mask = Mask(True, prefix=segments([1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]))
    assert mask.array(4, 4).astype(int).tolist() == [
        [[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]],
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]],
        [[[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]],
    ]


def test_a_prefix_is_that_of_its_segment():
    mask = Mask(True, **PACKED, prefix=segments([1, 1, 0, 1, 1, 0]))
    assert mask.array(6, 6).astype(int).tolist() == [
        [
            [
                [1, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 0, 0, 1],
            ]
        ]
    ]


def test_a_window_looks_as_far_ahead_into_a_prefix_as_back():
    mask = Mask(True, window=2, prefix=segments([1, 1, 1, 0, 0]))
    assert mask.array(5, 5).astype(int).tolist() == [
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]]
    ]
    for holds in (True, False):
        other = mask.replace(windowed=jnp.asarray(holds))
        np.testing.assert_array_equal(other.array(5, 5), mask.replace(window=2 if holds else None).array(5, 5))


def test_a_mask_without_a_prefix_does_no_more_than_before():
    trace = str(jax.make_jaxpr(lambda ids: Mask(True, ids, ids).array(6, 6))(PACKED["query_segment_ids"]))
    assert " or " not in trace and " gt " not in trace


def test_mask_without_conditions_allows_all():
    assert Mask().array(2, 3).all()


# --- the reference -------------------------------------------------------------------------------------------------


def by_loops(q, k, v, bias, allowed, scale, logit_cap=None):
    """Attention as its definition says, one query at a time in float64."""
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        logits = scale * np.asarray(k, np.float64)[b, :, g] @ np.asarray(q, np.float64)[b, t, h]
        logits = logits if logit_cap is None else logit_cap * np.tanh(logits / logit_cap)
        logits = logits + (0 if bias is None else np.asarray(bias)[0, h, t])
        weights = np.where(np.asarray(allowed)[b, 0, t], np.exp(logits), 0)
        out[b, t, h] = weights @ np.asarray(v, np.float64)[b, :, g] / weights.sum()
    return out


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("key_heads", (4, 2, 1))
def test_reference_is_the_definition(key_heads, has_bias):
    args = arrays(2, 5, 5, 4, key_heads, 8, has_bias)
    ids = segments([1, 1, 1, 2, 2], [1, 1, 1, 1, 0])
    mask = Mask(True, ids, ids)
    expected = by_loops(*args, mask.array(5, 5), 0.3)
    np.testing.assert_allclose(run(*args, mask), expected, atol=2e-6)  # float32 sums of 8 and 5 terms near 1


def test_cross_attention_takes_keys_of_another_length():
    args = arrays(1, 3, 6, 2, 2, 8)
    mask = Mask(False, segments([1, 1, 1]), segments([1, 1, 1, 1, 0, 0]))
    expected = by_loops(*args, mask.array(3, 6), 0.3)
    np.testing.assert_allclose(run(*args, mask), expected, atol=2e-6)  # float32 sums of 8 and 6 terms near 1


@pytest.mark.parametrize("causal", (True, False))
def test_reference_with_a_window_and_a_cap_is_the_definition(causal):
    args = arrays(2, 7, 7, 4, 2, 8)
    ids = segments([1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 1, 0])
    mask = Mask(causal, ids, ids, window=4)
    expected = by_loops(*args, mask.array(7, 7), 0.3, logit_cap=0.5)
    np.testing.assert_allclose(run(*args, mask, logit_cap=0.5), expected, atol=2e-6)  # float32 sums of 8 and 5 terms


def test_reference_with_a_prefix_is_the_definition():
    args = arrays(1, 6, 6, 4, 2, 8)
    mask = Mask(True, **PACKED, window=2, prefix=segments([1, 1, 0, 1, 1, 0]))
    expected = by_loops(*args, mask.array(6, 6), 0.3)
    np.testing.assert_allclose(run(*args, mask), expected, atol=2e-6)  # float32 sums of 8 and 3 terms near 1


@pytest.mark.parametrize("prefix", [None, segments([1, 1, 0, 1, 1, 0])], ids=["causal", "prefix"])
def test_what_the_mask_forbids_has_no_influence(prefix):
    q, k, v, _ = arrays(1, 6, 6, 2, 2, 8)
    mask = Mask(True, **PACKED, prefix=prefix)
    before = run(q, k, v, None, mask)
    forbidden = ~np.asarray(mask.array(6, 6))[0, 0]
    for s in range(6):
        after = run(q, k.at[:, s].set(50.0), v.at[:, s].set(50.0), None, mask)
        assert np.array_equal(before[:, forbidden[:, s]], after[:, forbidden[:, s]])
        assert not np.isclose(before[:, ~forbidden[:, s]], after[:, ~forbidden[:, s]]).all(-1).any()  # it is seen


DECODER = ModelConfig(
    family="decoder",
    layer_pattern=("local", "global"),
    window=2,
    position=RotaryPositions(16),
    init_stddev=0.5,  # so that attention is not uniform
    **dict(vocab_size=50, num_layers=2, d_model=16, d_ff=32, num_heads=4, num_kv_heads=2),
)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one device", "8 devices"])
def test_of_a_decoder_all_see_the_prefix_and_none_what_comes_after_it(mesh):
    rows = dict(segment_ids=[1, 1, 1, 1, 2, 2, 2, 0], positions=[0, 1, 2, 3, 0, 1, 2, 0], tokens=range(8))
    batch = {name: np.array([row] * 4, np.int32) for name, row in rows.items()}
    batch["prefix_mask"] = np.array([[1, 1, 0, 0, 1, 1, 0, 0]] * 4, np.int32)
    model = models.build(DECODER, Compute())
    params = model.init(jax.random.key(0), batch, deterministic=True)["params"]
    apply = jax.jit(lambda batch: model.apply({"params": params}, batch, deterministic=True).heads["lm"].features)

    def features(batch):
        if not mesh:
            return np.asarray(apply(batch))
        devices = make_mesh(MeshConfig(**mesh))
        with jax.set_mesh(devices):
            return np.asarray(apply(jax.device_put(batch, NamedSharding(devices, P(("data", "fsdp"))))))

    before = features(batch)
    seen_by = [{0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3}, {3}, {4, 5, 6}, {4, 5, 6}, {6}, {7}]
    for place, expected in enumerate(seen_by):
        tokens = batch["tokens"].copy()
        tokens[:, place] = 40
        differs = (features(batch | {"tokens": tokens}) != before).any(-1)
        assert all(set(np.flatnonzero(row).tolist()) == expected for row in differs)


def test_bfloat16_gives_bfloat16_near_float32():
    exact = arrays(2, 16, 16, 2, 2, 16)
    out = run(*arrays(2, 16, 16, 2, 2, 16, dtype=jnp.bfloat16), Mask(True))
    assert out.dtype == jnp.bfloat16
    # operands are off by 2^-9 = 0.2 %, logits (a few units) by some times that, and so are the weights of values near 1
    np.testing.assert_allclose(out.astype(jnp.float32), run(*exact, Mask(True)), atol=0.05)


@pytest.mark.parametrize("has_bias", (False, True))
def test_queries_without_a_key_are_finite_and_so_are_gradients(has_bias):
    args = arrays(1, 4, 3, 2, 2, 8, has_bias)
    mask = Mask(False, segments([1, 1, 0, 0]), segments([1, 1, 1]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(output_and_gradients(args, mask)))


# --- the kernels, interpreted --------------------------------------------------------------------------------------


def kernel_cases(batch=2):
    """(name, mask, lengths): packed causal, padded cross-attention, causal without segment ids."""
    whole = jnp.ones((batch, 114), jnp.int32)
    yield Mask(True, packed_ids(batch, 128), packed_ids(batch, 128)), (128, 128)
    yield Mask(False, whole, jnp.minimum(packed_ids(batch, 200), 1)), (114, 200)
    yield Mask(True), (200, 200)


@pytest.mark.parametrize("implementation, has_bias", [("tpu_splash", False), ("tpu_flash", False), ("tpu_flash", True)])
@pytest.mark.parametrize("case", range(3))
def test_kernels_give_the_output_and_gradients_of_the_reference(interpreted, implementation, has_bias, case):
    mask, (t, s) = list(kernel_cases())[case]
    args = arrays(2, t, s, 2, 1, 64, has_bias)
    got = output_and_gradients(args, mask, implementation)
    expected = output_and_gradients(args, mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)  # float32 sums of <= 200 terms near 1, in another order


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("windowed", (None, True, False))
def test_splash_has_windows_and_a_cap(interpreted, causal, windowed):
    ids = packed_ids(2, 200)
    mask = Mask(causal, ids, ids, window=20, windowed=None if windowed is None else jnp.asarray(windowed))
    args = arrays(2, 200, 200, 2, 1, 64)
    got = output_and_gradients(args, mask, "tpu_splash", logit_cap=2.0)
    expected = output_and_gradients(args, mask, logit_cap=2.0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)  # float32 sums of <= 200 terms near 1, in another order


@pytest.mark.parametrize("implementation, has_bias", [("tpu_splash", False), ("tpu_flash", True)])
def test_kernels_run_on_each_devices_own_rows_and_heads(interpreted, implementation, has_bias):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    mask, (t, s) = next(kernel_cases(batch=4))
    args = arrays(4, t, s, 4, 2, 64, has_bias)
    expected = output_and_gradients(args, mask)
    with jax.set_mesh(mesh):
        heads = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
        args = (*jax.device_put(args[:3], heads), args[3])
        got = output_and_gradients(args, mask, implementation)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)  # float32 sums of <= 128 terms near 1, in another order


def test_kernels_take_a_batch_that_the_mesh_does_not_divide(interpreted):
    mask, (t, s) = next(kernel_cases(batch=3))
    args = arrays(3, t, s, 4, 2, 64)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        got = jax.jit(lambda *args: run(*args, mask, "tpu_splash"))(*args)
    np.testing.assert_allclose(got, run(*args, mask), atol=2e-5)  # float32 sums of <= 128 terms near 1


@pytest.mark.parametrize("windowed", (None, True, False))
def test_what_cudnn_is_asked_for_with_a_prefix_is_the_reference(monkeypatch, windowed):
    """The function of JAX that calls cuDNN, with the same arguments on the CPU."""
    asked = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, **options: asked(*args, **(options | {"implementation": "xla"}))
    )
    ids = packed_ids(2, 32)
    prefix = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 32)), jnp.int32)
    mask = Mask(True, ids, ids, 8, None if windowed is None else jnp.asarray(windowed), prefix)
    q, k, v, _ = arrays(2, 32, 32, 4, 2, 8)
    expected = run(q, k, v, None, mask)
    np.testing.assert_allclose(run(q, k, v, None, mask, "cudnn"), expected, atol=1e-5)  # float32 sums of <= 32 terms


# --- the choice ----------------------------------------------------------------------------------------------------

choose = functools.partial(
    choose_implementation, head_dim=64, query_length=512, key_length=512, has_bias=False, dtype=jnp.bfloat16
)


@pytest.mark.parametrize(
    "platform, options, expected",
    [
        ("cpu", {}, "xla"),
        ("cpu", {"dtype": jnp.float32, "head_dim": 7}, "xla"),
        ("gpu", {}, "cudnn"),
        ("gpu", {"has_bias": True, "query_length": 114}, "cudnn"),
        ("gpu", {"has_window": True}, "cudnn"),
        ("gpu", {"has_window": True, "has_prefix": True}, "cudnn"),
        ("cpu", {"has_prefix": True}, "xla"),
        ("tpu", {"has_window": True, "causal": False, "has_logit_cap": True}, "tpu_splash"),
        ("tpu", {}, "tpu_splash"),
        ("tpu", {"query_length": 114}, "tpu_splash"),
        ("tpu", {"has_bias": True}, "tpu_flash"),
        ("tpu", {"dtype": jnp.float32, "head_dim": 128}, "tpu_splash"),
        ("tpu", {"query_length": 64, "key_length": 64}, "xla"),
    ],
)
def test_auto_is_the_fastest_that_fits(platform, options, expected):
    assert choose("auto", platform, **options) == (expected, None)


@pytest.mark.parametrize(
    "platform, options, reason",
    [
        ("gpu", {"dtype": jnp.float32}, "config.train.dtype 'bfloat16' and got 'float32'"),
        ("gpu", {"head_dim": 20}, "multiple of 8 and at most 128, and it is 20"),
        ("gpu", {"head_dim": 256}, "multiple of 8 and at most 128, and it is 256"),
        ("gpu", {"query_length": 113}, "even lengths, and they are 113 and 512"),
        ("tpu", {"head_dim": 80}, "64 or a multiple of 128, and it is 80"),
        ("tpu", {"has_prefix": True}, "'tpu_splash' has no bidirectional prefix, and config.objective makes one"),
        ("tpu", {"has_prefix": True, "has_bias": True}, "'tpu_flash' has no bidirectional prefix"),
    ],
)
def test_auto_warns_in_one_line_where_the_fast_one_does_not_fit(platform, options, reason):
    name, warning = choose("auto", platform, **options)
    assert name == "xla"
    assert warning.startswith("SLOW ATTENTION") and reason in warning and "\n" not in warning


@pytest.mark.parametrize("platform", ("cpu", "gpu", "tpu"))
def test_xla_can_be_requested_anywhere(platform):
    assert choose("xla", platform, dtype=jnp.float32, head_dim=7, has_bias=True) == ("xla", None)


@pytest.mark.parametrize(
    "requested, platform, options, reason",
    [
        ("cudnn", "cpu", {}, "needs an NVIDIA GPU, and this is a CPU"),
        ("cudnn", "gpu", {"dtype": jnp.float32}, "config.train.dtype"),
        ("tpu_flash", "gpu", {}, "needs a TPU, and this is a GPU"),
        ("cudnn", "gpu", {"has_window": True, "causal": False}, "has causal windows only"),
        ("cudnn", "gpu", {"has_logit_cap": True}, "has no cap of attention logits"),
        ("tpu_flash", "tpu", {"has_window": True}, "has neither windows nor a cap"),
        ("tpu_splash", "tpu", {"has_bias": True}, "takes no bias"),
        ("cudnn", "gpu", {"has_bias": True, "has_row_bias": True}, "has not been seen to give a bias of each row"),
        ("flash", "tpu", {}, "is unknown (allowed: auto, xla, cudnn, tpu_flash, tpu_splash)"),
    ],
)
def test_a_request_that_cannot_run_is_an_error_that_says_what_to_set(requested, platform, options, reason):
    with pytest.raises(UserError) as error:
        choose(requested, platform, **options)
    assert f"config.train.attention is {requested!r}" in str(error.value) and reason in str(error.value)
