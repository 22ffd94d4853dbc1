"""Defines the config of hyperparameter transfer, and models of other widths and depths with equal proportions."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Optional

from pretrainax.config.choice import Choice
from pretrainax.config.model import ModelConfig
from pretrainax.files.errors import UserError, counted

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment

# Sections of config.model -> fields that grow with the width. The size of a head, the vocabulary, `embedding_dim`
# (ALBERT) and the number of experts stay the same.
_WIDTHS: Mapping[str, tuple[str, ...]] = {
    "": ("d_model", "d_ff", "num_heads", "num_kv_heads"),
    "decoder": ("d_model", "d_ff", "num_heads", "num_kv_heads"),
    "generator": ("d_model", "d_ff", "num_heads"),
    "experts": ("d_ff", "dense_after"),
    "latent_attention": ("rank", "query_rank"),
}
_DEPTHS: Mapping[str, tuple[str, ...]] = {"": ("num_layers", "num_decoder_layers"), "generator": ("num_layers",)}


@dataclasses.dataclass
class Transfer(Choice):
    """Transfers hyperparameters from a small base model: its best learning rate is also best for the config's model.

    All other fields keep the values that were tuned for the base model: learning rate, weight decay, `init_stddev`. The
    initial values and the updates of each parameter are multiplied by factors that follow from its shapes in the two
    models (optim/transfer.py; Yang et al. 2022, arXiv 2203.03466; Dey et al. 2025, arXiv 2505.01618). A model of the
    base sizes trains as without this config, if `output_scale` is 1. The logits of a narrow model are small and learn
    slowly; `output_scale`, the output multiplier of Yang et al., makes up for this (docs/how-to/transfer.md).
    """

    base_width: int  # config.model.d_model of the base model, whose other widths are in proportion
    base_depth: Optional[int] = None  # config.model.num_layers of the base model; None: the same depth as in the config
    output_scale: float = 1.0  # factor of the vocabulary logits in all sizes; tune it for the base model

    def base(self, model: ModelConfig) -> ModelConfig:
        """Returns the base model of `model`.

        Raises:
          UserError: a size of the base model would not be a whole number.
        """
        return resized(model, self.base_width, self.base_depth)

    def describe(self, experiment: "Experiment") -> str:
        """Describes the base model, and the factor of Adam's updates of hidden matrices."""
        model, base = experiment.model, self.base(experiment.model)
        width, depth = model.d_model / base.d_model, model.num_layers / base.num_layers
        return (
            f"from width {base.d_model:,} (× {width:.3g}) and {counted(base.num_layers, 'layer')} (× {depth:.3g}); "
            f"Adam's updates of hidden matrices × {1 / width:.3g}, logits × {self.output_scale:.3g} "
            "(docs/how-to/transfer.md)"
        )

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        sizes = {"base_width": self.base_width, "base_depth": self.base_depth}
        for name, size in sizes.items():
            if size is not None and size < 1:
                yield f"config.transfer.{name} is {size}, it must be at least 1"
                return
        if not 0 < self.output_scale < math.inf:
            yield f"config.transfer.output_scale is {self.output_scale}, it must be above 0"
        try:
            self.base(experiment.model)
        except UserError as e:
            yield f"config.transfer: {e}"
        if experiment.model.own_model is not None:
            family = experiment.model.family
            yield f"config.transfer requires a Transformer, config.model.family is {family!r}: set it to None"
        if not experiment.optimizer.transfers:
            yield (
                f"config.transfer has no rule for {type(experiment.optimizer).__name__}: set config.optimizer to "
                "AdamW, Muon, Adafactor or Lamb"
            )
        settings = {
            "tuning": experiment.tuning,
            "distill": experiment.distill,
            "checkpoint.init_from": experiment.checkpoint.init_from,
        }
        for name in (name for name, value in settings.items() if value is not None):
            yield f"config.transfer requires fresh parameters, and config.{name} is set: set one of them to None"


def resized(model: ModelConfig, width: Optional[int] = None, depth: Optional[int] = None) -> ModelConfig:
    """Returns a model with a different width and depth; all widths and numbers of layers stay in proportion.

    The size of a head stays the same, so the number of heads grows with the width. There is at least one key-value
    head, even if the proportion gives less than one.

    Args:
      width: `d_model` of the result; None: the width of `model`.
      depth: `num_layers` of the result; None: the depth of `model`.

    Raises:
      UserError: a size would not be a whole number.
    """
    result = copy.deepcopy(model)
    if width is not None:
        _multiply(result, _WIDTHS, Fraction(width, model.d_model))
        result.parts = tuple(part.scaled(width, model.d_model) for part in model.parts)
    if depth is not None:
        _multiply(result, _DEPTHS, Fraction(depth, model.num_layers))
    return result


def _multiply(model: ModelConfig, sections: Mapping[str, tuple[str, ...]], ratio: Fraction) -> None:
    """Multiplies size fields of `model` by `ratio`, in place."""
    for section, names in sections.items():
        config = getattr(model, section) if section else model
        for name in names if config is not None else ():
            if (value := getattr(config, name)) is None:
                continue
            size = value * ratio
            if name == "num_kv_heads" and size < 1:
                size = Fraction(1)
            if size.denominator != 1:
                path = ".".join(filter(None, ("config.model", section, name)))
                raise UserError(
                    f"{ratio} of {path} {value} is not a whole number: change it, or choose sizes of another proportion"
                )
            setattr(config, name, int(size))
