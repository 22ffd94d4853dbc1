"""Parses `config.train.budget`, the length of a run in epochs, FLOPs or time."""

import math
import re
from typing import Literal, NamedTuple

from pretrainax.files.errors import UserError

# unit in the config -> (unit of RunBudget, factor)
_UNITS: dict[str, tuple[Literal["epochs", "flops", "seconds"], float]] = {
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1)),
    **dict.fromkeys(("flop", "flops"), ("flops", 1)),
    **dict.fromkeys(("s", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
}


class RunBudget(NamedTuple):
    """The length of a run."""

    amount: float
    unit: Literal["epochs", "flops", "seconds"]

    @classmethod
    def parse(cls, text: str) -> "RunBudget":
        """Parses a number and a unit: "3 epochs", "1e15 flops", "20 min" or "2 hours".

        Raises:
          ValueError: the string has a different format, or the number is not positive and finite.
        """
        match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]+)\s*", text, re.ASCII)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError("it must be a number and a unit, such as '3 epochs', '1e15 flops' or '20 min'")
        unit, factor = _UNITS[match[2].lower()]
        if not 0 < (amount := float(match[1]) * factor) < math.inf:
            raise ValueError("it must be greater than 0 and finite")
        return cls(amount, unit)

    def steps(self, cost: float, text: str) -> int:
        """Returns the number of steps within the budget.

        Args:
          cost: the FLOPs or seconds of one step.
          text: config.train.budget, for the message.

        Raises:
          UserError: one step exceeds the budget.
        """
        if cost > self.amount:
            unit = "FLOPs" if self.unit == "flops" else "s"
            raise UserError(f"config.train.budget is {text!r}, less than one step, which takes {cost:.4g} {unit}")
        return int(self.amount / cost)
