"""Compares three updates of each optimizer with its paper or released code, in NumPy and float64 for one matrix.

The optimizers of configs use the schedule, clipping, decay and other numbers of the config.
"""

import dataclasses
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models  # noqa: F401 (its layers declare the axes of their parameters)
from pretrainax.config import LayersConfig, TrainConfig
from pretrainax.optim import (
    SM3,
    Adafactor,
    Adagrad,
    AdEMAMix,
    Lion,
    Muon,
    ScheduleFreeAdamW,
    Sophia,
    StableAdamW,
    WarmupConstant,
    WarmupLinear,
)
from pretrainax.optim.arguments import build_optimizer, numbers_of
from pretrainax.sharding.param_paths import parameter_names
from tests.support.runs import ROOT

# [L, D, H, K], [L, H, K, D], …: Adafactor factors the matrices of at least 128, and not the smaller ones.
SHAPES = {
    "decoder/blocks/self_attention/query/kernel": (2, 128, 2, 64),
    "decoder/blocks/self_attention/query/bias": (2, 2, 64),
    "decoder/blocks/self_attention/out/kernel": (2, 2, 64, 128),
    "decoder/blocks/mlp/up/kernel": (2, 128, 160),
    "decoder/blocks/mlp/experts_up/kernel": (2, 3, 128, 144),  # [L, E, D, F]: one matrix per expert
    "decoder/blocks/mlp_norm/scale": (2, 128),
    "decoder/relative_bias/embedding": (8, 2),
    "decoder/final_norm/scale": (128,),
    "token_embedding/embedding": (130, 128),
}


def nested(flat):
    tree = {}
    for path, x in flat.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = jnp.asarray(x, jnp.float32)
    return tree


def matrices(flat):
    """Converts {path: array} to {path:layer: matrix} or {path:expert:layer: matrix} in float64; merges heads."""
    found = {}
    for path, x in flat.items():
        layers = {f"{path}:{i}": layer for i, layer in enumerate(x)} if "/blocks/" in path else {path: x}
        if "experts" in path:
            layers = {f"{path}:{e}:{i}": expert for i, layer in enumerate(x) for e, expert in enumerate(layer)}
        for name, layer in layers.items():
            heads = {"query/kernel": (128, 128), "query/bias": (128,), "out/kernel": (128, 128)}
            shape = next((s for end, s in heads.items() if path.endswith(end)), layer.shape)
            found[name] = np.asarray(layer, np.float64).reshape(shape)
    return found


def draw(seed, scale):
    rng = np.random.default_rng(seed)
    return {path: (scale(path) * rng.normal(size=shape)).astype(np.float32) for path, shape in SHAPES.items()}


PARAMS = draw(0, lambda path: 0.5 if path.endswith("scale") else 0.02)
# The gradients have all orders of magnitude, so that epsilon has an effect.
GRADIENTS = [draw(seed, lambda path: 10.0 ** -(len(path) % 7)) for seed in (1, 2, 3)]
LARGE = [{path: np.sign(x) + x for path, x in draw(seed, lambda path: 1.0).items()} for seed in (1, 2, 3)]


