"""Formats views and statistics of rows as text for a terminal."""

import textwrap

from pretrainax.data.inspection.check import Measurement, format_plan_value, format_statistic
from pretrainax.data.inspection.row_view import Piece, View
from pretrainax.files.errors import counted
from pretrainax.reporting.tables import text_table

_MAX_TOKENS = 240  # maximum number of tokens per panel; the HTML page shows all tokens

# Kind of a piece -> colour code of a terminal (SGR parameters).
_COLOURS = {"masked": "1;33", "random": "1;31", "kept": "1;32", "sentinel": "1;35", "special": "36", "unknown": "7"}
_DIM = "2"


def render(one: View, colours: bool, width: int) -> str:
    """Formats the view of a row as lines of text.

    Args:
      one: the view.
      colours: whether to mark the kinds of pieces by colour; otherwise, they are marked in plain text, such as
        [MASK→hairy].
      width: characters per line. With `colours`, lines are not wrapped.
    """
    lines = [_colour(one.title, "1", colours), *(f"  ({note})" for note in one.notes)]
    for panel in one.panels:
        text, part, remaining = "", "", _MAX_TOKENS
        for piece in panel.pieces:
            if piece.kind == "padding":
                text += _format_piece(piece, colours)
            elif remaining:
                if piece.new and text:
                    text += "\n¶ "
                if piece.part != part:
                    text, part = f"{text} ⟨{piece.part or 'prefix ends'}⟩ ", piece.part
                piece = _truncate(piece, remaining)
                text += _format_piece(piece, colours)
                remaining -= piece.tokens
        if omitted := sum(piece.tokens for piece in panel.pieces if piece.kind != "padding") - _MAX_TOKENS + remaining:
            text += f" … {counted(omitted, 'token')} more"
        lines.append(f"  {panel.name}")
        for paragraph in text.splitlines():
            # Colour codes have no width, but textwrap counts their characters, so only plain text is wrapped.
            wrapped = [paragraph] if colours else textwrap.wrap(paragraph, max(width - 4, 20), break_on_hyphens=False)
            lines += [f"    {line}" for line in wrapped]
    return "\n".join(lines)


def table(measured: Measurement) -> str:
    """Formats all statistics in `measured` as a text table of measured and expected values."""
    rows = [("", "measured", "expected", "")]
    for name, statistics in [(group.name, group.statistics) for group in measured.groups] + [
        ("rows", measured.statistics)
    ]:
        for statistic in statistics:
            expected = "" if statistic.expected is None else f"{statistic.expected:.4g} ± {statistic.tolerance:.2g}"
            verdict = "" if statistic.expected is None else "OFF" if statistic.is_off else "ok"
            rows.append((f"{name}: {statistic.name}", format_statistic(statistic), expected, verdict))
    rows += [(f"plan: {name}", f"{format_plan_value(value)}", "", "") for name, value in measured.plan.items()]
    return f"measured over {counted(measured.rows, 'row')}\n{text_table(rows, '<>><')}"


def _truncate(piece: Piece, limit: int) -> Piece:
    """Truncates a piece to `limit` tokens, shortening its text in the same proportion."""
    if piece.tokens <= limit:
        return piece
    return piece._replace(text=piece.text[: len(piece.text) * limit // piece.tokens], tokens=limit)


def _format_piece(piece: Piece, colours: bool) -> str:
    """Formats a piece, marking its kind by colour or in plain text."""
    space = " " if piece.text.startswith(" ") else ""
    text = piece.text.strip(" ") if piece.target else piece.text
    if piece.kind == "padding":
        return _colour(f" [{piece.tokens} padding]" if piece.tokens else piece.text, _DIM, colours)
    if piece.kind == "masked" and piece.target:
        return space + (_colour(piece.target, "4;" + _COLOURS["masked"], True) if colours else f"[MASK→{piece.target}]")
    if piece.kind == "random":
        replacement = f"{text}→{piece.target}"
        return space + (_colour(replacement, _COLOURS["random"], True) if colours else f"[{replacement}]")
    if piece.kind == "kept":
        return space + (_colour(text, _COLOURS["kept"], True) if colours else f"[={text}]")
    return _colour(piece.text, _DIM if piece.dim else _COLOURS.get(piece.kind, ""), colours)


def _colour(text: str, code: str, colours: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colours and code else text
