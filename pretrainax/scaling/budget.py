"""Computes the optimal model size and number of tokens for a budget: `python -m pretrainax.plan --flops=1e21`.

    --flops=1e21 | --hours=24 --topology=v5p:4x4x4 | --tokens=1e11     the budget
    --corpus=38MB     the available text, which the run may repeat; alone, or with --flops or --hours
    --family=decoder|encoder|encoder_decoder --vocab_size=N --sequence_length=N
    --law=besiroglu|hoffmann|muennighoff|FILE.json|DIR     the loss law; --fit=runs/* and `pretrainax ladder` write laws

The published laws were measured on causal decoders. An encoder or an encoder-decoder predicts different targets,
so its loss differs, and its optimal ratio of parameters to tokens may differ. For these two families, run a ladder
(docs/how-to/ladder.md) or `--fit` on a grid of small runs, and set --law to the law that it writes.

`--config=FILE --law=…` predicts the loss of a config's run, with its interval if `--fit` wrote the law.
"""

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, NamedTuple, Optional

from absl import flags

from pretrainax.config import UserError, nearest
from pretrainax.files.json_files import JsonObject
from pretrainax.files.paths import define_path

if TYPE_CHECKING:
    from pretrainax.planning.topologies import Topology
    from pretrainax.scaling.compute_optimal import Plan, Space
    from pretrainax.scaling.power_laws import LossLaw
    from pretrainax.scaling.scarce import ScarcePlan

# The user sets exactly one of these fields of Budget, or `corpus` together with `flops` or `hours`.
BUDGETS = ("corpus", "flops", "hours", "tokens", "fit")


@dataclasses.dataclass(frozen=True)
class Budget:
    """The values of the flags of `plan` that set a budget (BUDGETS), and further options."""

    flops: Optional[float] = None  # training FLOPs of the whole run
    hours: Optional[float] = None  # duration of the run on the topology
    tokens: Optional[float] = None  # number of tokens of text that are available
    corpus: Optional[str] = None  # amount of different text, for example "38MB"; alone, or with flops or hours
    fit: Optional[str] = None  # glob of workdirs: fits a law to these runs, and writes it to the folder `to`
    family: str = "decoder"
    topology: Optional[str] = None  # in the format of `Topology.parse`
    # name in LAWS, or path of a JSON file that --fit writes; None: muennighoff with `corpus`, or else besiroglu
    law: Optional[str] = None
    # model FLOPs / peak FLOPs; LLaMA 3 405B reached 0.38 to 0.43 (Grattafiori et al. 2024, table 4; recalled)
    mfu: float = 0.4
    vocab_size: Optional[int] = None  # None: the value of the family, or less for a small budget
    sequence_length: Optional[int] = None  # None: the value of the family, or less for a small budget
    to: str = "scaling"  # output folder of a fit

    @property
    def flag(self) -> str:
        """Returns the budget as flags, for example "--flops=1e+21".

        Raises:
          UserError: the fields of BUDGETS that are set contradict each other.
        """
        fields = {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}
        set_flags = {name: f"--{name}={x if isinstance(x, str) else f'{x:g}'}" for name, x in fields.items()}
        corpus, given = set_flags.pop("corpus", None), " ".join(set_flags.values())
        if corpus is None and len(set_flags) != 1:
            raise UserError(f"set exactly one of --flops, --hours, --tokens, --corpus and --fit; got {given or 'none'}")
        if corpus is not None and set_flags.keys() not in (set(), {"flops"}, {"hours"}):
            raise UserError(f"{corpus} goes with --flops or --hours, or alone; got {given}")
        return f"{corpus or ''} {given}".strip()

    def check_range(self) -> None:
        """Raises UserError if the budget or the MFU is out of range, or if hours are given without a topology."""
        amounts = [x for x in (self.flops, self.hours, self.tokens) if x is not None]
        if not all(0 < x < math.inf for x in amounts):
            raise UserError(f"{self.flag}: the budget must be above 0 and finite")
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu={self.mfu}: the MFU must be in (0, 1]")
        if self.hours is not None and self.topology is None:
            raise UserError(f"{self.flag} needs a --topology, such as v5p:4x4x4 or h100:8")


def report(budget: Budget) -> str:
    """Returns the text that `plan` prints for a budget: a report about the fit (with `--fit`) or the optimal run.

    Raises:
      UserError: not exactly one of BUDGETS is set, or a value is out of range.
    """
    from pretrainax.scaling.fit import fit_report
    from pretrainax.scaling.report import plan_report

    budget_flag = budget.flag
    if budget.fit is not None:
        return fit_report(budget.fit, budget.to)
    found = _solve(budget)
    return plan_report(budget_flag, found.plan, found.space, found.law, found.topology, budget.mfu, found.scarce)


