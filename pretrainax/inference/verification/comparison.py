"""Records and formats comparisons of a model in PretrainAX with the same model in transformers."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pretrainax.files.errors import printable
from pretrainax.reporting.tables import text_table

Status = Literal["ok", "DIFFERS", "not compared"]
_MAX_DETAILS, _MAX_CHARACTERS = 5, 300  # maximum number and length of the differences that one comparison prints


class Comparison(NamedTuple):
    """The result of one comparison."""

    what: str  # "logits"
    status: Status
    count: str = ""  # number of compared items: "9 rows, 180 tokens"
    difference: str = ""  # largest difference, or the number of items that differ
    limit: str = ""  # largest accepted difference, with its reason
    details: tuple[str, ...] = ()  # the first differences, or the reason why nothing was compared

    def cells(self) -> list[str]:
        """Returns the cells of a table row."""
        if self.status == "not compared":
            return [self.what, f"{self.status}: {self.details[0]}"]
        return [self.what, self.count, self.difference, self.limit, self.status]


def exact(what: str, count: int, unit: str, differences: Sequence[str]) -> Comparison:
    """Builds the result of a comparison of values that must be equal.

    Args:
      count: number of compared values.
      unit: plural noun for the compared values.
      differences: descriptions of the values that differ.
    """
    status: Status = "DIFFERS" if differences else "ok"
    shown = tuple(map(_line, differences[:_MAX_DETAILS]))
    return Comparison(what, status, f"{count} {unit}", str(len(differences)), "0", shown)


def within(what: str, count: str, difference: float, limit: float, reason: str, details: Sequence[str]) -> Comparison:
    """Builds the result of a comparison of floats, which must differ by at most `limit`; NaN counts as a difference.

    Args:
      details: descriptions of the largest differences, used only if the limit is exceeded.
    """
    is_equal = difference <= limit
    shown = () if is_equal else tuple(map(_line, details[:_MAX_DETAILS]))
    bound = f"{limit:.1g}: {reason}"
    return Comparison(what, "ok" if is_equal else "DIFFERS", count, f"{difference:.1e}", bound, shown)


def not_compared(what: str, reason: str) -> Comparison:
    """Builds the entry of values that cannot be compared, with the reason."""
    return Comparison(what, "not compared", details=(_line(reason),))


def _line(text: str) -> str:
    """Formats text of a library or of a file as one short line."""
    text = printable(text)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"


class Verification(NamedTuple):
    """The comparisons of a model."""

    name: str  # description of the two models: "exports/mine in transformers 5.23.0 and in PretrainAX"
    comparisons: tuple[Comparison, ...]
    seconds: float

    @property
    def differs(self) -> bool:
        """Returns True if a comparison found a difference."""
        return any(comparison.status == "DIFFERS" for comparison in self.comparisons)

    def summary(self) -> str:
        """Formats the result as one line."""
        names = {status: [] for status in ("ok", "DIFFERS", "not compared")}
        for comparison in self.comparisons:
            names[comparison.status].append(comparison.what)
        equal = f"{len(names['ok'])} comparisons with transformers are equal"
        differing = f"; DIFFERENT: {', '.join(names['DIFFERS'])}" if names["DIFFERS"] else ""
        skipped = f"; not compared: {', '.join(names['not compared'])}" if names["not compared"] else ""
        return f"verified in {self.seconds:.1f} s: {equal}{differing}{skipped}"

    def table(self) -> str:
        """Formats all comparisons, one per line, followed by the first differences of each comparison."""
        header = ["", "compared", "difference", "limit", ""]
        lines = [f"{self.name}\n", text_table([header, *(comparison.cells() for comparison in self.comparisons)])]
        for comparison in self.comparisons:
            if comparison.status == "DIFFERS":
                lines += ["", f"{comparison.what} DIFFERS:", *(f"  {line}" for line in comparison.details)]
        return "\n".join([*lines, "", self.summary()])
