"""A student beside its teacher: used like the student, which in training learns from what the teacher computes too.

The maps between states of different widths are trained beside the student's parameters, as MAPS of "params". Those of
the teacher are the collection TEACHER, which no update changes.
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
from pretrainax.layers.attention import choose_implementation
from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.sums import Sums
from pretrainax.models import AnyModel, Model, Outputs
from pretrainax.models.heads import HEADS
from pretrainax.models.outputs import TOKENS
from pretrainax.sharding.mesh import platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules
from pretrainax.training.wrapped import Frozen, Wrapped

if TYPE_CHECKING:  # which makes these models
    from pretrainax.distill.distillation import Distillation
    from pretrainax.training.run import Run


TEACHER = "teacher"  # the collection of its parameters
MAPS = "distillation"  # learned maps, among the parameters that are trained
declare(
    Metric(
        "distillation_loss",
        "how far the student is from its teacher: the parts below, by their weights in config.distill",
    ),
    Metric("soft_loss", "T² times the KL divergence from the teacher's answers, a target or a label"),
    Metric("soft_pair_loss", "the same of pairs of segments"),
    Metric("hidden_loss", "distance of hidden states from the teacher's, a token, summed over layers"),
    Metric("embedding_loss", "the same of what the first layer reads"),
    Metric(
        "attention_loss", "mean square of the difference of attention's logits from the teacher's, summed over layers"
    ),
    Metric("relation_loss", "KL divergence of relations among queries, keys and values from the teacher's, a token"),
)
add_partition_rules(((rf"{MAPS}/(hidden|embedded)/kernel", "d_model features"),))


@flax.struct.dataclass
class Part:
    """Holds how far a student is from its teacher in one thing."""

    value: jax.Array  # [] float32, a sum
    unit: str = flax.struct.field(pytree_node=False)  # what divides it: the name of a head's loss, or TOKENS
    weight: float = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Compared(Outputs):
    """The outputs of a student, with how far it is from its teacher."""

    own: float = flax.struct.field(pytree_node=False, default=1.0)  # weight of the student's own losses
    parts: dict[str, Part] = flax.struct.field(default_factory=dict)  # by the name of its metric

    def joined(
        self, own: jax.Array, counts: Mapping[str, jax.Array], total_counts: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Sums]:
        """Returns the objective with the parts of the teacher, and the sums of each part."""
        shares = [part.weight * part.value / total_counts[part.unit] for part in self.parts.values()]
        total = functools.reduce(jnp.add, shares)
        sums = {name: (part.value, counts[part.unit]) for name, part in self.parts.items()}
        sums["distillation_loss"] = total, counts[TOKENS] / total_counts[TOKENS]
        return self.own * own + total, jax.lax.stop_gradient(sums)


class _Pair(NamedTuple):
    """Holds the states of one stack of both models."""

    student: States
    teacher: States
    real: jax.Array  # [B, T] float32, 1 where there is no padding
    seen: jax.Array  # [B, T, T] bool, which tokens a token may see


@dataclasses.dataclass(frozen=True)
class Distilled(Wrapped):
    """Used like the student. Without dropout, as in validation, it is the student alone."""

    student: Model
    teacher: Model
    distillation: "Distillation"
    chunk: int  # tokens of a device whose logits exist at a time

    @property
    def plain(self) -> AnyModel:
        return cast(AnyModel, self.student)

    @property
    def teacher_config(self) -> ModelConfig:
        return self.teacher.config

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Returns {"params": the student's and the maps, TEACHER: as drawn anew}."""
        params = self.student.init(rngs, batch, deterministic=deterministic)["params"]
        teacher = self.teacher.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, rngs["params"]), TEACHER: teacher}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        ours, theirs = self.student.config.d_model, self.teacher.config.d_model
        asked = {"hidden": self.distillation.hidden, "embedded": self.distillation.embeddings}
        if ours == theirs or not any(asked.values()):
            return params
        keys = dict(zip(asked, jax.random.split(jax.random.fold_in(key, 1), len(asked)), strict=True))
        draw = lambda key: jax.random.normal(key, (ours, theirs), jnp.float32) * ours**-0.5  # noqa: E731
        return {**params, MAPS: {name: {"kernel": draw(keys[name])} for name, weight in asked.items() if weight}}

    def frozen(self, params: PyTree) -> None:
        """Nothing of a teacher follows from the student's parameters."""

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the student without the maps of its states."""
        return self.plain, without_maps(params)

    def counted(self, params: PyTree, frozen: Frozen) -> PyTree:
        return without_maps(params)

    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        assert run.abstract_frozen is not None  # the teacher's
        distillation, teacher = self.distillation, self.teacher.config
        size = sum(p.size for p in jax.tree.leaves(run.abstract_frozen[TEACHER])) / 1e6
        layers, width = teacher.shown("num_layers"), teacher.shown("d_model")
        maps = sum(p.size for p in jax.tree.leaves(run.abstract_state.params.get(MAPS)))
        learned = f"; {maps:,} parameters map states to its width" if maps else ""
        yield "teacher", f"{distillation}: {size:,.1f} M parameters, {layers} layers, width {width}{learned}"
        fastest = {choose_implementation("auto", platform(), spec)[0] for spec in run.work.attention_specs} - {"xla"}
        if distillation.attention and fastest:
            yield (
                "WARNING",
                f"SLOW ATTENTION: 'xla' is used in the place of {', '.join(sorted(fastest))}, as "
                "config.distill.attention compares the logits, which no other kernel holds; config.distill.relations "
                "needs none",
            )
        if not distillation.own and not distillation.soft:
            yield (
                "WARNING",
                "HEADS ARE NOT TRAINED: config.distill has weights 0 of the loss and of soft targets, so that what the "
                "model says, and each validation of it, means nothing before another training; config.distill.own and "
                "soft are these weights",
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
        own = self.distillation
        asked = {"vectors": bool(own.relations), "logits": bool(own.attention)}
        said, states = run_with_states(self.student, params, batch, **asked, deterministic=False, rngs=rngs)
        fixed = jax.lax.stop_gradient(variables[TEACHER])
        told, targets = run_with_states(self.teacher, fixed, batch, **asked, deterministic=True)
        parts = dict(self._of_answers(said, told, batch)) if own.soft else {}
        if own.compares_states:
            parts |= self._of_states(list(map(_Pair, states, targets, *_of_stacks(batch, self.config))), maps)
        return Compared(said.heads, said.sums, said.state, own=own.own, parts=parts)

    def _of_answers(self, said: Outputs, told: Outputs, batch: Batch) -> Iterator[tuple[str, Part]]:
        for name, output in said.heads.items():
            head = HEADS[name]
            if head.count(batch) is not None:
                value = SOFT_TARGETS[name](output, told.heads[name], batch, self.distillation.temperature, self.chunk)
                named = f"soft_{head.loss_name.removeprefix('label_')}"
                yield named, Part(value, head.loss_name, self.distillation.soft)

    def _of_states(self, pairs: list[_Pair], maps: PyTree) -> dict[str, Part]:
        own, functions = self.distillation, {"cosine": distances.cosine, "squares": distances.squares}
        asked = {
            "hidden_loss": (own.hidden, lambda pair: self._hidden(pair, maps, functions[own.distance])),
            "embedding_loss": (
                own.embeddings,
                lambda pair: distances.squares(_mapped(pair.student.embedded, maps, "embedded"), pair.teacher.embedded),
            ),
            "attention_loss": (own.attention, _attention),
            "relation_loss": (own.relations, self._relations),
        }
        return {
            name: Part(functools.reduce(jnp.add, [(of(p) * p.real).sum() for p in pairs]), TOKENS, weight)
            for name, (weight, of) in asked.items()
            if weight
        }

    def _hidden(self, pair: _Pair, maps: PyTree, distance) -> jax.Array:
        ours, theirs = pair.student.hidden, pair.teacher.hidden
        if self.distillation.hidden_layers == "last":
            ours, theirs = ours[-1:], theirs[-1:]
        return distances.over_layers(distance, _mapped(ours, maps, "hidden"), theirs)

    def _relations(self, pair: _Pair) -> jax.Array:
        """Returns the sum over the three kinds, [B, T]."""
        layer = (self.distillation.relation_layer or len(pair.teacher.hidden)) - 1
        heads = self.distillation.relation_heads or pair.teacher.vectors["query"].shape[-2]
        found = [
            distances.relations(x[-1], pair.teacher.vectors[kind][layer], heads, pair.seen)
            for kind, x in pair.student.vectors.items()
        ]
        return functools.reduce(jnp.add, found)


def _attention(pair: _Pair) -> jax.Array:
    assert pair.student.logits is not None and pair.teacher.logits is not None  # as they are asked for
    return distances.over_layers(distances.attention_squares, pair.student.logits, pair.teacher.logits)


def _mapped(x: jax.Array, maps: PyTree, name: str) -> jax.Array:
    """Returns states as wide as the teacher's, […, D] -> […, D'] float32."""
    return x if name not in maps else jnp.einsum("...D,DE->...E", x.astype(jnp.float32), maps[name]["kernel"])


def without_maps(params: PyTree) -> PyTree:
    """Returns the parameters of the student alone."""
    return {name: tree for name, tree in params.items() if name != MAPS}


def _of_stacks(batch: Batch, config: ModelConfig) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns for each stack where there is text, [B, T] float32, and which tokens a token may see, [B, T, T] bool."""
    ids = [batch[name] for name in ("encoder_segment_ids", "segment_ids") if name in batch]
    causal = [config.family != "encoder"] if len(ids) == 1 else [False, True]
    masks = [Mask(c, i, i, prefix=batch.get("prefix_mask") if c else None) for c, i in zip(causal, ids, strict=True)]
    seen = [m.materialize(i.shape[1], i.shape[1])[:, 0] for m, i in zip(masks, ids, strict=True)]
    return [(i > 0).astype(jnp.float32) for i in ids], seen
