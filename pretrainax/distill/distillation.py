"""Defines the configs of distillation: loss terms that compare the student with the teacher, and their weights."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, Optional, cast

from pretrainax import models
from pretrainax.config import AUTO, Classify, DisentangledPositions, Experiment, ModelConfig, Tag, TrainConfig, kinds
from pretrainax.distill.distilled import Distilled
from pretrainax.distill.soft_targets import SOFT_TARGETS
from pretrainax.layers.compute import compute_for
from pretrainax.models import Model
from pretrainax.models.heads import heads_of

# Field -> the weight of the loss term that it belongs to.
_WEIGHT_OF = {
    "temperature": "soft",
    "distance": "hidden",
    "hidden_layers": "hidden",
    "relation_heads": "relations",
    "relation_layer": "relations",
}


@dataclasses.dataclass
class Distillation(kinds.DistillConfig):
    """Trains a student with a weighted sum of the student's own loss and of distances from a teacher.

    The loss is hard · loss + soft · soft_loss + hidden · hidden_loss + embeddings · embedding_loss + attention ·
    attention_loss + relations · relation_loss. Each term is a mean over predictions or tokens. By default, the loss
    uses only the student's own loss and the soft targets, with the default weights of DistilBERT's fine-tuning code.

    - soft_loss: T² · KL(teacher || student) of softmax(logits / T), for the target tokens or the labels of a task
      (Hinton et al. 2015, arXiv 1503.02531, section 2)
    - hidden_loss, embedding_loss: distances of hidden states and of embeddings. If the widths differ, a learned linear
      layer projects the states of the student to the width of the teacher.
    - attention_loss: mean squared difference of the attention logits, summed over layers (Jiao et al. 2020)
    - relation_loss: KL(teacher || student) of the query, key and value relations in one layer (Wang et al. 2021)
    """

    metric_names: ClassVar[tuple[str, ...]] = ("combined_loss", "distillation_loss")  # for config.evaluate.select_by
    teacher: str  # a run, RUN@2000, RUN@best, an export, a Hugging Face directory, hf:org/name[@revision]
    hard: float = 0.5  # weight of the student's own loss
    soft: float = 0.5  # weight of the teacher's soft targets
    temperature: float = 2.0  # T of both softmaxes; a higher T gives unlikely outputs more weight
    hidden: float = 0.0  # weight of the distance of hidden states
    distance: Literal["cosine", "squares"] = (
        "squares"  # distance of hidden states: 1 - cosine similarity, or mean squared difference
    )
    # which hidden states are compared. last: the input of the heads | all: student layer m of M with teacher layer
    # m · N / M, summed over layers
    hidden_layers: Literal["last", "all"] = "all"
    embeddings: float = 0.0  # weight of the mean squared difference of the inputs of the first layers
    attention: float = 0.0  # weight of the distance of self-attention logits, of the layers of `hidden_layers="all"`
    relations: float = 0.0  # weight of the self-attention relations in the student's last layer
    relation_heads: int = 0  # number of relation heads; 0: as many as the teacher has attention heads
    relation_layer: int = 0  # layer of the teacher for the relations, counted from 1; 0: the last layer

    def wrap(self, experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig]) -> Distilled:
        assert teacher is not None  # every distillation has a teacher
        compute = compute_for(train)
        if self.attention:  # only this attention backend materializes the logits
            compute = dataclasses.replace(compute, attention="xla")
        student_model, teacher_model = (
            cast(Model, models.build(model, compute)) for model in (experiment.model, teacher)
        )
        return Distilled(student_model, teacher_model, self, train.loss_chunk)

    @property
    def select_by(self) -> str:
        """Returns the metric that selects checkpoints by default, or "" for the metric of the objective.

        The student's own loss means nothing if no term trains the heads.
        """
        return "" if self.hard or self.soft else "combined_loss"

    @property
    def compares_states(self) -> bool:
        """Checks whether a loss term compares intermediate states of student and teacher, not only head outputs."""
        return any((self.hidden, self.embeddings, self.attention, self.relations))

    def problems(self, experiment: Experiment) -> Iterator[str]:
        weights = ("hard", "soft", "hidden", "embeddings", "attention", "relations")
        for name in (*weights, "relation_heads", "relation_layer"):
            if getattr(self, name) < 0:
                yield f"config.distill.{name} is {getattr(self, name)}, it must be at least 0"
        if not any(getattr(self, name) > 0 for name in weights[1:]):
            yield f"config.distill has no loss term of the teacher: set one of {', '.join(weights[1:])} above 0"
        for name, weight in _WEIGHT_OF.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and not getattr(self, weight):
                yield (
                    f"config.distill.{name} is {value!r}, which has no effect if config.distill.{weight} is 0: set "
                    f"{weight} above 0, or {name} to {default!r}"
                )
        if not self.temperature > 0:
            yield f"config.distill.temperature is {self.temperature}, it must be above 0 (1: plain probabilities)"
        if not self.teacher:
            yield "config.distill.teacher is empty: set it to a run or a Hugging Face directory"
        if experiment.tuning is not None:
            yield (
                "config.distill and config.tuning are both set, but distillation trains all parameters of a student: "
                "set one of them to None, and tune the student after its distillation"
            )
        if experiment.model.generator is not None:
            yield (
                "config.distill does not support config.model.generator, the second encoder of ELECTRA: distill the "
                "discriminator when it is fine-tuned on a task"
            )
        if self.attention and experiment.train.attention not in ("auto", "xla"):
            yield (
                f"config.distill.attention compares logits, which config.train.attention={experiment.train.attention} "
                "does not materialize: set it to 'xla' or 'auto', or use config.distill.relations, which needs none"
            )
        unsupported = [head.name for head in heads_of(experiment.model) if head.name not in SOFT_TARGETS]
        if self.soft and unsupported:
            supported = ", ".join(SOFT_TARGETS)
            yield f"config.distill.soft supports the heads {supported}, and config.model has {unsupported}: set it to 0"
        if reason := experiment.model.unsupported("distillation"):
            yield f"config.distill needs Transformers, and config.model {reason}: set config.distill to None"
        yield from self._state_problems(experiment.model, "config.model")

    def _state_problems(self, model: ModelConfig, name: str) -> Iterator[str]:
        """Yields the reasons why the intermediate states of a model cannot be compared.

        Args:
          name: name of the model, for the error messages.
        """
        if self.compares_states and model.enhanced_mask_decoder:
            yield (
                f"{name} has enhanced_mask_decoder, whose last layer runs twice, so its states cannot be compared: set "
                "only config.distill.soft"
            )
        for field, reason in (
            ("latent_attention", "projected from a latent vector"),
            ("sparse_attention", "not visible to all queries"),
        ):
            if (self.attention or self.relations) and getattr(model, field) is not None:
                yield (
                    f"{name} has {field}, whose keys are {reason}: set config.distill.attention and "
                    "config.distill.relations to 0"
                )
        if self.attention and isinstance(model.position, DisentangledPositions):
            yield (
                f"{name} has DisentangledPositions, which has no plain attention logits: set "
                "config.distill.attention to 0, or use config.distill.relations"
            )

    def teacher_problems(self, student: ModelConfig, teacher: ModelConfig) -> Iterator[str]:
        """Yields the reasons why the student cannot learn from the teacher with this config."""
        name = f"the teacher {self.teacher}"
        if teacher.family != student.family:
            yield (
                f"{name} has family {teacher.family!r}, config.model.family is {student.family!r}: set "
                "config.distill.teacher to a model of that family"
            )
            return
        if AUTO not in (student.vocab_size, teacher.vocab_size) and teacher.vocab_size != student.vocab_size:
            yield (
                f"{name} has {teacher.vocab_size} ids, config.model.vocab_size is {student.vocab_size}: set it, and "
                "config.tokenizer, to the values of the teacher"
            )
        limit, length = teacher.position.max_length, student.position.max_length
        if limit is not None and isinstance(length, int) and length > limit:
            yield (
                f"{name} reads at most {limit} tokens, config.model.position.max_length is {length}: set it, and "
                "config.data.sequence_length, to at most that number"
            )
        yield from self._state_problems(teacher, name)
        yield from self._layer_problems(student, teacher, name)
        yield from self._size_problems(student, teacher, name)
        yield from self._head_problems(student, teacher, name)

    def _layer_problems(self, student: ModelConfig, teacher: ModelConfig, name: str) -> Iterator[str]:
        pairs = list(zip(student.stacks.values(), teacher.stacks.values(), strict=True))
        all_layers = self.attention or (self.hidden and self.hidden_layers == "all")
        layers = [(ours.num_layers, theirs.num_layers) for ours, theirs in pairs]
        if all_layers and (uneven := [(ours, theirs) for ours, theirs in layers if theirs % ours]):
            yield (
                f"{name} has {uneven[0][1]} layers, which config.model.num_layers={uneven[0][0]} does not divide: set "
                "it to a divisor, or config.distill.hidden_layers='last' and config.distill.attention=0"
            )
        fewest = min(theirs for _, theirs in layers)
        if self.relations and self.relation_layer > fewest:
            yield f"config.distill.relation_layer is {self.relation_layer}, {name} has {fewest} layers"

    def _size_problems(self, student: ModelConfig, teacher: ModelConfig, name: str) -> Iterator[str]:
        """Yields the reasons why the widths or head counts of student and teacher do not match."""
        pairs = list(zip(student.stacks.values(), teacher.stacks.values(), strict=True))
        widths = sorted({(ours.d_model, theirs.d_model) for ours, theirs in pairs})
        if (self.hidden or self.embeddings) and len(widths) > 1 and any(ours != theirs for ours, theirs in widths):
            pairs_text = " and ".join(f"{ours} to {theirs}" for ours, theirs in widths)
            yield (
                f"{name} has stacks with other widths than config.model ({pairs_text}), and both stacks share one map: "
                "set config.distill.hidden and config.distill.embeddings to 0, or use config.distill.relations"
            )
        heads = [(ours.num_heads, theirs.num_heads) for ours, theirs in pairs]
        if self.attention and (mismatched := [(ours, theirs) for ours, theirs in heads if ours != theirs]):
            yield (
                f"{name} has {mismatched[0][1]} attention heads, config.model.num_heads is {mismatched[0][0]}: "
                "config.distill.attention needs the same number; config.distill.relations does not"
            )
        for ours, theirs in pairs if self.relations else ():
            relation_heads = self.relation_heads or theirs.num_heads
            widths = [count * m.dim_per_head for m in (ours, theirs) for count in (m.num_heads, m.kv_heads)]
            if uneven := sorted({width for width in widths if width % relation_heads}):
                yield (
                    f"config.distill.relation_heads is {relation_heads}, which does not divide the widths {uneven} of "
                    f"queries or keys: set it to a divisor of all widths of student and teacher"
                )
                break  # one message is enough; after a fix, the next check reports a problem of the other stack

    def _head_problems(self, student: ModelConfig, teacher: ModelConfig, name: str) -> Iterator[str]:
        if not self.soft:
            return
        available = [head.name for head in heads_of(teacher)]
        if missing := [head.name for head in heads_of(student) if head.name not in available]:
            yield (
                f"{name} lacks the heads {', '.join(missing)} of config.model: set config.distill.teacher to a model "
                "with these heads, or set config.distill.soft to 0"
            )
        elif (expected := _task_properties(student)) != (actual := _task_properties(teacher)):
            yield f"{name} has {actual}, config.model.head has {expected}: the tasks must be the same"
        elif getattr(student.head, "second_text", False) and not getattr(teacher.head, "second_text", False):
            yield (
                f"{name} gives probabilities to tokens of the question, which config.model.head.second_text=True "
                "excludes, so that the soft loss would be infinite: set it to False, or config.distill.soft to 0"
            )


def _task_properties(model: ModelConfig) -> str:
    """Formats the properties of a model's task head that must match between student and teacher."""
    if isinstance(model.head, Classify):
        return f"{model.head.num_labels} labels, kind={model.head.kind}"
    return f"{model.head.num_labels} labels" if isinstance(model.head, Tag) else ""


