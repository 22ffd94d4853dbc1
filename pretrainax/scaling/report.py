"""Formats the report of `plan` for a budget: the optimal run, other sizes, other laws, and the training command."""

import math
from collections.abc import Iterator
from typing import Optional

import numpy as np
from scipy import optimize

from pretrainax.data.sources import HuggingFace
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import large_number, three_digits, with_decimals
from pretrainax.scaling.compute_optimal import Plan, Space, published
from pretrainax.scaling.power_laws import (
    LARGEST_KAPLAN,
    LAWS,
    LossLaw,
    kaplan_loss,
    kaplan_loss_by_flops,
    kaplan_loss_by_parameters,
    kaplan_loss_by_tokens,
    learning_rate,
)
from pretrainax.scaling.scarce import DROPOUT_SHARE, FEW_EPOCHS, MIN_TEXT, ScarcePlan, epochs_of

# (number of tokens with GPT-2's tokenizer, dataset, its configuration): WikiText-103 (Merity et al. 2016), and samples
# of FineWeb (Penedo et al. 2024), all of which has 15 T tokens.
_DATASETS = (
    (100e6, "Salesforce/wikitext", "wikitext-103-raw-v1"),
    (10e9, "HuggingFaceFW/fineweb", "sample-10BT"),
    (100e9, "HuggingFaceFW/fineweb", "sample-100BT"),
    (350e9, "HuggingFaceFW/fineweb", "sample-350BT"),
    (math.inf, "HuggingFaceFW/fineweb", None),
)


def plan_report(
    said: str,
    plan: Plan,
    space: Space,
    law: LossLaw,
    topology: Optional[Topology],
    mfu: float,
    scarce: Optional[ScarcePlan] = None,
) -> str:
    """Formats the report: the optimal run, other sizes and laws for the same FLOPs, and the training command.

    Args:
      said: the flag that sets the budget, for example "--flops=1e+21".
      plan: the optimal run.
      topology: the devices for which to estimate hours and price. If None, the report omits both.
      mfu: the fraction of the peak FLOP/s that the run is assumed to reach on the topology.
      scarce: the plan for limited text that contains `plan`. None: the text is not limited.
    """
    rows = [("budget", said.replace("--", "").replace("=", " ")), *_run_rows(plan, space, law)]
    if scarce is not None:
        rows += _scarce_rows(scarce)
    if topology is not None:
        rows += _cost(plan, topology, mfu)
    sections = [text_table(rows)]
    sections += [_neighbours(plan, space, law)] if scarce is None else [_scarce_sizes(scarce, space, law)]
    if plan.shape.config.family == "decoder" and scarce is None:
        sections.append(_other_laws(plan))
    return "\n\n".join([*sections, training_command(plan, space, scarce)]) + "\n"


def _scarce_rows(scarce: ScarcePlan) -> Iterator[tuple[str, str]]:
    """Yields (label, text) for the properties of a run on limited text."""
    source = "Kim et al. 2025 at this ratio of parameters to tokens"
    yield "text", f"{large_number(scarce.text)} different tokens, estimated as for books in English"
    yield "epochs", three_digits(scarce.epochs)
    if scarce.epochs <= 1:
        yield "NOTE", "there is more text than the FLOPs need: nothing is repeated"
    else:
        yield (
            "weight decay",
            f"{scarce.weight_decay:.2g} for AdamW ({source}, whose settings differ by a factor of 1.4: tune it first)",
        )
        limit = f"{scarce.share:.0%} of the epochs that are best without a limit of FLOPs"
        yield "dropout", f"{scarce.dropout_rate:g} ({limit}; 0.1 from {DROPOUT_SHARE:.0%} and {FEW_EPOCHS:g} epochs on)"
    if scarce.text < MIN_TEXT:
        least = large_number(MIN_TEXT)
        yield "NOTE", f"the rules of epochs and weight decay are from {least} different tokens or more: tune them"


def _scarce_sizes(scarce: ScarcePlan, space: Space, law: LossLaw) -> str:
    """Formats a table of models with a quarter to four times the parameters of the best one, each with its epochs."""
    rows = [("", "parameters", "epochs", "FLOPs", "loss", "more")]
    factors = {"quarter": 0.25, "half": 0.5, "this": 1.0, "double": 2.0, "four times": 4.0}
    sizes = scarce.run.size * np.array([*factors.values()])
    costs = space.cost(law, sizes)
    epochs = epochs_of(sizes, costs, scarce.text, scarce.flops)
    losses = law.loss(sizes, epochs * scarce.text, epochs)
    flops, more = epochs * scarce.text * costs, losses - losses[[*factors].index("this")]
    for name, size, passes, cost, loss, extra in zip(factors, sizes, epochs, flops, losses, more, strict=True):
        rows.append((name, large_number(size), three_digits(passes), f"{cost:.3g}", f"{loss:.3f}", f"{extra:+.3f}"))
    return "Other sizes, each with its epochs (more: loss above this one):\n" + text_table(rows, "<>")


