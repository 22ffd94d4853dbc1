"""Shows the source of each number of a config: `python -m pretrainax.recipe --config=bert_base [--only=optimizer]`.

The table has a row for each number, and for each choice of a class or word that is not the default. Each row names its
source: the paper, the released code of its authors, or a choice of this project with its reason. The table marks fields
that flags override. Below the table is a list of the deviations: features of the source that this config does not have.
`--preset=macbert_base` shows an architecture of the zoo that no config trains. The sources are in the ledger, the
.toml file next to the config, such as `configs/bert_base.toml`.
"""

import collections

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError, ledger
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
    if _PRESET.value and cli.CONFIG.value:
        raise UserError("--preset and --config are both set: leave one of them out")
    compared = _compare_preset(_PRESET.value) if _PRESET.value else _compare_config()
    rows = [row for row in compared.rows if row.path.startswith(_ONLY.value) and not _is_idle(row)]
    if not rows:
        raise UserError(f"--only={_ONLY.value}: no field starts with this; the first field is {compared.rows[0].path}")
    print(text_table([("field", "value", "from", "source or reason"), *map(_cells, rows)]))
    print(f"\n{_LEGEND}")
    if compared.deviations and not _ONLY.value:
        print("\nDeviations: features of the source, and what this config has instead\n")
        pairs = ((("source", one.theirs), ("here", one.ours)) for one in compared.deviations)
        print(text_table((row for pair in pairs for row in pair), indent="  "))
    counts = collections.Counter(row.fact.status for row in rows if row.fact and row.agrees)
    shares = ", ".join(f"{counts[status]} {status}" for status in ledger.STATUSES)
    print(f"\n{len(rows)} fields: {shares}, {len(rows) - counts.total()} other (here or ?)")
    return 0


def _is_idle(row: ledger.LedgerRow) -> bool:
    """Returns True for a row whose field has the value None and may have any value according to the ledger."""
    return row.value is None and row.fact is not None and row.fact.value == "any"


def _compare_config() -> ledger.Comparison:
    cli.experiment(files=False)
    compared = cli.compare_with_ledger()
    if compared is None:
        raise UserError(
            f"--config={cli.config_name()} has no ledger: write a .toml file with its name next to it, as described in "
            "docs/how-to/recipe-sources.md"
        )
    return compared


def _compare_preset(name: str) -> ledger.Comparison:
    from pretrainax import zoo  # local import, because it imports JAX

    return ledger.compare(zoo.preset(name), zoo.sources_path(name), name, "model")


def _cells(row: ledger.LedgerRow) -> tuple[str, ...]:
    fact = row.fact
    if fact is None:
        return row.path, _written(row.value), "?", "not in the ledger"
    expected = (
        f"{large_number(fact.value)} tokens"
        if fact.in_tokens and ledger.is_number(fact.value)
        else _written(fact.value)
    )
    if not row.agrees:
        return row.path, _written(row.value), "here", f"instead of {expected} ({fact.status}: {fact.source})"
    return row.path, _written(row.value), fact.status, f"{fact.source}: {expected}" if fact.in_tokens else fact.source


def _written(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    cli.run(main)
