"""Formats numbers for readers: durations, bytes, counts, rates."""

import re


def clock(seconds: float) -> str:
    """Formats a duration as minutes and seconds, or with hours from one hour on: 83 as "1:23", 3683 as "1:01:23"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def elapsed(seconds: float) -> str:
    """Formats a duration below a minute as seconds ("4.2 s"), and others as hours, minutes and seconds ("0:01:23")."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def short_time(seconds: float) -> str:
    """Formats a duration in seconds, or in milliseconds if it is below one second: "1.25 s", "12.3 ms"."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def byte_size(size: float) -> str:
    """Formats a size in bytes in decimal units, as data sheets do: 2.5e6 as "2.50 MB", 4 as "4 bytes"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.999995 * scale:
            return f"{size / scale:.2f} {unit}"
    return f"{three_digits(size)} byte{'s' * (size != 1)}" if size else "0"


def percent(fraction: float, decimals: int = 0) -> str:
    """Formats a fraction in percent; only 0 is 0 %, and only 1 is 100 %: 0.9999 as "99%", 0.0001 as "1%"."""
    step = 10.0 ** -(2 + decimals)
    return f"{min(max(fraction, step), 1 - step) if 0 < fraction < 1 else fraction:.{decimals}%}"


def large_number(number: float) -> str:
    """Formats a number with at most three digits and a letter for its magnitude: 2.86e9 as "2.86 B", 4e12 as "4 T"."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * size:
            return three_digits(number / size) + name
    return three_digits(number)


def three_digits(number: float) -> str:
    """Formats a number with three significant digits, or with all digits of its integer part: 0.0123, 1.5, 12,345."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def with_decimals(number: float, decimals: int) -> str:
    """Formats a number with some decimals, or with three digits if it would have less than two: 12.3, 1.9, 0.0556."""
    return f"{number:,.{decimals}f}" if number >= 10 ** (1 - decimals) else three_digits(number)


def scientific(number: float) -> str:
    """Formats a number with two digits and an exponent without leading zeros: 0.001 as "1.0e-3"."""
    return re.sub(r"e([+-])0*(?=\d)", r"e\1", f"{number:.1e}").replace("e+", "e") if number else "0"
