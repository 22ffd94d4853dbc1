"""Looks up the sizes of a variant in the size table of a family."""

from collections.abc import Mapping
from typing import TypeVar

from pretrainax.config import UserError, nearest

Size = TypeVar("Size")


def pick(family: str, variant: str, sizes: Mapping[str, Size]) -> Size:
    """Returns the sizes of a variant, `sizes[variant]`.

    Args:
      family: name of the family, for the error message.
      variant: name of the variant.
      sizes: the family's size table, which maps variants to sizes.

    Raises:
      UserError: the variant is unknown. The message lists the most similar variants.
    """
    if variant not in sizes:
        raise UserError(f"{family} has no variant {variant!r}, {nearest(variant, sizes)}")
    return sizes[variant]
