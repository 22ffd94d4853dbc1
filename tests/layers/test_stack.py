import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.layers.block import Block
from pretrainax.layers.compute import Compute
from pretrainax.layers.feed_forward import FEED_FORWARDS, Dense, FeedForward
from pretrainax.layers.stack import Stack
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.param_paths import parameter_names
from tests.support.tiers import few

CONFIG = ModelConfig(num_layers=3, d_model=16, d_ff=32, num_heads=4, position=RotaryPositions(), dropout_rate=0.2)
X = jax.random.normal(jax.random.key(5), (2, 6, 16))
POSITIONS = jnp.tile(jnp.arange(6), (2, 1))
SEGMENTS = jnp.ones((2, 6), jnp.int32)


def stack(config=CONFIG, **compute):
    return Stack(config, Compute(**compute), causal=True, num_layers=config.num_layers)


PARAMS = stack().init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)


def run(params=PARAMS, x=X, key=1, deterministic=False, **compute):
    rngs = {"dropout": jax.random.key(key)}
    return stack(**compute).apply(params, x, POSITIONS, SEGMENTS, deterministic=deterministic, rngs=rngs)[0]


@functools.cache
def gradients(**compute):
    return jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(run(params, **compute)))))(PARAMS)


def test_each_layer_starts_with_numbers_of_its_own():
    for path in ("query", "key", "value", "out"):
        kernel = PARAMS["params"]["blocks"]["self_attention"][path]["kernel"]
        assert len(np.unique(kernel)) == kernel.size


def test_is_the_layers_one_after_the_other():
    one = ModelConfig(**vars(CONFIG) | {"num_layers": 1, "norm_at": "post"})  # A post-norm stack has no final norm.
    three = ModelConfig(**vars(CONFIG) | {"norm_at": "post"})
    blocks = {"blocks": PARAMS["params"]["blocks"]}
    x = X
    for i in range(3):
        layer = {"params": jax.tree.map(lambda p, i=i: p[i : i + 1], blocks)}
        x, _ = stack(one).apply(layer, x, POSITIONS, SEGMENTS, deterministic=True)
    together, _ = stack(three).apply({"params": blocks}, X, POSITIONS, SEGMENTS, deterministic=True)
    np.testing.assert_allclose(together, x, atol=1e-5)  # float32, compiled separately


@pytest.mark.slow
def test_unrolled_has_the_same_parameters():
    unrolled = stack(scan_unroll=3).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)
    # The tolerance allows two roundings: a different program may compute a product and a sum in one instruction.
    chex.assert_trees_all_close(unrolled, PARAMS, rtol=2.4e-7)


def test_unrolled_gives_the_same_with_the_same_dropout():
    np.testing.assert_allclose(run(scan_unroll=3), run(), atol=1e-5)  # float32 rounding; compiled differently


@pytest.mark.slow
@pytest.mark.parametrize("remat, unroll", [("block", 1), ("block", 3), ("dots", 1)])
def test_rematerialisation_gives_the_same_gradients(remat, unroll):
    got, want = gradients(remat=remat, scan_unroll=unroll), gradients()
    # float32, fused differently
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("unroll", [1, 3])
def test_what_an_accelerator_makes_again_gives_the_same_gradients(unroll, monkeypatch):
    want = gradients()
    monkeypatch.setattr("pretrainax.layers.stack.platform", lambda: "gpu")
    got = gradients.__wrapped__(scan_unroll=unroll)
    # float32, fused differently
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_is_made_again_has_gradients_of_gradients(monkeypatch):
    """Tests forward over backward differentiation, which Sophia uses."""
    signs = jax.tree.map(lambda p: jnp.sign(jnp.sin(jnp.arange(p.size, dtype=p.dtype))).reshape(p.shape), PARAMS)
    along = lambda: jax.jit(lambda p: jax.jvp(gradients_at, (p,), (signs,))[1])(PARAMS)  # noqa: E731
    gradients_at = jax.grad(lambda params: jnp.sum(jnp.sin(run(params))))
    want = along()
    monkeypatch.setattr("pretrainax.layers.stack.platform", lambda: "gpu")
    # float32 rounding; XLA fuses differently. Sums contain numbers up to 100 times as large.
    chex.assert_trees_all_close(
        along(), want, rtol=1e-3, atol=1e-3 * max(jnp.abs(x).max() for x in jax.tree.leaves(want))
    )


def test_an_accelerator_keeps_less_than_a_cpu(monkeypatch):
    on_cpu = temporary_bytes()
    monkeypatch.setattr("pretrainax.layers.stack.platform", lambda: "gpu")
    assert temporary_bytes() < 0.7 * on_cpu


