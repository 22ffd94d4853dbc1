"""Computes the load-balance metrics of a mixture of experts from the sums that the model's blocks return."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pretrainax.layers.by_layer import BY_LAYER, DROPPED, EXPERT_TOKENS, ROUTER_ENTROPY


def balance_metrics(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Averages the load-balance metrics over layers and counts unused experts; returns {} for a model without experts.

    Args:
      sums: {metric: (sum, count)}; per-layer sums, whose names start with BY_LAYER, are arrays [L, …].
    """
    loads = list(expert_loads(sums).values())
    if not loads:
        return {}
    metrics = {
        "expert_imbalance": float(np.mean([max(load) for load in loads])),
        "dead_experts": float(sum(tokens == 0 for load in loads for tokens in load)),
    }
    for name, metric in ((ROUTER_ENTROPY, "router_entropy"), (DROPPED, "dropped_fraction")):
        layer_means = [mean for _, mean in _means(sums, name)]
        metrics |= {metric: float(np.mean(layer_means))} if layer_means else {}
    return metrics


def layer_balance_metrics(sums: Mapping[str, Sequence]) -> dict[str, float]:
    """Computes the load-balance metrics of each layer, for example {"expert_imbalance/layer=decoder.0": …}."""
    metrics = {f"expert_imbalance/layer={layer}": max(load) for layer, load in expert_loads(sums).items()}
    for name, metric in ((ROUTER_ENTROPY, "router_entropy"), (DROPPED, "dropped_fraction")):
        metrics |= {f"{metric}/layer={layer}": mean for layer, mean in _means(sums, name)}
    return metrics


def expert_loads(sums: Mapping[str, Sequence]) -> dict[str, list[float]]:
    """Divides each expert's token count by the mean over its layer's experts; returns {"decoder.0": [E], …}."""
    loads = {}
    for layer, tokens, _ in _layer_sums(sums, EXPERT_TOKENS):
        loads[layer] = np.round(tokens / max(tokens.mean(), 1e-9), 4).tolist()
    return loads


def _means(sums: Mapping[str, Sequence], name: str) -> Iterator[tuple[str, float]]:
    for layer, total, count in _layer_sums(sums, name):
        yield layer, float(total / max(count, 1e-9))


def _layer_sums(sums: Mapping[str, Sequence], name: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (layer, sum, count) of the metric `name` for each layer, where the layer is a name such as "decoder.0"."""
    for key, (total, count) in sums.items():
        if key.startswith(BY_LAYER) and key.endswith(f"/{name}"):
            _, stack, layer_range, _ = key.split("/")
            first, step = map(int, layer_range.split(":"))
            for i, layer_values in enumerate(zip(*(np.asarray(x, np.float64) for x in (total, count)), strict=True)):
                yield f"{stack}.{first + i * step}", *layer_values
