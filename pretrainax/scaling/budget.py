"""The best model and the text to train it on for a budget: `python -m pretrainax.plan --flops=1e21`.

    --flops=1e21 | --hours=24 --topology=v5p:4x4x4 | --tokens=1e11     the budget
    --family=decoder|encoder|encoder_decoder --vocab_size=N --sequence_length=N
    --law=besiroglu|hoffmann|FILE.json     the constants of the loss; FILE.json is what --fit=runs/* makes of own runs

The published constants are those of causal decoders. An encoder or an encoder-decoder predicts other targets: its loss
is another, and the best share of parameters to tokens may be too. For these the answer is a start with the right cost,
not a measurement; `--fit` on a grid of small runs gives constants that are their own.
"""

import dataclasses
import math
import sys
from typing import Optional

from absl import flags

from pretrainax.config import UserError
from pretrainax.files.paths import define_path
from pretrainax.planning.topologies import Topology
from pretrainax.scaling.compute_optimal import RECIPES, Space, make_plan
from pretrainax.scaling.fit import fit_report
from pretrainax.scaling.power_laws import law_of
from pretrainax.scaling.report import plan_report

BUDGETS = ("flops", "hours", "tokens", "fit")  # fields of which one is given


@dataclasses.dataclass(frozen=True)
class Budget:
    """A question to `plan`: one of BUDGETS, and how to spend it."""

    flops: Optional[float] = None  # of the whole training
    hours: Optional[float] = None  # on the topology
    tokens: Optional[float] = None  # of text
    fit: Optional[str] = None  # a glob of workdirs, whose constants are written into the folder `to`
    family: str = "decoder"
    topology: Optional[str] = None  # as `Topology.parse` reads it
    law: str = "besiroglu"
    # model FLOPs over peak FLOPs; LLaMA 3 405B reached 0.38 to 0.43 (Grattafiori et al. 2024, table 4; recalled)
    mfu: float = 0.4
    vocab_size: Optional[int] = None
    sequence_length: Optional[int] = None
    to: str = "scaling"

    @property
    def flag(self) -> str:
        """Returns the one of BUDGETS that is given, as a flag; UserError for none or several of them."""
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        said = [f"--{name}={value if name == 'fit' else f'{value:g}'}" for name, value in given.items()]
        if len(said) != 1:
            raise UserError(f"give one of --flops, --hours, --tokens and --fit; got {' '.join(said) or 'none'}")
        return said[0]

    def check_range(self) -> None:
        """Raises UserError for a number that is out of range, or for hours on an unknown topology."""
        if not 0 < (self.flops or self.hours or self.tokens or 0) < math.inf:
            raise UserError(f"{self.flag}: it must be above 0")
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu={self.mfu}: it must be in (0, 1]")
        if self.hours is not None and self.topology is None:
            raise UserError(f"{self.flag} needs a --topology, as v5p:4x4x4 or h100:8")


def report(budget: Budget) -> str:
    """Returns what `plan` prints for a budget.

    Raises:
      UserError: none or several of BUDGETS, or a value out of range.
    """
    said = budget.flag
    if budget.fit is not None:
        return fit_report(budget.fit, budget.to)
    budget.check_range()
    law = law_of(budget.law)
    space = Space(budget.family, budget.vocab_size, budget.sequence_length)
    topology = Topology.parse(budget.topology) if budget.topology else None
    flops = budget.flops
    if budget.hours is not None:
        flops = budget.hours * 3600 * topology.flops_at(budget.mfu)
    elif budget.tokens is not None:
        flops = space.flops_for(law, budget.tokens)
    plan = make_plan(space, law, flops, budget.tokens)
    return plan_report(said, plan, space, law, topology, budget.mfu)


def define_flags() -> dict[str, flags.FlagHolder]:
    """Defines the flags of a budget, by the names of `Budget`'s fields; the topology is the command's own."""
    made = {
        "flops": flags.DEFINE_float("flops", None, "Budget: training FLOPs"),
        "hours": flags.DEFINE_float("hours", None, "Budget: hours on the --topology"),
        "tokens": flags.DEFINE_float("tokens", None, "Budget: tokens of text"),
        "fit": define_path("fit", None, "Workdirs, as runs/*: fit the law to their validation losses"),
        "to": define_path("to", Budget.to, "--fit: folder to write"),
        "family": flags.DEFINE_enum("family", Budget.family, list(RECIPES), "Family of the model"),
        "law": define_path("law", Budget.law, "Constants of the loss: besiroglu, hoffmann, a file of --fit"),
        "mfu": flags.DEFINE_float("mfu", Budget.mfu, "Share of the peak FLOP/s that the run is assumed to reach"),
        "vocab_size": flags.DEFINE_integer("vocab_size", None, "Rows of the embedding; the family's where not given"),
        "sequence_length": flags.DEFINE_integer("sequence_length", None, "Tokens of an example's input"),
    }
    for holder in made.values():  # what --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[holder.name])
    return made
