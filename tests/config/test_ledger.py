"""The comparison of a ledger with a config reports numbers, classes and words that differ or have no source."""

import dataclasses
import textwrap

import pytest

from pretrainax.config import LearnedPositions, ModelConfig, SinusoidalPositions, UserError, ledger
from pretrainax.data.objectives import NGrams
from tests.support import tiny

# Together with `configs/defaults.toml`, this ledger has all numbers of the tiny decoder.
LEDGER = """
    default = "small"
    scaled_down = "half"

    [[facts]]
    paper = "table 1"
    model.num_layers = {half = 1}
    optimizer.learning_rate = {"small large" = 3e-3, "wide_*" = 1e-3}

    [[facts]]
    code = "train.py"
    theirs = "growing batches"
    tokens.train.steps = 10_240
    optimizer.b1 = {wide_1 = 0.8}
"""


@pytest.fixture
def compare(tmp_path):
    def compare(text: str, variant: str = "", path: str = "", config=None) -> ledger.Comparison:
        file = tmp_path / "tiny.toml"
        file.write_text(textwrap.dedent(text))
        return ledger.compare(config or tiny.get_config("gpt"), str(file), variant, path)

    return compare


def of(comparison: ledger.Comparison, path: str) -> ledger.LedgerRow:
    (row,) = [row for row in comparison.rows if row.path == path]
    return row


def test_a_number_has_its_source_and_a_number_without_one_is_said(compare):
    compared = compare(LEDGER)
    rate = of(compared, "optimizer.learning_rate")
    assert rate.agrees and (rate.fact.status, rate.fact.source) == ("paper", "table 1")
    assert of(compared, "optimizer.b1") == ledger.LedgerRow("optimizer.b1", 0.9, None, False)
    assert of(compared, "train.seed").fact.status == "chosen"  # configs/defaults.toml has it
    assert not [row for row in compared.rows if row.path in ("train.log_every", "checkpoint.every", "mesh.fsdp")]


@pytest.mark.parametrize(
    "variant, value",
    [("", 3e-3), ("small", 3e-3), ("large", 3e-3), ("wide_1", 1e-3), ("wide_2", 1e-3), ("half", 3e-3), ("other", None)],
)
def test_a_value_is_that_of_the_variant(compare, variant, value):
    fact = of(compare(LEDGER, variant), "optimizer.learning_rate").fact
    assert (fact and fact.value) == value


def test_what_is_scaled_down_has_its_own_value_and_else_that_of_the_default(compare):
    assert of(compare(LEDGER, "half"), "model.num_layers").fact.value == 1
    assert of(compare(LEDGER, "large"), "model.num_layers").fact is None


def test_steps_in_tokens_are_the_nearest_whole_number(compare):
    assert of(compare(LEDGER), "train.steps").agrees  # 40 steps of 8 x 32 tokens
    assert of(compare(LEDGER.replace("10_240", "10_367")), "train.steps").agrees
    assert not of(compare(LEDGER.replace("10_240", "10_369")), "train.steps").agrees
    assert not of(compare(LEDGER.replace("10_240", "'many'")), "train.steps").agrees


def test_a_block_is_a_deviation_where_one_of_its_values_counts(compare):
    assert [d.theirs for d in compare(LEDGER).deviations] == ["growing batches"]
    before = LEDGER.replace("[[facts]]", '[[facts]]\n    chosen = "short"\n    train.steps = 40\n\n    [[facts]]', 1)
    assert of(compare(before), "train.steps").fact.source == "short" and compare(before).deviations == []
    assert [d.theirs for d in compare(before, "wide_1").deviations] == ["growing batches"]


def test_a_deviation_without_values_is_of_the_variants_that_it_names(compare):
    text = '[[facts]]\nchosen = "here"\ntheirs = "there"\nvariants = "large wide_*"'
    assert [compare(text, variant).deviations for variant in ("large", "wide_3", "small", "")] == [
        [ledger.Deviation("there", "here")],
        [ledger.Deviation("there", "here")],
        [],
        [],
    ]


def test_one_line_says_what_the_source_has_and_which_fields_are_others(compare):
    compared = compare(LEDGER.replace("10_240", "20_480"))
    compared = compared._replace(rows=[row for row in compared.rows if row.fact])
    assert compared.summary() == "the source has growing batches. Other values here: train.steps"
    assert ledger.Comparison([], []).summary() == ""


def test_a_quote_is_that_of_the_variant(compare):
    text = """
        [[facts]]
        code = "train.py"
        optimizer.b1 = 0.9
        optimizer.learning_rate = {small = 3e-3, large = 3e-3}
        quote.optimizer.learning_rate = {small = "lr = 3", large = "lr = 0.003"}
        expression.optimizer.learning_rate = {small = "a / 1000"}
    """
    small, large = (of(compare(text, variant), "optimizer.learning_rate").fact for variant in ("small", "large"))
    assert (small.quote, small.expression) == ("lr = 3", "a / 1000")
    assert (large.quote, large.expression) == ("lr = 0.003", "")
    assert of(compare(text), "optimizer.b1").fact.quote == ""


