"""Implements models that transformers lacks in torch, from their papers and released descriptions.

Each model is a function (parameters by our paths, tokens [B, T]) -> (logits [B, T, V], the residual stream after each
block of each stack). An encoder-decoder also takes the tokens [B, S] of the encoder. Token 0 pads the rows on the
right. A causal model does not see the padding, and an encoder must mask it. `forward` and `reference` return the same
keys as the functions in tests/golden/make.py, also for ELMo.
"""

import dataclasses
import math

import jax
import numpy as np

from pretrainax.config import MixtureOfExperts, RelativePositionBuckets, RotaryPositions
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.zoo import deepseek, elmo, grok, neobert, palm, st_moe
from tests.golden.case import VOCABULARY, Case, batch, weights
from tests.support import written_elmo

SIZES = dict(vocab_size=VOCABULARY, num_layers=2, d_model=16, d_ff=48, num_heads=4, head_dim=8)
POSITION = RotaryPositions(20, theta=40.0)
CONFIGS = {
    "palm": dataclasses.replace(palm.palm("8b"), **SIZES, position=POSITION),
    "neobert": dataclasses.replace(neobert.neobert("base"), **SIZES, num_kv_heads=4, position=POSITION),
    "grok": dataclasses.replace(
        grok.grok("1_314b"),
        **SIZES,
        num_kv_heads=2,
        position=POSITION,
        experts=MixtureOfExperts(num_experts=4, top_k=2, normalized=False, balance_weight=0.0),
    ),
    "deepseek": dataclasses.replace(
        deepseek.deepseek("moe_16b"),
        **SIZES | {"num_layers": 3},
        num_kv_heads=None,
        position=POSITION,
        experts=dataclasses.replace(
            deepseek.deepseek("moe_16b").experts, num_experts=5, top_k=3, d_ff=24, balance_weight=0.0
        ),
    ),
    # Two periods of two layers in the encoder, and one period in the decoder.
    "st_moe": dataclasses.replace(
        st_moe.st_moe("l"),
        **SIZES | {"num_layers": 4, "num_decoder_layers": 2},
        position=RelativePositionBuckets(num_buckets=8, max_distance=10),
        experts=dataclasses.replace(
            st_moe.st_moe("l").experts, num_experts=3, every=2, dense_after=40, balance_weight=0.0, z_weight=0.0
        ),
    ),
}


def turned(x, theta):
    """Rotates queries or keys [B, T, H, K]: pairs (i, i + K/2) by the angle position · theta^(-2i/K)."""
    import torch

    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    cosines, sines = (f(angles).float()[None, :, None] for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], dim=-1)


def attended(p, x, config, theta, cap=None, real=None):
    """Computes grouped-query attention of x [B, T, D], to all tokens in real [B, T], or causal without real."""
    import torch

    q, k, v = (
        torch.einsum("btd,dhk->bthk", x, p[f"self_attention/{name}/kernel"]) for name in ("query", "key", "value")
    )
    q, k = turned(q, theta), turned(k, theta)
    k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], dim=2) for each in (k, v))
    logits = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if real is None else ~real[:, None, None]
    weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("bhts,bshk,hkd->btd", weights, v, p["self_attention/out/kernel"])


def palm_forward(params, tokens):
    """Computes PaLM (Chowdhery et al. 2022, section 2)."""
    import torch

    config = CONFIGS["palm"]
    functional, table = torch.nn.functional, params["token_embedding/embedding"]

    def norm(x, scale):
        return functional.layer_norm(x, x.shape[-1:], scale, None, config.norm_epsilon)

    x, hidden = table[tokens], []
    for p in layers(params, config):
        y = norm(x, p["self_attention_norm/scale"])
        inside = functional.silu(y @ p["mlp/gate/kernel"]) * (y @ p["mlp/up/kernel"])
        x = x + inside @ p["mlp/down/kernel"] + attended(p, y, config, 40.0)
        hidden.append(x)
    x = norm(x, params["decoder/final_norm/scale"])
    return x @ table.T / config.d_model**0.5, {"decoder": hidden}


