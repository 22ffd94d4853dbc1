import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax import models
from pretrainax.config import MeshConfig, ModelConfig, RotaryPositions, UserError
from pretrainax.layers import attention_spec, gpu_attention
from pretrainax.layers.attention import Mask, attention
from pretrainax.layers.attention_spec import Weights
from pretrainax.layers.compute import Compute
from pretrainax.sharding.mesh import make_mesh
from tests.support.attending import (
    PACKED,
    arrays,
    assert_close,
    choose,
    output_and_gradients,
    packed_ids,
    run,
    segments,
)

# --- the reference -------------------------------------------------------------------------------------------------


def by_loops(q, k, v, bias, allowed, scale, logit_cap=None, sinks=None):
    """Computes attention from its definition, one query at a time, in float64."""
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        logits = scale * np.asarray(k, np.float64)[b, :, g] @ np.asarray(q, np.float64)[b, t, h]
        logits = logits if logit_cap is None else logit_cap * np.tanh(logits / logit_cap)
        logits = logits + (0 if bias is None else np.asarray(bias)[0, h, t])
        largest = logits.max() if sinks is None else max(logits.max(), sinks[h])
        weights = np.where(np.asarray(allowed)[b, 0, t], np.exp(logits - largest), 0)
        whole = weights.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - largest))
        out[b, t, h] = weights @ np.asarray(v, np.float64)[b, :, g] / whole
    return out.astype(np.float32)


with_and_without_jit = pytest.mark.parametrize("compiled", [jax.jit, lambda f: f], ids=["jit", "no jit"])


@with_and_without_jit
@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("key_heads", (4, 2, 1))
def test_reference_is_the_definition(key_heads, has_bias, compiled):
    args = arrays(2, 5, 5, 4, key_heads, 8, has_bias)
    ids = segments([1, 1, 1, 2, 2], [1, 1, 1, 1, 0])
    mask = Mask(True, ids, ids)
    expected = by_loops(*args, mask.materialize(5, 5), 0.3)
    assert_close(
        compiled(lambda *args: run(*args, mask))(*args), expected, 2e-6
    )  # float32 sums of 8 and 5 terms near 1


@with_and_without_jit
def test_cross_attention_takes_keys_of_another_length(compiled):
    args = arrays(1, 3, 6, 2, 2, 8)
    mask = Mask(False, segments([1, 1, 1]), segments([1, 1, 1, 1, 0, 0]))
    expected = by_loops(*args, mask.materialize(3, 6), 0.3)
    assert_close(
        compiled(lambda *args: run(*args, mask))(*args), expected, 2e-6
    )  # float32 sums of 8 and 6 terms near 1


@with_and_without_jit
@pytest.mark.parametrize("causal", (True, False))
def test_reference_with_a_window_and_a_cap_is_the_definition(causal, compiled):
    args = arrays(2, 7, 7, 4, 2, 8)
    ids = segments([1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 1, 0])
    mask = Mask(causal, ids, ids, window=4)
    expected = by_loops(*args, mask.materialize(7, 7), 0.3, logit_cap=0.5)
    assert_close(
        compiled(lambda *args: run(*args, mask, logit_cap=0.5))(*args), expected, 2e-6
    )  # float32 sums of 8 and 5 terms


@with_and_without_jit
@pytest.mark.parametrize("size", (1.0, 200.0))
def test_a_sink_takes_its_part_of_the_weights(size, compiled):
    args, sinks = arrays(2, 5, 5, 4, 2, 8), size * jnp.array([-1.0, 0.0, 0.5, 1.0])
    mask = Mask(True, window=3)
    expected = by_loops(*args, np.broadcast_to(mask.materialize(5, 5), (2, 1, 5, 5)), 0.3, sinks=sinks)

    def with_sinks(sinks):
        q, k, v, _ = args
        return attention(q, k, v, weights=Weights(sinks=sinks), mask=mask, scale=0.3)

    got = compiled(with_sinks)(sinks)
    assert_close(got, expected, 2e-6)  # float32 sums of 8 and 3 terms; exp(200) overflows float32
    gradient = jax.grad(lambda sinks: jnp.sum(jnp.sin(with_sinks(sinks))))(sinks)
    assert np.isfinite(gradient).all() and gradient[1] != 0


