"""Says what a student is to have in common with its teacher, and how much each part counts."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, Optional, cast

from pretrainax import models
from pretrainax.config import AUTO, Classify, DisentangledPositions, Experiment, ModelConfig, Tag, TrainConfig, kinds
from pretrainax.distill.distilled import Distilled
from pretrainax.distill.soft_targets import SOFT_TARGETS
from pretrainax.layers.compute import compute_for
from pretrainax.models import Model
from pretrainax.models.heads import heads_of


@dataclasses.dataclass
class Distillation(kinds.DistillConfig):
    """Trains by own · loss + soft · soft_loss + hidden · hidden_loss + embeddings · embedding_loss
    + attention · attention_loss + relations · relation_loss, each a mean over predictions or tokens.

    By default by the student's own loss and the soft targets, as the fine-tuning code of DistilBERT has it.

    soft_loss: T² · KL(teacher || student) of the softmax of logits / T, at the targets, or of a task's labels (Hinton
      et al. 2015, arXiv 1503.02531, section 2).
    hidden_loss, embedding_loss: the distance of states, through a learned map where the widths differ.
    attention_loss: mean squares of the difference of the logits of attention, summed over layers (Jiao et al. 2020).
    relation_loss: KL of the relations among queries, among keys and among values, of one layer (Wang et al. 2021).
    """

    teacher: str  # a run, RUN@2000, RUN@best, an export, a Hugging Face directory, hf:org/name[@revision]
    own: float = 0.5  # weight of the student's own loss
    soft: float = 0.5  # weight of the teacher's soft targets
    temperature: float = 2.0  # of both softmaxes; the higher, the more the unlikely answers count
    hidden: float = 0.0  # weight of hidden states
    distance: Literal["cosine", "squares"] = "squares"  # of hidden states: 1 - cosine, or mean squares
    # last: what heads read | all: of each layer m of M that of the teacher's layer m · N / M, summed
    hidden_layers: Literal["last", "all"] = "all"
    embeddings: float = 0.0  # weight of the mean squares of what the first layers read
    attention: float = 0.0  # weight of the logits of self-attention, layers as of `hidden_layers="all"`
    relations: float = 0.0  # weight of the relations of self-attention in the student's last layer
    relation_heads: int = 0  # parts that queries, keys and values are cut into; 0: the teacher's attention heads
    relation_layer: int = 0  # of the teacher, from 1; 0: its last

    def wrap(self, experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig]) -> Distilled:
        assert teacher is not None  # a distillation has one
        compute = compute_for(train)
        if self.attention:  # no other kernel holds the logits
            compute = dataclasses.replace(compute, attention="xla")
        student, other = (cast(Model, models.build(model, compute)) for model in (experiment.model, teacher))
        return Distilled(student, other, self, train.loss_chunk)

    @property
    def compares_states(self) -> bool:
        """Returns True if more than answers is compared."""
        return any((self.hidden, self.embeddings, self.attention, self.relations))

    def problems(self, experiment: Experiment) -> Iterator[str]:
        weights = ("own", "soft", "hidden", "embeddings", "attention", "relations")
        for name in (*weights, "relation_heads", "relation_layer"):
            if getattr(self, name) < 0:
                yield f"config.distill.{name} is {getattr(self, name)}, it must be at least 0"
        if not any(getattr(self, name) > 0 for name in weights[1:]):
            yield f"config.distill has no part to learn from the teacher: set one of {', '.join(weights[1:])} above 0"
        if not self.temperature > 0:
            yield f"config.distill.temperature is {self.temperature}, it must be above 0; 1: probabilities as they are"
        if not self.teacher:
            yield "config.distill.teacher is empty: set it to a run or a Hugging Face directory"
        if experiment.tuning is not None:
            yield (
                "config.distill and config.tuning are both set: a student is trained whole; set one of them to None, "
                "and tune the student after its distillation"
            )
        if experiment.model.generator is not None:
            yield (
                "config.distill is for a model of one encoder, and config.model.generator makes two of ELECTRA: set it "
                "where the discriminator goes on to a task"
            )
        if self.attention and experiment.train.attention not in ("auto", "xla"):
            yield (
                f"config.distill.attention compares logits, which config.train.attention={experiment.train.attention} "
                "never holds: set that to 'xla' or 'auto', or use config.distill.relations, which any kernel allows"
            )
        others = [head.name for head in heads_of(experiment.model) if head.name not in SOFT_TARGETS]
        if self.soft and others:
            known = ", ".join(SOFT_TARGETS)
            yield f"config.distill.soft is of the heads {known}, and config.model has {others}: set it to 0"
        if why := experiment.model.unsupported("distillation"):
            yield f"config.distill compares what Transformers compute, and config.model {why}: set it to None"
        yield from self._state_problems(experiment.model, "config.model")

    def _state_problems(self, model: ModelConfig, name: str) -> Iterator[str]:
        """Yields what keeps states of a model from being compared."""
        if self.compares_states and model.enhanced_mask_decoder:
            yield (
                f"{name} has enhanced_mask_decoder, whose last layer runs twice: it has no states to compare: set "
                "config.distill.soft alone"
            )
        for field, why in (("latent_attention", "made in another way"), ("sparse_attention", "not met by all queries")):
            if (self.attention or self.relations) and getattr(model, field) is not None:
                yield (
                    f"{name} has {field}, whose keys are {why}: set config.distill.attention and "
                    "config.distill.relations to 0"
                )
        if self.attention and isinstance(model.position, DisentangledPositions):
            yield (
                f"{name} has DisentangledPositions, whose attention has no plain logits: set config.distill.attention "
                "to 0, or use config.distill.relations"
            )

    def teacher_problems(self, student: ModelConfig, teacher: ModelConfig) -> Iterator[str]:
        """Yields why a student cannot learn from this teacher."""
        name = f"the teacher {self.teacher}"
        if teacher.family != student.family:
            yield (
                f"{name} is of family {teacher.family!r}, config.model.family is {student.family!r}: set "
                "config.distill.teacher to one of that family"
            )
            return
        if AUTO not in (student.vocab_size, teacher.vocab_size) and teacher.vocab_size != student.vocab_size:
            yield (
                f"{name} has {teacher.vocab_size} ids, config.model.vocab_size is {student.vocab_size}: set that, and "
                "config.tokenizer to the teacher's"
            )
        room, wanted = teacher.position.max_length, student.position.max_length
        if room is not None and isinstance(wanted, int) and wanted > room:
            yield (
                f"{name} reads {room} tokens at most, config.model.position.max_length is {wanted}: set that, and "
                "config.data.sequence_length, to what it reads"
            )
        yield from self._state_problems(teacher, name)
        yield from self._layer_problems(student, teacher, name)
        yield from self._size_problems(student, teacher, name)
        yield from self._head_problems(student, teacher, name)

    def _layer_problems(self, student: ModelConfig, teacher: ModelConfig, name: str) -> Iterator[str]:
        pairs = list(zip(student.stacks.values(), teacher.stacks.values(), strict=True))
        all_layers = self.attention or (self.hidden and self.hidden_layers == "all")
        layers = [(ours.num_layers, theirs.num_layers) for ours, theirs in pairs]
        if all_layers and (wrong := [(ours, theirs) for ours, theirs in layers if theirs % ours]):
            yield (
                f"{name} has {wrong[0][1]} layers, which {wrong[0][0]} of config.model.num_layers do not divide: set "
                "that to a divisor, or config.distill.hidden_layers='last' and config.distill.attention=0"
            )
        fewest = min(theirs for _, theirs in layers)
        if self.relations and self.relation_layer > fewest:
            yield f"config.distill.relation_layer is {self.relation_layer}, {name} has {fewest} layers"

    def _size_problems(self, student: ModelConfig, teacher: ModelConfig, name: str) -> Iterator[str]:
        pairs = list(zip(student.stacks.values(), teacher.stacks.values(), strict=True))
        widths = sorted({(ours.d_model, theirs.d_model) for ours, theirs in pairs})
        if (self.hidden or self.embeddings) and len(widths) > 1 and any(ours != theirs for ours, theirs in widths):
            said = " and ".join(f"{ours} to {theirs}" for ours, theirs in widths)
            yield (
                f"{name} has stacks of other widths than config.model ({said}), and there is one map for both: set "
                "config.distill.hidden and embeddings to 0, or use config.distill.relations"
            )
        heads = [(ours.num_heads, theirs.num_heads) for ours, theirs in pairs]
        if self.attention and (wrong := [(ours, theirs) for ours, theirs in heads if ours != theirs]):
            yield (
                f"{name} has {wrong[0][1]} attention heads, config.model.num_heads is {wrong[0][0]}: "
                "config.distill.attention needs as many; config.distill.relations does not"
            )
        for ours, theirs in pairs if self.relations else ():
            parts = self.relation_heads or theirs.num_heads
            widths = [count * m.dim_per_head for m in (ours, theirs) for count in (m.num_heads, m.kv_heads)]
            if uneven := sorted({width for width in widths if width % parts}):
                yield (
                    f"config.distill.relation_heads is {parts}, which does not divide queries or keys of width "
                    f"{uneven}: set it to a divisor of all widths of student and teacher"
                )
                break  # the other stack says the same, or will

    def _head_problems(self, student: ModelConfig, teacher: ModelConfig, name: str) -> Iterator[str]:
        if not self.soft:
            return
        theirs = [head.name for head in heads_of(teacher)]
        if lacking := [head.name for head in heads_of(student) if head.name not in theirs]:
            yield (
                f"{name} has no answers of the heads {', '.join(lacking)} that config.model has: take one that was "
                "trained for the same, or set config.distill.soft to 0"
            )
        elif (asked := _task(student)) != (known := _task(teacher)):
            yield f"{name} answers with {known}, config.model.head is of {asked}: another task"


def _task(model: ModelConfig) -> str:
    """Tells what a task's head must have in common with a teacher's."""
    if isinstance(model.head, Classify):
        return f"{model.head.num_labels} labels, kind={model.head.kind}"
    return f"{model.head.num_labels} labels" if isinstance(model.head, Tag) else ""


@dataclasses.dataclass
class DistilBERT(Distillation):
    """Has the parts and weights of DistilBERT (Sanh et al. 2019, arXiv 1910.01108, section 3; the released training
    commands): soft targets, the masked LM, and the cosine of the last hidden states.

    NOTE The released code takes soft targets at all tokens; here they are at the targets, where there are logits.
    """

    own: float = 2.0  # alpha_mlm
    soft: float = 5.0  # alpha_ce
    temperature: float = 2.0  # of both softmaxes
    hidden: float = 1.0  # alpha_cos
    distance: Literal["cosine", "squares"] = "cosine"  # of hidden states
    hidden_layers: Literal["last", "all"] = "last"  # what heads read


@dataclasses.dataclass
class TinyBERT(Distillation):
    """Has the parts and weights of TinyBERT's distillation of layers (Jiao et al. 2020, arXiv 1909.10351, section 3.1):
    attention, hidden states and embeddings, and no loss of answers. Its second stage for a task, of answers alone, is
    `Distillation(own=0.0, soft=1.0, temperature=1.0)` from the first one's model.
    """

    own: float = 0.0  # the first stage has no loss of answers
    soft: float = 0.0  # nor of the teacher's
    temperature: float = 1.0  # of both softmaxes
    hidden: float = 1.0  # equation 8, and 11 with a lambda of 1
    embeddings: float = 1.0  # equation 9
    attention: float = 1.0  # equation 7


@dataclasses.dataclass
class MiniLM(Distillation):
    """Has the relations of MiniLMv2 (Wang et al. 2021, arXiv 2012.15828, section 3.1) and nothing else: among queries,
    among keys and among values. The number of relation heads is that of teachers of BERT base's size.
    """

    own: float = 0.0  # relations alone
    soft: float = 0.0  # relations alone
    relations: float = 1.0  # of the three kinds together
    relation_heads: int = 48  # for teachers as large as BERT base; 64 for BERT large
