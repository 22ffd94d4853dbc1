"""What a model will see: `python -m pretrainax.inspect --config=… [--count=4] [--html=FILE]`.

Shows the first rows of a run in words, each token marked with what the objective did to it, and the measured rates
beside those that the config asks for. Exit code 1 when one is out of its range; 0 when all are as asked.
"""

import os
import shutil
import sys
import textwrap

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.data.collate import collate
from pretrainax.data.inspection import check, page
from pretrainax.data.inspection.row_view import Piece, View, Words, view
from pretrainax.data.objectives import ReplacedTokenDetection
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.reporting.tables import text_table

_COUNT = flags.DEFINE_integer("count", 4, "Rows to show", lower_bound=0)
_HTML = flags.DEFINE_string("html", None, "File of a page that shows them, to write")
_MOST = 240  # tokens of a side in the terminal; the page shows all

# SGR codes of what a terminal colours, and how a piece is written where it does not.
_COLOURS = {"masked": "1;33", "random": "1;31", "kept": "1;32", "sentinel": "1;35", "special": "36", "unknown": "7"}
_DIM = "2"


def main() -> int:
    experiment = cli.experiment()
    if _HTML.value:
        cli.folder("html", os.path.dirname(_HTML.value) or ".")
    prepared = prepare(experiment)
    batches = batches_of(experiment, prepared, "train")
    measured = check.measure(batches)
    views = views_of(batches, Words(prepared.tokenizer), _COUNT.value)
    if _HTML.value:
        _write(_HTML.value, page.render(cli.config_name(), prepared.summary, measured, views))
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((100, 24)).columns
    for one in views:
        print("\n" + in_words(one, colours, width))
    print("\n" + table(measured))
    check.check(measured, experiment.objective)
    return 0


def views_of(batches: Batches, words: Words, count: int) -> list[View]:
    """The first `count` rows of a run."""
    views = []
    for number in range(count):
        objective, examples = batches.examples(number)
        lengths = batches.lengths_of(number // batches.global_batch_size)
        row = {name: array[0] for name, array in collate([examples], lengths, batches.vocabulary.pad or 0).items()}
        title = f"row {number} · {type(objective).__name__}"
        if len(examples) > 1:
            title += f" · {len(examples)} examples"
        on_device = isinstance(objective, ReplacedTokenDetection)
        notes = ("the generator's replacements are drawn on the device, during the training",) if on_device else ()
        views.append(view(row, words, title, notes))
    return views


def in_words(one: View, colours: bool, width: int) -> str:
    """A view as lines for a terminal; without `colours` with plain marks, such as [MASK→hairy]."""
    lines = [_painted(one.title, "1", colours), *(f"  ({note})" for note in one.notes)]
    for side in one.sides:
        text, part, left = "", "", _MOST
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
        if over := sum(piece.tokens for piece in side.pieces if piece.kind != "padding") - _MOST + left:
            text += f" … {over:,} tokens more"
        lines.append(f"  {side.name}")
        for paragraph in text.splitlines():
            # Colours take no place: long lines wrap by what is seen only where there are none.
            wrapped = [paragraph] if colours else textwrap.wrap(paragraph, max(width - 4, 20), break_on_hyphens=False)
            lines += [f"    {line}" for line in wrapped]
    return "\n".join(lines)


def table(measured: check.Measured) -> str:
    """Each figure measured, beside the one asked for."""
    rows = [("", "measured", "asked", "")]
    for name, figures in [(group.name, group.statistics) for group in measured.groups] + [("rows", measured.figures)]:
        for figure in figures:
            asked = "" if figure.asked is None else f"{figure.asked:.4g} ± {figure.tolerance:.2g}"
            verdict = "" if figure.asked is None else "OFF" if figure.is_off else "ok"
            rows.append((f"{name}: {figure.name}", check.number(figure), asked, verdict))
    rows += [(f"plan: {name}", f"{value:,.4g}", "", "") for name, value in measured.plan.items()]
    return f"measured over {measured.rows} rows\n{text_table(rows, '<>><')}"


def _cut(piece: Piece, room: int) -> Piece:
    """A piece whose text is no longer than its share of `room` tokens."""
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


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        raise UserError(f"--html={path} cannot be written: {e.strerror}") from e
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.run(main)
