"""How large a model, on how much text, for a budget: `python -m pretrainax.plan --flops=1e21`.

    --flops=1e21 | --hours=24 --topology=v5p:4x4x4 | --tokens=1e11     the budget
    --family=decoder|encoder|encoder_decoder --vocab_size=N --sequence_length=N
    --law=besiroglu|hoffmann|FILE.json     the constants of the loss; FILE.json is what --fit=runs/* makes of own runs

The published constants are those of causal decoders. An encoder or an encoder-decoder predicts other targets: its loss
is another, and the best share of parameters to tokens may be too. For these the answer is a start with the right cost,
not a measurement; `--fit` on a grid of small runs gives constants that are their own.
"""

import math
import sys
from collections.abc import Iterator
from typing import Optional

from absl import flags
from scipy import optimize

from pretrainax.config import UserError
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import large_number, three_digits
from pretrainax.scaling.compute_optimal import RECIPES, Plan, Space, make_plan, published
from pretrainax.scaling.fit import fit_report
from pretrainax.scaling.power_laws import (
    LAWS,
    LossLaw,
    critical_batch_size,
    deepseek_learning_rate,
    kaplan_learning_rate,
    kaplan_loss,
    kaplan_loss_by_flops,
    kaplan_loss_by_parameters,
    kaplan_loss_by_tokens,
    law_of,
    learning_rate,
)

BUDGETS = ("flops", "hours", "tokens", "fit")  # flags of which one is given
MFU = 0.4  # of peak FLOP/s; LLaMA 3 405B reached 0.38 to 0.43 (Grattafiori et al. 2024, table 4; recalled)


def report(
    *,
    flops: Optional[float] = None,
    hours: Optional[float] = None,
    tokens: Optional[float] = None,
    fit: Optional[str] = None,
    family: str = "decoder",
    topology: Optional[str] = None,
    law: str = "besiroglu",
    mfu: float = MFU,
    vocab_size: Optional[int] = None,
    sequence_length: Optional[int] = None,
    to: str = "scaling",
) -> str:
    """What `plan` prints for one of --flops, --hours, --tokens and --fit.

    Args:
      flops, hours, tokens: the budget, one of them; hours need a topology.
      fit: a glob of workdirs, whose constants are written into the folder `to`.
      topology: as `Topology.parse` reads it.
      mfu: model FLOPs over peak FLOPs, for hours.

    Raises:
      UserError: none or several of them, or a value out of range.
    """
    given = {"flops": flops, "hours": hours, "tokens": tokens, "fit": fit}
    said = [
        f"--{name}={value if name == 'fit' else f'{value:g}'}" for name, value in given.items() if value is not None
    ]
    if len(said) != 1:
        raise UserError(f"give one of --flops, --hours, --tokens and --fit; got {' '.join(said) or 'none'}")
    if fit is not None:
        return fit_report(fit, to)
    if not 0 < (flops or hours or tokens or 0) < math.inf:
        raise UserError(f"{said[0]}: it must be above 0")
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu={mfu}: it must be in (0, 1]")
    if hours is not None and topology is None:
        raise UserError(f"{said[0]} needs a --topology, as v5p:4x4x4 or h100:8")
    constants, space = law_of(law), Space(family, vocab_size, sequence_length)
    where = topology and Topology.parse(topology)
    rate = where and mfu * where.num_devices * where.chip.peak_flops
    if tokens is not None:
        flops = space.flops_for(constants, tokens)
    plan = make_plan(space, constants, hours * 3600 * rate if hours else flops, tokens)
    rows = [("budget", said[0].lstrip("-").replace("=", " ")), *_rows_of(plan, space, constants)]
    if where:
        time = plan.flops / rate / 3600
        price = where.chip.price and f", {time * where.num_devices * where.chip.price:,.0f} USD on demand"
        rows.append(("time", f"{three_digits(time)} hours on {where} at {mfu:.0%} MFU, assumed (--mfu){price or ''}"))
        if plan.examples % where.num_devices:
            rows.append(("NOTE", f"{plan.examples} examples do not divide over {where.num_devices} devices"))
    parts = [text_table(rows), _caveat(family, constants), _neighbours(plan, space, constants), _other_laws(plan)]
    return "\n\n".join([*filter(None, parts), _command(plan, space)]) + "\n"


