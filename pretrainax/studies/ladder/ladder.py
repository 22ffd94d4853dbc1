"""Defines the contents of a ladder file, and checks them."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Optional

from pretrainax.config import Experiment, UserError
from pretrainax.studies.arms import configured
from pretrainax.studies.study import Arm
from pretrainax.studies.study_file import raise_problems, read_file

MIN_RATIO, MAX_RATIO = 8.0, 16.0  # FLOPs of the held-out run, as multiples of the largest rung's


@dataclasses.dataclass
class Rate:
    """The learning rates of a size: the config's rates, times (N / parameters)^exponent."""

    parameters: float  # number of parameters without embeddings at which the config's learning rates hold
    # OLMo-core's ladders have -1/3 (rate = 0.0047 / 2 · (N / 108e6)^(-1/3)); 0: the same rate for all sizes
    exponent: float = -1 / 3


@dataclasses.dataclass
class HeldOut:
    """The run whose loss the ladder predicts before it starts."""

    width: int
    tokens: float


@dataclasses.dataclass
class Ladder:
    """A ladder file: sizes and amounts of text of one config."""

    config: str  # value of --config
    widths: tuple[int, ...]  # model widths of the rungs; depth, heads and feed-forward follow (see `rungs.size_flags`)
    tokens: tuple[float, ...]  # tokens of text of each size: one trunk, and a branch that decays at each smaller amount
    flags: tuple[str, ...] = ()  # further flags of all runs, for example "--config.train.global_batch_size=16"
    head_width: int = 16  # width of an attention head; divides all widths
    rate: Optional[Rate] = None  # None: the config's learning rates for all sizes, for example with rates that transfer
    warmup_share: float = 0.1  # steps of the warmup, as a share of the shortest branch
    decay_share: float = 0.2  # steps of each decay, as a share of its branch (Hägele et al. 2024 recommend 0.1 to 0.2)
    seed: int = 0  # first seed
    seeds: int = 1  # trunks of each size
    held_out: Optional[HeldOut] = None  # None: only fits the law

    @property
    def base(self) -> Arm:
        """Returns the config that all runs share, except for their sizes."""
        return Arm("base", self.config, self.flags)


def read_ladder(path: str) -> tuple[Ladder, Experiment]:
    """Reads and checks a ladder file; returns it with the config that it names.

    Raises:
      UserError: the file or a value is invalid. The message lists all problems, with their places in the file.
    """
    ladder, problems = read_file(Ladder, path), []
    try:
        base = configured(ladder.base, files=True)
    except UserError as e:
        raise_problems(path, [f"config: {e}"])
    problems += [*_number_problems(ladder), *_config_problems(base)]
    if problems:
        raise_problems(path, problems)
    return ladder, base


def _number_problems(ladder: Ladder) -> Iterator[str]:
    for name, values, least in (("widths", ladder.widths, 3), ("tokens", ladder.tokens, 2)):
        is_finite = all(0 < value < math.inf for value in values)
        if len(values) < least or list(values) != sorted({*values}) or not is_finite:
            yield f"{name} is {list(values)}, it must have at least {least} different positive numbers, in order"
    widths = [*ladder.widths, *([ladder.held_out.width] if ladder.held_out else [])]
    if ladder.head_width < 1 or any(width % ladder.head_width for width in widths):
        yield f"head_width is {ladder.head_width}, it must be a divisor of all widths, {widths}"
    for name in ("width", "tokens") if ladder.held_out else ():
        if not 0 < (value := getattr(ladder.held_out, name)) < math.inf:
            yield f"held_out.{name} is {value}, it must be above 0 and finite"
    for name in ("warmup_share", "decay_share"):
        if not 0 < (share := getattr(ladder, name)) < 1:
            yield f"{name} is {share}, it must be above 0 and below 1"
    if ladder.seeds < 1:
        yield f"seeds is {ladder.seeds}, it must be at least 1"
    if ladder.rate is not None and not 0 < ladder.rate.parameters < math.inf:
        yield f"rate.parameters is {ladder.rate.parameters}, it must be above 0 and finite"


def _config_problems(base: Experiment) -> Iterator[str]:
    """Yields the reasons why the sizes or the branches of a config are not defined."""
    model = base.model
    for name in ("generator", "decoder", "num_decoder_layers", "latent_attention", "embedding_dim"):
        if getattr(model, name) is not None:
            yield f"config.model.{name} is set: the sizes of a ladder do not define it; set it to none"
    if model.parts:
        yield "config.model.parts is set: the sizes of a ladder do not define it"
    if base.phases:
        yield "config.phases is set: a branch has the same phase as its trunk; set it to ()"
    if base.evaluate.patience is not None:
        yield "config.evaluate.patience would end a run before its tokens: set it to none"
    if base.train.on_spike == "rollback":
        yield "config.train.on_spike=rollback repeats steps, which the law does not count: set it to stop or ignore"
