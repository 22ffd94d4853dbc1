"""Tests that docs/config.md lists every field in valid Markdown, and that --help lists the fields of one config."""

import re

from pretrainax.config import Choice, Generator, kinds
from pretrainax.config.reference import fields_of
from pretrainax.config.validation import get
from pretrainax.data.sources import SourceMixture, TextFiles
from pretrainax.optim import AdamW, Lamb
from pretrainax.reporting.config_reference import format_config, page
from tests.support import tiny
from tests.support.runs import ROOT

PAGE = page()
SECTIONS = {m[1]: m[2] for m in re.finditer(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)}


def cells(row: str) -> list[str]:
    """Splits a row of a table into cells like GitHub: at each bar without a backslash before it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_docs_config_md_is_made_of_the_fields_as_they_are():
    assert (ROOT / "docs" / "config.md").read_text() == PAGE, "run python docs/reference.py"


def test_every_field_has_a_row_with_type_default_and_meaning():
    for cls in Choice.alternatives(kinds.Optimizer):
        rows = [cells(row) for row in SECTIONS[cls.__name__].splitlines() if row.startswith("| `")]
        assert [(row[0], row[1], row[2]) for row in rows] == [
            (f"`{f.name}`", f"`{f.hint}`".replace("|", r"\|"), f"`{f.default}`") for f in fields_of(cls)
        ]
        assert all(row[3] for row in rows)


def test_every_row_of_a_table_has_four_cells():
    rows = [row for row in PAGE.splitlines() if row.startswith("|")]
    assert len(rows) > 200 and {len(cells(row)) for row in rows} == {4}


def test_every_link_leads_to_a_heading_of_its_own():
    headings = re.findall(r"^##+ (.+)", PAGE, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading).lower() for heading in headings]
    assert sorted(set(anchors)) == sorted(anchors)
    links = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    assert len(links) > 15 and links <= set(anchors)


def test_pieces_in_angle_brackets_are_no_html():
    plain = re.sub(r"`[^`]*`", "", PAGE)
    assert re.findall(r"(?<!\\)<", plain) == [] and r"\<extra_id_0>" in plain


def values(config: object, path: str) -> dict[str, object]:
    """Returns each field of a config and of its parts, by the flag that sets it."""
    fields = {f"{path}.{name}": value for name, value in vars(config).items()}
    return fields | {
        k: v for name, part in fields.items() if hasattr(part, "__dict__") for k, v in values(part, name).items()
    }


def test_help_has_every_field_of_a_config_with_its_value():
    experiment = tiny.get_config("bert")
    said = format_config(experiment, 100)
    flags = re.findall(r"^  --(config\.\S+?)=", said, re.MULTILINE)
    parts = ("model", "data", "mesh", "train", "layers", "evaluate", "checkpoint")
    assert sorted(flags) == sorted(set(values(experiment, "config")) - {f"config.{part}" for part in parts})
    assert '--config.objective="MaskedLM()"' in said and "--config.train.steps=40" in said
    assert max(len(line) for line in said.splitlines() if line.startswith("      ")) <= 100


def test_help_quotes_what_a_shell_would_part():
    experiment = tiny.get_config("gpt")
    experiment.model.generator = Generator()
    experiment.data.source = SourceMixture((TextFiles("a"), TextFiles("b")))
    said = format_config(experiment, 100)
    sources = "(TextFiles(path='a'), TextFiles(path='b'))"
    assert f'--config.data.source="SourceMixture(sources={sources})"' in said
    assert f'--config.data.source.sources="{sources}"' in said
    assert '--config.model.generator="Generator(' in said and "--config.model.generator.d_ff=1024" in said


def test_help_names_the_other_classes_with_their_fields():
    experiment = tiny.get_config("gpt")
    assert f"or Lamb({', '.join(f.name for f in fields_of(Lamb))})" in " ".join(format_config(experiment, 100).split())
    experiment.optimizer = Lamb()
    said = " ".join(format_config(experiment, 100).split())
    assert f"or AdamW({', '.join(f.name for f in fields_of(AdamW))})" in said
    assert get(experiment, "optimizer.epsilon") == 1e-6 and "--config.optimizer.epsilon=1e-06" in said
