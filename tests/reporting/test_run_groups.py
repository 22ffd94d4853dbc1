"""Tests groups of runs by objective, tokenizer and validation text, and the conditions for comparing a metric."""

import pytest

from pretrainax.reporting.run_groups import Record, comparison_notes, group_runs, panels_of
from tests.support.made_records import made_record, made_run

LOSS, BITS = "loss", "bits_per_byte"


def groups_of(records, runs=None):
    runs = runs or [made_run(str(i), [3.0, 2.0]) for i in range(len(records))]
    return [group.runs for group in group_runs(runs, records)]


def test_seeds_and_learning_rates_are_one_group():
    assert groups_of([made_record(), made_record(seed=1), made_record(rate=1e-3)]) == [(0, 1, 2)]


@pytest.mark.parametrize(
    "other",
    [
        made_record("bert"),
        made_record(tokenizer="500 ids"),
        made_record(validation_text="books", corpora="d"),
        made_record(filters="quality"),
        made_record(rows="rows of 64 tokens"),
    ],
)
def test_each_property_of_the_validation_divides_runs(other):
    assert groups_of([made_record(), other, made_record()]) == [(0, 2), (1,)]


def test_an_equal_fingerprint_is_equal_text_wherever_the_files_are():
    assert groups_of([made_record(), made_record(validation_text="moved")]) == [(0, 1)]


def test_text_that_changed_at_the_same_path_divides_runs():
    assert groups_of([made_record(corpora="old"), made_record(corpora="new")]) == [(0,), (1,)]


def test_a_run_before_its_first_checkpoint_and_validation_joins_the_runs_of_its_config():
    runs = [made_run("a", [3.0]), made_run("b", [3.0])]
    runs[1] = runs[1]._replace(lines=runs[1].lines[:1])
    assert groups_of([made_record(), made_record(corpora=None)], runs) == [(0, 1)]


def test_validations_of_different_sizes_do_not_compare():
    runs = [made_run("a", [3.0]), made_run("b", [3.0], loss_tokens=128.0)]
    records = [made_record(), made_record()]
    groups = group_runs(runs, records)
    assert [group.label for group in groups] == ["64 targets", "128 targets"]
    (note,) = comparison_notes(runs, groups, records, [LOSS], "step")
    assert note == (
        "loss: not comparable between groups A, B: other size (64 targets / 128 targets); "
        "config.evaluate.batches=0 validates on all text"
    )


def test_runs_with_missing_records_are_the_last_group_with_the_reason():
    runs = [made_run("old", [3.0]), made_run("new", [3.0])]
    records = [Record(None, {}, missing="no config.json"), made_record()]
    groups = group_runs(runs, records)
    assert [(group.name, group.runs) for group in groups] == [("A", (1,)), ("?", (0,))]
    assert list(comparison_notes(runs, groups, records, [LOSS], "step")) == [
        "group ?: not comparable with other runs, because records are missing (old: no config.json)"
    ]
    assert [panel.groups for panel in panels_of(runs, groups, [LOSS])] == ["A", "?"]


def with_tokenizers(*text_bytes):
    """Returns runs of two tokenizers that validate on this many bytes, and their records."""
    bits = [dict(bits_per_token=3.0, bits_per_byte=3.0 * 64 / n) for n in text_bytes]
    runs = [made_run(name, [3.0], **line) for name, line in zip("ab", bits, strict=True)]
    return runs, [made_record(), made_record(tokenizer="500 ids", corpora="d")]


def test_bits_per_byte_compare_between_tokenizers_and_the_loss_does_not():
    # The difference of 0.5 % is the last, incomplete batch, which a run omits.
    runs, records = with_tokenizers(200.0, 201.0)
    groups = group_runs(runs, records)
    panels = panels_of(runs, groups, [LOSS, BITS])
    assert [(panel.metric, panel.runs) for panel in panels] == [(LOSS, (0,)), (LOSS, (1,)), (BITS, (0, 1))]
    (note,) = comparison_notes(runs, groups, records, [LOSS, BITS], "step")
    assert note == "loss: not comparable between groups A, B: other tokenizer (400 ids / 500 ids)"


def test_bits_per_byte_of_different_amounts_of_text_do_not_compare():
    """Tests a fixed number of batches: a row of a coarser tokenizer has more text."""
    runs, records = with_tokenizers(200.0, 210.0)
    groups = group_runs(runs, records)
    assert [panel.runs for panel in panels_of(runs, groups, [BITS])] == [(0,), (1,)]
    (note,) = comparison_notes(runs, groups, records, [BITS], "step")
    assert note.startswith(
        "bits_per_byte: not comparable between groups A, B: other size (200 bytes of text / 210 bytes"
    )


def test_metrics_of_a_task_compare_between_tokenizers():
    runs = [made_run(name, [3.0], labels=8.0, accuracy=0.5) for name in "ab"]
    groups = group_runs(runs, [made_record(), made_record(tokenizer="500 ids", corpora="d")])
    assert [panel.runs for panel in panels_of(runs, groups, ["accuracy", LOSS])] == [(0, 1), (0, 1)]


def test_the_discriminator_compares_only_with_an_equal_generator():
    runs = [made_run(name, [3.0], replaced_loss=0.4) for name in "ab"]
    records = [made_record(), made_record(generator="generator of width 64")]
    panels = panels_of(runs, group_runs(runs, records), [LOSS, "replaced_loss"])
    assert [panel.runs for panel in panels] == [(0, 1), (0,), (1,)]


def test_a_diagnostic_has_one_panel_with_a_mark():
    runs = [made_run(name, [3.0], gradient_norm=1.0) for name in "ab"]
    (panel,) = panels_of(runs, group_runs(runs, [made_record(), made_record("bert")]), ["gradient_norm"])
    assert panel.runs == (0, 1) and panel.is_mixed


def test_training_metrics_of_other_training_data_do_not_compare():
    runs, other = [made_run(name, [3.0]) for name in "ab"], made_record()
    other.experiment.model.dropout_rate = 0.1
    records = [made_record(), other]
    notes = list(comparison_notes(runs, group_runs(runs, records), records, [LOSS], "step"))
    assert notes == ["training metrics in group A: not comparable, only validation is: other model.dropout_rate"]


def test_time_compares_only_on_equal_hardware():
    runs, records = [made_run(name, [3.0]) for name in "ab"], [made_record(), made_record()]
    (note,) = comparison_notes(runs, group_runs(runs, records), records, [LOSS], "time")
    assert note == "time: comparable only on equal hardware, which a run does not record"


def test_equal_numbers_of_ids_are_told_apart_by_the_fingerprint():
    groups = group_runs([made_run(n, [3.0]) for n in "ab"], [made_record(), with_fingerprint("fffffff")])
    assert [group.label for group in groups] == ["400 ids (400 id)", "400 ids (ffffff)"]


def with_fingerprint(fingerprint):
    record = made_record(corpora=None)
    tokenizer = record.parts["tokenizer"]._replace(key=fingerprint)
    return record._replace(parts={**record.parts, "tokenizer": tokenizer})