def grok_forward(params, tokens):
    """Computes the released model.py: four norms per block; a softmax over all experts weights their outputs."""
    import torch

    config = CONFIGS["grok"]
    functional, table = torch.nn.functional, params["token_embedding/embedding"]

    def norm(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon) * scale

    def experts(p, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.softmax(rows @ p["mlp/router/kernel"], dim=-1).topk(2)
        out = []
        for row, weight, choice in zip(rows, weights, chosen, strict=True):
            one = 0.0
            for w, e in zip(weight, choice, strict=True):
                gate = functional.gelu(row @ p["mlp/experts_gate/kernel"][e], approximate="tanh")
                one = one + w * ((gate * (row @ p["mlp/experts_up/kernel"][e])) @ p["mlp/experts_down/kernel"][e])
            out.append(one)
        return torch.stack(out).reshape(x.shape)

    x, hidden = table[tokens] * config.d_model**0.5, []
    for p in layers(params, config):
        y = attended(p, norm(x, p["self_attention_norm/scale"]), config, 40.0, cap=30.0)
        x = x + norm(y, p["self_attention_post_norm/scale"])
        x = x + norm(experts(p, norm(x, p["mlp_norm/scale"])), p["mlp_post_norm/scale"])
        hidden.append(x)
    x = norm(x, params["decoder/final_norm/scale"])
    return (x @ table.T) / 3**0.5, {"decoder": hidden}


def deepseek_forward(params, tokens):
    """Computes shared experts and the top-k routed experts (Dai et al. 2024, section 3, equations 9 to 11)."""
    import torch

    config = CONFIGS["deepseek"]
    functional, table = torch.nn.functional, params["token_embedding/embedding"]

    def norm(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon) * scale

    def feed_forward(x, gate, up, down):
        return (functional.silu(x @ gate) * (x @ up)) @ down

    def inside(p, x):
        if "mlp/up/kernel" in p:
            return feed_forward(x, *(p[f"mlp/{name}/kernel"] for name in ("gate", "up", "down")))
        y = feed_forward(x, *(p[f"mlp/shared_{name}/kernel"] for name in ("gate", "up", "down")))
        scores = torch.softmax(x @ p["mlp/router/kernel"], dim=-1)
        gates = torch.where(scores >= scores.topk(3).values[..., -1:], scores, 0.0)
        for e in range(5):
            own = (p[f"mlp/experts_{name}/kernel"][e] for name in ("gate", "up", "down"))
            y = y + gates[..., e, None] * feed_forward(x, *own)
        return y

    x, hidden = table[tokens], []
    for p in layers(params, config):
        x = x + attended(p, norm(x, p["self_attention_norm/scale"]), config, 40.0)
        x = x + inside(p, norm(x, p["mlp_norm/scale"]))
        hidden.append(x)
    return norm(x, params["decoder/final_norm/scale"]) @ params["unembedding/kernel"], {"decoder": hidden}


def neobert_forward(params, tokens):
    """Computes pre-norm blocks with SwiGLU, and an output matrix with a bias (Le Breton et al. 2025, section 3)."""
    import torch

    config, real = CONFIGS["neobert"], tokens != 0
    functional = torch.nn.functional

    def norm(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon) * scale

    x, hidden = params["token_embedding/embedding"][tokens], []
    for p in layers(params, config):
        x = x + attended(p, norm(x, p["self_attention_norm/scale"]), config, 40.0, real=real)
        y = norm(x, p["mlp_norm/scale"])
        x = x + (functional.silu(y @ p["mlp/gate/kernel"]) * (y @ p["mlp/up/kernel"])) @ p["mlp/down/kernel"]
        hidden.append(x)
    x = norm(x, params["encoder/final_norm/scale"])
    return x @ params["unembedding/kernel"] + params["unembedding/bias"], {"encoder": hidden}


def st_moe_forward(params, tokens, read):
    """Computes ST-MoE (Zoph et al. 2022): blocks of T5 1.1, some of which have experts; no capacity.

    A dense feed-forward layer follows the experts, as in flaxformer's SparseEncoderLayer.
    """
    import torch

    config, functional = CONFIGS["st_moe"], torch.nn.functional

    def norm(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon) * scale

    def feed_forward(p, name, x):
        gate, up, down = (p[f"{name}{which}/kernel"] for which in ("gate", "up", "down"))
        return (functional.gelu(x @ gate, approximate="tanh") * (x @ up)) @ down

    def inside(p, x):
        y = norm(x, p["mlp_norm/scale"])
        if "mlp/up/kernel" in p:
            return x + feed_forward(p, "mlp/", y)
        scores = torch.softmax(y @ p["mlp/router/kernel"], dim=-1)
        gates = torch.where(scores >= scores.topk(2).values[..., -1:], scores, 0.0)
        for e in range(3):
            own = {name: kernel[e] for name, kernel in p.items() if "mlp/experts_" in name}
            x = x + gates[..., e, None] * feed_forward(own, "mlp/experts_", y)
        return x + feed_forward(p, "mlp_after/", norm(x, p["mlp_after_norm/scale"]))

    def stack(side, x, real, encoded=None):
        length, hidden = x.shape[1], []
        seen = real[:, None, None] if encoded is None else torch.ones(length, length).tril().bool()
        numbers = [[bucket(key - query, encoded is None) for key in range(length)] for query in range(length)]
        bias = params[f"{side}/relative_bias/embedding"][torch.tensor(numbers)].permute(2, 0, 1)
        for p in turns(params, side, config):
            x = x + heads(p, "self", norm(x, p["self_attention_norm/scale"]), None, seen, bias)
            if encoded is not None:
                y = norm(x, p["cross_attention_norm/scale"])
                x = x + heads(p, "cross", y, encoded, (read != 0)[:, None, None], 0.0)
            x = inside(p, x)
            hidden.append(x)
        return norm(x, params[f"{side}/final_norm/scale"]), hidden

    def heads(p, kind, x, other, seen, bias):
        other = x if other is None else other
        q, k, v = (p[f"{kind}_attention/{name}/kernel"] for name in ("query", "key", "value"))
        logits = torch.einsum("btd,dhk,bse,ehk->bhts", x, q, other, k) + bias
        weights = torch.softmax(logits.masked_fill(~seen, float("-inf")), dim=-1)
        return torch.einsum("bhts,bse,ehk,hkd->btd", weights, other, v, p[f"{kind}_attention/out/kernel"])

    table = params["token_embedding/embedding"]
    encoded, of_encoder = stack("encoder", table[read], read != 0)
    x, of_decoder = stack("decoder", table[tokens], tokens != 0, encoded)
    return x @ params["unembedding/kernel"], {"encoder": of_encoder, "decoder": of_decoder}


def bucket(distance, both_ways):
    """Returns the index of the bias for a key at this distance from a query (Raffel et al. 2020, section 2.1).

    Half of the indices are for single distances. The others are for ranges of distances, which grow up to the maximum.
    """
    position = CONFIGS["st_moe"].position
    count, offset = position.num_buckets, 0
    if both_ways:
        count //= 2
        offset, distance = count * (distance > 0), -abs(distance)
    behind, exact = max(-distance, 0), count // 2
    if behind < exact:
        return offset + behind
    wider = math.log(behind / exact) / math.log(position.max_distance / exact) * (count - exact)
    return offset + min(exact + int(wider), count - 1)


def turns(params, side, config):
    """Returns the parameters of each block of a stack, by path; the last layer of each period has experts."""
    parts = [f"{side}/between/blocks/", f"{side}/blocks/"]
    plain, sparse = ({n.removeprefix(p): x for n, x in params.items() if n.startswith(p)} for p in parts)
    every, found = config.experts.every, []
    for i in range(config.stacks[side].num_layers):
        turn, place = divmod(i, every)
        of_kind, number = (sparse, turn) if place == every - 1 else (plain, turn * (every - 1) + place)
        found.append({name: x[number] for name, x in of_kind.items()})
    return found


def layers(params, config):
    """Returns the parameters of each block, by path in the block; blocks without experts, if any, come first."""
    found = []
    for part in (f"{config.family}/dense/blocks/", f"{config.family}/blocks/"):
        blocks = {name.removeprefix(part): x for name, x in params.items() if name.startswith(part)}
        found += [{name: x[i] for name, x in blocks.items()} for i in range(max(map(len, blocks.values()), default=0))]
    assert len(found) == config.num_layers
    return found


FORWARDS = {
    "palm": palm_forward,
    "grok": grok_forward,
    "deepseek": deepseek_forward,
    "neobert": neobert_forward,
    "st_moe": st_moe_forward,
}
CASES = {
    "palm": Case(CONFIGS["palm"], palm.FAMILIES[0]),
    "neobert": Case(CONFIGS["neobert"], neobert.FAMILIES[0]),
    "grok": Case(CONFIGS["grok"], grok.FAMILIES[0]),
    "deepseek": Case(CONFIGS["deepseek"], deepseek.FAMILIES[0]),
    "st_moe": Case(CONFIGS["st_moe"], st_moe.FAMILIES[0]),
    "elmo": Case(written_elmo.CONFIGS["elmo"], elmo.FAMILIES[0]),
}
OF_ELMO = {name: Case(config, elmo.FAMILIES[0]) for name, config in written_elmo.CONFIGS.items()}  # with other clipping


def parameters(name):
    """Returns the parameters of a case as trainable tensors, by our paths."""
    import torch

    tree = weights((CASES | OF_ELMO)[name].config)
    arrays = zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
    return {path: torch.from_numpy(np.array(x)).requires_grad_() for path, x in arrays}


def forward(name, params):
    """Returns the tensors "logits", "hidden …" and "loss" of the batch of a case, with gradients."""
    import torch

    arrays = batch((CASES | OF_ELMO)[name])
    if name in written_elmo.CONFIGS:
        return written_elmo.forward(written_elmo.CONFIGS[name], params, arrays)
    t = {key: torch.from_numpy(value.astype(np.int64)) for key, value in arrays.items()}
    logits, hidden = FORWARDS[name](params, *(t[side] for side in ("tokens", "encoder_tokens") if side in t))
    counted = torch.from_numpy(arrays["loss_weights"] > 0)
    found = {"logits": logits, "loss": torch.nn.functional.cross_entropy(logits[counted], t["targets"][counted])}
    return found | {f"hidden {side}": torch.stack(states) for side, states in hidden.items()}


def reference(name):
    """Returns the arrays of `forward`, and "gradient <path>" of each parameter."""
    params = parameters(name)
    found = forward(name, params)
    found["loss"].backward()
    gradients = {f"gradient {path}": p.grad.numpy() for path, p in params.items()}
    return {key: value.detach().numpy() for key, value in found.items()} | gradients
