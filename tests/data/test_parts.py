"""Tests that the names of validation parts are readable, and that different parts have different names."""

import pytest

from pretrainax.data.objectives import (
    UL2R,
    CausalLM,
    DecoderOnly,
    MaskedLM,
    MixtureOfDenoisers,
    ObjectiveMixture,
    SequentialDenoising,
    SpanCorruption,
    TextToText,
)
from pretrainax.data.parts import stream_part_names, with_halves
from pretrainax.data.sources import TFDS, HuggingFace, JsonLines, PythonDocs, TextFiles

ONE = [TextFiles(path="books")]


def test_one_source_and_one_objective_have_no_parts():
    assert stream_part_names(ONE, CausalLM()) == [()]
    assert stream_part_names(ONE, ObjectiveMixture((CausalLM(), CausalLM()), (1.0, 1.0))) == [(), ()]


@pytest.mark.parametrize(
    "source, name",
    [
        (TextFiles(path="/data/books/"), "books"),
        (JsonLines(path="c4/*.json.gz"), "c4"),
        (JsonLines(path="wmt14.jsonl", target_field="de"), "wmt14.jsonl"),
        (HuggingFace(path="wikimedia/wikipedia", name="20231101.en"), "wikipedia-20231101.en"),
        (HuggingFace(path="wikimedia/wikipedia"), "wikipedia"),
        (TFDS(name="wikipedia/20230601.en"), "wikipedia-20230601.en"),
        (TextFiles(path="*"), "TextFiles"),
        (PythonDocs(), "PythonDocs"),
    ],
)
def test_a_source_is_named_by_its_path_or_its_class(source, name):
    assert stream_part_names([TextFiles(path="other"), source], CausalLM())[1] == (f"source={name}",)


def test_sources_of_one_name_are_numbered_and_the_same_one_twice_is_one():
    sources = [TextFiles(path="en/books"), TextFiles(path="de/books"), TextFiles(path="en/books")]
    assert stream_part_names(sources, CausalLM()) == [("source=books#1",), ("source=books#2",), ("source=books#1",)]


def test_the_denoisers_of_ul2_have_their_letters_and_rates():
    names = ["R-0.15-3", "R-0.15-8", "X-0.5-3", "X-0.5-8", "X-0.15-64", "X-0.5-64", "S-0.25"]
    assert stream_part_names(ONE, MixtureOfDenoisers()) == [(f"denoiser={name}",) for name in names]
    names = ["S-0.5", "R-0.15-3", "X-0.15-32", "X-0.5-3"]
    assert stream_part_names(ONE, DecoderOnly(UL2R())) == [(f"denoiser={name}",) for name in names]


def test_objectives_that_differ_in_another_field_are_numbered():
    mixture = ObjectiveMixture((MaskedLM(rate=0.15), MaskedLM(rate=0.3)), (1.0, 1.0))
    assert stream_part_names(ONE, mixture) == [("objective=MaskedLM#1",), ("objective=MaskedLM#2",)]


def test_each_stream_is_of_a_source_and_of_an_objective():
    """The order is the one in pipeline.Batches, corpus by corpus; an objective of weight 0 has no stream."""
    mixture = ObjectiveMixture((SpanCorruption(), SequentialDenoising(), SpanCorruption(0.5)), (1.0, 2.0, 0.0))
    span, rest = "denoiser=SpanCorruption-0.15-3", "denoiser=SequentialDenoising-0.25"
    assert stream_part_names([*ONE, PythonDocs()], mixture) == [
        (f"source={source}", part) for source in ("books", "PythonDocs") for part in (span, rest)
    ]
    pairs = JsonLines(path="pairs.jsonl", target_field="de")
    assert stream_part_names([*ONE, pairs], TextToText()) == [
        ("source=books", span),
        ("source=pairs.jsonl", "objective=SequenceToSequence"),
    ]


def test_each_stream_has_a_first_and_a_second_half():
    parts = [("source=a",), ("source=a",), ("source=a",), ("source=b",), ("source=b",), ()]
    halves = [names[-1] for names in with_halves(parts, True)]
    assert halves == ["half=1", "half=1", "half=2", "half=1", "half=2", "half=1"]
    assert with_halves(parts, False) == parts
