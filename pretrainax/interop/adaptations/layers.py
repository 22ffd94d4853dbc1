"""Removes or repeats layers of a trained model."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Experiment, ModelConfig
from pretrainax.files.errors import counted
from pretrainax.interop.adaptations.base import Adaptation, Operation, ParameterRule
from pretrainax.layers.feed_forward import LayerGroup, layer_groups
from pretrainax.sharding.param_paths import split_stack_path, stack_of

# Matches the paths of output projections, whose outputs are added to the residual stream.
_OUTPUT_PROJECTION = re.compile(r"blocks/(\w+_attention/out|mlp(_after)?/(experts_|shared_)?down)/")


@dataclasses.dataclass
class Layers(Adaptation):
    """Selects or repeats layers of a trained model: every second layer, for example (Sanh et al. 2019, section 3)."""

    fields = ("num_layers", "num_decoder_layers")
    # number of the source of each layer, from 0. evenly: 0, 2, 4, … halves the layers, 0, 0, 1, 1, … doubles them |
    # stacked: 0, 1, 2, …, 0, 1, 2, … (Gong et al. 2019)
    layers: Annotated[tuple[int, ...], "evenly", "stacked"] = "evenly"
    # repeated layers are initialized with output projections of zero (LLaMA Pro: Wu et al. 2024, section 3.2)
    zero_init: bool = False

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        model, name = experiment.model, f"config.checkpoint.adapt has {self}"
        if model.share_layers:
            yield f"{name}, and config.model.share_layers shares one layer: set it to False, or leave Layers out"
        if self.zero_init and model.norm_at != "pre":
            yield (
                f"{name}, and config.model.norm_at is {model.norm_at!r}, whose norm changes the stream even after a "
                "zero output: set zero_init=False"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours, num_layers=theirs.num_layers, num_decoder_layers=theirs.num_decoder_layers)

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        before = self.before(ours, theirs)
        for name, stack in ours.stacks.items():
            problems = list(self._mismatches(name, stack.num_layers, before.stacks[name].num_layers))
            yield from problems or self._expert_mismatches(name, before, ours)

    def _mismatches(self, stack: str, ours: int, theirs: int) -> Iterator[str]:
        """Yields a message if `layers` cannot convert a stack with `theirs` layers to a stack with `ours` layers."""
        name = f"config.checkpoint.adapt has {self}"
        if isinstance(self.layers, tuple):
            if len(self.layers) != ours or not all(0 <= layer < theirs for layer in self.layers):
                yield (
                    f"{name}: layers must be {ours} numbers from 0 to {theirs - 1}, one for each layer of the {stack} "
                    f"of config.model; the start has {counted(theirs, 'layer')}"
                )
        elif self.layers == "stacked" and ours < theirs:
            fewer = f"{counted(ours, 'layer')}, fewer than the {theirs} there"
            yield f"{name}, and config.model has {fewer}: set layers='evenly'"
        elif max(ours, theirs) % min(ours, theirs) and self.layers == "evenly":
            yield (
                f"{name}, and neither of {ours} layers of config.model and the {theirs} of the {stack} there divides "
                "the other: set config.model.num_layers to a divisor or a multiple, or layers to layer numbers"
            )

    def _expert_mismatches(self, stack: str, before: ModelConfig, ours: ModelConfig) -> Iterator[str]:
        """Yields a message if a layer with experts has a source layer without experts, or vice versa."""
        our_layers, their_layers = (_layer_groups(model, stack)[0].numbers for model in (ours, before))
        mismatched = [
            i
            for i, n in enumerate(self._source_layers(stack, before, ours))
            if (i in our_layers) != (n in their_layers)
        ]
        if mismatched:
            yield (
                f"config.checkpoint.adapt has {self}, and some layers have no experts here and there "
                f"(config.model.experts.first_dense, every): layers {_join_numbers(mismatched)} would be "
                "of the other kind: set layers to layers of the same kind"
            )

    def _source_layers(self, stack: str, before: ModelConfig, ours: ModelConfig) -> list[int]:
        """Returns the index of the source layer in the trained model for each layer of a stack."""
        if isinstance(self.layers, tuple):
            return list(self.layers)
        count, source_count = (model.stacks[stack].num_layers for model in (ours, before))
        return [i % source_count if self.layers == "stacked" else i * source_count // count for i in range(count)]

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        """Selects the source layers of a stacked parameter, or copies any other parameter."""
        stack = stack_of(path)
        if stack is None:
            return ParameterRule(path)
        name, part = split_stack_path(stack)
        # Layers with and without experts are stored separately. The source layers are in the same part of the stack.
        layers, stored_layers = (
            next(group.numbers for group in _layer_groups(model, name) if group.part == part)
            for model in (ours, before)
        )
        all_sources = self._source_layers(name, before, ours)
        sources = [all_sources[i] for i in layers]
        if sources == list(stored_layers):
            return ParameterRule(path)
        how = f"layers {_join_numbers(sources)} of {before.stacks[name].num_layers}"
        select = Operation(how, lambda x: x[np.array([stored_layers.index(number) for number in sources])])
        repeated = [number in sources[:i] for i, number in enumerate(sources)]
        if not (self.zero_init and any(repeated) and _OUTPUT_PROJECTION.search(path)):
            return ParameterRule(path, (select,))
        zero = Operation(
            f"zero in layers {_join_numbers([layers[i] for i in np.flatnonzero(repeated)])}", _zero_layers(repeated)
        )
        return ParameterRule(path, (select, zero))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        effects, is_unchanged = [], self.zero_init
        for stack in ours.stacks:
            sources, source_count = self._source_layers(stack, before, ours), before.stacks[stack].num_layers
            effects.append(f"layers {_join_numbers(sources)} of the {source_count} of the {stack}")
            changed = [i for i, n in enumerate(sources) if _attention_of(i, ours) != _attention_of(n, ours)]
            effects += [
                "with another attention than in the start (local, global, without rotation): "
                f"{_join_numbers(changed)} of these {len(sources)}"
            ] * bool(changed)
            first_copies = {number: i for i, number in reversed(list(enumerate(sources)))}  # additional copies add zero
            in_order = sorted(first_copies, key=first_copies.__getitem__) == list(range(source_count))
            is_unchanged = is_unchanged and in_order and not set(changed) & set(first_copies.values())
        return "; ".join([*effects, *["the initial function is unchanged"] * is_unchanged])


def _layer_groups(model: ModelConfig, stack: str) -> tuple[LayerGroup, LayerGroup]:
    return layer_groups(model, model.stacks[stack].num_layers)


def _attention_of(number: int, model: ModelConfig) -> tuple[str, bool]:
    """Returns the attention type of a layer ("local", "global", …), and True if the layer applies rotary positions."""
    every, pattern = getattr(model.position, "no_rotation_every", None), model.layer_pattern
    return pattern[number % len(pattern)], every is None or (number + 1) % every != 0


def _zero_layers(layers: list[bool]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that sets the layers of an array [L, …] to zero where the flags `layers` [L] are True."""
    # [L] -> [L, 1, …]
    return lambda x: jnp.where(np.array(layers).reshape(-1, *(1,) * (x.ndim - 1)), 0.0, x)


def _join_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
