"""Wraps a student with its teacher. The wrapper is used like the student, and adds distillation losses during training.

If student and teacher have different widths, learned linear layers project the student's states. The parameters of
these layers are in params[MAPS], next to the student's parameters. The teacher's parameters are the Flax collection
TEACHER, which is never updated.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Optional, cast

import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.config.metric import Metric, declare
from pretrainax.data.batch import Batch
from pretrainax.distill import distances
from pretrainax.distill.soft_targets import SOFT_TARGETS
from pretrainax.distill.states import States, run_with_states
from pretrainax.layers.attention import choose_backend
from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.sums import Sums
from pretrainax.models import AnyModel, Model, Outputs
from pretrainax.models.heads import HEADS
from pretrainax.models.outputs import TOKENS, main_loss
from pretrainax.sharding.mesh import platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules
from pretrainax.training.wrapped import Frozen, Wrapped

if TYPE_CHECKING:  # circular: `distillation` builds `Distilled`
    from pretrainax.distill.distillation import Distillation
    from pretrainax.training.run import Run


TEACHER = "teacher"  # name of the Flax collection of the teacher's parameters
PROJECTIONS = "distillation"  # key of the projections in the tree of trained parameters
declare(
    Metric(
        "distillation_loss",
        "sum of the loss terms of the teacher below, with their weights in config.distill",
    ),
    Metric("combined_loss", "the loss that distillation trains: config.distill.hard · loss + distillation_loss"),
    Metric("soft_loss", "T² times the KL divergence from the teacher's outputs, per target or label", unit="nats"),
    Metric(
        "soft_pair_loss",
        "T² times the KL divergence from the teacher's outputs for pairs of segments, per row",
        unit="nats",
    ),
    Metric("hidden_loss", "distance of hidden states from the teacher's, per token, summed over layers"),
    Metric("embedding_loss", "mean squared difference of the first layer's input from the teacher's, per token"),
    Metric(
        "attention_loss",
        "mean squared difference of attention logits from the teacher's, per token, summed over layers",
    ),
    Metric("relation_loss", "KL divergence of the relations of queries, keys and values from the teacher's, per token"),
)
add_partition_rules(((rf"{PROJECTIONS}/(hidden|embedded)/kernel", "d_model features"),))


@flax.struct.dataclass
class LossTerm:
    """A loss term that compares the student with its teacher."""

    value: jax.Array  # [] float32, sum over predictions or tokens
    unit: str = flax.struct.field(pytree_node=False)  # name of the denominator: a head's loss, or TOKENS
    weight: float = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Compared(Outputs):
    """The outputs of a student, with the loss terms that compare it with its teacher."""

    hard: float = flax.struct.field(pytree_node=False, default=1.0)  # weight of the student's own losses
    parts: dict[str, LossTerm] = flax.struct.field(default_factory=dict)  # loss terms by metric name

    def combined_objective(
        self, own: jax.Array, counts: Mapping[str, jax.Array], total_counts: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Sums]:
        """Computes the total loss, and the (sum, count) of each loss term that compares student and teacher.

        "combined_loss" and "distillation_loss" of several batches are means that are weighted by the predictions.

        Args:
          own: the student's own loss.
          counts: the numbers of predictions or tokens in this microbatch, by unit.
          total_counts: the same numbers for the global batch, by unit.
        """
        main = main_loss(total_counts)
        weighted_terms = [term.weight * term.value / total_counts[term.unit] for term in self.parts.values()]
        total = functools.reduce(jnp.add, weighted_terms)
        sums = {name: (term.value, counts[term.unit]) for name, term in self.parts.items()}
        combined = self.hard * own + total
        sums["distillation_loss"] = total * total_counts[main], counts[main]
        sums["combined_loss"] = combined * total_counts[main], counts[main]
        return combined, jax.lax.stop_gradient(sums)


class _Pair(NamedTuple):
    """The student's and the teacher's states in one stack (encoder or decoder)."""

    student: States
    teacher: States
    real: jax.Array  # [B, T] float32, 1 for tokens, 0 for padding
    attended: jax.Array  # [B, T, T] bool, True if a token (axis 1) attends to another token (axis 2)


@dataclasses.dataclass(frozen=True)
class Distilled(Wrapped):
    """A student with its teacher, used like the student.

    Calls without the teacher's parameters run only the student and add no distillation losses.
    """

    student: Model
    teacher: Model
    distillation: "Distillation"
    chunk: int  # number of tokens per device whose logits are in memory at a time

    @property
    def plain(self) -> AnyModel:
        return cast(AnyModel, self.student)

    @property
    def teacher_config(self) -> ModelConfig:
        return self.teacher.config

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Initializes random parameters: {"params": student and projections, TEACHER: teacher}."""
        params = self.student.init(rngs, batch, deterministic=deterministic)["params"]
        teacher = self.teacher.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, rngs["params"]), TEACHER: teacher}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        student_width, teacher_width = self.student.config.d_model, self.teacher.config.d_model
        weights = {"hidden": self.distillation.hidden, "embedded": self.distillation.embeddings}
        if student_width == teacher_width or not any(weights.values()):
            return params
        keys = dict(zip(weights, jax.random.split(jax.random.fold_in(key, 1), len(weights)), strict=True))
        draw = lambda key: jax.random.normal(key, (student_width, teacher_width), jnp.float32) * student_width**-0.5  # noqa: E731
        return {
            **params,
            PROJECTIONS: {name: {"kernel": draw(keys[name])} for name, weight in weights.items() if weight},
        }

    def frozen(self, params: PyTree) -> None:
        """Returns None, because the teacher's parameters cannot be computed from the student's parameters."""

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the student and its parameters, without the projections."""
        return self.plain, without_projections(params)

    def model_params(self, params: PyTree, frozen: Frozen) -> PyTree:
        return without_projections(params)

    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        assert run.abstract_frozen is not None  # the teacher's parameters
        distillation, teacher = self.distillation, self.teacher.config
        size = sum(p.size for p in jax.tree.leaves(run.abstract_frozen[TEACHER])) / 1e6
        layers, width = teacher.format_size("num_layers"), teacher.format_size("d_model")
        num_projection_params = sum(p.size for p in jax.tree.leaves(run.abstract_state.params.get(PROJECTIONS)))
        projections = (
            f"; {num_projection_params:,} parameters map states to this width" if num_projection_params else ""
        )
        yield "teacher", f"{distillation}: {size:,.1f} M parameters, {layers} layers, width {width}{projections}"
        fast_backends = {choose_backend("auto", platform(), spec)[0] for spec in run.work.attention_specs} - {"xla"}
        if distillation.attention and fast_backends:
            yield (
                "WARNING",
                f"SLOW ATTENTION: 'xla' is used instead of {', '.join(sorted(fast_backends))}, because "
                "config.distill.attention compares logits, which other kernels do not materialize; "
                "config.distill.relations needs none",
            )
        if not distillation.hard and not distillation.soft:
            yield (
                "WARNING",
                "HEADS ARE NOT TRAINED: config.distill.hard and config.distill.soft, the weights of the loss and of "
                "soft targets, are 0; outputs and validations of the model mean nothing until you train its heads",
            )

    def apply(
        self,
        variables: dict[str, PyTree],
        batch: Batch,
        *,
        deterministic: bool,
        rngs: Optional[dict[str, jax.Array]] = None,
    ) -> Outputs:
        params, maps = without_projections(variables["params"]), variables["params"].get(PROJECTIONS, {})
        if TEACHER not in variables:
            return self.student.apply({"params": params}, batch, deterministic=deterministic, rngs=rngs)
        config = self.distillation
        captured = {"vectors": bool(config.relations), "logits": bool(config.attention)}
        student, student_states = run_with_states(
            self.student, params, batch, **captured, deterministic=deterministic, rngs=rngs
        )
        teacher_params = jax.lax.stop_gradient(variables[TEACHER])
        teacher, teacher_states = run_with_states(self.teacher, teacher_params, batch, **captured, deterministic=True)
        terms = dict(self._output_terms(student, teacher, batch)) if config.soft else {}
        if config.compares_states:
            terms |= self._state_terms(
                list(map(_Pair, student_states, teacher_states, *_stack_masks(batch, self.config))), maps
            )
        return Compared(student.heads, student.sums, student.state, hard=config.hard, parts=terms)

    def _output_terms(self, student: Outputs, teacher: Outputs, batch: Batch) -> Iterator[tuple[str, LossTerm]]:
        for name, output in student.heads.items():
            head = HEADS[name]
            if head.count(batch) is not None:
                value = SOFT_TARGETS[name](
                    output, teacher.heads[name], batch, self.distillation.temperature, self.chunk
                )
                metric = f"soft_{head.loss_name.removeprefix('label_')}"
                yield metric, LossTerm(value, head.loss_name, self.distillation.soft)

    def _state_terms(self, pairs: list[_Pair], maps: PyTree) -> dict[str, LossTerm]:
        """Computes the loss terms that compare intermediate states, by metric name."""
        config, functions = self.distillation, {"cosine": distances.cosine, "squares": distances.squares}
        terms = {
            "hidden_loss": (config.hidden, lambda pair: self._hidden_distance(pair, maps, functions[config.distance])),
            "embedding_loss": (
                config.embeddings,
                lambda pair: distances.squares(
                    _project(pair.student.embedded, maps, "embedded"), pair.teacher.embedded
                ),
            ),
            "attention_loss": (config.attention, _attention_distance),
            "relation_loss": (config.relations, self._relation_distance),
        }
        return {
            name: LossTerm(functools.reduce(jnp.add, [(distance(p) * p.real).sum() for p in pairs]), TOKENS, weight)
            for name, (weight, distance) in terms.items()
            if weight
        }

    def _hidden_distance(self, pair: _Pair, maps: PyTree, distance) -> jax.Array:
        student, teacher = pair.student.hidden, pair.teacher.hidden
        if self.distillation.hidden_layers == "last":
            student, teacher = student[-1:], teacher[-1:]
        return distances.over_layers(distance, _project(student, maps, "hidden"), teacher)

    def _relation_distance(self, pair: _Pair) -> jax.Array:
        """Computes the relation distances of one stack, summed over queries, keys and values, [B, T]."""
        layer = (self.distillation.relation_layer or len(pair.teacher.hidden)) - 1
        heads = self.distillation.relation_heads or pair.teacher.vectors["query"].shape[-2]
        relation_distances = [
            distances.relations(x[-1], pair.teacher.vectors[kind][layer], heads, pair.attended)
            for kind, x in pair.student.vectors.items()
        ]
        return functools.reduce(jnp.add, relation_distances)


def _attention_distance(pair: _Pair) -> jax.Array:
    # The logits are captured if config.distill.attention is not 0.
    assert pair.student.logits is not None and pair.teacher.logits is not None
    return distances.over_layers(distances.attention_squares, pair.student.logits, pair.teacher.logits)


def _project(x: jax.Array, maps: PyTree, name: str) -> jax.Array:
    """Projects states to the teacher's width, […, D] -> […, D'] float32; returns `x` if there is no projection.

    Args:
      x: states of the student.
      maps: the projections by name.
      name: name of the projection, "hidden" or "embedded".
    """
    return x if name not in maps else jnp.einsum("...D,DE->...E", x.astype(jnp.float32), maps[name]["kernel"])


def without_projections(params: PyTree) -> PyTree:
    """Returns the student's parameters, without the distillation projections."""
    return {name: tree for name, tree in params.items() if name != PROJECTIONS}


def _stack_masks(batch: Batch, config: ModelConfig) -> tuple[list[jax.Array], list[jax.Array]]:
    """Builds two masks per stack: a token mask [B, T] float32, and an attention mask [B, T, T] bool."""
    segment_ids = [batch[name] for name in ("encoder_segment_ids", "segment_ids") if name in batch]
    causal = [config.family != "encoder"] if len(segment_ids) == 1 else [False, True]
    masks = [
        Mask(c, i, i, prefix=batch.get("prefix_mask") if c else None) for c, i in zip(causal, segment_ids, strict=True)
    ]
    attended = [m.materialize(i.shape[1], i.shape[1])[:, 0] for m, i in zip(masks, segment_ids, strict=True)]
    return [(i > 0).astype(jnp.float32) for i in segment_ids], attended
