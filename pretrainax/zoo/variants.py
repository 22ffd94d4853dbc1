"""Looking up a row of a family's table of sizes."""

from collections.abc import Mapping
from typing import TypeVar

from pretrainax.config import UserError, nearest

Size = TypeVar("Size")


def pick(family: str, variant: str, sizes: Mapping[str, Size]) -> Size:
    """Returns `sizes[variant]`; UserError with the nearest names where there is none."""
    if variant not in sizes:
        raise UserError(f"{family} has no variant {variant!r}, {nearest(variant, sizes)}")
    return sizes[variant]
