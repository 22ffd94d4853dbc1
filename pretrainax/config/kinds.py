"""The base classes of the choices that config fields offer.

Other packages subclass them to implement the work. These bases allow type checks of config fields without importing
the implementations, and therefore without JAX or NumPy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Optional

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment, TrainConfig
    from pretrainax.config.heads import Classify, Kind
    from pretrainax.config.model import ModelConfig
    from pretrainax.training.wrapped import Wrapped

# Features that a model can lack: see `ModelPart.unsupported`.
Use = Literal["generation", "distillation", "virtual tokens", "sequence parallelism"]


class TokenizerConfig(Choice):
    """Trains or loads a tokenizer: pretrainax.tokenization."""


class Source(Choice):
    """Provides documents: pretrainax.data.sources."""


class Packing(Choice):
    """Packs documents into rows: pretrainax.data.packing."""


class NearDuplicates(Choice):
    """Drops near-duplicates of earlier documents: pretrainax.data.preparation.filters."""


class QualityFilter(Choice):
    """Drops low-quality documents: pretrainax.data.preparation.filters."""


class Objective(Choice):
    """Converts a document to a training example: pretrainax.data.objectives."""


class Optimizer(Choice):
    """Computes parameter updates from gradients: pretrainax.optim."""


class Schedule(Choice):
    """Computes the learning rate of each step: pretrainax.optim."""


class Wrapper(Choice):
    """Base class of configs that wrap the model during training: tuning methods and distillation."""

    def wrap(self, experiment: "Experiment", train: "TrainConfig", teacher: "Optional[ModelConfig]") -> "Wrapped":
        """Returns the wrapped training model; arguments as in `training.wrapped.trained_model`."""
        raise NotImplementedError


class ModelPart(Choice):
    """Base class of model parts from other packages: a feed-forward, an attention, a head or a whole model.

    The implementation registers itself with `register_feed_forward`, `register_attention`, `register_head` or
    `register_model`. Its `is_in(config)` returns True if `config.part` finds this class in `config.model.parts`.

    A part that is a whole model also overrides the attributes and methods below, whose defaults describe a Transformer.
    `config/recurrent.py` is an example (ELMo).
    """

    family: ClassVar[str] = ""  # the value of config.model.family for this model; "": not a whole model
    objective: ClassVar[str] = ""  # class name of the objective that evaluates an imported model
    unsupported: ClassVar[Mapping[Use, str]] = {}  # use -> why the model does not support it
    task_modules: ClassVar[tuple[str, ...]] = ()  # submodules that a task adds in addition to its head

    def stream_width(self, model: "ModelConfig") -> int:
        """Returns the width of the last hidden state."""
        return model.d_model

    def default_classifier(self, num_labels: int, kind: "Kind") -> "Optional[Classify]":
        """Returns the classification head for this model; None: the default head of its family."""
        return None

    def scaled(self, numerator: int, denominator: int) -> "ModelPart":
        """Returns the part for a model whose width is multiplied by `numerator / denominator`."""
        return self


class Tuning(Wrapper):
    """Trains a few parameters of a model and freezes the others: pretrainax.adapt."""

    passes: ClassVar[int] = 2  # matrix products per frozen matrix: forward, and backward for its inputs


class DistillConfig(Wrapper):
    """Trains a model to match a teacher, in addition to its own loss: pretrainax.distill."""


class Adaptation(Choice):
    """Converts initial parameters to the family or the shape of the run's model: pretrainax.interop.adaptations."""


class Callback(Choice):
    """Runs custom code during training: pretrainax.training.callbacks."""


class Tracker(Choice):
    """Mirrors the metrics of a run, in addition to metrics.jsonl: pretrainax.trackers."""