@dataclasses.dataclass
class DistilBERT(Distillation):
    """The loss of DistilBERT: soft targets, masked language modelling, and the cosine distance of last hidden states.

    The weights are from the released training commands (Sanh et al. 2019, arXiv 1910.01108, section 3).

    NOTE The released code has soft targets for all tokens. Here, only predicted tokens have logits and therefore soft
    targets.
    """

    hard: float = 2.0  # weight of the student's own loss, alpha_mlm
    soft: float = 5.0  # weight of soft targets, alpha_ce
    temperature: float = 2.0  # of both softmaxes
    hidden: float = 1.0  # weight of the distance of hidden states, alpha_cos
    distance: Literal["cosine", "squares"] = "cosine"  # of hidden states
    hidden_layers: Literal["last", "all"] = "last"  # the input of the heads


@dataclasses.dataclass
class TinyBERT(Distillation):
    """The loss of TinyBERT's Transformer distillation: attention, hidden states and embeddings, but no outputs.

    Source: Jiao et al. 2020, arXiv 1909.10351, section 3.1. The second stage trains on the outputs for a task:
    `Distillation(hard=0.0, soft=1.0, temperature=1.0)`, initialized from the model of the first stage.
    """

    hard: float = 0.0  # the first stage does not train on outputs
    soft: float = 0.0  # the first stage does not train on soft targets
    temperature: float = 1.0  # of both softmaxes
    hidden: float = 1.0  # equation 8, and equation 11 with lambda 1
    embeddings: float = 1.0  # equation 9
    attention: float = 1.0  # equation 7


@dataclasses.dataclass
class MiniLM(Distillation):
    """The loss of MiniLMv2: only the relations of queries, of keys and of values.

    Source: Wang et al. 2021, arXiv 2012.15828, section 3.1. The default number of relation heads is for teachers the
    size of BERT-base.
    """

    hard: float = 0.0  # trains only on relations
    soft: float = 0.0  # trains only on relations
    relations: float = 1.0  # weight of the sum over queries, keys and values
    relation_heads: int = 48  # for teachers with the size of BERT base; 64 for BERT large
