"""Tests the statistics of the first rows, and the errors that stop a run."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from pretrainax.config import RunFailed, UserError
from pretrainax.data.inspection.check import check, measure, summary_line
from pretrainax.data.objectives import CausalLM, Lengths, Objective, Statistic
from pretrainax.tokenization.base import Vocabulary


@dataclasses.dataclass
class Half(Objective):
    """An objective that expects a loss on half of the tokens, and measures the mean of the loss weights."""

    mask_rate: float = 0.5
    families: ClassVar[tuple[str, ...]] = ("decoder",)

    def statistics(self, examples, vocabulary):
        found = np.mean([example["loss_weights"].mean() for example in examples])
        yield Statistic("mask rate", float(found), self.mask_rate, 0.1)


class FakeBatches:
    """Rows of 8 tokens; `rows` lists the loss weights of the examples of each row."""

    vocabulary, lengths, global_batch_size = Vocabulary(size=10, pad=0, unk=1), Lengths(8, 8, 8), 4
    start = 0

    def __init__(self, rows, objectives=None):
        self.made, self.objectives = rows, objectives or [Half()]

    def examples(self, row):
        weights = self.made[row % len(self.made)]
        examples = [
            {"tokens": np.full(len(w), 1 + (row % 2), np.int32), "loss_weights": np.array(w, np.float32)}
            for w in weights
        ]
        return self.objectives[row % len(self.objectives)], examples

    def lengths_of(self, step):
        return self.lengths

    def progress(self, row):
        return row / 1000

    def statistics(self):
        return {"documents cut": 3}


def figure(measured, name) -> float:
    return {f.name: f.measured for f in measured.statistics}[name]


def test_figures_of_the_rows():
    measured = measure(FakeBatches([[[1, 0], [0, 1]], [[1, 0, 1, 0, 1, 0]]]), rows=10)  # 4 and 6 of 8 tokens
    assert measured.rows == 10
    assert figure(measured, "padding") == 1 - 10 / 16
    assert figure(measured, "loss tokens a batch") == 4 * 2.5
    assert figure(measured, "examples a row") == 1.5
    assert figure(measured, "unknown tokens") == 0.4  # the tokens of even rows
    np.testing.assert_array_equal(measured.fill, [0.5, 0.75] * 5)
    assert measured.plan == {"documents cut": 3}


def test_an_encoder_decoder_pads_both_sides():
    batches = FakeBatches([[[1, 1]]])
    example = {"encoder_tokens": np.ones(6, np.int32), "tokens": np.ones(2), "loss_weights": np.ones(2)}
    batches.examples = lambda row: (Half(), [example])
    measured = measure(batches, rows=4)
    assert figure(measured, "padding of the encoder") == 0.25 and figure(measured, "padding of the decoder") == 0.75


def test_each_objective_of_a_mixture_has_its_own_examples():
    batches = FakeBatches([[[1, 1]], [[0, 1]]], objectives=(Half(1.0), Half(0.5)))
    groups = measure(batches, rows=6).groups
    assert [(g.name, len(g.examples), g.statistics[0].measured) for g in groups] == [
        ("Half 1", 3, 1.0),
        ("Half 2", 3, 0.5),
    ]


def test_no_more_is_measured_than_is_quick():
    batches = FakeBatches([[[1, 0]]])
    batches.lengths = Lengths(100_000, 8, 8)
    assert measure(batches).rows == 2


def test_what_is_as_asked_passes():
    measured = measure(FakeBatches([[[1, 0]]]))
    check(measured, Half())
    assert summary_line(measured) == (
        "Half: mask rate 0.5 (expected 0.5 ± 0.1); "
        "padding 75.00%, loss tokens a batch 4, examples a row 1, unknown tokens 50.00%; 3 documents cut"
    )


def test_a_rate_out_of_its_range_stops_the_run():
    with pytest.raises(
        RunFailed, match=r"Half has mask rate 0\.7500 \(of 1,024 examples\), expected 0\.5 ± 0\.1\."
    ) as e:
        check(measure(FakeBatches([[[1, 0, 1, 1]]])), Half())
    assert e.value.exit_code == 1


def test_a_rate_that_is_no_number_stops_the_run():
    measured = measure(FakeBatches([[[1, 0]]]))
    measured.groups[0].statistics[0] = Statistic("mask rate", float("nan"), 0.5, 0.1)
    with pytest.raises(RunFailed, match="nan"):
        check(measured, Half())


def test_rows_without_a_loss_token_name_the_field():
    measured = measure(FakeBatches([[[0, 0]], [[1, 0]]]))
    with pytest.raises(
        UserError, match=r"50\.0% of 1,024 rows have no loss token.*Raise config\.objective\.mask_rate or"
    ):
        check(measured, Half())
    with pytest.raises(UserError, match=r"Raise config\.data\.sequence_length, or check"):
        check(measured, CausalLM())
    with pytest.raises(UserError, match=r"Raise config\.evaluate\.objective\.mask_rate or"):
        check(measured, Half(), "config.evaluate.objective")


def test_the_field_of_an_inner_objective_is_named():
    @dataclasses.dataclass
    class Outer(Objective):
        masking: Half = dataclasses.field(default_factory=Half)

    with pytest.raises(UserError, match=r"config\.objective\.masking\.mask_rate"):
        check(measure(FakeBatches([[[0, 0]]])), Outer())
