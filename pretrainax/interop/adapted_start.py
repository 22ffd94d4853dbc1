"""Initializes a model from a trained model of a different family or shape, as `config.checkpoint.adapt` specifies."""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from pretrainax import models
from pretrainax.checkpoints.params import Params
from pretrainax.config import ModelConfig, UserError
from pretrainax.interop.adaptations import Adaptation, ParameterRule
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import ParameterMapping, fit_of, model_at
from pretrainax.sharding.param_paths import PyTree, flat, nested


class ConversionPlan(NamedTuple):
    """A plan for converting the parameters of a trained model (the start) to the parameters of a new model."""

    model: ModelConfig  # model config to load the start with
    fit: ParameterMapping  # mapping from the parameters of `model` to the parameters of the start
    rules: dict[str, ParameterRule]  # rule that creates each parameter of the new model, by parameter path
    unused_paths: tuple[str, ...]  # paths of unused parameters of the start
    effects: tuple[str, ...]  # effect of each adaptation on the model's outputs

    @property
    def copied(self) -> dict[str, str]:
        """Returns the source path of each parameter that is copied unchanged, keyed by its path in the new model."""
        return {
            path: rule.source for path, rule in self.rules.items() if rule.source is not None and not rule.operations
        }

    @property
    def created(self) -> dict[str, str]:
        """Describes how each parameter is converted or initialized, keyed by its path; omits copied parameters."""
        others = {path: rule for path, rule in self.rules.items() if path not in self.copied}
        return {
            path: f"{rule.description} ({rule.source})" if rule.source else "initialized"
            for path, rule in others.items()
        }

    @property
    def report(self) -> dict[str, object]:
        """Builds the entries of `start.json` that list the copied, converted, initialized and unused parameters."""
        return {"copied": self.copied, "made": self.created, "left_out": list(self.unused_paths)}

    @property
    def drawn(self) -> list[str]:
        """Returns the paths of the new model's parameters that are initialized, because they have no source."""
        return [path for path, rule in self.rules.items() if rule.source is None]

    def without(self, lacking: Sequence[str]) -> "ConversionPlan":
        """Returns a copy of the plan that initializes each parameter whose source is in `lacking`.

        Args:
          lacking: paths of the start's parameters that must not be used.
        """
        rules = {path: ParameterRule(None) if rule.source in lacking else rule for path, rule in self.rules.items()}
        return self._replace(rules=rules)

    def take(self, params: Params, shardings: PyTree, drawn: Mapping[str, jax.Array]) -> Params:
        """Converts the parameters of the start to the parameters of the new model.

        At any time, at most one parameter is held in memory twice, before and after its conversion.

        Args:
          params: parameters of `model`, with any shardings. The caller must drop its references to these parameters, so
            that each parameter can be freed after its last use.
          shardings: shardings of the returned parameters.
          drawn: the new model's parameters that have no source, already initialized, by path.
        """
        source, target, result = flat(params), flat(shardings), dict(drawn)
        del params  # otherwise `params` would keep all arrays in memory
        remaining = collections.Counter(rule.source for path, rule in self.rules.items() if path not in drawn)
        for path, rule in self.rules.items():
            if path in drawn:
                continue
            assert rule.source is not None  # parameters without a source are in `drawn`
            remaining[rule.source] -= 1
            x = source[rule.source] if remaining[rule.source] else source.pop(rule.source)
            is_copied = not rule.operations and not remaining[rule.source] and x.sharding == target[path]
            result[path] = x if is_copied else jax.jit(rule.applied, out_shardings=target[path])(x)
        return nested(result)


def adapted_start(
    origin: Origin, model: ModelConfig, adaptations: Sequence[Adaptation], fresh_heads: bool
) -> ConversionPlan:
    """Plans the conversion of a trained model to a new model, without reading parameters.

    Args:
      origin: location of the trained model (the start).
      model: config of the new model.
      adaptations: the adaptations, applied in order. If empty, both models must have the same parameters.
      fresh_heads: as in `fit_of`.

    Raises:
      UserError: an adaptation cannot convert between the two models, a parameter of the new model has no rule, or the
        start's parameters do not match the input of the first adaptation.
    """
    theirs, stages = model_at(origin) if adaptations else model, [model]
    for adaptation in reversed(adaptations):
        if problems := list(adaptation.mismatches(stages[0], theirs)):
            raise UserError(f"config.checkpoint.init_from={origin.description}: {'; '.join(problems)}")
        stages.insert(0, adaptation.before(stages[0], theirs))
    shapes = [_shapes(stage) for stage in stages]
    rules, effects = {path: ParameterRule(path) for path in shapes[0]}, []
    for i, adaptation in enumerate(adaptations):
        before, ours = stages[i : i + 2]
        composed = {path: adaptation.parameter_rule(path, before, ours).after(rules) for path in shapes[i + 1]}
        rules = {path: rule for path, rule in composed.items() if rule is not None}
        effects.append(f"{adaptation}: {adaptation.effect(before, ours)}")
    missing = [path for path, x in shapes[-1].items() if path not in rules or not _fits(rules[path], shapes[0], x)]
    if missing:
        raise UserError(
            f"config.checkpoint.init_from={origin.description}: config.checkpoint.adapt "
            f"({', '.join(map(str, adaptations))}) does not create {', '.join(missing)} of config.model: set "
            "config.model to the result of the adaptations"
        )
    fit, used = fit_of(origin, stages[0], fresh_heads), {rule.source for rule in rules.values()}
    unused = [path for path in fit.sources if path not in used]
    start = ConversionPlan(stages[0], fit, rules, (*fit.unused_paths, *unused), tuple(effects))
    return start.without(fit.missing_head_paths)


def _fits(rule: ParameterRule, shapes: Mapping[str, jax.ShapeDtypeStruct], target: jax.ShapeDtypeStruct) -> bool:
    return rule.source is None or jax.eval_shape(rule.applied, shapes[rule.source]).shape == target.shape


def _shapes(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return flat(models.abstract_params(model))
