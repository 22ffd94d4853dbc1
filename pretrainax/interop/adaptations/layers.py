"""Makes fewer layers, or more, of those that there are."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Making, Way
from pretrainax.layers.feed_forward import first_dense
from pretrainax.sharding.param_paths import stack_of

# Of a sublayer the last map, whose result is added to the stream.
_LAST_MAP = re.compile(r"blocks/(\w+_attention/out|mlp/down|mlp/experts_down)/")


@dataclasses.dataclass
class Layers(Adaptation):
    """Begins each layer as one of the start's: with every second (Sanh et al. 2019, section 3), or with some twice."""

    fields = ("num_layers", "num_decoder_layers")
    # numbers from 0, one for each layer. evenly: 0, 2, 4, … of twice as many, 0, 0, 1, 1, … of half as many |
    # stacked: 0, 1, 2, …, 0, 1, 2, … (Gong et al. 2019)
    taken: Annotated[tuple[int, ...], "evenly", "stacked"] = "evenly"
    # a layer that is taken again adds nothing to the stream at first (LLaMA Pro: Wu et al. 2024, section 3.2)
    silent: bool = False

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        model, name = experiment.model, f"config.checkpoint.adapt has {self}"
        if model.share_layers:
            yield f"{name}, and config.model.share_layers makes one of all layers: set it to False, or leave Layers out"
        if first_dense(model):
            yield (
                f"{name}, and config.model.experts.first_dense makes two kinds of layers: set it to None, or leave "
                "Layers out"
            )
        if self.silent and model.norm_at != "pre":
            yield (
                f"{name}, and config.model.norm_at is {model.norm_at!r}, where a layer that adds nothing has a norm "
                "that does: set silent=False"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours, num_layers=theirs.num_layers, num_decoder_layers=theirs.num_decoder_layers)

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        start = self.before(ours, theirs).stacks
        for stack, count in ours.stacks.items():
            yield from self._mismatches(stack, count, start[stack])

    def _mismatches(self, stack: str, ours: int, theirs: int) -> Iterator[str]:
        name = f"config.checkpoint.adapt has {self}"
        if isinstance(self.taken, tuple):
            if len(self.taken) != ours or not all(0 <= layer < theirs for layer in self.taken):
                yield (
                    f"{name}: taken must be {ours} numbers from 0 to {theirs - 1}, one for each layer of the {stack} "
                    f"of config.model, of the {theirs} there"
                )
        elif self.taken == "stacked" and ours < theirs:
            yield f"{name}, and {ours} layers of config.model are fewer than the {theirs} there: set taken='evenly'"
        elif max(ours, theirs) % min(ours, theirs) and self.taken == "evenly":
            yield (
                f"{name}, and neither of {ours} layers of config.model and the {theirs} of the {stack} there divides "
                "the other: set config.model.num_layers to a divisor or a multiple, or taken to their numbers"
            )

    def _numbers(self, stack: str, before: ModelConfig, ours: ModelConfig) -> list[int]:
        """Returns the layer of the start that each layer of a stack begins as."""
        if isinstance(self.taken, tuple):
            return list(self.taken)
        count, there = ours.stacks[stack], before.stacks[stack]
        return [i % there if self.taken == "stacked" else i * there // count for i in range(count)]

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        stack = stack_of(path)
        if stack is None:
            return Way(path)
        name = stack.partition("/")[0]
        numbers = self._numbers(name, before, ours)
        if numbers == list(range(before.stacks[name])):
            return Way(path)
        taken = Making(f"layers {_listed(numbers)} of {before.stacks[name]}", lambda x: x[np.array(numbers)])
        again = [number in numbers[:i] for i, number in enumerate(numbers)]
        if not (self.silent and any(again) and _LAST_MAP.search(path)):
            return Way(path, (taken,))
        zero = Making(f"zero in layers {_listed(np.flatnonzero(again).tolist())}", lambda x: _zero(x, again))
        return Way(path, (taken, zero))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        said, pattern, same = [], ours.layer_pattern, self.silent
        for stack, count in ours.stacks.items():
            numbers = self._numbers(stack, before, ours)
            said.append(f"layers {_listed(numbers)} of the {before.stacks[stack]} of the {stack}")
            other = [i for i, n in enumerate(numbers) if pattern[i % len(pattern)] != pattern[n % len(pattern)]]
            said += [f"of another kind, local or global, than there: {_listed(other)} of these {count}"] * bool(other)
            first = {number: i for i, number in reversed(list(enumerate(numbers)))}  # the others add nothing
            in_order = sorted(first, key=first.__getitem__) == list(range(before.stacks[stack]))
            same = same and in_order and not set(other) & set(first.values())
        return "; ".join([*said, *["the same is computed at first"] * same])


def _zero(x: jax.Array, layers: list[bool]) -> jax.Array:
    """Returns x [L, …] with zeros in some layers."""
    # [L] -> [L, 1, …]
    return jnp.where(np.array(layers).reshape(-1, *(1,) * (x.ndim - 1)), 0.0, x)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
