"""Finds the model size and the number of tokens with the lowest loss for a budget of FLOPs.

The models have real architectures, with whole layers and heads. `models.flops` counts their FLOPs per token, including
attention over the sequence. For an encoder, the FLOPs include the head at masked positions only; for an
encoder-decoder, they account for the sequence lengths of both stacks. The number of tokens is the number in the text,
before the objective adds masks and sentinels.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple, Optional

import jax
import numpy as np
from scipy import optimize

from pretrainax import models, zoo
from pretrainax.config import Experiment, ModelConfig, UserError, phases_of
from pretrainax.data.objectives import CausalLM, Lengths, MaskedLM, Objective, SpanCorruption
from pretrainax.models.electra import discriminator_config
from pretrainax.models.flops import flops_per_step
from pretrainax.reporting.units import large_number
from pretrainax.scaling.power_laws import LossLaw, critical_batch_size
from pretrainax.sharding.param_paths import parameter_names

# Smaller defaults of (vocabulary size, sequence length), for budgets whose optimal model would consist of more than
# three quarters of embeddings. The small variants (scaling/small.py) have the vocabulary size 8,192.
_SMALLER = ((8192, 512), (1024, 128), (512, 64))
MIN_FLOPS = 1e12  # smallest budget: a second on a laptop

_TABLES = re.compile(r"((decoder_)?(token|position|token_type)_embedding|unembedding)/")

# The batch size as a fraction of the critical batch size. GPT-3's eight sizes and Chinchilla used fractions of 0.17 to
# 0.42. These fractions follow from their batch sizes (tables 2.1 and 4) and from the losses that Besiroglu's law
# predicts for these models. At a fraction of 0.25, a run needs a quarter more tokens than with small batches to reach
# the same loss (Kaplan et al. 2020, equation 5.5).
BATCH_SHARE = 0.25
# The fewest steps of a run, so that small runs have smaller batches. Kaplan's critical batch size is from larger runs,
# and with a law of small runs it would leave a GPT of 56 k parameters 39 steps on 2.6 M tokens.
MIN_STEPS = 1000


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Counts the parameters of a model; returns (all parameters, parameters without embeddings).

    Embeddings are the embedding tables of tokens, positions and token types, and an untied output matrix. For a model
    with a generator (ELECTRA), both numbers count the discriminator alone.
    """
    params = models.abstract_params(discriminator_config(config) if config.generator else config)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    names = parameter_names(params)
    return sum(sizes), sum(n for n, name in zip(sizes, names, strict=True) if not _TABLES.match(name))


def text_tokens(experiment: Experiment) -> float:
    """Computes the number of tokens of text that all steps of a run train on; padding counts as text."""
    runs = ((phase.steps, phase.experiment) for phase in phases_of(experiment))
    return float(
        sum(steps * e.train.global_batch_size * e.objective.lengths(e.data.sequence_length).raw for steps, e in runs)
    )


class Recipe(NamedTuple):
    """The settings of a model family that do not depend on the size of the model."""

    config: str  # the config file of the printed command
    preset: str  # the config's preset in the zoo, which sets all model fields except the sizes
    objective: Objective
    sequence_length: int
    spare_rows: int  # embedding rows beyond config.tokenizer.vocab_size: sentinels, padding
    relative_rate: bool = False  # whether the optimizer scales updates by the size of each matrix


RECIPES = {
    "decoder": Recipe("configs/llama.py:2_7b", "llama2_7b", CausalLM(), 2048, 0),
    "encoder": Recipe("configs/modernbert_base.py", "modernbert_base", MaskedLM(rate=0.3), 1024, 83),
    "encoder_decoder": Recipe("configs/t5_base.py", "t5_base", SpanCorruption(), 512, 128, relative_rate=True),
}


class Shape(NamedTuple):
    """A model config with its numbers of parameters and its training FLOPs per token."""

    config: ModelConfig
    parameters: int  # with embeddings
    without_embeddings: int  # parameters without embeddings
    flops_per_token: float  # training FLOPs per token of text

    def size(self, law: LossLaw) -> float:
        """Returns the number of parameters N, with or without embeddings, as `law` defines it."""
        return self.parameters if law.with_embeddings else self.without_embeddings