def _cost(plan: Plan, topology: Topology, mfu: float) -> Iterator[tuple[str, str]]:
    """Yields (label, text) for the run's hours and price, and a NOTE if the devices do not divide the batch evenly."""
    hours, devices = plan.flops / topology.flops_at(mfu) / 3600, topology.num_devices
    price = topology.chip.price and f", {with_decimals(hours * devices * topology.chip.price, 0)} USD on demand"
    yield "time", f"{three_digits(hours)} hours on {topology} at {mfu:.0%} MFU, assumed (set by --mfu){price or ''}"
    if plan.examples % devices:
        yield "NOTE", f"a batch of {plan.examples} examples does not divide over {devices} devices"


def _run_rows(plan: Plan, space: Space, law: LossLaw) -> Iterator[tuple[str, str]]:
    """Yields (label, text) for each property of the optimal run."""
    shape, config = plan.shape, plan.shape.config
    without_embeddings = "" if law.with_embeddings else " without embeddings, as in the law"
    layers = config.format_size("num_layers")
    length = f"{space.sequence_length:,}"
    if config.family == "encoder_decoder":
        length = f"{space.lengths.inputs:,} + {space.lengths.targets:,}"
    b_crit = plan.critical_batch_size
    yield "law", law.source
    yield "parameters", f"{large_number(shape.parameters)}; {large_number(shape.without_embeddings)} without embeddings"
    yield (
        "tokens",
        f"{large_number(plan.tokens)} of text, {plan.tokens / plan.size:.1f} per parameter{without_embeddings}",
    )
    yield (
        "FLOPs",
        f"{plan.flops:.3g} in total; {shape.flops_per_token:.3g} per token, which is "
        f"{shape.flops_per_token / shape.parameters:.2f} per parameter and token",
    )
    yield (
        "architecture",
        f"{layers} layers, width {config.d_model:,}, {config.num_heads} heads of {config.dim_per_head}, feed-forward "
        f"{config.d_ff:,}, vocabulary {config.vocab_size:,}",
    )
    yield "published", published(shape)
    yield (
        "batch",
        f"{plan.examples:,} sequences of {length} tokens: {large_number(plan.examples * space.lengths.raw)} tokens of "
        "text, "
        f"{plan.examples * space.lengths.raw / b_crit:.0%} of the critical batch size {large_number(b_crit)} "
        "(Kaplan et al. 2020, equation 1.4)",
    )
    yield "steps", f"{plan.steps:,}"
    yield "learning rate", _rate(plan, space)
    yield "expected loss", f"{plan.loss:.3f} nats per token"
    if law.config is not None and (rows := law.config["model"]["vocab_size"]) != config.vocab_size:
        note = f"the runs of the law have a vocabulary of {rows:,}, which changes the loss: set --vocab_size={rows}"
        yield "NOTE", note
    if plan.loss > (uniform := math.log(config.vocab_size)):
        yield "NOTE", f"a loss above {uniform:.2f}, that of a uniform distribution: the law does not hold at this size"


def _rate(plan: Plan, space: Space) -> str:
    """Formats the peak learning rate of the printed command, with its source."""
    if space.recipe.relative_rate:
        return f"the one of {space.recipe.config}, whose optimizer scales updates by the size of the matrix"
    size = plan.shape.without_embeddings
    source = "Kaplan et al. 2020, eq. D.1" + ", extrapolated as in Bi et al. 2024" * (size > LARGEST_KAPLAN)
    return f"peak {learning_rate(size):.2g}, for Adam ({source})"


def _neighbours(plan: Plan, space: Space, law: LossLaw) -> str:
    """Formats a table of models with half, once and twice the optimal number of parameters, for the same FLOPs.

    The last column is the fraction of these FLOPs with which an optimal model would reach the same loss.
    """
    rows = [("", "parameters", "tokens", "tokens per parameter", "loss", "more", "worth")]
    lowest_loss = law.loss(plan.size, plan.flops / space.cost(law, plan.size))
    for name, factor in (("half", 0.5), ("this", 1.0), ("double", 2.0)):
        size = factor * plan.size
        tokens = plan.flops / space.cost(law, size)
        loss = law.loss(size, tokens)
        worth = _worth(space, law, plan.flops, loss)
        cells = large_number(size), large_number(tokens), f"{tokens / size:.1f}"
        rows.append((name, *cells, f"{loss:.3f}", f"{loss - lowest_loss:+.3f}", worth))
    return (
        "Other sizes at the same FLOPs (more: loss above the optimum; worth: share of the FLOPs with which the best\n"
        "size reaches this loss):\n" + text_table(rows, "<>")
    )