def values(budget: Budget) -> JsonObject:
    """Returns the numbers that `plan --json` prints for a budget: the optimal run, and its hours on the topology.

    Raises:
      UserError: not exactly one of BUDGETS is set, a value is out of range, or the budget is `fit`.
    """
    if budget.fit is not None:
        raise UserError(f"{budget.flag} writes its law as JSON to --to={budget.to}: leave --json out")
    plan, _, law, topology, scarce = _solve(budget)
    shape, config = plan.shape, plan.shape.config
    return {
        "budget": budget.flag,
        "law": law.source,
        "family": config.family,
        "parameters": shape.parameters,
        "parameters_without_embeddings": shape.without_embeddings,
        "num_layers": config.num_layers,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "num_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "tokens": plan.tokens,
        "flops": plan.flops,
        "flops_per_token": shape.flops_per_token,
        "global_batch_size": plan.examples,
        "steps": plan.steps,
        "loss": plan.loss,
        **(scarce.values() if scarce else {}),
        "topology": topology and str(topology),
        "hours": topology and plan.flops / topology.flops_at(budget.mfu) / 3600,
    }


class _Solution(NamedTuple):
    """The optimal run of a budget, and the models, the law and the devices that determine it."""

    plan: "Plan"
    space: "Space"
    law: "LossLaw"
    topology: Optional["Topology"]
    scarce: Optional["ScarcePlan"]  # None: the budget has no `corpus`


def _solve(budget: Budget) -> _Solution:
    """Computes the optimal run of a budget; raises UserError if a value is out of range."""
    from pretrainax.planning.topologies import Topology
    from pretrainax.scaling.compute_optimal import RECIPES, make_plan, space_for
    from pretrainax.scaling.power_laws import NATS, law_of
    from pretrainax.scaling.prediction import check_identified
    from pretrainax.scaling.scarce import best_size, make_scarce_plan, parse_bytes, tokens_of

    budget.check_range()
    if budget.family not in RECIPES:
        raise UserError(f"--family={budget.family}: {nearest(budget.family, RECIPES)}")
    name = budget.law or ("besiroglu" if budget.corpus is None else "muennighoff")
    law = law_of(name)
    if law.family != budget.family:
        raise UserError(
            f"--law={name} was measured on runs of the family {law.family}, and --family is {budget.family}: fit "
            "a law to your own runs of this family (--fit=runs/*), and set --law to its law.json"
        )
    if law.unit != NATS:  # Kaplan's critical batch size depends on the loss in nats per token
        raise UserError(
            f"--law={name} predicts {law.metric}, and the batch size of a budget follows from a loss in {NATS}: fit a "
            "law to runs with --config.evaluate.select_by=loss"
        )
    check_identified(name, law)
    topology = Topology.parse(budget.topology) if budget.topology else None
    flops = budget.flops if budget.hours is None else budget.hours * 3600 * topology.flops_at(budget.mfu)
    fields = (budget.family, budget.vocab_size, budget.sequence_length, law)
    if budget.corpus is not None:
        num_bytes = parse_bytes(budget.corpus)
        space = space_for(*fields, lambda space: best_size(space, law, tokens_of(num_bytes, space.vocab_size), flops))
        scarce = make_scarce_plan(space, law, tokens_of(num_bytes, space.vocab_size), flops)
        return _Solution(scarce.run, space, law, topology, scarce)

    def total(space: "Space") -> float:
        return space.flops_for(law, budget.tokens) if flops is None else flops

    space = space_for(*fields, lambda space: space.optimum(law, total(space)))
    return _Solution(make_plan(space, law, total(space), budget.tokens), space, law, topology, None)


def define_flags() -> dict[str, flags.FlagHolder]:
    """Defines the command-line flags of a budget and returns their flag holders by name.

    The names are the fields of `Budget`, except for --topology, which `plan` itself defines.
    """
    holders = {
        "flops": flags.DEFINE_float("flops", None, "Budget: training FLOPs"),
        "hours": flags.DEFINE_float("hours", None, "Budget: hours on the --topology"),
        "tokens": flags.DEFINE_float("tokens", None, "Budget: tokens of text"),
        "corpus": flags.DEFINE_string(
            "corpus",
            None,
            "The text there is, such as 38MB, which the run may repeat; alone, or with --flops or --hours",
        ),
        "fit": define_path("fit", None, "Glob of workdirs, such as runs/*: fit the law to their validation losses"),
        "to": define_path("to", Budget.to, "Output folder of --fit"),
        "family": flags.DEFINE_string("family", Budget.family, "Model family: decoder, encoder or encoder_decoder"),
        "law": define_path(
            "law",
            None,
            "Constants of the loss: besiroglu (default), hoffmann, muennighoff (default with --corpus), a file that "
            "--fit writes, or the folder of a ladder",
        ),
        "mfu": flags.DEFINE_float("mfu", Budget.mfu, "Assumed MFU: share of the peak FLOP/s that the run reaches"),
        "vocab_size": flags.DEFINE_integer(
            "vocab_size", None, "Rows of the embedding; default: the value of the family, or less for a small budget"
        ),
        "sequence_length": flags.DEFINE_integer(
            "sequence_length",
            None,
            "Tokens per input sequence; default: the value of the family, or less for a small budget",
        ),
    }
    for holder in holders.values():  # makes --help list the flag
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[holder.name])
    return holders