def ours(optimizer, schedule, steps, gradients, layers):
    """Returns the matrices after three updates, at `steps` of a run of 1,000."""
    tx = build_optimizer(optimizer, layers, nested(PARAMS))
    numbers = numbers_of(schedule.build(optimizer.learning_rate, 1000), TrainConfig(steps=1000), optimizer)
    arguments = numbers.arrays(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    params = nested(PARAMS)
    state = tx.init(params)

    @jax.jit
    def update(
        gradient, state, params, step, arguments
    ):  # The curvature is the squares of gradients, as in the release.
        def gradients_at(params):
            return jax.tree.map(lambda w, g: g**2 * w, params, gradient)

        return tx.update(gradient, state, params, step=step, arguments=arguments, gradients_at=gradients_at)

    for step, gradient in zip(steps, gradients, strict=True):
        updates, state = update(nested(gradient), state, params, jnp.int32(step), arguments)
        params = jax.tree.map(jnp.add, params, updates)
    return matrices(dict(zip(parameter_names(params), jax.tree.leaves(params), strict=True)))


def theirs(step_of, optimizer, schedule, steps, gradients, layers):
    """Returns the same from `step_of(optimizer, name, w, g, state, rate, number) -> w`, for each matrix separately."""
    rate_of = schedule.build(optimizer.learning_rate, 1000)
    params, states = matrices(PARAMS), {name: {} for name in matrices(PARAMS)}
    for number, (step, gradient) in enumerate(zip(steps, gradients, strict=True), 1):
        gradient, rate = matrices(gradient), float(rate_of(jnp.int32(step)))
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        scale = min(1.0, optimizer.clip_norm / norm) if optimizer.clip_norm else 1.0
        params = {
            name: step_of(optimizer, name, w, scale * gradient[name], states[name], rate * factor(layers, name), number)
            for name, w in params.items()
        }
    return {name: states[name].get("x", w) for name, w in params.items()}  # for schedule-free optimizers, the average


def factor(layers, name):
    """Returns the factor of a layer's rate; from below, the layers are embeddings, two blocks and the final norm."""
    above = 3 if "embedding" in name else 2 if name.endswith(":0") else 1 if name.endswith(":1") else 0
    return layers.rate_decay**above


def mean(state, name, memory, x):
    """Updates a moving average that starts at zero."""
    state[name] = memory * state.get(name, 0.0) + (1 - memory) * x
    return state[name]


def rms(x):
    return np.sqrt(np.mean(x**2))


GROUPS = {"bias": "decay_biases", "scale": "decay_norms", "embedding": "decay_embeddings"}


def decay(o, name):
    """Returns the decay of matrices, and of biases, norms and embeddings if configured; 0 for T5's positions."""
    if "relative_bias" in name:
        return 0.0
    field = next((field for part, field in GROUPS.items() if part in name), None)
    return o.weight_decay if field is None or getattr(o, field) else 0.0


# --- from the papers and the released code ---------------------------------------------------------------------------


def adamw(o, name, w, g, state, rate, t):
    """The update of torch.optim.AdamW, for GPT, LLaMA and similar models."""
    m = mean(state, "m", o.b1, g) / (1 - o.b1**t)
    v = mean(state, "v", o.b2, g**2) / (1 - o.b2**t)
    return w * (1 - rate * decay(o, name)) - rate * m / (np.sqrt(v) + o.epsilon)


def adam_of_rate(o, name, w, g, state, rate, t):
    """The update of tf.train.AdamOptimizer and fairseq's Adam: they correct the rate, which does not affect epsilon."""
    m, v = mean(state, "m", o.b1, g), mean(state, "v", o.b2, g**2)
    rate_t = rate * np.sqrt(1 - o.b2**t) / (1 - o.b1**t)
    return w * (1 - rate * decay(o, name)) - rate_t * m / (np.sqrt(v) + o.epsilon)


def adamw_scale(o, name, w, g, state, rate, t):
    """The update of nanoT5, copied_utils.py, AdamWScale."""
    m, v = mean(state, "m", o.b1, g), mean(state, "v", o.b2, g**2)
    rate_t = rate * np.sqrt(1 - o.b2**t) / (1 - o.b1**t) * max(1e-3, rms(w))
    return w - rate_t * m / (np.sqrt(v) + o.epsilon)


def adamw_relative(o, name, w, g, state, rate, t):
    """The update of torch.optim.AdamW with nanoT5's rate relative to each matrix, for the quickstart and PaLM."""
    return adamw(o, name, w, g, state, rate * max(1e-3, rms(w)), t)


def bert(o, name, w, g, state, rate, t):
    """The update of google-research/bert, optimization.py, AdamWeightDecayOptimizer, and ELECTRA: no correction."""
    update = mean(state, "m", o.b1, g) / (np.sqrt(mean(state, "v", o.b2, g**2)) + o.epsilon)
    return w - rate * (update + decay(o, name) * w)


def albert(o, name, w, g, state, rate, t):
    """The update of google-research/albert, lamb_optimizer.py: no correction; it only adapts decayed matrices."""
    update = mean(state, "m", o.b1, g) / (np.sqrt(mean(state, "v", o.b2, g**2)) + o.epsilon) + decay(o, name) * w
    ratio = np.linalg.norm(w) / np.linalg.norm(update) if decay(o, name) else 1.0
    return w - rate * ratio * update


def adafactor(o, name, w, g, state, rate, t):
    """The update of tensorflow/mesh, optimize.py, AdafactorOptimizer, with T5's numbers (its operative_config.gin)."""
    memory, squares = 1 - t**-0.8, g**2 + 1e-30
    if g.ndim == 2 and min(g.shape) >= 128:
        rows, columns = mean(state, "r", memory, squares.mean(1)), mean(state, "c", memory, squares.mean(0))
        update = g / np.sqrt(np.outer(rows / rows.mean(), columns))
    else:
        update = g / np.sqrt(mean(state, "v", memory, squares))
    update /= max(1.0, rms(update) / 1.0)
    return w - rate * max(1e-3, rms(w)) * update


def stable_adamw(o, name, w, g, state, rate, t):
    """The update of optimi, stableadamw.py, with decouple_lr: it corrects the averages when it updates them."""
    for key, x, memory in (("m", g, o.b1), ("v", g**2, o.b2)):
        share = (1 - memory) / (1 - memory**t)
        state[key] = (1 - share) * state.get(key, 0.0) + share * x
    slowed = rate / max(1.0, rms(g / np.sqrt(np.maximum(state["v"], o.epsilon**2))))
    max_lr = o.learning_rate
    released_decay = decay(o, name) * max_lr  # 1e-5 for ModernBERT
    return w * (1 - slowed / max_lr * released_decay) - slowed * state["m"] / (np.sqrt(state["v"]) + o.epsilon)


def adagrad(o, name, w, g, state, rate, t):
    """The update of tf.train.AdagradOptimizer, as in bilm-tf."""
    state["v"] = state.get("v", o.initial_square) + g**2
    return w - rate * (g / np.sqrt(state["v"]) + decay(o, name) * w)


def lion(o, name, w, g, state, rate, t):
    """The update of Chen et al. 2023, algorithm 2."""
    sign = np.sign(o.b1 * state.get("m", 0.0) + (1 - o.b1) * g)
    mean(state, "m", o.b2, g)
    return w - rate * (sign + decay(o, name) * w)


def ademamix(o, name, w, g, state, rate, t):
    """The update of apple/ml-ademamix, optax/ademamix.py, with its alpha_scheduler and beta3_scheduler."""
    risen = (t - 1) / o.alpha_warmup_steps  # fraction of an unfinished warmup
    f = lambda beta: np.log(0.5) / np.log(beta) - 1  # noqa: E731
    b3 = 0.5 ** (1 / ((1 - risen) * f(o.b1) + risen * f(o.b3) + 1))
    m = mean(state, "m", o.b1, g) / (1 - o.b1**t)
    v = mean(state, "v", o.b2, g**2) / (1 - o.b2**t)
    slow = mean(state, "m2", b3, g)
    return w - rate * ((m + risen * o.alpha * slow) / (np.sqrt(v) + o.epsilon) + decay(o, name) * w)


def newton_schulz(x):
    """The orthogonalization of KellerJordan/Muon, muon.py, zeropower_via_newtonschulz5, for a matrix [out, in].

    The release computes in bfloat16.
    """
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def muon(o, name, w, g, state, rate, t):
    """The update of KellerJordan/Muon, muon.py, MuonWithAuxAdam.

    Its lerp is a mean. Nesterov's momentum is a mean of this mean and the gradient.
    """
    if "/blocks/" not in name or "kernel" not in name:
        m = mean(state, "m", o.b1, g) / (1 - o.b1**t)
        v = mean(state, "v", o.b2, g**2) / (1 - o.b2**t)
        rate *= o.adam_learning_rate / o.learning_rate
        return w * (1 - rate * decay(o, name)) - rate * m / (np.sqrt(v) + o.epsilon)
    g = g.T  # Torch's matrices are [out, in].
    momentum = mean(state, "m", o.momentum, g)
    update = newton_schulz((1 - o.momentum) * g + o.momentum * momentum)
    if o.neuron_b2 is not None:  # ShizukaKuze/NorMuon at 22b57d4, normuon.py, normuon_update
        squares = mean(state, "v", o.neuron_b2, np.mean(update**2, axis=1, keepdims=True))
        normalized = update / (np.sqrt(squares) + 1e-10)
        update = normalized * np.linalg.norm(update) / (np.linalg.norm(normalized) + 1e-10)
    update *= max(1, g.shape[0] / g.shape[1]) ** 0.5
    return w * (1 - rate * decay(o, name)) - rate * update.T


@pytest.mark.parametrize("rows, columns", [(64, 64), (64, 256), (256, 64)])
def test_muon_in_bfloat16_orthogonalizes_as_in_float64(rows, columns):
    """Tests within 10 %: an iteration multiplies rounding errors of 2^-9 by up to 3.4.

    The RMS of the differences was 5.0 to 7.4 %.
    """
    gradient = np.random.default_rng(0).normal(size=(2, rows, columns))
    params = {"decoder": {"blocks": {"mlp": {"up": {"kernel": gradient.astype(np.float32)}}}}}
    built = Muon(products="bfloat16").build(WarmupConstant(0).build(1.0, 10), params)
    (update,) = jax.tree.leaves(built.update(params, built.init(params), params, step=jnp.int32(0))[0])
    assert update.dtype == jnp.float32
    for found, x in zip(update, gradient, strict=True):
        expected = -(max(1, columns / rows) ** 0.5) * newton_schulz(x)
        assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


def moonlight(o, name, w, g, state, rate, t):
    """The update of Liu et al. 2025, section 2.2, with separate heads: momentum is a sum, and there is one rate."""
    if "/blocks/" not in name or "kernel" not in name:
        return adamw(o, name, w, g, state, rate, t)
    state["m"] = o.momentum * state.get("m", 0.0) + g
    nesterov = o.momentum * state["m"] + g
    axis = {"query": 1, "out": 0}.get(name.split("/")[-2])  # the axis of the two heads
    parts = [nesterov] if axis is None else np.split(nesterov, 2, axis)
    parts = [0.2 * np.sqrt(max(part.shape)) * newton_schulz(part) for part in parts]
    update = parts[0] if axis is None else np.concatenate(parts, axis)
    return w - rate * (update + decay(o, name) * w)


def sophia(o, name, w, g, state, rate, t):
    """The update of Liuhong99/Sophia, sophia.py, SophiaG, where `gamma` is rho times the batch.

    The curvature is computed after a step. Optax corrects the bias of m, and the release does not.
    """
    m = mean(state, "m", o.b1, g) / (1 - o.b1**t)
    ratio = np.minimum(np.abs(m) / (o.gamma * state.get("h", 0.0) + 1e-15), 1.0)
    if t % o.interval == 1:
        mean(state, "h", o.b2, g**2)
    return w * (1 - rate * decay(o, name)) - rate * np.sign(m) * ratio


def sm3(o, name, w, g, state, rate, t):
    """The update of Anil et al. 2019, SM3-II, with momentum as in google-research/sm3, sm3.py."""
    sums = state.setdefault("sums", [np.zeros(n) for n in g.shape])
    least = np.minimum(sums[0][:, None], sums[1]) if g.ndim == 2 else sums[0]
    v = least + g**2
    state["sums"] = [v.max(1), v.max(0)] if g.ndim == 2 else [v]
    return w - rate * (mean(state, "m", o.b1, g / np.sqrt(v)) + decay(o, name) * w)


def schedule_free(o, name, w, g, state, rate, t):
    """The update of facebookresearch/schedule_free, adamw_schedulefree_reference.py.

    It stores z and x, and the point y of the gradients.
    """
    x, y, z = state.get("x", w), state.get("y", w), state.get("z", w)
    rate *= np.sqrt(1 - o.b2**t)
    state["sum"] = state.get("sum", 0.0) + rate**2
    share = rate**2 / state["sum"]
    z = z - rate * decay(o, name) * y - rate * g / (np.sqrt(mean(state, "v", o.b2, g**2)) + o.epsilon)
    state["x"], state["z"] = (1 - share) * x + share * z, z
    state["y"] = o.b1 * state["x"] + (1 - o.b1) * z
    return state["y"]


# --- comparison with ours --------------------------------------------------------------------------------------------

FALLING, CONSTANT = WarmupLinear(2), WarmupConstant(2)


@pytest.mark.parametrize("rate_decay", [1.0, 0.5])
@pytest.mark.parametrize(
    "step_of, optimizer, schedule",
    [
        (adafactor, Adafactor(), FALLING),
        (stable_adamw, StableAdamW(8e-4, weight_decay=1e-5 / 8e-4, b2=0.98), FALLING),
        (adagrad, Adagrad(weight_decay=0.1), FALLING),
        (lion, Lion(), FALLING),
        (ademamix, AdEMAMix(alpha_warmup_steps=4, clip_norm=None), FALLING),
        (muon, Muon(weight_decay=0.1), FALLING),
        (muon, Muon(weight_decay=0.1, neuron_b2=0.95), FALLING),
        (
            moonlight,
            Muon(2e-3, adam_learning_rate=None, update_rms=0.2, split_heads=True, weight_decay=0.1, epsilon=1e-8),
            FALLING,
        ),
        (sophia, Sophia(gamma=50.0, interval=2, clip_norm=None), FALLING),
        (sm3, SM3(), FALLING),
        (schedule_free, ScheduleFreeAdamW(weight_decay=0.1), CONSTANT),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_three_updates_are_those_of_the_paper_or_the_release(step_of, optimizer, schedule, rate_decay):
    check(step_of, optimizer, schedule, (0, 1, 2), LayersConfig(rate_decay))


# config -> the update of the release that its recipe names; the other configs use AdamW as in PyTorch
RELEASED = dict.fromkeys((path.stem for path in (ROOT / "configs").glob("*.py")), adamw) | {
    "albert_base": albert,
    "bart_base": adam_of_rate,
    "bert_base": bert,
    "bigbird": bert,
    "deberta_v3_base": bert,  # microsoft/DeBERTa, xadam.py, disables the correction
    "electra_base": bert,
    "electra_small": bert,
    "elmo": adagrad,
    "finetune": bert,
    "longformer": adam_of_rate,
    "modernbert_base": stable_adamw,
    "palm": adamw_relative,
    "quickstart": adamw_relative,
    "roberta_base": adam_of_rate,
    "st_moe": adafactor,
    "switch_base": adafactor,
    "t5_base": adamw_scale,
    "t5_base:base": adafactor,
    "transformer": adam_of_rate,
    "ul2_base": adafactor,
}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", RELEASED)
def test_three_updates_of_a_config_are_those_of_its_release(name):
    step_of = RELEASED[name]
    name, _, variant = name.partition(":")
    experiment = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](*[variant] * bool(variant))
    schedule = dataclasses.replace(experiment.schedule, warmup_steps=100, anneal_steps=0)  # for a run of 1,000 steps
    check(step_of, experiment.optimizer, schedule, (98, 99, 100), LayersConfig())  # These steps are around the peak.


def check(step_of, optimizer, schedule, steps, layers):
    # Moonlight's momentum is a sum, so that its constant 1e-7 has less effect. With large gradients, Sophia clips some
    # updates and not others.
    gradients = LARGE if step_of in (moonlight, sophia) else GRADIENTS
    found = ours(optimizer, schedule, steps, gradients, layers)
    expected = theirs(step_of, optimizer, schedule, steps, gradients, layers)
    assert found.keys() == expected.keys()
    before = matrices(PARAMS)
    for name, w in expected.items():
        moved = np.abs(w - before[name]).max()
        assert moved > 0
        # float32 loses 1e-7 of a weight in each addition, compared with float64. Roots and products change a small part
        # of each update.
        np.testing.assert_allclose(found[name], w, rtol=3e-7, atol=2e-5 * moved, err_msg=name)