def _rows_of(plan: Plan, space: Space, law: LossLaw) -> Iterator[tuple[str, str]]:
    shape, config = plan.shape, plan.shape.config
    counted = "" if law.with_embeddings else " without embeddings, as the law counts"
    layers = f"{config.num_layers}"
    read = f"{space.sequence_length:,}"
    if config.family == "encoder_decoder":
        layers = f"{config.num_layers} + {config.decoder_layers}"
        read = f"{space.lengths.inputs:,} + {space.lengths.targets:,}"
    critical = critical_batch_size(plan.loss)
    rate = learning_rate(shape.without_embeddings)
    kaplan, deepseek = kaplan_learning_rate(shape.without_embeddings), deepseek_learning_rate(plan.flops)
    yield "law", law.source
    yield "parameters", f"{large_number(shape.parameters)}, without embeddings {large_number(shape.without_embeddings)}"
    yield "tokens", f"{large_number(plan.tokens)} of text, {plan.tokens / plan.size:.1f} a parameter{counted}"
    yield (
        "FLOPs",
        f"{plan.flops:.3g}; {shape.flops_per_token:.3g} a token, counted: "
        f"{shape.flops_per_token / shape.parameters:.2f} a parameter",
    )
    yield (
        "architecture",
        f"{layers} layers, width {config.d_model:,}, {config.num_heads} heads of {config.dim_per_head}, feed-forward "
        f"{config.d_ff:,}, vocabulary {config.vocab_size:,}",
    )
    yield "published", published(shape)
    yield (
        "batch",
        f"{plan.examples:,} examples of {read}: {large_number(plan.examples * space.lengths.raw)} tokens of text, "
        f"{plan.examples * space.lengths.raw / critical:.0%} of the critical {large_number(critical)} "
        "(Kaplan et al. 2020, equation 1.4)",
    )
    yield "steps", f"{plan.steps:,}"
    yield (
        "learning rate",
        f"{rate:.2g} at the peak, of Adam (Kaplan et al. 2020, D.1: {kaplan:.2g}; Bi et al. 2024, 1: {deepseek:.2g})",
    )
    yield (
        "expected loss",
        f"{plan.loss:.3f} nats a token{'' if law.family == config.family else ', of a ' + law.family}",
    )


def _caveat(family: str, law: LossLaw) -> str:
    if family == law.family:
        return ""
    return (
        f"NOTE The constants of this law are those of the {_words(law.family)} family. The {_words(family)} family\n"
        "predicts other targets: the losses here are not what its run will show, and its best share of parameters to\n"
        "tokens may differ. The FLOPs are its own. Take N and D as a start; a grid of small runs and --fit=runs/*\n"
        "give constants that are its own."
    )


def _neighbours(plan: Plan, space: Space, law: LossLaw) -> str:
    """Half and double N at the same FLOPs, and which share of them would reach as low a loss at its optimum."""
    rows = [("", "parameters", "tokens", "tokens a parameter", "loss", "more", "worth")]
    best = law.loss(plan.size, plan.flops / space.cost(law, plan.size))
    for name, factor in (("half", 0.5), ("this", 1.0), ("double", 2.0)):
        size = factor * plan.size
        tokens = plan.flops / space.cost(law, size)
        loss = law.loss(size, tokens)
        worth = _worth(space, law, plan.flops, loss)
        amounts = large_number(size), large_number(tokens), f"{tokens / size:.1f}"
        rows.append((name, *amounts, f"{loss:.3f}", f"{loss - best:+.3f}", worth))
    return "At the same FLOPs (worth: of the FLOPs, for this loss at the best size):\n" + text_table(rows, "<>")


def _worth(space: Space, law: LossLaw, flops: float, loss: float) -> str:
    def excess(share: float) -> float:
        size = space.optimum(law, share * flops)
        return law.loss(size, share * flops / space.cost(law, size)) - loss

    return "100 %" if excess(1.0) >= -1e-6 else f"{100 * optimize.brentq(excess, 1e-3, 1.0, xtol=1e-3):.0f} %"


