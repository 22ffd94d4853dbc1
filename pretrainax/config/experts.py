"""Defines the config of a mixture of experts."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Optional

from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment
    from pretrainax.config.model import ModelConfig

_SIZES = "num_experts", "top_k", "d_ff", "shared_experts", "first_dense", "dense_after"


@dataclasses.dataclass
class MixtureOfExperts(Choice):
    """Config of feed-forward experts; a router assigns each token to `top_k` experts.

    Source: Shazeer et al. 2017, arXiv 1701.06538.
    """

    num_experts: int = 8  # experts per block
    top_k: int = 2  # experts per token
    d_ff: Optional[int] = None  # width inside an expert; None: config.model.d_ff
    # additional experts that process every token (DeepSeekMoE, section 3.2); None: none
    shared_experts: Optional[int] = None
    scores: Literal["softmax", "sigmoid"] = "softmax"  # maps a token's router logits to scores (DeepSeek-V3: sigmoid)
    # the weights of a token's experts sum to 1 (Mixtral); False: they are the scores (OLMoE), as top_k=1 requires
    normalized: bool = True
    scale: Optional[float] = None  # multiplies the final weights (DeepSeek-V3: 2.5); None: 1
    # number of equal groups of experts (DeepSeek-V2, section 2.2.2: one per device); None: no groups
    groups: Optional[int] = None
    top_groups: Optional[int] = None  # number of groups that contain the experts of a token; required with `groups`
    # score of a group of experts: the score of its best expert, or the sum of its two best scores (DeepSeek-V3)
    group_score: Literal["best", "best_two"] = "best"
    # number of first layers of a stack with a dense feed-forward of width config.model.d_ff instead of experts
    # (DeepSeek); None: 0
    first_dense: Optional[int] = None
    # every n-th layer has experts; the other layers have a dense feed-forward (Switch Transformer: 2); None: all layers
    # have experts
    every: Optional[int] = None
    # width of an additional dense feed-forward after the experts of each layer, with its own norm (ST-MoE: Zoph et al.
    # 2022, the released st_moe_base.gin); None: no such feed-forward
    dense_after: Optional[int] = None
    # maximum number of tokens per expert, as a multiple of the number under an even load. An expert skips additional
    # tokens (GShard); padding counts for nothing. A model that generates, scores or predicts text has no capacity, so
    # that a text's outputs do not depend on its batch. None: unlimited, as in every imported model
    capacity: Optional[float] = None
    # weight of the balance loss, which is 1 for an even load (Fedus et al. 2021, section 2.2)
    balance_weight: float = 0.01
    # tokens over which the balance loss balances the load: the whole batch, or each row (DeepSeek-V2, V3)
    balance_over: Literal["batch", "row"] = "batch"
    # step size of a bias per expert that balances the load. After each training step, the bias decreases for experts
    # with more tokens than the mean, and increases for the other experts. The bias is added to the scores that select
    # experts, not to the weights (DeepSeek-V3, section 2.1.2; 0.001). None: no bias
    bias_rate: Optional[float] = None
    # weight of the loss log(Z)^2; Z is the softmax normalizer of the router (ST-MoE: Zoph et al. 2022, section 3.3;
    # 0.001)
    z_weight: float = 0.0

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path = "config.model.experts"
        for name in (*_SIZES, "groups", "top_groups"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        if self.top_k > self.num_experts:
            yield f"{path}.top_k is {self.top_k}, it must be at most {path}.num_experts, {self.num_experts}"
        if self.capacity is not None and self.capacity < 1:
            yield (
                f"{path}.capacity is {self.capacity}, which drops tokens even under an even load: "
                "it must be at least 1, such as 1.25; None drops no tokens"
            )
        for name in ("balance_weight", "z_weight", "bias_rate"):
            if (value := getattr(self, name)) is not None and value < 0:
                yield f"{path}.{name} is {value}, it must be at least 0"
        if self.scale is not None and self.scale <= 0:
            yield f"{path}.scale is {self.scale}, it must be above 0"
        if self.bias_rate is not None and experiment.optimizer.has_gradient_point:
            yield (
                f"{path}.bias_rate is {self.bias_rate}, and {type(experiment.optimizer).__name__} stores two copies of "
                "the parameters, and the bias would change only one: set it to None, or use another config.optimizer"
            )
        yield from self._problems_of_groups(path)
        model = experiment.model
        layers = min(stack.num_layers for stack in model.stacks.values())
        if self.first_dense and self.first_dense >= layers:
            yield f"{path}.first_dense is {self.first_dense}, it must be below the number of layers, {layers}"
        if self.first_dense and model.share_layers:
            yield f"{path}.first_dense is {self.first_dense}, which config.model.share_layers does not support"
        if self.dense_after and model.parallel:
            yield (
                f"{path}.dense_after is {self.dense_after}, and with config.model.parallel a block has no sublayer "
                "after its feed-forward: set one of them to its default"
            )
        yield from self._problems_of_spacing(path, model)

    def _problems_of_spacing(self, path: str, model: "ModelConfig") -> Iterator[str]:
        """Yields an error message for each problem with `every`; `path` is this config's path in messages."""
        if self.every is None:
            return
        message = f"{path}.every is {self.every}"
        if self.every < 2:
            yield f"{message}, it must be at least 2; None puts experts in every layer"
            return
        for stack_name, stack in model.stacks.items():
            if (layers := stack.num_layers) % self.every:
                yield (
                    f"{message}, it must divide the {layers} layers of the {stack_name}; None puts experts in every "
                    "layer"
                )
        if self.first_dense:
            yield f"{message} and {path}.first_dense {self.first_dense}, which conflict: set one to None"
        for field in ("share_layers", "enhanced_mask_decoder"):
            if getattr(model, field):
                yield f"{message}, and config.model.{field} requires identical layers: set one of them to its default"

    def _problems_of_groups(self, path: str) -> Iterator[str]:
        """Yields an error message for each problem with the expert groups; `path` is this config's path in messages."""
        if self.groups is None or self.top_groups is None:
            if self.groups != self.top_groups:
                yield f"{path}.groups is {self.groups} and {path}.top_groups is {self.top_groups}: set both or neither"
            return
        if min(self.groups, self.top_groups) < 1:
            return
        group_size, remainder = divmod(self.num_experts, self.groups)
        if remainder:
            yield f"{path}.num_experts {self.num_experts} is not a multiple of {path}.groups {self.groups}"
        elif self.top_groups > self.groups:
            yield f"{path}.top_groups is {self.top_groups}, it must be at most {path}.groups, {self.groups}"
        elif self.top_k > self.top_groups * group_size:
            yield (
                f"{path}.top_k is {self.top_k}, it must be at most {self.top_groups * group_size}: {self.top_groups} "
                "groups"
            )
        elif self.group_score == "best_two" and group_size < 2:
            yield f"{path}.group_score is 'best_two', which requires 2 experts per group: decrease {path}.groups"
