"""Says where each number of a config comes from: `python -m pretrainax.recipe --config=bert_base [--only=optimizer]`.

Each choice of a class or a word too, where it is not the default. They are from the paper, from its released code, or
chosen here, for the reason that is given. Below the table stands what the source has and this config has not. Fields
that flags set otherwise are marked. `--preset=macbert_base` is for an architecture of the zoo that no config trains.
The ledger is the file beside the config: `configs/bert_base.toml`.
"""

import collections

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError, ledger
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import large_number

_ONLY = flags.DEFINE_string("only", "", "Start of the fields to show: optimizer, train.steps")
_PRESET = flags.DEFINE_string("preset", None, "An architecture of the zoo, in the place of --config")


def main() -> int:
    if _PRESET.value and cli.CONFIG.value:
        raise UserError("--preset and --config are two things to show: leave one of them out")
    compared = _of_preset(_PRESET.value) if _PRESET.value else _of_config()
    rows = [row for row in compared.rows if row.path.startswith(_ONLY.value) and not _is_idle(row)]
    if not rows:
        raise UserError(f"--only={_ONLY.value}: no field begins so; the first is {compared.rows[0].path}")
    print(text_table([("field", "value", "from", ""), *map(_cells, rows)]))
    if compared.deviations and not _ONLY.value:
        print("\nWhat the source has and this has not:\n")
        pairs = ((("theirs", one.theirs), ("here", one.ours)) for one in compared.deviations)
        print(text_table((row for pair in pairs for row in pair), indent="  "))
    counts = collections.Counter(row.fact.status for row in rows if row.fact and row.agrees)
    shares = ", ".join(f"{counts[status]} {status}" for status in ledger.STATUSES)
    print(f"\n{len(rows)} fields: {shares}, {len(rows) - counts.total()} otherwise")
    return 0


def _is_idle(row: ledger.Row) -> bool:
    """Tells a field that may hold anything and holds nothing."""
    return row.value is None and row.fact is not None and row.fact.value == "any"


def _of_config() -> ledger.Comparison:
    cli.experiment(files=False)
    compared = cli.compare_with_ledger()
    if compared is None:
        raise UserError(
            f"--config={cli.config_name()} has no ledger: write one beside its file, under its name with .toml, as "
            "docs/recipes.md says"
        )
    return compared


def _of_preset(name: str) -> ledger.Comparison:
    from pretrainax import zoo  # imports JAX

    return ledger.compare(zoo.preset(name), zoo.ledger_of(name), name, "model")


def _cells(row: ledger.Row) -> tuple[str, ...]:
    fact = row.fact
    if fact is None:
        return row.path, _written(row.value), "?", "the ledger does not say"
    theirs = (
        f"{large_number(fact.value)} tokens"
        if fact.in_tokens and ledger.is_number(fact.value)
        else _written(fact.value)
    )
    if not row.agrees:
        return row.path, _written(row.value), "here", f"in the place of {theirs} ({fact.status}: {fact.source})"
    return row.path, _written(row.value), fact.status, f"{fact.source}: {theirs}" if fact.in_tokens else fact.source


def _written(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    cli.run(main)
