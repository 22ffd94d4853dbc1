"""A student with its teacher: used like the student, and in training it also computes the loss terms of the teacher.

If student and teacher have different widths, learned linear layers project the student's states. Their parameters are
in params[MAPS], next to the student's parameters. The teacher's parameters are the Flax collection TEACHER, which no
update changes.
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
from pretrainax.models.outputs import TOKENS
from pretrainax.sharding.mesh import platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules
from pretrainax.training.wrapped import Frozen, Wrapped

if TYPE_CHECKING:  # circular: `distillation` builds `Distilled`
    from pretrainax.distill.distillation import Distillation
    from pretrainax.training.run import Run


TEACHER = "teacher"  # name of the Flax collection of the teacher's parameters
MAPS = "distillation"  # name of the projections among the trained parameters
declare(
    Metric(
        "distillation_loss",
        "sum of the loss terms of the teacher below, with their weights in config.distill",
    ),
    Metric("soft_loss", "T² times the KL divergence from the teacher's outputs, per target or label"),
    Metric("soft_pair_loss", "T² times the KL divergence from the teacher's outputs for pairs of segments, per row"),
    Metric("hidden_loss", "distance of hidden states from the teacher's, per token, summed over layers"),
    Metric("embedding_loss", "mean squared difference of the first layer's input from the teacher's, per token"),
    Metric(
        "attention_loss",
        "mean squared difference of attention logits from the teacher's, per token, summed over layers",
    ),
    Metric("relation_loss", "KL divergence of the relations of queries, keys and values from the teacher's, per token"),
)
add_partition_rules(((rf"{MAPS}/(hidden|embedded)/kernel", "d_model features"),))


@flax.struct.dataclass
class LossTerm:
    """A loss term that compares the student with its teacher."""

    value: jax.Array  # [] float32, sum over predictions or tokens
    unit: str = flax.struct.field(pytree_node=False)  # name of the count: a head's loss, or TOKENS
    weight: float = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Compared(Outputs):
    """The outputs of a student, with the loss terms that compare it with its teacher."""

    hard: float = flax.struct.field(pytree_node=False, default=1.0)  # weight of the student's own losses
    parts: dict[str, LossTerm] = flax.struct.field(default_factory=dict)  # loss terms by metric name

    def combined_objective(
        self, own: jax.Array, counts: Mapping[str, jax.Array], total_counts: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Sums]:
        """Returns the total loss, and the (sum, count) of each loss term of the teacher.

        Args:
          own: the student's own loss.
          counts: the numbers of predictions or tokens of this part of the batch, by unit.
          total_counts: the same numbers for the whole batch, by unit.
        """
        shares = [part.weight * part.value / total_counts[part.unit] for part in self.parts.values()]
        total = functools.reduce(jnp.add, shares)
        sums = {name: (part.value, counts[part.unit]) for name, part in self.parts.items()}
        sums["distillation_loss"] = total, counts[TOKENS] / total_counts[TOKENS]
        return self.hard * own + total, jax.lax.stop_gradient(sums)


class _Pair(NamedTuple):
    """The states of one stack (encoder or decoder), of the student and of the teacher."""

    student: States
    teacher: States
    real: jax.Array  # [B, T] float32, 1 for tokens, 0 for padding
    seen: jax.Array  # [B, T, T] bool, True if a token (axis 1) attends to another (axis 2)


@dataclasses.dataclass(frozen=True)
class Distilled(Wrapped):
    """A student with its teacher, used like the student.

    Calls with deterministic=True (validation) run only the student.
    """

    student: Model
    teacher: Model
    distillation: "Distillation"
    chunk: int  # tokens per device whose logits are in memory at a time

    @property
    def plain(self) -> AnyModel:
        return cast(AnyModel, self.student)

    @property
    def teacher_config(self) -> ModelConfig:
        return self.teacher.config

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Returns random parameters: {"params": of the student and the projections, TEACHER: of the teacher}."""
        params = self.student.init(rngs, batch, deterministic=deterministic)["params"]
        teacher = self.teacher.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, rngs["params"]), TEACHER: teacher}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        ours, theirs = self.student.config.d_model, self.teacher.config.d_model
        weights = {"hidden": self.distillation.hidden, "embedded": self.distillation.embeddings}
        if ours == theirs or not any(weights.values()):
            return params
        keys = dict(zip(weights, jax.random.split(jax.random.fold_in(key, 1), len(weights)), strict=True))
        draw = lambda key: jax.random.normal(key, (ours, theirs), jnp.float32) * ours**-0.5  # noqa: E731
        return {**params, MAPS: {name: {"kernel": draw(keys[name])} for name, weight in weights.items() if weight}}

    def frozen(self, params: PyTree) -> None:
        """Returns None: the teacher's parameters do not follow from the student's parameters."""

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the student and its parameters, without the projections."""
        return self.plain, without_maps(params)

    def model_params(self, params: PyTree, frozen: Frozen) -> PyTree:
        return without_maps(params)

    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        assert run.abstract_frozen is not None  # the teacher's parameters
        distillation, teacher = self.distillation, self.teacher.config
        size = sum(p.size for p in jax.tree.leaves(run.abstract_frozen[TEACHER])) / 1e6
        layers, width = teacher.format_size("num_layers"), teacher.format_size("d_model")
        maps = sum(p.size for p in jax.tree.leaves(run.abstract_state.params.get(MAPS)))
        learned = f"; {maps:,} parameters map states to this width" if maps else ""
        yield "teacher", f"{distillation}: {size:,.1f} M parameters, {layers} layers, width {width}{learned}"
        fastest = {choose_backend("auto", platform(), spec)[0] for spec in run.work.attention_specs} - {"xla"}
        if distillation.attention and fastest:
            yield (
                "WARNING",
                f"SLOW ATTENTION: 'xla' is used instead of {', '.join(sorted(fastest))}, because "
                "config.distill.attention compares logits, which other kernels do not materialize; "
                "config.distill.relations needs none",
            )
        if not distillation.hard and not distillation.soft:
            yield (
                "WARNING",
                "HEADS ARE NOT TRAINED: config.distill.hard and config.distill.soft, the weights of the loss and of "
                "soft targets, are 0; outputs and validations of the model have no meaning before a further training",
            )

    def apply(
        self,
        variables: dict[str, PyTree],
        batch: Batch,
        *,
        deterministic: bool,
        rngs: Optional[dict[str, jax.Array]] = None,
    ) -> Outputs:
        params, maps = without_maps(variables["params"]), variables["params"].get(MAPS, {})
        if deterministic:
            return self.student.apply({"params": params}, batch, deterministic=True, rngs=rngs)
        config = self.distillation
        captured = {"vectors": bool(config.relations), "logits": bool(config.attention)}
        student, states = run_with_states(self.student, params, batch, **captured, deterministic=False, rngs=rngs)
        fixed = jax.lax.stop_gradient(variables[TEACHER])
        teacher, targets = run_with_states(self.teacher, fixed, batch, **captured, deterministic=True)
        parts = dict(self._output_parts(student, teacher, batch)) if config.soft else {}
        if config.compares_states:
            parts |= self._state_parts(list(map(_Pair, states, targets, *_stack_masks(batch, self.config))), maps)
        return Compared(student.heads, student.sums, student.state, hard=config.hard, parts=parts)

    def _output_parts(self, student: Outputs, teacher: Outputs, batch: Batch) -> Iterator[tuple[str, LossTerm]]:
        for name, output in student.heads.items():
            head = HEADS[name]
            if head.count(batch) is not None:
                value = SOFT_TARGETS[name](
                    output, teacher.heads[name], batch, self.distillation.temperature, self.chunk
                )
                metric = f"soft_{head.loss_name.removeprefix('label_')}"
                yield metric, LossTerm(value, head.loss_name, self.distillation.soft)

    def _state_parts(self, pairs: list[_Pair], maps: PyTree) -> dict[str, LossTerm]:
        config, functions = self.distillation, {"cosine": distances.cosine, "squares": distances.squares}
        terms = {
            "hidden_loss": (config.hidden, lambda pair: self._hidden(pair, maps, functions[config.distance])),
            "embedding_loss": (
                config.embeddings,
                lambda pair: distances.squares(_mapped(pair.student.embedded, maps, "embedded"), pair.teacher.embedded),
            ),
            "attention_loss": (config.attention, _attention),
            "relation_loss": (config.relations, self._relations),
        }
        return {
            name: LossTerm(functools.reduce(jnp.add, [(distance(p) * p.real).sum() for p in pairs]), TOKENS, weight)
            for name, (weight, distance) in terms.items()
            if weight
        }

    def _hidden(self, pair: _Pair, maps: PyTree, distance) -> jax.Array:
        ours, theirs = pair.student.hidden, pair.teacher.hidden
        if self.distillation.hidden_layers == "last":
            ours, theirs = ours[-1:], theirs[-1:]
        return distances.over_layers(distance, _mapped(ours, maps, "hidden"), theirs)

    def _relations(self, pair: _Pair) -> jax.Array:
        """Returns the relation distances of one stack, summed over queries, keys and values, [B, T]."""
        layer = (self.distillation.relation_layer or len(pair.teacher.hidden)) - 1
        heads = self.distillation.relation_heads or pair.teacher.vectors["query"].shape[-2]
        kinds = [
            distances.relations(x[-1], pair.teacher.vectors[kind][layer], heads, pair.seen)
            for kind, x in pair.student.vectors.items()
        ]
        return functools.reduce(jnp.add, kinds)


def _attention(pair: _Pair) -> jax.Array:
    assert (
        pair.student.logits is not None and pair.teacher.logits is not None
    )  # they are captured if config.distill.attention is not 0
    return distances.over_layers(distances.attention_squares, pair.student.logits, pair.teacher.logits)


def _mapped(x: jax.Array, maps: PyTree, name: str) -> jax.Array:
    """Returns states projected to the width of the teacher, […, D] -> […, D'] float32; unchanged without a projection.

    Args:
      x: states of the student.
      maps: the projections.
      name: of the projection, "hidden" or "embedded".
    """
    return x if name not in maps else jnp.einsum("...D,DE->...E", x.astype(jnp.float32), maps[name]["kernel"])


def without_maps(params: PyTree) -> PyTree:
    """Returns the parameters of the student, without the projections of the distillation."""
    return {name: tree for name, tree in params.items() if name != MAPS}


def _stack_masks(batch: Batch, config: ModelConfig) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns two lists, with an array per stack: masks of tokens [B, T] float32, attention masks [B, T, T] bool."""
    ids = [batch[name] for name in ("encoder_segment_ids", "segment_ids") if name in batch]
    causal = [config.family != "encoder"] if len(ids) == 1 else [False, True]
    masks = [Mask(c, i, i, prefix=batch.get("prefix_mask") if c else None) for c, i in zip(causal, ids, strict=True)]
    seen = [m.materialize(i.shape[1], i.shape[1])[:, 0] for m, i in zip(masks, ids, strict=True)]
    return [(i > 0).astype(jnp.float32) for i in ids], seen