class Space:
    """The possible models of one family, from thousands of parameters to trillions.

    The number of layers is a function of the width, `depth_of`. Heads have width 64, or 128 in models of width
    2,048 and above. The class builds models of increasing width (`ladder`) and interpolates parameters and FLOPs
    between them.
    """

    def __init__(self, family: str, vocab_size: Optional[int], sequence_length: Optional[int]):
        """Builds the models of `ladder`.

        Args:
          family: key of RECIPES.
          vocab_size: number of embedding rows. Defaults to the value in the family's preset.
          sequence_length: tokens per sequence. Defaults to the value in the family's recipe.

        Raises:
          UserError: the vocabulary or the sequence length is too small.
        """
        self.recipe = RECIPES[family]
        self.base = zoo.preset(self.recipe.preset)
        self.vocab_size = vocab_size or self.base.vocab_size
        self.sequence_length = sequence_length or self.recipe.sequence_length
        if self.vocab_size < 2 or self.sequence_length < self.recipe.objective.shortest:
            raise UserError(
                f"--vocab_size={self.vocab_size} --sequence_length={self.sequence_length}: they must be at least 2 and "
                f"{self.recipe.objective.shortest}"
            )
        self.lengths: Lengths = self.recipe.objective.lengths(self.sequence_length)
        narrowest = 8 if self.vocab_size <= _SMALLER[0][0] else 12  # width 16, or 64
        widths = sorted({_round_width(2 ** (i / 2)) for i in range(narrowest, 31)})  # to 32,768
        self.ladder = [self.build(width, depth_of(width)) for width in widths]

    def build(self, width: int, layers: int) -> Shape:
        """Builds the model with a given width and number of layers, and counts its parameters and FLOPs."""
        head = _head_width(width)
        config = dataclasses.replace(
            self.base,
            vocab_size=self.vocab_size,
            num_layers=layers,
            d_model=width,
            d_ff=round_to(width * self.base.d_ff / self.base.d_model, 128 if width >= 64 else 16),
            num_heads=width // head,
            num_kv_heads=self.base.num_kv_heads and width // head,
            head_dim=self.base.head_dim and head,
        )
        cost = flops_per_step(config, 1, self.lengths.inputs, self.lengths.targets) / self.lengths.raw
        return Shape(config, *count_parameters(config), cost)

    def cost(self, law: LossLaw, size):
        """Computes the training FLOPs per token of text for models with N = `size` parameters (as `law` defines N).

        `size` may be a number or an array; the result has the same shape.
        """
        sizes = np.log([shape.size(law) for shape in self.ladder])
        return np.exp(np.interp(np.log(size), sizes, np.log([shape.flops_per_token for shape in self.ladder])))

    def optimum(self, law: LossLaw, flops: float) -> float:
        """Finds the number of parameters N (as `law` defines it) that gives the lowest loss for `flops` training FLOPs.

        The FLOPs per token are interpolated between the models of `ladder`.
        """
        sizes = np.geomspace(self.ladder[0].size(law), self.ladder[-1].size(law), 20_000)
        return float(sizes[np.argmin(law.loss(sizes, flops / self.cost(law, sizes)))])

    def contains(self, law: LossLaw, size: float) -> bool:
        """Returns True if N = `size` is larger than the smallest and smaller than the largest model of `ladder`."""
        return 1.001 * self.ladder[0].size(law) < size < self.ladder[-1].size(law) / 1.001

    def flops_for(self, law: LossLaw, tokens: float) -> float:
        """Computes the training FLOPs at which the compute-optimal run trains on `tokens` tokens."""
        low, high = (math.log(tokens * self.ladder[i].flops_per_token) for i in (0, -1))

        def excess(log_flops: float) -> float:
            flops = math.exp(log_flops)
            return flops / self.cost(law, self.optimum(law, flops)) - tokens

        return math.exp(optimize.bisect(excess, low - 1e-3, high + 1e-3, xtol=1e-4))

    def nearest(self, law: LossLaw, size: float) -> Shape:
        """Builds the model whose N is closest to `size`, with a difference of about half a layer's parameters at most.

        Raises:
          UserError: `size` is smaller than the smallest or larger than the largest model of `ladder`.
        """
        low, high = self.ladder[0].size(law), self.ladder[-1].size(law)
        if not self.contains(law, size):
            raise UserError(
                f"the best model for this budget has less than {large_number(low)} or more than {large_number(high)} "
                "parameters, which is out of range: give another budget, or set --vocab_size and --sequence_length"
            )
        width = math.exp(np.interp(math.log(size), np.log([s.size(law) for s in self.ladder]), self._log_widths()))
        width = _round_width(width)
        two_layers, three_layers = (
            self.build(width, layers).size(law) for layers in (2, 3)
        )  # N is linear in the layers
        return self.build(width, max(2, round(2 + (size - two_layers) / (three_layers - two_layers))))

    def _log_widths(self) -> np.ndarray:
        return np.log([shape.config.d_model for shape in self.ladder])


def depth_of(width: int) -> int:
    """Returns the number of layers for a model width, at least 2: 12 layers at width 768, 44 at 4,096.

    This function is a straight line in log-log space, fitted to the zoo's models of all families.
    """
    return max(2, round(math.exp(np.polyval(_depth_line(), math.log(width)))))


@functools.cache
def _depth_line() -> np.ndarray:
    pairs = {(c.d_model, c.num_layers) for name in RECIPES for _, c in _zoo_models(name)}
    return np.polyfit(*np.log(sorted(pairs)).T, 1)


