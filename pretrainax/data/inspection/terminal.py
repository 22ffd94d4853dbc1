"""Formats views of rows and statistics of rows as text for a terminal."""

import textwrap

from pretrainax.data.inspection.check import Measurement, format_statistic
from pretrainax.data.inspection.row_view import Piece, View
from pretrainax.reporting.tables import text_table

_MAX_TOKENS = 240  # maximum number of tokens per side; the HTML page shows all tokens

# Kind of a piece -> colour code of a terminal (SGR parameters).
_COLOURS = {"masked": "1;33", "random": "1;31", "kept": "1;32", "sentinel": "1;35", "special": "36", "unknown": "7"}
_DIM = "2"


def render(one: View, colours: bool, width: int) -> str:
    """Returns a view of a row as lines of text.

    Args:
      colours: marks pieces by colours; False: by plain text, such as [MASK→hairy].
      width: characters per line. With `colours`, lines are not wrapped.
    """
    lines = [_painted(one.title, "1", colours), *(f"  ({note})" for note in one.notes)]
    for side in one.panels:
        text, part, left = "", "", _MAX_TOKENS
        for piece in side.pieces:
            if piece.kind == "padding":
                text += _marked(piece, colours)
            elif left:
                if piece.new and text:
                    text += "\n¶ "
                if piece.part != part:
                    text, part = f"{text} ⟨{piece.part or 'prefix ends'}⟩ ", piece.part
                piece = _cut(piece, left)
                text += _marked(piece, colours)
                left -= piece.tokens
        if over := sum(piece.tokens for piece in side.pieces if piece.kind != "padding") - _MAX_TOKENS + left:
            text += f" … {over:,} tokens more"
        lines.append(f"  {side.name}")
        for paragraph in text.splitlines():
            # Colour codes have no width, but textwrap counts their characters, so only plain text is wrapped.
            wrapped = [paragraph] if colours else textwrap.wrap(paragraph, max(width - 4, 20), break_on_hyphens=False)
            lines += [f"    {line}" for line in wrapped]
    return "\n".join(lines)


def table(measured: Measurement) -> str:
    """Returns a text table of all statistics of `measured`, with measured and expected values."""
    rows = [("", "measured", "expected", "")]
    for name, statistics in [(group.name, group.statistics) for group in measured.groups] + [
        ("rows", measured.statistics)
    ]:
        for statistic in statistics:
            expected = "" if statistic.expected is None else f"{statistic.expected:.4g} ± {statistic.tolerance:.2g}"
            verdict = "" if statistic.expected is None else "OFF" if statistic.is_off else "ok"
            rows.append((f"{name}: {statistic.name}", format_statistic(statistic), expected, verdict))
    rows += [(f"plan: {name}", f"{value:,.4g}", "", "") for name, value in measured.plan.items()]
    return f"measured over {measured.rows} rows\n{text_table(rows, '<>><')}"


def _cut(piece: Piece, room: int) -> Piece:
    """Returns a piece with at most `room` tokens. The text is shortened in the same proportion as the tokens."""
    if piece.tokens <= room:
        return piece
    return piece._replace(text=piece.text[: len(piece.text) * room // piece.tokens], tokens=room)


def _marked(piece: Piece, colours: bool) -> str:
    space = " " if piece.text.startswith(" ") else ""
    text = piece.text.strip(" ") if piece.target else piece.text
    if piece.kind == "padding":
        return _painted(f" [{piece.tokens} padding]" if piece.tokens else piece.text, _DIM, colours)
    if piece.kind == "masked" and piece.target:
        return space + (
            _painted(piece.target, "4;" + _COLOURS["masked"], True) if colours else f"[MASK→{piece.target}]"
        )
    if piece.kind == "random":
        marked = f"{text}→{piece.target}"
        return space + (_painted(marked, _COLOURS["random"], True) if colours else f"[{marked}]")
    if piece.kind == "kept":
        return space + (_painted(text, _COLOURS["kept"], True) if colours else f"[={text}]")
    return _painted(piece.text, _DIM if piece.dim else _COLOURS.get(piece.kind, ""), colours)


def _painted(text: str, code: str, colours: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colours and code else text