def temporary_bytes(remat="none", batch=16, dtype=jnp.float32, **changes):
    """Returns the temporary memory of the gradient, without inputs and outputs."""
    config = ModelConfig(**vars(CONFIG) | {"num_layers": 12, "d_ff": 512, "dropout_rate": 0.0} | changes)
    x = jax.ShapeDtypeStruct((batch, 6, config.d_model), dtype)
    ids = jax.ShapeDtypeStruct((batch, 6), jnp.int32)
    module = stack(config, remat=remat)

    def loss(params, *inputs):
        return jnp.sum(module.apply(params, *inputs, deterministic=True)[0].astype(jnp.float32))

    shapes = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs, deterministic=True), x, ids, ids)
    compiled = jax.jit(jax.grad(loss)).lower(shapes, x, ids, ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_rematerialisation_keeps_less():
    block, dots, none = (temporary_bytes(remat) for remat in ("block", "dots", "none"))
    assert block < 0.5 * dots
    assert dots < 0.5 * none


def test_no_copy_of_the_kernels_is_kept_for_the_backward():
    kernels = 4 * 12 * (4 * 64 * 64 + 2 * 64 * 512)  # bytes
    # A bfloat16 copy of all kernels would take half of this memory, in addition to the memory of one layer.
    assert temporary_bytes(batch=1, dtype=jnp.bfloat16, d_model=64) < 0.5 * kernels


@pytest.mark.parametrize("remat", ["none", "block", "dots"])
@pytest.mark.parametrize("unroll", [1, 3])
def test_where_layers_are_no_loop_an_accelerator_keeps_kernels_as_products_take_them(unroll, remat):
    def kept(params):
        outputs = functools.partial(run, x=X.astype(jnp.bfloat16), scan_unroll=unroll, remat=remat)
        return jax.tree.leaves(jax.vjp(lambda params: outputs(params), params)[1])

    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), "gpu")):
        shapes = [x.shape for x in jax.eval_shape(kept, PARAMS) if x.dtype == jnp.bfloat16]
    named = zip(parameter_names(PARAMS), jax.tree.leaves(PARAMS), strict=True)
    kernels = [p.shape for name, p in named if name.endswith("kernel")]
    assert all((shape in shapes) == (unroll == 3) for shape in kernels)


def test_dropout_is_drawn_anew_in_each_layer():
    # Every layer adds the dropout of a vector of ones. If all layers dropped the same positions, only two values would
    # exist.
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    params["params"]["blocks"]["mlp"]["down"]["bias"] += 1.0
    params["params"]["final_norm"]["scale"] += 1.0
    rows = np.round(run(params, jnp.zeros_like(X)), 3).reshape(-1, 16)
    assert max(len(np.unique(row)) for row in rows) > 2


def test_dropout_follows_its_key():
    np.testing.assert_array_equal(run(key=1), run(key=1))
    assert not np.allclose(run(key=1), run(key=2))


@pytest.mark.slow
def test_shared_layers_are_one_layer_applied_again_and_again():
    shared = ModelConfig(**vars(CONFIG) | {"share_layers": True})
    one = jax.tree.map(lambda p: p[:1], PARAMS["params"]["blocks"])
    three = jax.tree.map(lambda p: jnp.concatenate([p] * 3), one)

    def out(config, blocks):
        params = {"params": {"blocks": blocks, "final_norm": PARAMS["params"]["final_norm"]}}
        return stack(config).apply(params, X, POSITIONS, SEGMENTS, deterministic=True)[0]

    np.testing.assert_allclose(out(shared, one), out(CONFIG, three), atol=1e-5)  # float32, compiled separately
    start = stack(shared).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)
    assert jax.tree.map(jnp.shape, start["params"]["blocks"]) == jax.tree.map(jnp.shape, one)


def test_shared_layers_draw_dropout_anew():
    shared = ModelConfig(**vars(CONFIG) | {"share_layers": True, "num_layers": 2})
    params = jax.tree.map(
        jnp.zeros_like, stack(shared).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)
    )
    params["params"]["blocks"]["mlp"]["down"]["bias"] += 1.0
    params["params"]["final_norm"]["scale"] += 1.0
    rngs = {"dropout": jax.random.key(0)}
    out, _ = stack(shared).apply(params, jnp.zeros_like(X), POSITIONS, SEGMENTS, deterministic=False, rngs=rngs)
    assert max(len(np.unique(row)) for row in np.round(out, 3).reshape(-1, 16)) > 2


