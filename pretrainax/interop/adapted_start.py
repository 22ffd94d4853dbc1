"""Initializes a model from a model of a different family or shape, as set in `config.checkpoint.adapt`."""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from pretrainax import models
from pretrainax.checkpoints.params import Params
from pretrainax.config import ModelConfig, UserError
from pretrainax.interop.adaptations import Adaptation, ParameterRule
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import Fit, fit_of, model_at
from pretrainax.sharding.param_paths import PyTree, flat, nested


class AdaptedStart(NamedTuple):
    """The plan that converts the parameters of a trained model (the start) to the parameters of a new model."""

    model: ModelConfig  # model config with which the parameters of the start are read
    fit: Fit  # mapping between the parameters of the start and of `model`
    rules: dict[str, ParameterRule]  # rule for each parameter of the new model, by path
    left_out: tuple[str, ...]  # paths of unused parameters of the start
    effects: tuple[str, ...]  # description of the effect of each adaptation on the function of the model

    @property
    def copied(self) -> dict[str, str]:
        """Returns the path in the start of each parameter that is copied unchanged, by path in the new model."""
        return {path: way.source for path, way in self.rules.items() if way.source is not None and not way.operations}

    @property
    def created(self) -> dict[str, str]:
        """Returns a description for each parameter that is converted or initialized, by path in the new model."""
        others = {path: way for path, way in self.rules.items() if path not in self.copied}
        return {path: f"{way.how} ({way.source})" if way.source else "initialized" for path, way in others.items()}

    @property
    def report(self) -> dict[str, object]:
        """Returns the record for `start.json`: which parameters are copied, converted, initialized or left out."""
        return {"copied": self.copied, "made": self.created, "left_out": list(self.left_out)}

    @property
    def drawn(self) -> list[str]:
        """Returns the paths of the parameters of the new model that have no source in the start and are initialized."""
        return [path for path, way in self.rules.items() if way.source is None]

    def without(self, lacking: Sequence[str]) -> "AdaptedStart":
        """Returns the plan for a start without some parameters; everything made from them is initialized.

        Args:
          lacking: paths of the parameters that the start lacks.
        """
        ways = {path: ParameterRule(None) if way.source in lacking else way for path, way in self.rules.items()}
        return self._replace(rules=ways)

    def take(self, params: Params, shardings: PyTree, drawn: Mapping[str, jax.Array]) -> Params:
        """Returns the parameters of the new model, converted from the parameters of the start.

        At most one parameter is in memory twice at any time.

        Args:
          params: parameters of `model`, with any shardings. The caller must drop its references to them, so that each
            can be freed after its last use.
          shardings: shardings of the returned parameters.
          drawn: initialized parameters by path.
        """
        source, target, result = flat(params), flat(shardings), dict(drawn)
        del params  # otherwise `params` would keep all arrays in memory
        remaining = collections.Counter(way.source for path, way in self.rules.items() if path not in drawn)
        for path, way in self.rules.items():
            if path in drawn:
                continue
            assert way.source is not None  # parameters without a source are in `drawn`
            remaining[way.source] -= 1
            x = source[way.source] if remaining[way.source] else source.pop(way.source)
            is_copied = not way.operations and not remaining[way.source] and x.sharding == target[path]
            result[path] = x if is_copied else jax.jit(way.applied, out_shardings=target[path])(x)
        return nested(result)


def adapted_start(
    origin: Origin, model: ModelConfig, adaptations: Sequence[Adaptation], fresh_heads: bool
) -> AdaptedStart:
    """Returns the plan that converts a trained model to a new model, without reading parameters.

    Args:
      origin: location of the trained model (the start).
      model: config of the new model.
      adaptations: applied in this order; (): the two models have the same parameters.
      fresh_heads: as in `fit_of`.

    Raises:
      UserError: an adaptation does not fit the two models, a parameter has no rule, or the start differs from the model
        to which the first adaptation is applied.
    """
    theirs, stages = model_at(origin) if adaptations else model, [model]
    for adaptation in reversed(adaptations):
        if problems := list(adaptation.mismatches(stages[0], theirs)):
            raise UserError(f"config.checkpoint.init_from={origin.description}: {'; '.join(problems)}")
        stages.insert(0, adaptation.before(stages[0], theirs))
    shapes = [_shapes(stage) for stage in stages]
    ways, effects = {path: ParameterRule(path) for path in shapes[0]}, []
    for i, adaptation in enumerate(adaptations):
        before, ours = stages[i : i + 2]
        rules = {path: adaptation.parameter_rule(path, before, ours).after(ways) for path in shapes[i + 1]}
        ways = {path: way for path, way in rules.items() if way is not None}
        effects.append(f"{adaptation}: {adaptation.effect(before, ours)}")
    missing = [path for path, x in shapes[-1].items() if path not in ways or not _fits(ways[path], shapes[0], x)]
    if missing:
        raise UserError(
            f"config.checkpoint.init_from={origin.description}: config.checkpoint.adapt "
            f"({', '.join(map(str, adaptations))}) does not create {', '.join(missing)} of config.model: set "
            "config.model to the result of the adaptations"
        )
    fit, used = fit_of(origin, stages[0], fresh_heads), {way.source for way in ways.values()}
    unused = [path for path in fit.sources if path not in used]
    start = AdaptedStart(stages[0], fit, ways, (*fit.left_out, *unused), tuple(effects))
    return start.without(fit.lacking)


def _fits(way: ParameterRule, shapes: Mapping[str, jax.ShapeDtypeStruct], target: jax.ShapeDtypeStruct) -> bool:
    return way.source is None or jax.eval_shape(way.applied, shapes[way.source]).shape == target.shape


def _shapes(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return flat(models.abstract_params(model))
