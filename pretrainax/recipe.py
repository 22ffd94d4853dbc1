"""Shows the source of each number of a config: `python -m pretrainax.recipe --config=bert_base [--only=optimizer]`.

The table has a row for each number, and for each class or option that is not the default. A row gives the source of the
value: the paper, its authors' code, or this project's own choice, with the reason. The table marks fields that flags
override. Below the table is a list of deviations: features of the source that this config lacks.
`--preset=macbert_base` shows a zoo architecture that no config trains. The sources are in the ledger, the .toml file
next to the config, such as `configs/bert_base.toml`.

`--check` looks up the quote of each value in the released file that the ledger names, on GitHub or in the folder
`--copies`, and compares the number in the quote with the value. The exit code is 1 if a quote is not found or differs.
"""

import collections
import os
from typing import NamedTuple

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError, ledger, quotes
from pretrainax.files.json_files import JsonObject
from pretrainax.files.paths import define_path
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import large_number
from pretrainax.storage.released_files import Unavailable, contains, read_released

_LEGEND = """\
from: paper, code (released by its authors), recalled (from memory; nobody checked the source) or chosen (by this
      project), with the place or the reason in the last column
      here: this value differs from its source; ?: the ledger has no entry for this field"""
_ONLY = flags.DEFINE_string(
    "only", "", "Show only the fields that start with this path, such as optimizer or train.steps"
)
_PRESET = flags.DEFINE_string(
    "preset", None, "Architecture of the zoo to show instead of --config, such as macbert_base"
)
_CHECK = flags.DEFINE_bool(
    "check", False, "Look up each quote in the released file of its source, and compare its number with the value"
)
_COPIES = define_path(
    "copies", "", "With --check: folder with OWNER/NAME/COMMIT/PATH or clones OWNER/NAME to read instead of GitHub"
)


def main() -> int:
    """Prints the source of each value in a config or preset, and its deviations. Returns the exit code."""
    if _PRESET.value and cli.CONFIG.value:
        raise UserError("--preset and --config are both set: leave one of them out")
    comparison = _compare_preset(_PRESET.value) if _PRESET.value else _compare_config()
    rows = [row for row in comparison.rows if row.path.startswith(_ONLY.value) and not _is_unused(row)]
    if not rows:
        raise UserError(
            f"--only={_ONLY.value}: no field starts with this; the first field is {comparison.rows[0].path}"
        )
    if _COPIES.value and not _CHECK.value:
        raise UserError(f"--copies={_COPIES.value} has no effect without --check: add it")
    if _COPIES.value and not os.path.isdir(_COPIES.value):
        raise UserError(f"--copies={_COPIES.value} is not a folder")
    if _CHECK.value:
        return _check(rows)
    if cli.prints_json():
        cli.print_json({"fields": [*map(_values, rows)], "deviations": [d._asdict() for d in comparison.deviations]})
        return 0
    print(text_table([("field", "value", "from", "source or reason"), *map(_cells, rows)]))
    print(f"\n{_LEGEND}")
    if comparison.deviations and not _ONLY.value:
        print("\nDeviations: features of the source, and what this config has instead\n")
        pairs = ((("source", deviation.theirs), ("here", deviation.ours)) for deviation in comparison.deviations)
        print(text_table((row for pair in pairs for row in pair), indent="  "))
    counts = collections.Counter(row.fact.status for row in rows if row.fact and row.agrees)
    counts_by_status = ", ".join(f"{counts[status]} {status}" for status in ledger.STATUSES)
    print(f"\n{len(rows)} fields: {counts_by_status}, {len(rows) - counts.total()} other (here or ?)")
    return 0


class _Result(NamedTuple):
    """The result of checking one value."""

    row: ledger.LedgerRow
    # "agrees" (the quote is found, and its number equals the value), "found" (the quote has no number to compare),
    # "differs", "not found", "unavailable" or "not checkable"
    outcome: str
    detail: str  # the quote or the problem


def _check(rows: list[ledger.LedgerRow]) -> int:
    """Prints the result of `_check_row` for each row; returns 1 unless all quotes are found and agree."""
    results = [_check_row(row) for row in rows]
    counts = collections.Counter(result.outcome for result in results)
    if cli.prints_json():
        fields = [_values(result.row) | {"outcome": result.outcome, "detail": result.detail} for result in results]
        cli.print_json({"fields": fields, "counts": dict(counts)})
    else:
        cells = ((row.path, _format_value(row.value), outcome, detail) for row, outcome, detail in results)
        print(text_table([("field", "value", "check", "quote or reason"), *cells]))
        summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"\n{len(results)} fields: {summary}")
    return int(any(counts[outcome] for outcome in ("differs", "not found", "unavailable")))


