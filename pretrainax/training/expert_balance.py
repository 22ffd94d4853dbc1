"""Says how evenly the routers of a mixture of experts spread the tokens: figures of a line, from sums of its blocks."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pretrainax.layers.by_layer import BY_LAYER, DROPPED, EXPERT_TOKENS, ROUTER_ENTROPY


def figures(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Returns figures of all layers: means, and how many experts got no token. {} for a model without experts.

    sums: {name: (sum, count)}, of which those BY_LAYER are arrays [L, …].
    """
    loads = list(expert_loads(sums).values())
    if not loads:
        return {}
    found = {
        "expert_imbalance": float(np.mean([max(load) for load in loads])),
        "dead_experts": float(sum(of_expert == 0 for load in loads for of_expert in load)),
    }
    for name, figure in ((ROUTER_ENTROPY, "router_entropy"), (DROPPED, "dropped_fraction")):
        of_layers = [mean for _, mean in _means(sums, name)]
        found |= {figure: float(np.mean(of_layers))} if of_layers else {}
    return found


def layer_figures(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Returns the same of each layer, {"expert_imbalance/layer=decoder.0": …}."""
    found = {f"expert_imbalance/layer={layer}": max(load) for layer, load in expert_loads(sums).items()}
    for name, figure in ((ROUTER_ENTROPY, "router_entropy"), (DROPPED, "dropped_fraction")):
        found |= {f"{figure}/layer={layer}": mean for layer, mean in _means(sums, name)}
    return found


def expert_loads(sums: Mapping[str, Sequence]) -> dict[str, list[float]]:
    """Returns the tokens of each expert over their mean, [E] by the name of the layer, "decoder.0"; 1 is even."""
    found = {}
    for layer, tokens, _ in _of_layers(sums, EXPERT_TOKENS):
        found[layer] = np.round(tokens / max(tokens.mean(), 1e-9), 4).tolist()
    return found


def _means(sums: Mapping[str, Sequence], name: str) -> Iterator[tuple[str, float]]:
    for layer, total, count in _of_layers(sums, name):
        yield layer, float(total / max(count, 1e-9))


def _of_layers(sums: Mapping[str, Sequence], name: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields the name of each layer, and the sum and the count that it has under a name."""
    for key, (total, count) in sums.items():
        if key.startswith(BY_LAYER) and key.endswith(f"/{name}"):
            _, stack, numbers, _ = key.split("/")
            first, step = map(int, numbers.split(":"))
            for i, of_layer in enumerate(zip(*(np.asarray(x, np.float64) for x in (total, count)), strict=True)):
                yield f"{stack}.{first + i * step}", *of_layer