@with_and_without_jit
def test_reference_with_a_prefix_is_the_definition(compiled):
    args = arrays(1, 6, 6, 4, 2, 8)
    mask = Mask(True, **PACKED, window=2, prefix=segments([1, 1, 0, 1, 1, 0]))
    expected = by_loops(*args, mask.materialize(6, 6), 0.3)
    assert_close(
        compiled(lambda *args: run(*args, mask))(*args), expected, 2e-6
    )  # float32 sums of 8 and 3 terms near 1


@pytest.mark.parametrize("prefix", [None, segments([1, 1, 0, 1, 1, 0])], ids=["causal", "prefix"])
def test_what_the_mask_forbids_has_no_influence(prefix):
    q, k, v, _ = arrays(1, 6, 6, 2, 2, 8)
    mask = Mask(True, **PACKED, prefix=prefix)
    before = run(q, k, v, None, mask)
    forbidden = ~np.asarray(mask.materialize(6, 6))[0, 0]
    for s in range(6):
        after = run(q, k.at[:, s].set(50.0), v.at[:, s].set(50.0), None, mask)
        assert np.array_equal(before[:, forbidden[:, s]], after[:, forbidden[:, s]])
        # Allowed queries see the changed key.
        assert not np.isclose(before[:, ~forbidden[:, s]], after[:, ~forbidden[:, s]]).all(-1).any()


DECODER = ModelConfig(
    family="decoder",
    layer_pattern=("local", "global"),
    window=2,
    position=RotaryPositions(16),
    init_stddev=0.5,  # so that the attention weights are not uniform
    **dict(vocab_size=50, num_layers=2, d_model=16, d_ff=32, num_heads=4, num_kv_heads=2),
)


@pytest.mark.slow
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


def test_the_last_queries_alone_give_the_last_outputs():
    q, k, v, bias = arrays(2, 6, 6, 4, 2, 8, has_bias=True)
    whole = run(q, k, v, bias, Mask(True, window=4))
    last = run(q[:, 4:], k, v, bias[:, :, 4:], Mask(True, window=4, query_positions=jnp.array([4, 5])))
    assert_close(last, whole[:, 4:], 2e-6)  # float32 sums of 8 and 4 terms near 1


def test_bfloat16_gives_bfloat16_near_float32():
    exact = arrays(2, 16, 16, 2, 2, 16)
    out = run(*arrays(2, 16, 16, 2, 2, 16, dtype=jnp.bfloat16), Mask(True))
    assert out.dtype == jnp.bfloat16
    # Rounding changes operands by 2^-9 = 0.2 %. Logits (a few units) and the weights of values near 1 change by a few
    # times that.
    assert_close(out.astype(jnp.float32), run(*exact, Mask(True)), 0.05)


@pytest.mark.parametrize("has_bias", (False, True))
def test_queries_without_a_key_are_finite_and_so_are_gradients(has_bias):
    args = arrays(1, 4, 3, 2, 2, 8, has_bias)
    mask = Mask(False, segments([1, 1, 0, 0]), segments([1, 1, 1]))
    chex.assert_tree_all_finite(output_and_gradients(args, mask))


# --- wrong shapes -------------------------------------------------------------------------------------------------

Q = jnp.zeros((2, 6, 4, 8))
K = jnp.zeros((2, 6, 2, 8))
IDS = jnp.ones((2, 6), jnp.int32)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"q": Q[0]}, r"q is \[B, T, H, K\]"),
        ({"k": K[:1]}, "with B and K of q"),
        ({"v": K[:, :1]}, r"v is \[B, S, G, V\] with B, S and G of k"),
        ({"k": jnp.zeros((2, 6, 3, 8)), "v": jnp.zeros((2, 6, 3, 8))}, "H / G heads of q each"),
        ({"bias": jnp.zeros((1, 1, 6, 6))}, r"bias is \[1 or B, H, T, S\]"),
        ({"bias": jnp.zeros((1, 4, 1, 6))}, r"bias is \[1 or B, H, T, S\]"),
        ({"mask": Mask(False, IDS[:1], IDS)}, r"mask.query_segment_ids is \[B, T\]"),
        ({"mask": Mask(False, IDS, IDS[:, :1])}, r"mask.key_segment_ids is \[B, S\]"),
        ({"mask": Mask(True, prefix=IDS[:1])}, r"mask.prefix is \[B, S\]"),
        ({"mask": Mask(True, query_positions=jnp.arange(1))}, r"mask.query_positions is \[T\] or \[B, T\]"),
        ({"mask": Mask(True, key_positions=jnp.zeros((1, 6), jnp.int32))}, r"key_positions is \[S\] or \[B, S\]"),
    ],
)
@with_and_without_jit
def test_an_axis_that_would_broadcast_is_refused_by_its_name(change, said, compiled):
    given = {"q": Q, "k": K, "v": K, "bias": None, "mask": Mask(True)} | change
    with pytest.raises(AssertionError, match=said):
        compiled(lambda given: run(**given))(given)