def test_the_counts_are_of_the_values_outside_the_model_that_the_config_has(compare):
    text = """
        [[facts]]
        recalled = "table 1"
        optimizer.b1 = 0.9
        optimizer.b2 = 0.5
        model.num_layers = 2

        [[facts]]
        code = "train.py"
        optimizer.learning_rate = 3e-3
    """
    counts = compare(text).counts()
    assert counts.startswith("1 values from released code, 0 from the paper, 1 recalled (source not checked), ")


def test_no_number_where_one_is_usual_needs_a_source_too(compare):
    config = tiny.get_config("gpt")
    config.optimizer.clip_norm = None
    assert of(compare(LEDGER, config=config), "optimizer.clip_norm") == ledger.LedgerRow(
        "optimizer.clip_norm", None, None, False
    )
    text = LEDGER.replace(
        "[[facts]]", '[[facts]]\n    paper = "a"\n    optimizer.clip_norm = "none"\n\n    [[facts]]', 1
    )
    assert of(compare(text, config=config), "optimizer.clip_norm").agrees


def test_parts_of_tuples_none_and_words_have_their_sources(compare):
    model = ModelConfig(position=LearnedPositions("auto"), generator=None, head_dim=None)
    text = (
        '[[facts]]\ncode = "a.py"\nmodel.position.max_length = "auto"\nmodel.head_dim = "none"\nmodel.use_bias = true'
    )
    compared = compare(text, path="model", config=model)
    for path in ("model.position.max_length", "model.head_dim", "model.use_bias"):
        assert of(compared, path).agrees
    assert not of(compare(text.replace("true", "1"), path="model", config=model), "model.use_bias").agrees
    weights = '[[facts]]\ncode = "a.py"\nunit.weights = [1.0, 0.5]'
    unit = NGrams(weights=(1.0, 0.5))
    assert of(compare(weights, path="unit", config=unit), "unit.weights").agrees
    assert not of(
        compare(weights, path="unit", config=dataclasses.replace(unit, weights=(1.0,))), "unit.weights"
    ).agrees


def test_a_class_needs_a_source_and_a_word_where_it_is_not_the_default(compare):
    config = tiny.get_config("gpt")
    assert [of(compare(LEDGER), f"{part}.type").fact for part in ("optimizer", "schedule", "objective")] == [None] * 3
    assert not [row for row in compare(LEDGER).rows if row.path in ("model.position.type", "model.norm_at")]
    config.model.position, config.model.norm_at = SinusoidalPositions(), "post"
    config.tokenizer.path = config.data.source.path = "mine"  # files of the user
    compared = compare(LEDGER, config=config)
    assert of(compared, "model.position.type").value == "SinusoidalPositions"
    assert not of(compared, "model.position.type").agrees and not of(compared, "model.norm_at").agrees
    assert not [row for row in compared.rows if row.path.endswith(".path")]
    text = LEDGER.replace('"table 1"', '"table 1"\n    optimizer.type = "AdamW"\n    model.norm_at = "post"')
    assert of(compare(text, config=config), "optimizer.type").agrees
    assert of(compare(text, config=config), "model.norm_at").agrees
    assert not of(compare(text.replace("AdamW", "Lamb")), "optimizer.type").agrees


def test_what_any_value_does_for_is_no_deviation(compare):
    config = tiny.get_config("gpt")
    config.train.seed, config.train.mask_seed, config.train.accumulate, config.train.dtype = 3, 4, 2, "float32"
    compared = compare(LEDGER, config=config)
    assert of(compared, "train.mask_seed").value == 4
    for field in ("seed", "mask_seed", "accumulate", "dtype"):
        assert of(compared, f"train.{field}").agrees


@pytest.mark.parametrize(
    "text, said",
    [
        ("[[facts]", "is not a ledger: "),
        ("default = 'base'", "it must have blocks that begin with [[facts]]"),
        ("facts = [1]", "it must have blocks that begin with [[facts]]"),
        (
            "[[facts]]\ntrain.steps = 5",
            "block 1: it must name its source with exactly one of paper, code, recalled, chosen, see",
        ),
        ("[[facts]]\npaper = 'a'\ncode = 'b'", "block 1: it must name its source"),
        ("[[facts]]\npaper = 3", "block 1: paper is 3, it must be a string in quotes"),
        ("default = 3\n[[facts]]\npaper = 'a'", "default is 3, it must be a string in quotes"),
        ("[[facts]]\npaper = 'a'\ntokens.model.d_model = 5", "block 1: only fields of train and schedule"),
        ("[[facts]]\npaper = 'a'\nquote = 'b'", "block 1: quote is 'b', it must be a table, as in quote.train.steps"),
        ("[[facts]]\nsee = 'zoo/nosuch.toml'", "zoo/nosuch.toml is not a ledger: [Errno 2] No such file"),
    ],
)
def test_what_is_no_ledger_is_one_line(compare, text, said):
    with pytest.raises(UserError) as refused:
        compare(text)
    assert said in str(refused.value)
