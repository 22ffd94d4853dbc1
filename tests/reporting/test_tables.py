"""Tests that columns are as wide as their widest cell, and that no line ends in spaces."""

from pretrainax.reporting.tables import markdown, text_table


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table([("a", "bbb", "c"), ("aaa", "b", "c")]) == "a    bbb  c\naaa  b    c"


def test_the_last_alignment_is_that_of_all_further_columns():
    assert text_table([("a", "1", "2"), ("aaa", "100", "200")], "<>") == "a      1    2\naaa  100  200"


def test_an_indented_table_with_a_wider_gap():
    assert text_table([("a", "b"), ("aa", "bb")], indent="  ", gap=" | ") == "  a  | b\n  aa | bb"


def test_a_short_row_is_filled_and_no_line_ends_in_spaces():
    assert text_table([("long",), ("a", "b")]) == "long\na     b"


def test_a_table_without_rows_is_empty():
    assert text_table([]) == ""


def test_markdown_that_can_be_read_as_it_is():
    assert markdown(["name", "n"], [["a", "10"]]) == "| name |  n |\n| ---- | -: |\n| a    | 10 |\n"


def test_markdown_without_padding():
    assert markdown(["name", "n"], [["a", "10"]], padded=False) == "| name | n |\n| --- | --- |\n| a | 10 |\n"