# --- the kernels, interpreted --------------------------------------------------------------------------------------


def kernel_cases(batch=2):
    """Yields (mask, lengths): packed causal, padded cross-attention, causal without segment ids."""
    whole = jnp.ones((batch, 114), jnp.int32)
    yield Mask(True, packed_ids(batch, 128), packed_ids(batch, 128)), (128, 128)
    yield Mask(False, whole, jnp.minimum(packed_ids(batch, 200), 1)), (114, 200)
    yield Mask(True), (200, 200)


@pytest.mark.first(4)
@pytest.mark.parametrize("implementation, has_bias", [("tpu_splash", False), ("tpu_flash", False), ("tpu_flash", True)])
@pytest.mark.parametrize("case", range(3))
def test_kernels_give_the_output_and_gradients_of_the_reference(interpreted, implementation, has_bias, case):
    mask, (t, s) = list(kernel_cases())[case]
    args = arrays(2, t, s, 2, 1, 64, has_bias)
    got = output_and_gradients(args, mask, implementation)
    expected = output_and_gradients(args, mask)
    assert_close(got, expected, 2e-5)  # float32 sums of <= 200 terms near 1, in another order


@pytest.mark.first(1)
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("windowed", (None, True, False))
def test_splash_has_windows_and_a_cap(interpreted, causal, windowed):
    ids = packed_ids(2, 200)
    mask = Mask(causal, ids, ids, window=20, windowed=None if windowed is None else jnp.asarray(windowed))
    args = arrays(2, 200, 200, 2, 1, 64)
    got = output_and_gradients(args, mask, "tpu_splash", logit_cap=2.0)
    expected = output_and_gradients(args, mask, logit_cap=2.0)
    assert_close(got, expected, 2e-5)  # float32 sums of <= 200 terms near 1, in another order


@pytest.mark.first(1)
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
    assert_close(got, expected, 2e-5)  # float32 sums of <= 128 terms near 1, in another order


def test_kernels_take_a_batch_that_the_mesh_does_not_divide(interpreted):
    mask, (t, s) = next(kernel_cases(batch=3))
    args = arrays(3, t, s, 4, 2, 64)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        got = jax.jit(lambda *args: run(*args, mask, "tpu_splash"))(*args)
    assert_close(got, run(*args, mask), 2e-5)  # float32 sums of <= 128 terms near 1


@pytest.fixture
def asked_of_cudnn(monkeypatch):
    """Replaces JAX's call of cuDNN with its XLA implementation, for the CPU; returns the arguments of the calls."""
    calls, answer = [], jax.nn.dot_product_attention

    def call(*args, **options):
        calls.append((args, options))
        return answer(*args, **(options | {"implementation": "xla"}))

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    return calls


@pytest.mark.parametrize("windowed", (None, True, False))
def test_what_cudnn_is_asked_for_with_a_prefix_is_the_reference(asked_of_cudnn, windowed):
    ids = packed_ids(2, 32)
    prefix = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 32)), jnp.int32)
    mask = Mask(True, ids, ids, 8, None if windowed is None else jnp.asarray(windowed), prefix)
    q, k, v, _ = arrays(2, 32, 32, 4, 2, 8)
    expected = run(q, k, v, None, mask)
    assert_close(run(q, k, v, None, mask, "cudnn"), expected, 1e-5)  # float32 sums of <= 32 terms


