"""A quote gives its number, and an expression computes only with the numbers of its quote."""

import pytest

from pretrainax.config import UserError
from pretrainax.config.quotes import is_compared, mismatch, numbers, quoted_number, released_file

COMMIT = "eedf5716ce1268e56f0a50264a88cafad334ac61"


@pytest.mark.parametrize(
    "quote, expected",
    [
        ("learning_rate: 4.0e-4", [4e-4]),
        # The digit of a name is not a number.
        ("beta_1=0.9", [0.9]),
        # This comma separates numbers. The commas of the next quote group digits.
        ("(0.9,0.98)", [0.9, 0.98]),
        ("10,000 of 1,000,000", [10_000, 1_000_000]),
        ("1_000_000", [1e6]),
        ("max_duration: 4e12T", [4e12]),
        ("eps=.5, 1.", [0.5, 1.0]),
        ("T5 v1.1", []),
        ("", []),
    ],
)
def test_the_numbers_of_a_quote_are_those_outside_words(quote, expected):
    assert numbers(quote) == expected


@pytest.mark.parametrize(
    "quote, expression, expected",
    [
        ("t_warmup: 8388608000", "a / (512 * 4096)", 4000.0),
        ("2 ** 18", "a ** b", 262_144.0),
        ("betas: (0.9, 0.95)", "b", 0.95),
        ("step = 3", "-a + 4", 1.0),
    ],
)
def test_an_expression_computes_with_the_numbers_in_their_order(quote, expression, expected):
    assert quoted_number(quote, expression) == expected


@pytest.mark.parametrize(
    "expression",
    ["c", "(", "a // b", "a / 0", "9 ** 9 ** 9 ** 9", "open('x')", "a.real", "True", "[a]", "(0 - a) ** 0.5"],
)
def test_an_expression_is_arithmetic_only(expression):
    with pytest.raises(UserError, match="the expression .* is invalid"):
        quoted_number("1 and 2", expression)


@pytest.mark.parametrize("quote, count", [("betas: (0.9, 0.95)", 2), ("no number", 0)])
def test_a_quote_without_exactly_one_number_needs_an_expression(quote, count):
    with pytest.raises(UserError, match=f"has {count} numbers: add an expression"):
        quoted_number(quote)


@pytest.mark.parametrize(
    "value, quote, expression, difference",
    [
        (4e-4, "lr: 4.0e-4", "", ""),
        (5e-4, "lr: 4.0e-4", "", "0.0004 in the quote"),
        (2000, "t: 10485760000", "a / 4_194_304", "2500 in the quote"),
        ([0.8, 0.9], "80 % and 90 %", "a / 100, b / 100", ""),
        ([0.8, 0.9], "0.8 and 0.95", "a, b", "0.8, 0.95 in the quote"),
        ([0.8, 0.9], "0.8", "", "0.8 in the quote"),
        # A word has no number.
        ("AdamW", "AdamWeightDecayOptimizer(", "", ""),
        (True, "decay_embeddings: true", "", ""),
        (3, "none", "", "the quote 'none' has 0 numbers: add an expression, such as 'a'"),
    ],
)
def test_a_value_differs_from_another_number_in_its_quote(value, quote, expression, difference):
    assert mismatch(value, quote, expression) == difference


@pytest.mark.parametrize(
    "value, expression, compared",
    [(0.9, "", True), (0.9, "a / 2", True), ([0.8, 0.9], "a, b", True), (0.0, "0", False), (5, "1e3 + 2", False)],
)
def test_a_constant_expression_compares_nothing(value, expression, compared):
    assert is_compared(value, expression) == compared


def test_a_word_or_a_flag_is_not_compared():
    assert not is_compared("AdamW") and not is_compared(True)


@pytest.mark.parametrize("rest", ["", ", the optimizer", ": the optimizer", "; so does ELECTRA", " (the optimizer)"])
def test_a_source_names_a_file_and_may_go_on(rest):
    file = released_file(f"google-research/bert@{COMMIT}:optimization.py{rest}")
    assert file == ("google-research/bert", COMMIT, "optimization.py")
    assert str(file) == "google-research/bert@eedf571:optimization.py"


@pytest.mark.parametrize("source", ["google-research/bert, optimization.py", "a/b@eedf571:c.py", "Liu et al. 2019"])
def test_a_source_without_repository_commit_and_path_names_no_file(source):
    assert released_file(source) is None