def _worth(space: Space, law: LossLaw, flops: float, loss: float) -> str:
    """Computes the fraction of `flops` with which an optimal model reaches `loss`, formatted as a percentage."""

    def excess(share: float) -> float:
        size = space.optimum(law, share * flops)
        return law.loss(size, share * flops / space.cost(law, size)) - loss

    return "100 %" if excess(1.0) >= -1e-6 else f"{100 * optimize.brentq(excess, 1e-3, 1.0, xtol=1e-3):.0f} %"


def _other_laws(plan: Plan) -> str:
    """Formats a table of the optimal run under each published law, and this run's loss as predicted by Kaplan's law."""
    rows = [("law", "parameters", "tokens", "tokens per parameter", "loss")]
    for law in LAWS.values():
        size, tokens = law.optimum(plan.flops)
        loss = f"{law.loss(size, tokens):.3f}" if isinstance(law, LossLaw) else ""
        if law is LAWS["kaplan"]:
            loss = f"{kaplan_loss_by_flops(plan.flops):.3f}"
        rows.append((law.source, large_number(size), large_number(tokens), f"{tokens / size:.1f}", loss))
    lines = [
        f"Published laws for a causal decoder at {plan.flops:.3g} FLOPs = 6 N D (N: parameters, D: tokens; Kaplan's "
        "N is without embeddings):",
        text_table(rows, "<>"),
    ]
    size, tokens = plan.shape.without_embeddings, plan.tokens
    lines.append(
        f"Expected loss of the run above by Kaplan et al.: {kaplan_loss(size, tokens):.3f} from N and D, "
        f"{kaplan_loss_by_parameters(size):.3f} from N alone, {kaplan_loss_by_tokens(tokens):.3f} from D alone."
    )
    return "\n".join(lines)


def training_command(plan: Plan, space: Space, scarce: Optional[ScarcePlan]) -> str:
    """Formats the shell command that trains the optimal run, with notes about data and learning rate."""
    config, recipe = plan.shape.config, space.recipe
    model = {name: getattr(config, name) for name in ("num_layers", "d_model", "d_ff", "num_heads")}
    model |= {name: getattr(config, name) for name in ("num_kv_heads", "head_dim") if getattr(config, name)}
    fields = {f"model.{name}": value for name, value in model.items()} | {
        "model.vocab_size": config.vocab_size,
        "tokenizer.vocab_size": config.vocab_size - recipe.spare_rows,
        "data.source": f'"{_dataset(plan.tokens)}"',
        "data.sequence_length": space.sequence_length,
        "train.steps": plan.steps,
        "train.global_batch_size": plan.examples,
        # The learning rate decays to a tenth over exactly the steps of the run (Hoffmann et al. 2022, section 3.1).
        "schedule": f'"WarmupCosine(warmup_steps={min(2000, plan.steps // 20)}, final_fraction=0.1)"',
    }
    notes = [
        "The dataset is on the Hugging Face Hub. For your own text: --config.data.source=\"TextFiles(path='FOLDER')\"."
    ]
    if scarce is not None:
        fields["data.source"] = "\"TextFiles(path='FOLDER')\""
        notes = ["FOLDER is the folder of your text."]
    if scarce is not None and scarce.epochs > 1:
        fields["data.packing"] = '"Windows(shuffle_documents=True)"'
        fields["model.dropout_rate"] = f"{scarce.dropout_rate:g}"
        fields |= {} if recipe.relative_rate else {"optimizer.weight_decay": f"{scarce.weight_decay:.2g}"}
    lines = [f"--config.{name}={value}" for name, value in fields.items()]
    if not recipe.relative_rate:
        lines.append(f"--config.optimizer.learning_rate={learning_rate(plan.shape.without_embeddings):.2g}")
    command = " \\\n  ".join([f"python -m pretrainax.main --config={recipe.config}", *lines])
    return "\n\n".join([command, *notes])


def _dataset(tokens: float) -> HuggingFace:
    """Selects the smallest dataset of _DATASETS with at least `tokens` tokens, or else all of FineWeb."""
    path, name = next((path, name) for size, path, name in _DATASETS if size >= tokens)
    return HuggingFace(path=path, name=name, streaming=True)