def _check_row(row: ledger.LedgerRow) -> _Result:
    """Finds the quote of a row's value in the released file, and compares the number in the quote with the value."""
    fact = row.fact
    if fact is None:
        return _Result(row, "not checkable", "not in the ledger")
    if not row.agrees:
        return _Result(row, "differs", f"the ledger has {_format_value(fact.value)} ({fact.status}: {fact.source})")
    if fact.quote and (problem := quotes.mismatch(fact.value, fact.quote, fact.expression)):
        return _Result(row, "differs", f"{problem}: {fact.quote!r} ({fact.status}: {fact.source})")
    file = quotes.released_file(fact.source)
    if file is None or not fact.quote:
        missing = "" if fact.status in ("recalled", "chosen") else ", without a " + ("quote" if file else "file")
        quote = f"{fact.quote!r}, " if fact.quote else ""
        return _Result(row, "not checkable", f"{fact.status}{missing}: {quote}{fact.source}")
    try:
        text = read_released(file, _COPIES.value)
    except Unavailable as e:
        return _Result(row, "unavailable", str(e))
    outcome = "agrees" if quotes.is_compared(fact.value, fact.expression) else "found"
    formula = f", {fact.expression}" if fact.expression else ""
    return _Result(row, outcome if contains(text, fact.quote) else "not found", f"{fact.quote!r}{formula}, {file}")


def _is_unused(row: ledger.LedgerRow) -> bool:
    """Returns whether a row carries no information: the field is None, and the ledger allows any value for it."""
    return row.value is None and row.fact is not None and row.fact.value == "any"


def _compare_config() -> ledger.Comparison:
    experiment, comparison = cli.experiment(files=False), cli.compare_with_ledger()
    if comparison is None:
        raise UserError(
            f"--config={cli.config_name()} has no ledger: write a .toml file with its name next to it, as described in "
            "docs/how-to/recipe-sources.md"
        )
    return comparison if experiment.transfer is None else comparison._replace(rows=comparison.rows + _transfer_rows())


def _transfer_rows() -> list[ledger.LedgerRow]:
    """Returns a row for each rule of `config.transfer`: what it multiplies, relative to the base model."""
    from pretrainax.optim.transfer import SOURCES  # local import, because it imports JAX

    return [
        ledger.LedgerRow(f"transfer.{kind}", rule, ledger.Fact(rule, "code", source, quote=quote), agrees=True)
        for kind, (rule, source, quote) in SOURCES.items()
    ]


def _compare_preset(name: str) -> ledger.Comparison:
    from pretrainax import zoo  # local import, because it imports JAX

    return ledger.compare(zoo.preset(name), zoo.sources_path(name), name, "model")


def _values(row: ledger.LedgerRow) -> JsonObject:
    """Returns a row as values that JSON supports; "from", "source" and "expected" are None without a ledger entry."""
    fact = row.fact
    return {
        "field": row.path,
        "value": row.value if isinstance(row.value, (int, float, str, type(None))) else str(row.value),
        "from": fact and fact.status,
        "source": fact and fact.source,
        "quote": fact and fact.quote,
        "expected": fact and fact.value,
        "expected_in_tokens": fact is not None and fact.in_tokens,
        "agrees": row.agrees,
    }


def _cells(row: ledger.LedgerRow) -> tuple[str, ...]:
    """Formats the four cells of a table row: field, value, where the value comes from, and the source or reason."""
    fact = row.fact
    if fact is None:
        return row.path, _format_value(row.value), "?", "not in the ledger"
    expected = (
        f"{large_number(fact.value)} tokens"
        if fact.in_tokens and ledger.is_number(fact.value)
        else _format_value(fact.value)
    )
    if not row.agrees:
        return row.path, _format_value(row.value), "here", f"instead of {expected} ({fact.status}: {fact.source})"
    return (
        row.path,
        _format_value(row.value),
        fact.status,
        f"{fact.source}: {expected}" if fact.in_tokens else fact.source,
    )


def _format_value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    cli.run(main, has_json=True, run_flags=("config",))
