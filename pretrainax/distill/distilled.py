"""A student beside its teacher: used like the student, which in training learns from what the teacher computes too.

The maps between states of different widths are trained beside the student's parameters, as MAPS of "params". Those of
the teacher are the collection TEACHER, which no update changes.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.data.batch import Batch
from pretrainax.distill import distances
from pretrainax.distill.distillation import Distillation
from pretrainax.distill.soft_targets import SOFT_TARGETS
from pretrainax.distill.states import States, run_with_states
from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.compute import Compute
from pretrainax.layers.sums import Sums
from pretrainax.models import Model, Outputs
from pretrainax.models.heads import HEADS
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules

TEACHER = "teacher"  # the collection of its parameters
MAPS = "distillation"  # learned maps, among the parameters that are trained
TOKENS = "tokens"  # what states are counted by: `count_tokens`
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
        """Returns what training minimises, and the sums of each part.

        Args:
          own: the objective without a teacher.
          counts: of the batch, by unit; total_counts: of the whole global batch, which the parts are divided by.
        """
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
class Distilled:
    """Used like the student. Without dropout, as in validation, it is the student alone."""

    student: Model
    teacher: Model
    distillation: Distillation
    chunk: int  # tokens of a device whose logits exist at a time

    @property
    def config(self) -> ModelConfig:
        return self.student.config

    @property
    def compute(self) -> Compute:
        return self.student.compute

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Returns {"params": the student's and the maps, TEACHER: as drawn anew}."""
        params = self.student.init(rngs, batch, deterministic=deterministic)["params"]
        teacher = self.teacher.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, rngs["params"]), TEACHER: teacher}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        """Returns the parameters that are trained as they start, from those of the student."""
        ours, theirs = self.student.config.d_model, self.teacher.config.d_model
        asked = {"hidden": self.distillation.hidden, "embedded": self.distillation.embeddings}
        if ours == theirs or not any(asked.values()):
            return params
        keys = dict(zip(asked, jax.random.split(jax.random.fold_in(key, 1), len(asked)), strict=True))
        draw = lambda key: jax.random.normal(key, (ours, theirs), jnp.float32) * ours**-0.5  # noqa: E731
        return {**params, MAPS: {name: {"kernel": draw(keys[name])} for name, weight in asked.items() if weight}}

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


def count_tokens(batch: Batch) -> jax.Array:
    """Returns how many tokens a model reads, padding left out; the encoder's and the decoder's."""
    read = [batch[name] > 0 for name in ("encoder_segment_ids", "segment_ids") if name in batch]
    return sum((tokens.sum(dtype=jnp.float32) for tokens in read), start=jnp.zeros((), jnp.float32))
