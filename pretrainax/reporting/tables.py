"""Formats tables for terminals and Markdown files."""

from collections.abc import Iterable, Sequence


def text_table(rows: Iterable[Sequence[str]], align: str = "<", indent: str = "", gap: str = "  ") -> str:
    """Returns a table as plain text with aligned columns, without trailing spaces.

    Args:
      rows: cells of each row; missing cells at the end of a row are empty.
      align: "<" (left) or ">" (right) for each column; the last character also applies to all further columns.
      indent: text before the first column.
      gap: text between two columns.
    """
    rows = [list(row) for row in rows]
    columns = max(map(len, rows), default=0)
    rows = [row + [""] * (columns - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(columns, align[-1])
    lines = (gap.join(map(_padded, row, widths, sides)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], padded: bool = True) -> str:
    """Returns a table in Markdown.

    padded: True also aligns the columns of the source text, the first column to the left and the others to the right.
    """
    if not padded:
        lines = [header, ["---"] * len(header), *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    sides = "<".ljust(len(header), ">")
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for width, side in zip(widths, sides, strict=True)]
    return "".join(f"| {' | '.join(map(_padded, row, widths, sides))} |\n" for row in [header, rule, *rows])


def _padded(cell: str, width: int, side: str) -> str:
    return cell.ljust(width) if side == "<" else cell.rjust(width)
