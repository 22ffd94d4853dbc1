"""Names the parts that a validation has figures of: the sources of a mixture, and the objectives of one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.data.objectives import Objective
    from pretrainax.data.sources import Source


def parts_of_streams(sources: "Sequence[Source]", objective: "Objective") -> list[tuple[str, ...]]:
    """Returns of which parts each stream of `pipeline.Batches` is, ("source=wiki", "denoiser=R-0.15-3").

    A stream is of no source where there is but one, and of no objective where that is the same for all.
    """
    streams = [(source, part) for source in sources for _, part in objective.components(source.pairs)]
    named = (_named(kind) for kind in zip(*streams, strict=True))
    return [tuple(filter(None, names)) for names in zip(*named, strict=True)]


def _named(things: "Sequence[Source | Objective]") -> list[str]:
    """Returns the name of each; those of different things are numbered where they are equal, "source=en#2"."""
    distinct = [thing for i, thing in enumerate(things) if thing not in things[:i]]
    if len(distinct) == 1:
        return [""] * len(things)
    names = [thing.part for thing in distinct]
    numbered = [f"{n}#{1 + names[:i].count(n)}" if names.count(n) > 1 else n for i, n in enumerate(names)]
    return [numbered[distinct.index(thing)] for thing in things]
