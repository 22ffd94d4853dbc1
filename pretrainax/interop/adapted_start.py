"""Starts a model from one of another family or shape, as `config.checkpoint.adapt` says: what is copied, made, left."""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from pretrainax import models
from pretrainax.checkpoints.params import Params
from pretrainax.config import ModelConfig, UserError
from pretrainax.interop.adaptations import Adaptation, Way
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import Fit, fit_of, model_at
from pretrainax.sharding.param_paths import PyTree, flat, nested


class AdaptedStart(NamedTuple):
    """Says what is read of a start, and how it becomes the parameters of a model."""

    model: ModelConfig  # whose parameters are read
    fit: Fit  # of that model and the start
    ways: dict[str, Way]  # of each parameter of the model that is started
    left_out: tuple[str, ...]  # what there becomes nothing
    effects: tuple[str, ...]  # of each adaptation, on what is computed

    @property
    def copied(self) -> dict[str, str]:
        """Returns the path there of each parameter that is taken as it is."""
        return {path: way.source for path, way in self.ways.items() if way.source is not None and not way.made}

    @property
    def made(self) -> dict[str, str]:
        """Returns how each of the others is made, by its path."""
        others = {path: way for path, way in self.ways.items() if path not in self.copied}
        return {path: f"{way.how} ({way.source})" if way.source else "drawn anew" for path, way in others.items()}

    @property
    def report(self) -> dict[str, object]:
        """Returns what became of each parameter, as `start.json` has it."""
        return {"copied": self.copied, "made": self.made, "left_out": list(self.left_out)}

    @property
    def drawn(self) -> list[str]:
        """Returns the parameters that nothing there becomes."""
        return [path for path, way in self.ways.items() if way.source is None]

    def without(self, lacking: Sequence[str]) -> "AdaptedStart":
        """Returns the same where what becomes of some parameters of the start, as they are not there, is drawn anew."""
        ways = {path: Way(None) if way.source in lacking else way for path, way in self.ways.items()}
        return self._replace(ways=ways)

    def take(self, params: Params, shardings: PyTree, drawn: Mapping[str, jax.Array]) -> Params:
        """Returns the parameters of the model that is started; at no time is more than one of them there twice.

        Args:
          params: of `model`, in any shards; given away, so that what is used up can be forgotten.
          shardings: of the parameters that are returned.
          drawn: those of them that are not taken.
        """
        there, wanted, taken = flat(params), flat(shardings), dict(drawn)
        del params  # or it would hold on to all of them
        left = collections.Counter(way.source for path, way in self.ways.items() if path not in drawn)
        for path, way in self.ways.items():
            if path in drawn:
                continue
            assert way.source is not None  # else it is drawn
            left[way.source] -= 1
            x = there[way.source] if left[way.source] else there.pop(way.source)
            as_it_is = not way.made and not left[way.source] and x.sharding == wanted[path]
            taken[path] = x if as_it_is else jax.jit(way.applied, out_shardings=wanted[path])(x)
        return nested(taken)


def adapted_start(
    origin: Origin, model: ModelConfig, adaptations: Sequence[Adaptation], fresh_heads: bool
) -> AdaptedStart:
    """Returns how a start becomes a model, one adaptation after the other; no number of it is read.

    Args:
      fresh_heads: as `fit_of` has it.

    Raises:
      UserError: an adaptation is not for these two models, there are parameters that none of them gives, or the start
        is of another model than they begin with.
    """
    theirs, stages = model_at(origin) if adaptations else model, [model]
    for adaptation in reversed(adaptations):
        if problems := list(adaptation.mismatches(stages[0], theirs)):
            raise UserError(f"config.checkpoint.init_from={origin.description}: {'; '.join(problems)}")
        stages.insert(0, adaptation.before(stages[0], theirs))
    shapes = [_shapes(stage) for stage in stages]
    ways, effects = {path: Way(path) for path in shapes[0]}, []
    for i, adaptation in enumerate(adaptations):
        before, ours = stages[i : i + 2]
        found = {path: adaptation.way(path, before, ours).after(ways) for path in shapes[i + 1]}
        ways = {path: way for path, way in found.items() if way is not None}
        effects.append(f"{adaptation}: {adaptation.effect(before, ours)}")
    lost = [path for path, x in shapes[-1].items() if path not in ways or not _fits(ways[path], shapes[0], x)]
    if lost:
        raise UserError(
            f"config.checkpoint.init_from={origin.description}: config.checkpoint.adapt "
            f"({', '.join(map(str, adaptations))}) gives no {', '.join(lost)} of config.model: set that to what "
            "these make of the start"
        )
    fit, used = fit_of(origin, stages[0], fresh_heads), {way.source for way in ways.values()}
    unused = [path for path in fit.taken if path not in used]
    start = AdaptedStart(stages[0], fit, ways, (*fit.left_out, *unused), tuple(effects))
    return start.without(fit.lacking)


def _fits(way: Way, shapes: Mapping[str, jax.ShapeDtypeStruct], wanted: jax.ShapeDtypeStruct) -> bool:
    return way.source is None or jax.eval_shape(way.applied, shapes[way.source]).shape == wanted.shape


def _shapes(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return flat(models.abstract_params(model))
