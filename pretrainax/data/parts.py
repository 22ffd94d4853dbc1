"""Names the parts of validation that have separate metrics: each data source, and each objective in a mixture."""

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.data.objectives import Objective
    from pretrainax.data.sources import Source


def stream_part_names(sources: "Sequence[Source]", objective: "Objective") -> list[tuple[str, ...]]:
    """Returns the part names of each stream of `pipeline.Batches`, for example ("source=wiki", "denoiser=R-0.15-3").

    The source name is omitted if there is only one source, and the objective name if all streams have the same
    objective.
    """
    streams = [(source, part) for source in sources for _, part in objective.components(source.pairs)]
    name_columns = (_part_names(column) for column in zip(*streams, strict=True))
    return [tuple(filter(None, names)) for names in zip(*name_columns, strict=True)]


def first_half(batches: int) -> int:
    """Returns how many of the `batches` of a validation select checkpoints, with `config.evaluate.halves`."""
    return (batches + 1) // 2


def with_halves(parts: Sequence[tuple[str, ...]], halves: bool) -> list[tuple[str, ...]]:
    """Adds the part "half=1" to the first half of the batches of each stream, and "half=2" to the other batches.

    Args:
      parts: the part names of each batch, which are equal for batches of the same stream.
      halves: `config.evaluate.halves`; if False, returns `parts`.
    """
    if not halves:
        return list(parts)
    totals, seen = collections.Counter(parts), collections.Counter()
    halved = []
    for names in parts:
        halved.append((*names, "half=1" if seen[names] < first_half(totals[names]) else "half=2"))
        seen[names] += 1
    return halved


def _part_names(items: "Sequence[Source | Objective]") -> list[str]:
    """Returns the part name of each item, or "" for every item if all are equal.

    Different items with the same name are numbered: "source=en#1", "source=en#2".
    """
    distinct = [item for i, item in enumerate(items) if item not in items[:i]]
    if len(distinct) == 1:
        return [""] * len(items)
    names = [item.part for item in distinct]
    numbered = [f"{n}#{1 + names[:i].count(n)}" if names.count(n) > 1 else n for i, n in enumerate(names)]
    return [numbered[distinct.index(item)] for item in items]
