"""Shows the source of each number of a config: `python -m pretrainax.recipe --config=bert_base [--only=optimizer]`.

The table has a row for each number, and for each class or option that is not the default. A row gives the source of the
value: the paper, its authors' code, or this project's own choice, with the reason. The table marks fields that flags
override. Below the table is a list of deviations: features of the source that this config lacks.
`--preset=macbert_base` shows a zoo architecture that no config trains. The sources are in the ledger, the .toml file
next to the config, such as `configs/bert_base.toml`.
"""

import collections

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError, ledger
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import large_number

_LEGEND = """\
from: paper, code (released by its authors) or chosen (by this project), with the place or the reason in the last column
      here: this value differs from its source; ?: the ledger has no entry for this field"""
_ONLY = flags.DEFINE_string(
    "only", "", "Show only the fields that start with this path, such as optimizer or train.steps"
)
_PRESET = flags.DEFINE_string(
    "preset", None, "Architecture of the zoo to show instead of --config, such as macbert_base"
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


def _is_unused(row: ledger.LedgerRow) -> bool:
    """Returns whether a row carries no information: the field is None, and the ledger allows any value for it."""
    return row.value is None and row.fact is not None and row.fact.value == "any"


def _compare_config() -> ledger.Comparison:
    cli.experiment(files=False)
    comparison = cli.compare_with_ledger()
    if comparison is None:
        raise UserError(
            f"--config={cli.config_name()} has no ledger: write a .toml file with its name next to it, as described in "
            "docs/how-to/recipe-sources.md"
        )
    return comparison


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
    cli.run(main, has_json=True)
