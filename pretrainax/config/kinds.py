"""The kinds of choices that the fields of a run offer.

The classes of these names in other packages do the work and are subclasses: what stands here is what a field can be
checked against without importing them, and so neither JAX nor NumPy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Optional

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment, TrainConfig
    from pretrainax.config.heads import Classify, Kind
    from pretrainax.config.model import ModelConfig
    from pretrainax.training.wrapped import Wrapped

# What a model may not support: see `ModelPart.unsupported`.
Use = Literal["generation", "distillation", "virtual tokens", "sequence parallelism"]


class TokenizerConfig(Choice):
    """Makes or reads a tokenizer: pretrainax.tokenization."""


class Source(Choice):
    """Gives documents: pretrainax.data.sources."""


class Packing(Choice):
    """Fills rows with texts: pretrainax.data.packing."""


class NearDuplicates(Choice):
    """Drops documents that are nearly equal to an earlier one: pretrainax.data.preparation.filters."""


class QualityFilter(Choice):
    """Drops documents that are no good text: pretrainax.data.preparation.filters."""


class Objective(Choice):
    """Makes an example of a text: pretrainax.data.objectives."""


class Optimizer(Choice):
    """Makes an update of a gradient: pretrainax.optim."""


class Schedule(Choice):
    """Gives the learning rate of a step: pretrainax.optim."""


class Wrapper(Choice):
    """Wraps the model of a run in training: a tuning or a teacher does."""

    def wrap(self, experiment: "Experiment", train: "TrainConfig", teacher: "Optional[ModelConfig]") -> "Wrapped":
        """Returns the model in training; arguments as of `training.wrapped.trained_model`."""
        raise NotImplementedError


class ModelPart(Choice):
    """Asks for a brick of another package: a feed-forward, an attention, a head or a whole model.

    The brick registers itself (`register_feed_forward`, `register_attention`, `register_head`, `register_model`); its
    `is_in(config)` says that a model has it where `config.part` finds this class in `config.model.parts`.

    A part that is a whole model also states the facts that other code needs. The defaults describe a Transformer;
    `config/recurrent.py` is an example (ELMo).
    """

    family: ClassVar[str] = ""  # the value of config.model.family for this model; "": the part is a brick
    objective: ClassVar[str] = ""  # class name of the objective that evaluates an imported model
    unsupported: ClassVar[Mapping[Use, str]] = {}  # use -> why the model does not support it
    task_modules: ClassVar[tuple[str, ...]] = ()  # submodules that a task adds in addition to its head

    def stream_width(self, model: "ModelConfig") -> int:
        """Returns the width of the last hidden state."""
        return model.d_model

    def default_classifier(self, num_labels: int, kind: "Kind") -> "Optional[Classify]":
        """Returns the classification head for this model; None: the default of its family."""
        return None

    def scaled(self, numerator: int, denominator: int) -> "ModelPart":
        """Returns the part for a model whose width is multiplied by `numerator / denominator`."""
        return self


class Tuning(Wrapper):
    """Trains a few parameters of a model that else stays as it is: pretrainax.adapt."""

    passes: ClassVar[int] = 2  # products with each frozen matrix: forward, and back to what is trained before it


class DistillConfig(Wrapper):
    """Trains a model to be like a teacher, beside its own loss: pretrainax.distill."""


class Adaptation(Choice):
    """Gives what a run starts from the family, or the shape, of its own model: pretrainax.interop.adaptations."""


class Callback(Choice):
    """Is called beside the steps of a run: pretrainax.training.callbacks."""


class Tracker(Choice):
    """Shows a run elsewhere too, beside its metrics.jsonl: pretrainax.trackers."""
