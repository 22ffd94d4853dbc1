"""Lists the runs of a ladder: for each size a trunk at a constant learning rate, and branches that decay from it."""

from typing import NamedTuple, Optional

from pretrainax.config import Experiment, ModelConfig, UserError, resolve_auto
from pretrainax.scaling.compute_optimal import count_parameters, depth_of, round_to
from pretrainax.studies.arms import configured, length_flags, rate_fields, tunable, value_flags
from pretrainax.studies.budgets import ArmCost, Length
from pretrainax.studies.ladder.ladder import MAX_RATIO, MIN_RATIO, Ladder
from pretrainax.studies.study import Arm, Budget

_ANY_VOCABULARY = 1024  # the value is arbitrary, because N does not count the embeddings


class Rung(NamedTuple):
    """A run of a ladder."""

    folder: str  # below the ladder's workdir
    arm: Arm  # config of the run; the flags define the run
    length: Length
    start: Optional[tuple[str, int]] = None  # a branch: folder of its trunk, and the step at which it leaves the trunk
    keep: tuple[int, ...] = ()  # a trunk: steps at which branches leave it

    @property
    def new_steps(self) -> int:
        """Returns the number of steps that this run trains, without the steps of its trunk."""
        return self.length.steps - (self.start[1] if self.start else 0)

    @property
    def new_flops(self) -> float:
        """Returns the training FLOPs of these steps."""
        return self.length.flops * self.new_steps / self.length.steps


class Rungs(NamedTuple):
    """All runs of a ladder."""

    sizes: dict[int, Arm]  # width -> config of the size
    runs: list[Rung]  # trunks before their branches, from small to large
    held_out: Optional[Rung]


def size_flags(model: ModelConfig, width: int, head_width: int) -> list[str]:
    """Returns the flags that set the size of a model.

    The number of layers follows from the width as in the zoo (`compute_optimal.depth_of`: 2 at 64, 3 at 128, 6 at 256,
    12 at 768). Feed-forwards and experts keep their ratio to the width, rounded to a multiple of 16, and grouped keys
    keep their ratio to the heads.
    """
    heads = width // head_width
    values = {"d_model": width, "num_layers": depth_of(width), "num_heads": heads}
    values["d_ff"] = round_to(width * model.d_ff / model.d_model, 16)
    for name in ("d_ff", "dense_after") if model.experts is not None else ():
        if (size := getattr(model.experts, name)) is not None:
            values[f"experts.{name}"] = round_to(width * size / model.d_model, 16)
    if model.num_kv_heads:
        values["num_kv_heads"] = max(heads * model.num_kv_heads // model.num_heads, 1)
    if model.head_dim:
        values["head_dim"] = head_width
    return [f"--config.model.{name}={value}" for name, value in values.items()]


def size_arm(ladder: Ladder, base: Experiment, width: int) -> Arm:
    """Returns the config of a size, without its length and schedule; the learning rates follow `ladder.rate`."""
    flags = size_flags(base.model, width, ladder.head_width)
    if ladder.rate is not None and not base.optimizer.is_scale_invariant:
        sized = configured(Arm("", ladder.config, (*ladder.flags, *flags)))
        resolve_auto(sized, _ANY_VOCABULARY)
        factor = (count_parameters(sized.model)[1] / ladder.rate.parameters) ** ladder.rate.exponent
        rates = tunable(base)
        flags += value_flags({field: float(f"{rates[field] * factor:.4g}") for field in rate_fields(base)})
    return Arm(f"width-{width}", ladder.config, (*ladder.flags, *flags))


def list_rungs(ladder: Ladder, base: Experiment) -> Rungs:
    """Lists the runs of a ladder; prepares the data.

    Raises:
      UserError: a branch has too few steps, or the held-out run does not have 8 to 16 times the FLOPs of the largest
        run.
    """
    sizes = {width: size_arm(ladder, base, width) for width in ladder.widths}
    runs = [
        run
        for arm in sizes.values()
        for seed in range(ladder.seed, ladder.seed + ladder.seeds)
        for run in _runs_of(ladder, arm, f"rungs/{arm.name}/seed-{seed}", seed, ladder.tokens)
    ]
    if ladder.held_out is None:
        return Rungs(sizes, runs, None)
    sizes[ladder.held_out.width] = arm = size_arm(ladder, base, ladder.held_out.width)
    (held_out,) = _runs_of(ladder, arm, "held-out", ladder.seed, (ladder.held_out.tokens,))
    ratio = held_out.length.flops / max(run.length.flops for run in runs)
    if not MIN_RATIO <= ratio <= MAX_RATIO:
        raise UserError(
            f"held_out has {ratio:.3g} times the FLOPs of the largest run, it must have {MIN_RATIO:g} to {MAX_RATIO:g} "
            "times: change held_out.width or held_out.tokens"
        )
    return Rungs(sizes, runs, held_out)


def _runs_of(ladder: Ladder, arm: Arm, folder: str, seed: int, tokens: tuple[float, ...]) -> list[Rung]:
    """Lists the trunk of a size and a seed, which has the most tokens, and then its branches."""
    plain = configured(arm)
    per_step = plain.train.global_batch_size * plain.objective.lengths(plain.data.sequence_length).raw
    steps = [max(round(amount / per_step), 1) for amount in tokens]
    decays = [max(round(ladder.decay_share * count), 1) for count in steps]
    leaves = tuple(count - decay for count, decay in zip(steps, decays, strict=True))
    warmup = max(round(ladder.warmup_share * steps[0]), 1)
    if not warmup < leaves[0] or len({*leaves}) < len(leaves):
        raise UserError(
            f"tokens has {tokens[0]:g}, which are {steps[0]} steps of {per_step:,} tokens: too few for a warmup and a "
            "decay"
        )
    cost, trunk = ArmCost(arm, Budget()), f"{folder}/steps-{steps[-1]}"
    runs = []
    for i, (count, decay, leave) in reversed([*enumerate(zip(steps, decays, leaves, strict=True))]):
        is_trunk = i == len(steps) - 1
        flags = [
            *length_flags(plain, count, validations=1),
            f"--config.schedule=WarmupStableDecay(warmup_steps={warmup}, decay_steps={decay})",
            f"--config.train.seed={seed}",
        ]
        keep = leaves[:-1] if is_trunk else ()
        if keep:
            flags.append(f"--config.checkpoint.keep_at={keep}")
        run = Arm(arm.name, arm.config, (*arm.flags, *flags))
        configured(run)  # an error before the first run
        start = None if is_trunk else (trunk, leave)
        runs.append(Rung(f"{folder}/steps-{count}", run, cost.at(count), start, keep))
    return runs


def experiment_of(rung: Rung) -> Experiment:
    """Returns the config of a run, with the sizes that follow from the data."""
    experiment = configured(rung.arm)
    resolve_auto(experiment, rung.length.vocabulary_size)
    return experiment