@pytest.mark.first(2)
@pytest.mark.parametrize("has_bias", (True, False))
@pytest.mark.parametrize("causal", (True, False))
def test_cudnn_is_told_the_length_of_the_one_text_of_a_row(asked_of_cudnn, causal, has_bias):
    """Tests that values and gradients equal those with a mask, and that all rows share one bias array."""
    queries, keys = jnp.asarray([12, 5, 0]), jnp.asarray([16, 9, 0])
    ids = [(jnp.arange(n)[None] < length[:, None]).astype(jnp.int32) for n, length in ((12, queries), (16, keys))]
    args = arrays(3, 12, 16, 4, 2, 8, has_bias)
    real = (ids[0] > 0)[:, :, None, None]

    def results(mask, implementation):
        def read(*args):  # The outputs at padding are undefined, and the model never reads them.
            return jnp.where(real, run(*args, mask, implementation), 0)

        out, backward = jax.vjp(read, *args)
        return out, backward(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    got, expected = results(Mask(causal, *ids, single_segment=True), "cudnn"), results(Mask(causal, *ids), "xla")
    assert_close(got, expected, 2e-6)  # float32 sums of 8 and 16 terms near 1
    ((_, _, _, bias), options), *_ = asked_of_cudnn
    assert (bias is None) != has_bias and (bias is None or bias.shape == (1, 4, 12, 16))
    assert options["query_seq_lengths"].tolist() == [12, 5, 1] and options["key_value_seq_lengths"].tolist() == [
        16,
        9,
        1,
    ]


def test_cudnn_is_given_a_mask_where_a_row_may_have_several_texts(asked_of_cudnn):
    q, k, v, bias = arrays(1, 6, 6, 4, 2, 8, has_bias=True)
    run(q, k, v, bias, Mask(True, **PACKED), "cudnn")
    (((_, _, _, given), options),) = asked_of_cudnn
    assert given.shape == (1, 4, 6, 6) and options["query_seq_lengths"] is None


@pytest.mark.first(7)
@pytest.mark.parametrize("has_bias", (True, False))
@pytest.mark.parametrize(
    "case, lengths",
    [
        *((case, lengths) for case in ("causal", "two-sided", "one segment") for lengths in ((7, 7), (8, 5), (5, 8))),
        # These cases are self-attention only, because the kernel's output is undefined for a query without a key.
        *(("packed", (7, 7)), ("window", (7, 7))),
    ],
)
def test_odd_lengths_are_padded_by_a_token_that_changes_nothing(asked_of_cudnn, lengths, has_bias, case):
    rng = np.random.default_rng(1)
    ids = [jnp.asarray(np.sort(rng.integers(1, 3, (2, length))), jnp.int32) for length in lengths]
    mask = {
        "causal": Mask(True),
        "two-sided": Mask(False),
        "packed": Mask(True, ids[0], ids[0]),
        "one segment": Mask(False, *(jnp.minimum(x, 1) for x in ids), single_segment=True),
        "window": Mask(True, window=3),
    }[case]
    args = arrays(2, *lengths, 4, 2, 8, has_bias)
    # float32 sums of at most 8 terms near 1
    assert_close(output_and_gradients(args, mask, "cudnn"), output_and_gradients(args, mask), 2e-6)
    (q, k, _, bias), _ = asked_of_cudnn[0]
    assert q.shape[1] % 2 == k.shape[1] % 2 == 0 and (bias is None or bias.shape[2:] == (q.shape[1], k.shape[1]))


# --- the choice of a backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "platform, options, expected",
    [
        ("cpu", {}, "xla"),
        ("cpu", {"dtype": "float32", "head_dim": 7}, "xla"),
        ("gpu", {}, "cudnn"),
        ("gpu", {"bias": "shared", "query_length": 114}, "cudnn"),
        ("gpu", {"query_length": 113, "head_dim": 256}, "cudnn"),
        ("gpu", {"window": 8}, "cudnn"),
        ("gpu", {"window": 8, "has_prefix": True}, "cudnn"),
        ("gpu", {"dtype": "float32", "head_dim": 20, "query_length": 113}, "tiled"),
        ("gpu", {"causal": False, "window": 8, "bias": "by_row", "logit_cap": 50.0}, "tiled"),
        ("gpu", {"dropout_rate": 0.1, "has_sinks": True, "has_prefix": True}, "tiled"),
        ("cpu", {"has_prefix": True}, "xla"),
        ("tpu", {"window": 8, "causal": False, "logit_cap": 50.0}, "tpu_splash"),
        ("tpu", {}, "tpu_splash"),
        ("tpu", {"query_length": 114}, "tpu_splash"),
        ("tpu", {"bias": "shared"}, "tpu_flash"),
        ("tpu", {"dtype": "float32", "head_dim": 128}, "tpu_splash"),
        ("tpu", {"query_length": 64, "key_length": 64}, "xla"),
        ("tpu", {"head_dim": 80}, "tiled"),
        ("tpu", {"has_prefix": True, "bias": "shared"}, "tiled"),
        ("tpu", {"dropout_rate": 0.1, "has_sinks": True}, "tiled"),
    ],
)
def test_auto_is_the_fastest_that_fits(platform, options, expected):
    assert choose("auto", platform, **options) == (expected, None)


