"""Defines the base class of each config field with alternatives.

Other packages define the subclasses, which implement the alternatives. These base classes let the config package check
the types of field values without importing the implementations, and therefore without JAX or NumPy.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Optional

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment, TrainConfig
    from pretrainax.config.heads import Classify, Kind
    from pretrainax.config.model import ModelConfig
    from pretrainax.models.flops import UpdateCost
    from pretrainax.training.wrapped import Wrapped

# Features that some models do not support: see `ModelPart.unsupported`.
Use = Literal["generation", "distillation", "virtual tokens", "sequence parallelism"]


class TokenizerConfig(Choice):
    """Trains or loads a tokenizer; pretrainax.tokenization has the subclasses."""

    def vocabulary_problems(self, experiment: "Experiment") -> Iterator[str]:
        """Yields an error message for each objective that needs special tokens which a trained tokenizer will lack."""
        yield from ()


class Source(Choice):
    """Provides the documents of a dataset; `data.sources` has the subclasses."""


class Packing(Choice):
    """Packs documents into rows of a batch; `data.packing` has the subclasses."""


class NearDuplicates(Choice):
    """A config that drops near-duplicates of earlier documents; data.preparation.filters implements the subclass."""


class QualityFilter(Choice):
    """Drops low-quality documents; `data.preparation.filters` has the subclass."""


class Objective(Choice):
    """Converts documents to training examples; `data.objectives` has the subclasses."""


class Optimizer(Choice):
    """Computes parameter updates from gradients; pretrainax.optim has the subclasses."""


class Schedule(Choice):
    """Computes the learning rate of each step; pretrainax.optim has the subclasses."""


class Wrapper(Choice):
    """Base class of configs that wrap the model during training: parameter-efficient tuning and distillation."""

    def wrap(self, experiment: "Experiment", train: "TrainConfig", teacher: "Optional[ModelConfig]") -> "Wrapped":
        """Wraps the run's model and returns the model to train; see `training.wrapped.trained_model`."""
        raise NotImplementedError


class ModelPart(Choice):
    """Base class of model components from other packages: a feed-forward layer, attention, a head or a whole model.

    The implementation registers itself with `register_feed_forward`, `register_attention`, `register_head` or
    `register_model`. Its `is_in(config)` returns True if `config.part` finds this class in `config.model.parts`.

    A class for a whole model also overrides the attributes and methods below, whose defaults describe a Transformer.
    See `config/recurrent.py` (ELMo) for an example.
    """

    family: ClassVar[str] = ""  # the value of config.model.family for this model; "": the class is not a whole model
    objective: ClassVar[str] = ""  # class name of the objective that evaluates an imported model
    unsupported: ClassVar[Mapping[Use, str]] = {}  # unsupported feature -> reason, the end of an error message
    task_modules: ClassVar[tuple[str, ...]] = ()  # additional submodules of a model with a task head

    def stream_width(self, model: "ModelConfig") -> int:
        """Returns the width of the last hidden states of a model with this component."""
        return model.d_model

    def default_classifier(self, num_labels: int, kind: "Kind") -> "Optional[Classify]":
        """Returns this model's default classification head, or None to use the default for the model's family."""
        return None

    def scaled(self, numerator: int, denominator: int) -> "ModelPart":
        """Scales this component's sizes for a model whose width is multiplied by `numerator / denominator`."""
        return self


class Tuning(Wrapper):
    """Trains few parameters of a model and freezes the other parameters; pretrainax.adapt has the subclasses."""

    # matrix multiplications per frozen matrix and step: forward, and backward for the gradient of the inputs
    passes: ClassVar[int] = 2

    def cost(self, experiment: "Experiment") -> "UpdateCost":
        """Returns the matmuls of an update; see `models.flops.UpdateCost`."""
        raise NotImplementedError


class DistillConfig(Wrapper):
    """Trains a model with its own loss and a distillation loss against a teacher model; see pretrainax.distill."""


class Adaptation(Choice):
    """Converts initial parameters to the family or shapes of the run's model; see pretrainax.interop.adaptations."""


class Callback(Choice):
    """Runs custom code at training events; pretrainax.training.callbacks has the base class for users."""


class Tracker(Choice):
    """Sends the metrics of a run to an experiment tracker, in addition to metrics.jsonl; see pretrainax.trackers."""