def test_a_pattern_gives_each_layer_its_window():
    def config(layers, *pattern):
        return ModelConfig(
            **vars(CONFIG) | {"num_layers": layers, "norm_at": "post", "layer_pattern": pattern, "window": 2}
        )

    blocks, x = {"blocks": PARAMS["params"]["blocks"]}, X
    for i, kind in enumerate(("local", "global", "local")):
        layer = {"params": jax.tree.map(lambda p, i=i: p[i : i + 1], blocks)}
        x, _ = stack(config(1, kind)).apply(layer, x, POSITIONS, SEGMENTS, deterministic=True)
    mixed, _ = stack(config(3, "local", "global")).apply({"params": blocks}, X, POSITIONS, SEGMENTS, deterministic=True)
    np.testing.assert_allclose(mixed, x, atol=1e-5)  # float32, compiled separately
    everywhere, _ = stack(config(3, "global")).apply({"params": blocks}, X, POSITIONS, SEGMENTS, deterministic=True)
    assert not np.allclose(mixed, everywhere)


def test_the_hidden_state_of_each_block_can_be_asked_for():
    (out, _), state = stack().apply(PARAMS, X, POSITIONS, SEGMENTS, deterministic=True, mutable=["intermediates"])
    (hidden,) = state["intermediates"]["blocks"]["hidden"]
    assert hidden.shape == (3, *X.shape)
    np.testing.assert_array_equal(state["intermediates"]["output"][0], out)


# --- auxiliary outputs of blocks -------------------------------------------------------------------------------------


class Counting(Block):
    """A block that counts its calls and the tokens that it read."""

    def __call__(self, x, layer, context, state=None, *others):
        x, side = super().__call__(x, layer, context, None, *others)
        return x, side.replace(state={"calls": state["calls"] + 1, "seen": state["seen"] + x[..., 0] * 0 + 1})


@pytest.mark.first(1)
@pytest.mark.parametrize("changes", [{}, {"share_layers": True}], ids=("own", "shared"))
@pytest.mark.parametrize("compute", few([{}, {"scan_unroll": 3}, {"remat": "block"}], [{}]), ids=str)
def test_a_block_hands_its_state_on(variant, changes, compute):
    config = ModelConfig(**vars(CONFIG) | changes)
    module = Stack(config, Compute(**compute), causal=True, num_layers=3, block=Counting)
    state = {"calls": jnp.array([0, 10, 20]), "seen": jnp.zeros((3, 2, 6))}
    params = stack(config).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)

    @variant
    def step(state):
        return module.apply(params, X, POSITIONS, SEGMENTS, state=state, deterministic=True)

    x, side = step(state)
    chex.assert_trees_all_close(side.state, {"calls": jnp.array([1, 11, 21]), "seen": jnp.ones((3, 2, 6))})
    _, side = step(side.state)
    chex.assert_trees_all_equal(side.state["calls"], jnp.array([2, 12, 22]))
    without, nothing = stack(config).apply(params, X, POSITIONS, SEGMENTS, deterministic=True)
    chex.assert_trees_all_close(x, without, atol=1e-5)  # float32, compiled separately
    assert not jax.tree.leaves(nothing)


class Weighed(FeedForward):
    """A plain feed-forward that also returns the size of its outputs, as a loss and as a metric."""

    config: Any

    @staticmethod
    def is_in(config):
        return True

    @nn.compact
    def __call__(self, x, real=None):
        y, _ = Dense(self.config, name="plain")(x)
        size = jnp.sum(jnp.square(y))
        count = jnp.asarray(y.size, jnp.float32)
        return y, {"size_loss": (0.1 * size, count), "size": (jax.lax.stop_gradient(size), count)}


def weighed(monkeypatch, **compute):
    """Returns the function from parameters to the stack's sums, and the parameters."""
    monkeypatch.setattr("pretrainax.layers.feed_forward.base.FEED_FORWARDS", [Weighed, *FEED_FORWARDS])
    params = stack().init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)
    return lambda params: stack(**compute).apply(params, X, POSITIONS, SEGMENTS, deterministic=True)[1].sums, params


@pytest.mark.slow
def test_sums_of_all_blocks_are_added_up(monkeypatch):
    sums, params = weighed(monkeypatch)
    (size, count), (metric, _) = sums(params)["size_loss"], sums(params)["size"]
    _, state = stack().apply(params, X, POSITIONS, SEGMENTS, deterministic=True, mutable=["intermediates"])
    assert count == 3 * X.size
    np.testing.assert_allclose(size, 0.1 * metric, rtol=1e-6)
    assert 0 < float(metric) and "hidden" in state["intermediates"]["blocks"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute", few([{"remat": "block"}, {"remat": "dots", "scan_unroll": 3}], [{"remat": "block"}]), ids=str
)
def test_sums_and_their_gradients_are_the_same_however_it_runs(monkeypatch, compute):
    def run(**compute):
        sums, params = weighed(monkeypatch, **compute)
        return jax.jit(jax.value_and_grad(lambda params: sums(params)["size_loss"][0]))(params)

    got, want = run(**compute), run()
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)  # float32, fused differently
