"""Estimates the memory, time and price of a run: `python -m pretrainax.plan --config=FILE --topology=v5p:4x4x8`.

Reports whether the run fits in memory, the memory by component, the traffic over each mesh axis, FLOPs, step time,
hours and price. If the run does not fit, the report lists changes that make it fit. `--search` lists the best meshes.
No accelerator is needed. If the extra `tpu` or `cuda13` is installed, the command also compiles the actual training
step for the topology and prints the compiler's values next to the estimates; `--nocompile` skips the compilation.
`--prove` prints a certificate of the compiled step instead: its bytes over the floor, the types and sizes of its
products, fused attention, recomputation, collectives, memory and more (`pretrainax.planning.certificate`).
`--law` also predicts the run's validation loss, and needs no topology. `--flops`, `--hours`, `--tokens` and `--fit`
size a model for a budget: see `pretrainax.scaling.budget`. `--transfer_from=RUN` transfers learning rate, weight decay
and batch size of a small, tuned run to the config, and prints the flags.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Optional

from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, TrainConfig, UserError, resolve_auto
from pretrainax.config.budget import RunBudget
from pretrainax.files.paths import define_path
from pretrainax.scaling import budget
from pretrainax.scaling.budget import Budget

if TYPE_CHECKING:  # the functions import the rest, because JAX takes seconds, for which --help must not wait
    from pretrainax.planning.compiled import Compiled
    from pretrainax.planning.topologies import Topology

_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Devices of the run: v5p:4x4x8, h100:8, h100:4x8 (hosts x devices), 4*v5e:16x16, v5e-16, p5.48xlarge",
)
_PROVE = flags.DEFINE_bool("prove", False, "Compile the step and print its certificate instead of the plan")
_SEARCH = flags.DEFINE_bool("search", False, "List the best meshes, each with the fastest rematerialization that fits")
_COMPILE = flags.DEFINE_bool("compile", True, "Compile the step if the compiler for the chip is installed")
_TABLE = flags.DEFINE_bool("table", False, "Print docs/plans.md, the plans of all configs, and exit")
_TRANSFER_FROM = define_path("transfer_from", None, "Run whose hyperparameters are transferred to the config")
_BUDGET = budget.define_flags()
_OF_CONFIG = ("config", "search", "prove", "table", "transfer_from")  # flags that have no effect with a budget
_IGNORED = {  # flags that have no effect together with the key
    **dict.fromkeys(budget.BUDGETS, (*_OF_CONFIG, "to")),
    "fit": (*_OF_CONFIG, "topology", "family", "law", "mfu", "vocab_size", "sequence_length"),
    "table": ("config", "topology", "search", "prove", "transfer_from", "law", "json"),
    "transfer_from": ("topology", "search", "prove", "law"),
    "search": ("prove",),
}


def main() -> int:
    """Prints the plan of a run, the best meshes, or a model size for a budget. Returns the exit code."""
    import jax

    from pretrainax.planning import plans_page, report, search, values
    from pretrainax.planning.topologies import Topology
    from pretrainax.scaling.prediction import predict_loss

    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device, so accelerators stay free for other processes
    budget_flags = {name: flag.value for name, flag in _BUDGET.items() if flag.present}
    _check_flags(budget_flags)
    if any(name in budget_flags for name in budget.BUDGETS):
        asked = Budget(**budget_flags, topology=_TOPOLOGY.value)
        if cli.prints_json():
            cli.print_json(budget.values(asked))
        else:
            print(budget.report(asked), end="")
        return 0
    if _TABLE.value:
        print(plans_page.markdown(list(plans_page.rows())), end="")
        return 0
    experiment = cli.experiment(files=False)
    tokenizer = experiment.tokenizer
    resolve_auto(experiment, tokenizer.size if tokenizer.path is None else None)
    _set_steps(experiment)
    if _TRANSFER_FROM.value:
        return _print_transfer(experiment, _TRANSFER_FROM.value)
    prediction = predict_loss(experiment, budget_flags["law"]) if "law" in budget_flags else None
    if prediction is not None and not cli.prints_json():
        print(prediction)
    if prediction is not None and _TOPOLOGY.value is None and not (_SEARCH.value or _PROVE.value):
        if cli.prints_json():
            cli.print_json({"prediction": prediction.values()})
        return 0
    if _TOPOLOGY.value is None:
        raise UserError("--topology is missing: the devices of the run, such as v5p:4x4x8 or h100:8")
    topology = Topology.parse(_TOPOLOGY.value)
    if _SEARCH.value:
        found = search.best(experiment, topology)
        if cli.prints_json():
            cli.print_json(values.mesh_values(experiment, found))
        else:
            print(report.mesh_table(experiment, found))
        return 0
    candidate = search.estimate_run(experiment, topology)
    experiment = candidate.experiment
    if _PROVE.value:
        return _print_certificate(experiment, candidate.largest.experiment, topology)
    compiled, compile_status = _compile_for_topology(candidate.largest.experiment, topology)
    if cli.prints_json():
        numbers = values.run_values(cli.config_name(), candidate, topology, compiled, compile_status)
        cli.print_json(numbers | ({"prediction": prediction.values()} if prediction else {}))
        return 0
    print(report.run_report(cli.config_name(), candidate, topology, compiled, compile_status))
    if not (compiled or candidate).fits:
        print("\n" + report.proposals(experiment, topology))
    return 0


def _check_flags(budget_flags: Mapping[str, object]) -> None:
    """Raises UserError if a flag has no effect together with the others."""
    for mode, ignored in _IGNORED.items():
        for name in ignored if flags.FLAGS[mode].value else ():
            if flags.FLAGS[name].present and flags.FLAGS[name].value:
                raise UserError(f"--{name} has no effect with --{mode}: leave one of them out")
    if cli.prints_json() and "law" in budget_flags and (_SEARCH.value or _PROVE.value):
        raise UserError("--law has no effect with --json and --search or --prove: leave one of them out")
    unused = sorted(set(budget_flags) - {"law"})
    if unused and not set(budget.BUDGETS) & set(unused):
        budgets = ", ".join(f"--{name}" for name in budget.BUDGETS)
        raise UserError(f"--{unused[0]} has no effect without a budget: set one of {budgets}, or leave it out")
    if "mfu" in unused and _TOPOLOGY.value is None:
        raise UserError("--mfu has no effect without --topology: set the devices of the run, or leave it out")


def _print_transfer(experiment: Experiment, base_run: str) -> int:
    """Prints the hyperparameters of `experiment`, transferred from the run `base_run`. Returns the exit code."""
    from pretrainax.scaling.transfer_plan import plan_transfer

    transferred = plan_transfer(experiment, base_run)
    if cli.prints_json():
        cli.print_json({"transfer": transferred.values()})
    else:
        print(transferred)
    return 0


def _print_certificate(run: Experiment, compiled: Experiment, topology: "Topology") -> int:
    """Compiles the step of `compiled`, the largest phase of `run`, and prints its certificate. Returns the exit code.

    Raises:
      UserError: the step cannot be compiled or does not fit in memory, or `--nocompile` is set.
    """
    from pretrainax.planning import certificate

    program, compile_status = _compile_for_topology(compiled, topology)
    if program is None:
        raise UserError(f"--prove reads the compiled step: {compile_status}")
    entries = certificate.certify(compiled, topology, program, run)
    if cli.prints_json():
        cli.print_json({"config": cli.config_name(), "topology": str(topology)} | certificate.values(entries))
    else:
        print(f"certificate of {cli.config_name()} on {topology}, {compile_status}\n{certificate.table(entries)}")
    return 0


def _set_steps(experiment: Experiment) -> None:
    """Sets `train.steps` from a budget in FLOPs; other budgets need the data or the devices, so the default is set."""
    from pretrainax.interop.teacher import teacher_of
    from pretrainax.models.flops import flops_per_step, update_cost

    if experiment.train.steps:
        return
    train, lengths = experiment.train, experiment.objective.lengths(experiment.data.sequence_length)
    budget = RunBudget.parse(train.budget) if train.budget else None
    if budget and budget.unit == "flops":
        rows, cost = experiment.rows_per_update, update_cost(experiment)
        flops = flops_per_step(experiment.model, rows, lengths.inputs, lengths.targets, teacher_of(experiment), cost)
        train.steps, train.budget = budget.steps(flops, str(train.budget)), None
        return
    train.steps, train.budget = TrainConfig.steps, None
    steps = f"config.train.steps follows from config.train.budget: the plan is for {train.steps:,} steps"
    print(f"pretrainax: {steps}", file=sys.stderr)


def _compile_for_topology(experiment: Experiment, topology: "Topology") -> tuple[Optional["Compiled"], str]:
    """Compiles the training step for a topology. Returns the compiled step and a status line for the report.

    If the step cannot be compiled, the first result is None and the status line gives the reason.
    """
    if not _COMPILE.value:
        return None, "not compiled: --nocompile"
    from pretrainax.planning.compiled import compile_step

    print(f"compiling for {topology} (--nocompile skips this) ...", file=sys.stderr, flush=True)
    try:
        compiled = compile_step(experiment, topology)
    except UserError as e:
        return None, f"not compiled: {e}"
    return compiled, f"compiled in {compiled.seconds:.0f} s"


if __name__ == "__main__":
    cli.run(main, has_json=True, run_flags=("config",))
