"""Checks a study before its start, and finds every problem that its file and its configs show."""

import re
from collections.abc import Iterator, Mapping

from pretrainax.config import Experiment, UserError, nearest, to_json
from pretrainax.planning.topologies import Topology
from pretrainax.studies.arms import configured, rate_fields, tunable
from pretrainax.studies.measures import ValidationLoss
from pretrainax.studies.sequential import look_seeds
from pretrainax.studies.study import AMOUNTS, Arm, Contrast, Study
from pretrainax.studies.study_file import raise_problems

SELECTED_METRIC = "loss"  # the default of `Tuning.measure`: the validation metric that selects checkpoints
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)  # names of arms and measures, which are also names of folders


def check_study(study: Study, path: str) -> dict[str, Experiment]:
    """Checks the values of a study file; returns the config of each arm by name.

    Raises:
      UserError: a value is invalid. The message lists all problems, with their places in the file `path`.
    """
    problems, experiments = [], {}
    for i, arm in enumerate(study.arms):
        try:
            experiments[arm.name] = configured(arm, files=True)
        except UserError as e:
            problems.append(f"arms[{i}] ({arm.name}): {e}")
    problems += [*_name_problems(study), *_budget_problems(study), *_seed_problems(study)]
    problems += [*_contrast_problems(study), *_tuning_problems(study, experiments)]
    for i, arm in enumerate(study.arms):
        if (experiment := experiments.get(arm.name)) is not None:
            lines = (*_length_problems(experiment), *_measure_problems(study, arm, experiment))
            problems += [f"arms[{i}] ({arm.name}): {line}" for line in lines]
    if study.budget.tokenizer == "shared":
        problems += _tokenizer_problems(experiments)
    if problems:
        raise_problems(path, problems)
    return experiments


def _name_problems(study: Study) -> Iterator[str]:
    for field, items, least in (("arms", study.arms, 2), ("measures", study.measures, 1)):
        names = [item.name for item in items]
        if len(names) < least:
            yield f"{field} has {len(names)} entries, it must have at least {least}"
        for i, name in enumerate(names):
            if not _NAME.fullmatch(name):
                yield f"{field}[{i}].name is {name!r}, it must consist of letters, digits and ._+-"
            if name in names[:i]:
                yield f"{field}[{i}].name is {name!r}, and so is {field}[{names.index(name)}].name: names must differ"


def _budget_problems(study: Study) -> Iterator[str]:
    budget = study.budget
    if not study.trained:
        yield "arms has only untrained arms: train at least one"
    given = [name for name in AMOUNTS if getattr(budget, name) is not None]
    if len(given) != 1:
        yield f"budget has {' and '.join(given) or 'no amount'}: set exactly one of {', '.join(AMOUNTS)}"
    for name in given:
        if not 0 < getattr(budget, name) < float("inf"):
            yield f"budget.{name} is {getattr(budget, name)}, it must be above 0 and finite"
    if "dollars" in given and budget.machine is None:
        yield "budget.dollars needs budget.machine, such as 'h100:8'"
    if budget.max_epochs <= 0:
        yield f"budget.max_epochs is {budget.max_epochs}, it must be above 0"
    if budget.machine is not None:
        try:
            Topology.parse(budget.machine)
        except UserError as e:
            yield f"budget.machine: {e}"


def _seed_problems(study: Study) -> Iterator[str]:
    final, tuning = study.final, study.tuning
    if final.seeds < 2:
        yield f"final.seeds is {final.seeds}, it must be at least 2: one seed has no spread"
    if final.downstream_seeds < 1:
        yield f"final.downstream_seeds is {final.downstream_seeds}, it must be at least 1"
    if not final.vary:
        yield "final.vary is empty, it must have at least one of 'init', 'order', 'dropout' and 'mask'"
    yield from _look_problems(study)
    for name in ("margin", "spread"):
        if (value := getattr(study, name)) is not None and not 0 < value < float("inf"):
            yield f"{name} is {value}, it must be above 0 and finite"
    if tuning is None:
        return
    if tuning.seeds < 1:
        yield f"tuning.seeds is {tuning.seeds}, it must be at least 1"
    if tuning.seed < final.seed + final.seeds and final.seed < tuning.seed + tuning.seeds:
        yield (
            f"tuning has the seeds {tuning.seed} to {tuning.seed + tuning.seeds - 1} and final {final.seed} to "
            f"{final.seed + final.seeds - 1}: they must differ; set tuning.seed"
        )


def _look_problems(study: Study) -> Iterator[str]:
    """Yields a line if the rule that ends the study does not use `stop.looks`, or if this number is invalid."""
    looks, seeds = study.stop.looks, study.final.seeds
    if study.stop.rule == "fixed" and looks != 1:
        yield f"stop.looks is {looks}, which only the rule 'group_sequential' uses: set stop.rule, or leave looks out"
    elif study.stop.rule == "group_sequential" and looks < 2:
        yield f"stop.looks is {looks}; it must be at least 2 with stop.rule = 'group_sequential'"
    else:
        try:
            look_seeds(seeds, looks)
        except UserError as e:
            yield str(e)


