"""Tests that durations, bytes and numbers are formatted for people."""

import pytest

from pretrainax.reporting import units


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (83.4, "1:23"), (3683, "1:01:23"), (90_000, "25:00:00")])
def test_durations(seconds, text):
    assert units.clock(seconds) == text


@pytest.mark.parametrize(
    "seconds, text", [(0, "0.0 s"), (4.24, "4.2 s"), (83.4, "0:01:23"), (3683, "1:01:23"), (90_000, "25:00:00")]
)
def test_time_that_has_passed_shows_tenths_below_a_minute(seconds, text):
    assert units.elapsed(seconds) == text


@pytest.mark.parametrize(
    "seconds, text", [(1.254, "1.25 s"), (0.9996, "1.00 s"), (0.01234, "12.3 ms"), (1e-6, "0.001 ms")]
)
def test_short_times(seconds, text):
    assert units.short_time(seconds) == text


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0"),
        (4, "4 bytes"),
        (204, "204 bytes"),
        (999.997, "1.00 kB"),
        (1500, "1.50 kB"),
        (2.5e6, "2.50 MB"),
        (16e9, "16.00 GB"),
        (999.997e6, "1.00 GB"),
        (3e12, "3.00 TB"),
    ],
)
def test_bytes_are_in_the_units_of_data_sheets(size, text):
    assert units.byte_size(size) == text


@pytest.mark.parametrize(
    "fraction, decimals, text",
    [
        (0.9999, 0, "99%"),
        (0.9999, 1, "99.9%"),
        (1.0, 1, "100.0%"),
        (0.0001, 1, "0.1%"),
        (0.0, 1, "0.0%"),
        (0.994, 0, "99%"),
        (0.256, 1, "25.6%"),
        (1.3, 0, "130%"),
    ],
)
def test_only_everything_is_100_percent_and_only_nothing_is_0_percent(fraction, decimals, text):
    assert units.percent(fraction, decimals) == text


@pytest.mark.parametrize(
    "number, text",
    [(4e12, "4 T"), (2.86e9, "2.86 B"), (999.6e6, "1 B"), (123.4e6, "123 M"), (1500, "1.5 k"), (999, "999"), (7, "7")],
)
def test_large_numbers_have_three_digits_and_a_unit(number, text):
    assert units.large_number(number) == text


@pytest.mark.parametrize("number, text", [(0.012345, "0.0123"), (99.96, "100"), (12345.6, "12,346")])
def test_three_digits(number, text):
    assert units.three_digits(number) == text


@pytest.mark.parametrize(
    "number, decimals, text",
    [(1234.56, 1, "1,234.6"), (1.94, 1, "1.9"), (0.0556, 1, "0.0556"), (12.3, 0, "12"), (3.06, 0, "3.06"), (0, 1, "0")],
)
def test_numbers_with_decimals_have_two_digits_or_more(number, decimals, text):
    assert units.with_decimals(number, decimals) == text


@pytest.mark.parametrize(
    "value, text", [(1e-3, "1.0e-3"), (0.0, "0"), (3e-4, "3.0e-4"), (1.5e-10, "1.5e-10"), (1, "1.0e0")]
)
def test_learning_rates(value, text):
    assert units.scientific(value) == text
