"""Formats tables for terminals and Markdown files."""

from collections.abc import Iterable, Sequence


def text_table(rows: Iterable[Sequence[str]], align: str = "<", indent: str = "", gap: str = "  ") -> str:
    """Formats a table as plain text with aligned columns and without trailing spaces.

    Args:
      rows: cells of each row; missing cells at the end of a row are empty.
      align: "<" (left) or ">" (right) for each column; the last character also applies to all remaining columns.
      indent: text before the first column.
      gap: text between two columns.
    """
    rows = [list(row) for row in rows]
    columns = max(map(len, rows), default=0)
    rows = [row + [""] * (columns - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    alignments = align.ljust(columns, align[-1])
    lines = (gap.join(map(_pad, row, widths, alignments)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], padded: bool = True) -> str:
    """Formats a table as Markdown.

    Args:
      padded: whether to pad the cells so that the columns of the Markdown source are aligned: the first column to the
        left, all others to the right.
    """
    if not padded:
        lines = [header, ["---"] * len(header), *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    alignments = "<".ljust(len(header), ">")
    rule = [
        "-" * width if alignment == "<" else "-" * (width - 1) + ":"
        for width, alignment in zip(widths, alignments, strict=True)
    ]
    return "".join(f"| {' | '.join(map(_pad, row, widths, alignments))} |\n" for row in [header, rule, *rows])


def _pad(cell: str, width: int, alignment: str) -> str:
    return cell.ljust(width) if alignment == "<" else cell.rjust(width)