def space_for(
    family: str,
    vocab_size: Optional[int],
    sequence_length: Optional[int],
    law: LossLaw,
    best_size: Callable[[Space], float],
) -> Space:
    """Builds the models of a family that suit a budget.

    If `vocab_size` or `sequence_length` is None, the function uses a default: the family's default, or the largest of
    the smaller defaults (_SMALLER). It takes the first default with a suitable optimal model. A suitable model has at
    least a quarter of its parameters outside the embeddings, and at most twice the layers of its width.

    Args:
      family: key of RECIPES.
      best_size: computes the number of parameters N, as `law` defines it, of the budget's optimal model.

    Raises:
      UserError: the vocabulary or the sequence length is too small.
    """
    recipe_length = RECIPES[family].sequence_length
    for vocabulary, length in ((None, None), *_SMALLER):
        space = Space(family, vocab_size or vocabulary, sequence_length or min(length or recipe_length, recipe_length))
        size = best_size(space)
        if not space.contains(law, size):
            continue
        shape = space.nearest(law, size)
        is_shallow = shape.config.num_layers <= 2 * depth_of(shape.config.d_model)
        if is_shallow and 4 * shape.without_embeddings > shape.parameters:
            break
    return space


def _head_width(width: float) -> int:
    return min(int(width), 64) if width < 2048 else 128


def round_to(number: float, multiple: int) -> int:
    """Rounds a number to the nearest positive multiple."""
    return multiple * max(1, round(number / multiple))


def _round_width(width: float) -> int:
    """Rounds a width to a multiple of 16 below 64, of 64 below 1,024, and then to one of eight widths per octave."""
    return round_to(width, 16 if width < 56 else max(64, 2 ** math.floor(math.log2(width)) // 8))


def published(shape: Shape) -> str:
    """Describes, in one line, the published dense model of the same family that is closest in number of parameters."""
    name, config = min(
        (row for row in _zoo_models(shape.config.family) if not row[1].experts),
        key=lambda row: abs(math.log(_approximate_size(row[1]) / _approximate_size(shape.config))),
    )
    return (
        f"nearest model: {name}, {large_number(count_parameters(config)[0])}, {config.num_layers} layers, "
        f"width {config.d_model:,}, {config.num_heads} heads"
    )


def _zoo_models(family: str) -> list[tuple[str, ModelConfig]]:
    """Returns (preset name, config) for each of the zoo's models of a family.

    Models with shared layers, with a generator, or with an encoder and decoder of different sizes are omitted.
    """
    presets = ((name, zoo.preset(name)) for name in zoo.PRESETS)
    return [
        (name, config)
        for name, config in presets
        if config.family == family and not (config.share_layers or config.generator or config.decoder)
    ]


def _approximate_size(config: ModelConfig) -> float:
    """Approximates the number of parameters from the FLOPs per token, because an exact count takes 0.1 s."""
    tables = 0 if config.tie_embeddings else config.vocab_size * config.embedding_width
    return tables + flops_per_step(config, 1, 1, 1) / 6


class Plan(NamedTuple):
    """The optimal run for a budget."""

    shape: Shape
    size: float  # number of parameters N, as the law defines N
    examples: int  # examples (rows) per update
    steps: int
    tokens: float  # tokens of text in total
    flops: float  # training FLOPs of all steps
    loss: float  # expected loss in nats per token

    @property
    def critical_batch_size(self) -> float:
        """Returns the critical batch size in tokens, for the loss of the plan.

        A law that is extrapolated to small runs can predict losses above the loss of a uniform distribution. The method
        then uses the loss of a uniform distribution.
        """
        return critical_batch_size(min(self.loss, math.log(self.shape.config.vocab_size)))


def make_plan(space: Space, law: LossLaw, flops: float, tokens: Optional[float] = None) -> Plan:
    """Computes the optimal run for a budget of training FLOPs.

    Args:
      tokens: number of tokens to train on. The default is the number that the FLOPs allow. If given, the model is still
        optimal for `flops`, but the run may need more or fewer FLOPs.

    Raises:
      UserError: the budget is less than MIN_FLOPS, or the optimal model is out of range.
    """
    if flops < MIN_FLOPS:
        raise UserError(f"the budget is {flops:.3g} FLOPs, it must be at least {MIN_FLOPS:.0e}")
    shape = space.nearest(law, space.optimum(law, flops))
    return run_of(space, shape, law, tokens or flops / shape.flops_per_token)


def run_of(space: Space, shape: Shape, law: LossLaw, tokens: float, text: Optional[float] = None) -> Plan:
    """Computes the batch and the steps of a run of one model on `tokens` tokens of text.

    Args:
      text: tokens of different text, which the run repeats. None: nothing is repeated.
    """

    def plan_of(examples: int, steps: int, tokens: float) -> Plan:
        size = shape.size(law)
        loss = law.loss(size, tokens, 1.0 if text is None else tokens / text)
        return Plan(shape, size, examples, steps, tokens, tokens * shape.flops_per_token, loss)

    plan = plan_of(1, 1, tokens)
    batch_tokens = BATCH_SHARE * plan.critical_batch_size
    most = math.floor(math.log2(max(tokens / MIN_STEPS / space.lengths.raw, 1.0)))
    examples = 2 ** max(0, min(round(math.log2(batch_tokens / space.lengths.raw)), most))
    steps = max(1, round(tokens / (examples * space.lengths.raw)))
    return plan_of(examples, steps, float(steps * examples * space.lengths.raw))
