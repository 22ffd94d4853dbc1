"""Builds the config of each run of a study from its arm: flags for the length, the tuned values and the seed."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from pretrainax.config import AUTO, Experiment, UserError, dump
from pretrainax.config.config_file import read_config_file
from pretrainax.config.grid import SEED_USES
from pretrainax.config.overrides import apply_overrides, split_overrides
from pretrainax.config.validation import complete, validate
from pretrainax.config.values import fields
from pretrainax.studies.study import Arm, Final

VALIDATIONS = 10  # validations of each run, equal for all arms: a run that validates more often finds a better minimum
# The fields with numbers of steps that scale with the length of a run.
_SCALED = (
    "schedule.warmup_steps schedule.anneal_steps schedule.decay_steps schedule.cosine_steps layers.unfreeze_every "
    "layers.unfreeze_warmup"
).split()


def configured(arm: Arm, flags: Sequence[str] = (), files: bool = False) -> Experiment:
    """Builds a config as `pretrainax train` does: the arm's config and flags, then `flags`.

    Args:
      files: whether to check that the files of the dataset and the tokenizer exist.

    Raises:
      UserError: the config is invalid, or a flag is not a config field.
    """
    others, overrides = split_overrides([*arm.flags, *flags])
    if others:
        raise UserError(f"{others[0]} is no flag of a config field, such as --config.train.global_batch_size=16")
    experiment = read_config_file(arm.config, dict(overrides).get("config.checkpoint.init_from"))
    apply_overrides(experiment, overrides)
    complete(experiment)
    validate(experiment, files)
    return experiment


def length_flags(experiment: Experiment, steps: int, validations: int = VALIDATIONS) -> list[str]:
    """Returns the flags that set the length of a run, its validations and its schedule.

    The schedule keeps its shape: numbers of steps, for example of the warmup, scale with the length. If the arm's
    config has no number of steps, the warmup is a tenth of the run.

    Args:
      experiment: the arm's config.
      steps: number of updates.
      validations: number of validations.
    """
    flags, ratio = ["--config.train.budget=none"], steps / (experiment.train.steps or steps)
    flags += [f"--config.train.steps={steps}", f"--config.evaluate.every={-(-steps // validations)}"]
    flags += [f"--config.checkpoint.every={min(experiment.checkpoint.every or steps, steps)}"]
    for path in _SCALED if ratio != 1 else ():
        section, _, name = path.partition(".")
        value = getattr(getattr(experiment, section), name, None)
        if isinstance(value, int) and value:
            flags.append(f"--config.{path}={max(round(value * ratio), 1)}")
    if not experiment.train.steps and getattr(experiment.schedule, "warmup_steps", None) != AUTO:
        flags.append(f"--config.schedule.warmup_steps={steps // 10}")
    for i, phase in enumerate(experiment.phases if ratio != 1 else ()):
        is_last = i == len(experiment.phases) - 1
        for name in ("steps", "tokens"):
            if (value := getattr(phase, name)) is not None:
                scaled = "none" if is_last else str(max(round(value * ratio), 1))
                flags.append(f"--config.phases[{i}].{name}={scaled}")
    return flags


def untrained_flags() -> list[str]:
    """Returns the flags of a run whose model is the checkpoint before the first update."""
    return ["--config.checkpoint.keep_at=(0,)"]


def value_flags(values: Mapping[str, float]) -> list[str]:
    """Returns the flags that set tuned values, {"optimizer.learning_rate": 1e-3}."""
    return [f"--config.{field}={value!r}" for field, value in values.items()]


def seed_flags(experiment: Experiment, final: Final, seed: int) -> list[str]:
    """Returns the flags that set the four seeds of a run: `seed` for the uses in `final.vary`, else the arm's seed."""
    seeds = {use: seed if use in final.vary else experiment.train.seed_of(use) for use in SEED_USES}
    return [f"--config.train.{use}_seed={number}" for use, number in seeds.items()]


def tunable(experiment: Experiment) -> dict[str, float]:
    """Returns the fields that a study may tune, {"optimizer.learning_rate": 1e-3}: all floats."""
    values = ((path.removeprefix("config."), value) for path, _, value in fields(experiment))
    return {path: value for path, value in values if isinstance(value, float)}


def rate_fields(experiment: Experiment) -> Iterator[str]:
    """Yields the paths of the learning rates of an arm's optimizer; Muon has two."""
    for path in tunable(experiment):
        if path.startswith("optimizer.") and path.endswith("learning_rate"):
            yield path


def fingerprint(experiment: Experiment) -> str:
    """Returns the SHA-256 of a config."""
    return hashlib.sha256(dump(experiment).encode()).hexdigest()
