"""Adds up the values of single predictions over clusters (documents or rows), for standard errors."""

from collections.abc import Mapping
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.data.baseline import values_of_targets
from pretrainax.data.batch import HostBatch, is_gathered

MIN_DOCUMENTS = 20  # with fewer documents, standard errors are computed over rows

Values = Mapping[str, tuple[np.ndarray, np.ndarray]]  # {metric: (value of each prediction, its weight)}, [B, …] each


class Sums(NamedTuple):
    """The sums of a metric over the predictions in each of n clusters, [n] float64 each."""

    model: np.ndarray
    baseline: Optional[np.ndarray]  # None: the metric has no baseline
    weights: np.ndarray


class ClusterSums:
    """The sums of all metrics over the predictions in each of n clusters (documents or rows)."""

    def __init__(self, size: int):
        self._size, self._sums = size, dict[str, Sums]()

    def add(self, values: Values, batch: HostBatch, clusters: np.ndarray, baseline: Optional[Values] = None) -> None:
        """Adds the predictions of a batch.

        Args:
          values: the values of the model, from `values_of_predictions`.
          clusters: the cluster of each token, int [B, T]; negative for padding, whose predictions have weight 0.
          baseline: the values of a baseline for some of the metrics; their weights are not used.
        """
        for name, (value, weights) in values.items():
            other = (baseline or {}).get(name)
            if name not in self._sums:
                model, of_baseline, total = np.zeros((3, self._size))
                self._sums[name] = Sums(model, None if other is None else of_baseline, total)
            sums, ids = self._sums[name], _clusters_of(name, value, batch, clusters).ravel()
            np.add.at(sums.model, ids, _flat(value * weights))
            np.add.at(sums.weights, ids, _flat(weights))
            if sums.baseline is not None and other is not None:
                np.add.at(sums.baseline, ids, _flat(other[0] * weights))

    def sums(self) -> dict[str, Sums]:
        """Returns the sums of each metric that has predictions."""
        return {name: sums for name, sums in self._sums.items() if sums.weights.any()}


def _flat(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float64).ravel()


def values_of_predictions(values: Values, batch: HostBatch) -> Values:
    """Returns {metric: (value of each prediction, its weight)}, given the values of `Validation.eval_step`."""
    if "loss" not in values:
        return dict(values)
    (loss, _), (is_correct, _) = values["loss"], values["accuracy"]
    of_heads = {name: pair for name, pair in values.items() if name not in ("loss", "accuracy")}
    return values_of_targets(np.asarray(loss, np.float64), is_correct, batch) | of_heads


def _clusters_of(name: str, value: np.ndarray, batch: HostBatch, clusters: np.ndarray) -> np.ndarray:
    """Returns the cluster of each prediction, as an array with the shape of `value`; `clusters` are as in `add`."""
    clusters = np.maximum(clusters, 0)
    if value.ndim == 1:  # one prediction per row
        return clusters[:, 0]
    # The tokens of a discriminator are not the targets of the generator.
    if is_gathered(batch) and not name.startswith("replaced_"):
        return np.take_along_axis(clusters, batch["masked_positions"], axis=1)
    return clusters
