"""Converts full attention to sparse attention, whose cost is linear in the sequence length."""

import dataclasses
from collections.abc import Iterator

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, ParameterRule

_FIELDS = ("sparse_attention", "layer_pattern", "window")


@dataclasses.dataclass
class FullToSparse(Adaptation):
    """Replaces full attention with sparse attention.

    The projections of global attention are initialized as copies of the projections of full attention (Beltagy et al.
    2020, section 5).
    """

    fields = _FIELDS

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.model.sparse_attention is None:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.sparse_attention is None: set it to "
                "SlidingWindows(), or leave the adaptation out"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours, **{name: getattr(theirs, name) for name in _FIELDS})

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        if theirs.sparse_attention is not None or ours.sparse_attention is None:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.sparse_attention is {ours.sparse_attention}, "
                f"there {theirs.sparse_attention}, which must be None: leave the adaptation out"
            )

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        return ParameterRule(path.replace("/global_", "/"))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        return "tokens attend to a part of their text; outputs for texts within the window are unchanged"