def _other_laws(plan: Plan) -> str:
    rows = [("law", "parameters", "tokens", "tokens a parameter", "loss")]
    for law in LAWS.values():
        size, tokens = law.optimum(plan.flops)
        loss = f"{law.loss(size, tokens):.3f}" if isinstance(law, LossLaw) else ""
        if law is LAWS["kaplan"]:
            loss = f"{kaplan_loss_by_flops(plan.flops):.3f}"
        rows.append((law.source, large_number(size), large_number(tokens), f"{tokens / size:.1f}", loss))
    lines = [
        f"Published laws for a causal decoder at {plan.flops:.3g} FLOPs = 6 N D (Kaplan's N is without embeddings):",
        text_table(rows, "<>"),
    ]
    if plan.shape.config.family == "decoder":
        size, tokens = plan.shape.without_embeddings, plan.tokens
        lines.append(
            f"The run above by Kaplan et al.: {kaplan_loss(size, tokens):.3f} by N and D, "
            f"{kaplan_loss_by_parameters(size):.3f} by N alone, {kaplan_loss_by_tokens(tokens):.3f} by D alone."
        )
    return "\n".join(lines)


def _command(plan: Plan, space: Space) -> str:
    """The flags that train it, beside the source of the text."""
    config, recipe = plan.shape.config, space.recipe
    model = {name: getattr(config, name) for name in ("num_layers", "d_model", "d_ff", "num_heads")}
    model |= {name: getattr(config, name) for name in ("num_kv_heads", "head_dim") if getattr(config, name)}
    fields = {f"model.{name}": value for name, value in model.items()} | {
        "model.vocab_size": config.vocab_size,
        "tokenizer.vocab_size": config.vocab_size - recipe.spare_rows,
        "data.sequence_length": space.sequence_length,
        "train.steps": plan.steps,
        "train.global_batch_size": plan.examples,
        # to a tenth over the steps of the run, no more and no fewer (Hoffmann et al. 2022, section 3.1)
        "schedule": f'"WarmupCosine(warmup_steps={min(2000, plan.steps // 20)}, final_fraction=0.1)"',
    }
    lines = [f"--config.{name}={value}" for name, value in fields.items()]
    note = ""
    if recipe.relative_rate:
        note = "\n\nThis config's optimizer scales a step by the size of its matrix: its own rate is kept, not Adam's."
    else:
        rate = learning_rate(plan.shape.without_embeddings)
        lines.append(f"--config.optimizer.learning_rate={rate:.2g}")
    return f"python -m pretrainax.main --config={recipe.config} " + " \\\n  ".join(["", *lines]).lstrip(" ") + note


# --- words ---------------------------------------------------------------------------------------------------------


def _words(family: str) -> str:
    return family.replace("_", "-")


def define_flags() -> dict[str, flags.FlagHolder]:
    """The flags of this part of `plan`, by the names of `report`'s arguments; the topology is the command's own."""
    made = {
        "flops": flags.DEFINE_float("flops", None, "Budget: training FLOPs"),
        "hours": flags.DEFINE_float("hours", None, "Budget: hours on the --topology"),
        "tokens": flags.DEFINE_float("tokens", None, "Budget: tokens of text"),
        "fit": flags.DEFINE_string("fit", None, "Workdirs, as runs/*: fit the law to their validation losses"),
        "to": flags.DEFINE_string("to", "scaling", "--fit: folder to write"),
        "family": flags.DEFINE_enum("family", "decoder", list(RECIPES), "Family of the model"),
        "law": flags.DEFINE_string("law", "besiroglu", "Constants of the loss: besiroglu, hoffmann, a file of --fit"),
        "mfu": flags.DEFINE_float("mfu", MFU, "Share of the peak FLOP/s that the run is assumed to reach"),
        "vocab_size": flags.DEFINE_integer("vocab_size", None, "Rows of the embedding; the family's where not given"),
        "sequence_length": flags.DEFINE_integer("sequence_length", None, "Tokens of an example's input"),
    }
    for holder in made.values():  # what --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[holder.name])
    return made
