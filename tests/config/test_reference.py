"""The comment next to a field documents it, and every field has a comment."""

import dataclasses
from typing import Literal, Optional

import pytest

from pretrainax.config import Choice, Experiment
from pretrainax.config.choice import resumable_field
from pretrainax.config.reference import fields_of, first_sentence, type_text


@dataclasses.dataclass
class Base:
    inherited: int = 1  # of the base
    said_again: int = 1  # of the base


@dataclasses.dataclass
class Example(Base):
    """Shows (Doe et al. 2020) all places. Of a comment."""

    at_the_end: float = 0.5  # of the line
    # above it | on two
    # lines
    above: Literal["a", "b"] = "a"
    both: Optional[int] = resumable_field(None)  # and beside
    within: bool = False  # the brackets
    said_again: int = 2
    text: str = "# no comment"
    nothing: tuple[int, ...] = ()
    # for the reader
    checked: int = None  # pyright: ignore[reportAssignmentType]
    both_checked: int = None  # for the reader  # pyright: ignore[reportAssignmentType]


FIELDS = {field.name: field for field in fields_of(Example)}


@pytest.mark.parametrize(
    "name, meaning",
    [
        ("inherited", "of the base"),
        ("at_the_end", "of the line"),
        ("above", "above it | on two lines"),
        ("both", "and beside"),
        ("within", "the brackets"),
        ("said_again", "of the base"),
        ("text", ""),
        ("nothing", ""),
        ("checked", "for the reader"),
        ("both_checked", "for the reader"),
    ],
)
def test_a_meaning_is_the_comment_beside_or_above(name, meaning):
    assert FIELDS[name].meaning == meaning


def test_a_default_is_the_value_and_a_free_field_is_known():
    assert (FIELDS["said_again"].default, FIELDS["above"].default) == ("2", "'a'")
    assert [name for name, field in FIELDS.items() if field.free] == ["both"]


@pytest.mark.parametrize(
    "hint, text",
    [
        (Literal["a", "b"], "'a' | 'b'"),
        (Optional[int], "int | None"),
        (tuple[tuple[float, str], ...], "tuple[tuple[float, str], ...]"),
        (Choice, "Choice"),
    ],
)
def test_a_type_is_written_as_in_a_config(hint, text):
    assert type_text(hint) == text


def test_the_first_sentence_goes_on_after_et_al():
    assert first_sentence(Example.__doc__) == "Shows (Doe et al. 2020) all places"


def classes() -> list[type]:
    """Returns Experiment, and all dataclasses that it can contain, directly or indirectly."""
    found = [Experiment]
    # The loop appends to this list.
    for cls in found:
        kinds = [kind for field in fields_of(cls) for kind in field.kinds]
        more = [c for kind in kinds for c in (Choice.alternatives(kind) if issubclass(kind, Choice) else [kind])]
        found += [cls for cls in dict.fromkeys(more) if cls not in found]
    return found


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_every_field_of_a_config_has_a_meaning(cls):
    assert [field.name for field in fields_of(cls) if not field.meaning] == []
    assert first_sentence(cls.__doc__)
