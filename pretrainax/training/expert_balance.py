"""Says how evenly the routers of a mixture of experts spread the tokens: figures of a line, from sums of its blocks."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pretrainax.layers.by_layer import BY_LAYER, DROPPED, EXPERT_TOKENS, ROUTER_ENTROPY


def figures(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Returns figures of all layers: means, and how many experts got no token. {} for a model without experts.

    sums: {name: (sum, count)}, of which those BY_LAYER are arrays [L, …].
    """
    loads = [row for of_stack in expert_loads(sums).values() for row in of_stack]
    if not loads:
        return {}
    found = {
        "expert_imbalance": float(np.mean([max(row) for row in loads])),
        "dead_experts": float(sum(load == 0 for row in loads for load in row)),
    }
    for name, figure in ((ROUTER_ENTROPY, "router_entropy"), (DROPPED, "dropped_fraction")):
        of_layers = [value for _, value in _of_layers(sums, name)]
        found |= {figure: float(np.mean(of_layers))} if of_layers else {}
    return found


def layer_figures(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Returns the same of each layer, {"expert_imbalance/layer=decoder.0": …}."""
    stacks = expert_loads(sums)
    found = {
        f"expert_imbalance/layer={stack}.{layer}": max(row)
        for stack, of_stack in stacks.items()
        for layer, row in enumerate(of_stack)
    }
    for name, figure in ((ROUTER_ENTROPY, "router_entropy"), (DROPPED, "dropped_fraction")):
        found |= {f"{figure}/layer={layer}": value for layer, value in _of_layers(sums, name)}
    return found


def expert_loads(sums: Mapping[str, Sequence]) -> dict[str, list[list[float]]]:
    """Returns the tokens of each expert over the mean of its layer, [L, E] by the name of the stack; 1 is even."""
    found = {}
    for name, (tokens, _) in sums.items():
        if name.startswith(BY_LAYER) and name.endswith(f"/{EXPERT_TOKENS}"):
            tokens = np.asarray(tokens, np.float64)
            even = np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
            found[name.split("/")[1]] = np.round(tokens / even, 4).tolist()
    return found


def _of_layers(sums: Mapping[str, Sequence], name: str) -> Iterator[tuple[str, float]]:
    """Yields "decoder.0" and the mean of a figure in that layer."""
    for key, (total, count) in sums.items():
        if key.startswith(BY_LAYER) and key.endswith(f"/{name}"):
            means = np.asarray(total, np.float64) / np.maximum(np.asarray(count, np.float64), 1e-9)
            for layer, mean in enumerate(means):
                yield f"{key.split('/')[1]}.{layer}", float(mean)