def _contrast_problems(study: Study) -> Iterator[str]:
    measures, arms = ([item.name for item in items] for items in (study.measures, study.arms))
    contrasts: dict[str, Contrast] = {"primary": study.primary}
    contrasts |= {f"declared[{i}]": contrast for i, contrast in enumerate(study.declared)}
    for place, contrast in contrasts.items():
        for field, allowed in (("measure", measures), ("one", arms), ("other", arms)):
            if (name := getattr(contrast, field)) not in allowed:
                yield f"{place}.{field} is {name!r}, {nearest(name, allowed)}"
        if contrast.one == contrast.other:
            yield f"{place} compares {contrast.one!r} with itself: one and other must differ"


def _tuning_problems(study: Study, experiments: Mapping[str, Experiment]) -> Iterator[str]:
    tuning, trained = study.tuning, study.trained
    if tuning is None:
        return
    experiments = {arm.name: experiments[arm.name] for arm in trained if arm.name in experiments}
    if not 0 <= tuning.stop_share < 1:
        yield f"tuning.stop_share is {tuning.stop_share}, it must be at least 0 and below 1"
    names = [SELECTED_METRIC, *(measure.name for measure in study.measures)]
    if tuning.measure not in names:
        yield f"tuning.measure is {tuning.measure!r}, {nearest(tuning.measure, names)}"
    for measure in study.measures:
        if isinstance(measure, ValidationLoss) and tuning.measure not in names[1:]:
            yield (
                f"tuning.measure is {tuning.measure!r}, which reads all records of the validation, also those on which "
                f"{measure.name} scores the final runs: set it to {measure.name!r}"
            )
    if not tuning.grid:
        yield "tuning.grid is empty: give a field and multiples, such as 'optimizer.learning_rate' = [0.3, 1, 3]"
    for field, multiples in tuning.grid.items():
        is_finite = all(0 < multiple < float("inf") for multiple in multiples)
        if len(multiples) < 2 or 1 not in multiples or list(multiples) != sorted({*multiples}) or not is_finite:
            yield f"tuning.grid.{field} is {list(multiples)}, it must have 1 and other positive multiples, in order"
        arms = [name for name, experiment in experiments.items() if tunable(experiment).get(field)]
        if not arms and len(experiments) == len(trained):
            known = dict.fromkeys(path for experiment in experiments.values() for path in tunable(experiment))
            zero = any(tunable(experiment).get(field) == 0 for experiment in experiments.values())
            reason = "is 0 in all arms, which has no multiples" if zero else f"is in no arm, {nearest(field, known)}"
            yield f"tuning.grid: {field} {reason}"
    for name, experiment in experiments.items():
        for field in rate_fields(experiment):
            if field not in tuning.grid:
                yield f"tuning.grid lacks {field} of the arm {name}: every learning rate of an arm must be tuned"
        if not any(tunable(experiment).get(field) for field in tuning.grid):
            yield f"the arm {name} has none of the fields of tuning.grid, {list(tuning.grid)}: add a field of this arm"
        if "optimizer.learning_rate" in tuning.grid and any(p.learning_rate is not None for p in experiment.phases):
            yield f"tuning.grid cannot scale config.phases[…].learning_rate of the arm {name}: remove it"


def _length_problems(experiment: Experiment) -> Iterator[str]:
    """Yields the reasons why a run would not end at the study's budget."""
    if experiment.evaluate.patience is not None:
        yield "config.evaluate.patience would end a run before its budget: set it to none"
    if experiment.train.on_spike == "rollback":
        yield "config.train.on_spike=rollback repeats steps, which the budget does not count: set it to stop or ignore"


def _measure_problems(study: Study, arm: Arm, experiment: Experiment) -> Iterator[str]:
    for i, measure in enumerate(study.measures):
        lines = ["it measures training steps, which an untrained arm lacks"] * (measure.is_time and arm.untrained)
        for line in (*lines, *measure.problems(experiment)):
            yield f"measures[{i}] ({measure.name}): {line}"


def _tokenizer_problems(experiments: Mapping[str, Experiment]) -> Iterator[str]:
    """Yields a line for each arm whose tokenizer config differs from the first arm's.

    Tokenizers of equal configs that are trained on different text differ, too; `budgets` compares them when they exist.
    """
    (first, *others) = experiments or {"": None}
    for name in others:
        tokenizers = [str(experiments[arm].tokenizer) for arm in (first, name)]
        if to_json(experiments[first].tokenizer) != to_json(experiments[name].tokenizer):
            yield (
                f"budget.tokenizer is 'shared', but the arms {first} and {name} have {' and '.join(tokenizers)}: give "
                "them one tokenizer, or set budget.tokenizer = 'own'"
            )
