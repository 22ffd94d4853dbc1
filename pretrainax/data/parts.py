"""Names the parts of a validation that have their own metrics: the sources and the objectives of a mixture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.data.objectives import Objective
    from pretrainax.data.sources import Source


def stream_part_names(sources: "Sequence[Source]", objective: "Objective") -> list[tuple[str, ...]]:
    """Returns the part names of each stream of `pipeline.Batches`, as ("source=wiki", "denoiser=R-0.15-3").

    The source is omitted if there is only one, and the objective if all streams have the same objective.
    """
    streams = [(source, part) for source in sources for _, part in objective.components(source.pairs)]
    named = (_part_names(column) for column in zip(*streams, strict=True))
    return [tuple(filter(None, names)) for names in zip(*named, strict=True)]


def _part_names(items: "Sequence[Source | Objective]") -> list[str]:
    """Returns the name of each item; "" if all are equal. Equal names of different items get numbers, "source=en#2"."""
    distinct = [item for i, item in enumerate(items) if item not in items[:i]]
    if len(distinct) == 1:
        return [""] * len(items)
    names = [item.part for item in distinct]
    numbered = [f"{n}#{1 + names[:i].count(n)}" if names.count(n) > 1 else n for i, n in enumerate(names)]
    return [numbered[distinct.index(item)] for item in items]