@pytest.mark.parametrize("version, is_taken", [("9.10.1", False), ("9.14.0", False), ("9.15.1", True), (None, True)])
def test_a_cudnn_whose_attention_errs_is_not_taken(version, is_taken, monkeypatch):
    monkeypatch.setattr(gpu_attention, "cudnn_version", lambda: version)
    name, warning = choose("auto", "gpu")
    assert (name, warning) == ("cudnn" if is_taken else "tiled", None)


@pytest.mark.parametrize("capability, is_fused", [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_gpu_without_the_instructions_of_fused_attention_takes_xla(capability, is_fused, monkeypatch):
    monkeypatch.setattr(attention_spec, "gpu_capability", lambda: capability)
    for options, fused in (({}, "cudnn"), ({"dropout_rate": 0.1}, "tiled")):
        name, warning = choose("auto", "gpu", **options)
        assert name == (fused if is_fused else "xla")
        reason = "'tiled' needs a GPU of compute capability 8.0 or newer, and this one has 7.5"
        assert warning is None if is_fused else warning.endswith(reason)


@pytest.mark.parametrize(
    "platform, options, reason",
    [
        ("gpu", {"head_dim": 288}, "'tiled' needs config.model.head_dim to be at most 256, and it is 288"),
        ("gpu", {"sequence": 2}, "'tiled' needs unsplit lengths, and config.mesh.sequence is 2"),
        ("tpu", {"head_dim": 320}, "64 or a multiple of 128, and it is 320"),
        (
            "tpu",
            {"has_prefix": True, "query_length": 16384, "key_length": 16384},
            "'tpu_splash' has no bidirectional prefix, and config.objective makes one in each row, and 'tiled' needs "
            "120 MiB of VMEM for 16384 queries and 16384 keys (config.data.sequence_length), and a program has 56",
        ),
        ("gpu", {"has_positions": True}, "'tiled' does not support explicit positions, and this mask has them"),
        ("tpu", {"has_positions": True}, "'tpu_splash' does not support explicit positions"),
    ],
)
def test_auto_warns_in_one_line_where_the_fast_one_does_not_fit(platform, options, reason):
    name, warning = choose("auto", platform, **options)
    assert name == "xla"
    assert warning.startswith("SLOW ATTENTION") and reason in warning and "\n" not in warning


@pytest.mark.parametrize("platform", ("cpu", "gpu", "tpu"))
def test_xla_can_be_requested_anywhere(platform):
    assert choose("xla", platform, dtype="float32", head_dim=7, bias="shared") == ("xla", None)


@pytest.mark.parametrize(
    "requested, platform, options, reason",
    [
        ("cudnn", "cpu", {}, "needs an NVIDIA GPU, and this is a CPU"),
        ("cudnn", "gpu", {"dtype": "float32"}, "config.train.dtype"),
        ("tpu_flash", "gpu", {}, "needs a TPU, and this is a GPU"),
        ("cudnn", "gpu", {"window": 8, "causal": False}, "has causal windows only"),
        ("cudnn", "gpu", {"has_sinks": True}, "has no attention sinks, and config.model.attention_sinks is set"),
        ("tpu_splash", "tpu", {"has_sinks": True}, "has no attention sinks"),
        ("cudnn", "gpu", {"logit_cap": 50.0}, "has no cap of attention logits"),
        ("tpu_flash", "tpu", {"window": 8}, "has neither windows nor a cap"),
        ("tpu_splash", "tpu", {"bias": "shared"}, "takes no bias"),
        ("cudnn", "gpu", {"bias": "by_row"}, "has no tested gradient for a bias per row"),
        ("cudnn", "gpu", {"dropout_rate": 0.1}, "has no dropout of attention weights"),
        ("tpu_flash", "tpu", {"dropout_rate": 0.1}, "has no dropout of attention weights"),
        ("tpu_splash", "tpu", {"dropout_rate": 0.1}, "has no dropout of attention weights"),
        ("flash", "tpu", {}, "is unknown (allowed: auto, xla, cudnn, tiled, tpu_flash, tpu_splash)"),
    ],
)
def test_a_request_that_cannot_run_is_an_error_that_says_what_to_set(requested, platform, options, reason):
    with pytest.raises(UserError) as error:
        choose(requested, platform, **options)
    assert f"config.train.attention is {requested!r}" in str(error.value) and reason in str(error.value)
