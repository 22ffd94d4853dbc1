"""The configuration of a mixture of experts."""

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
    """Feed-forwards of which a router gives each token to a few (Shazeer et al. 2017, arXiv 1701.06538)."""

    num_experts: int = 8  # feed-forwards of a block
    top_k: int = 2  # of them that a token is given to
    d_ff: Optional[int] = None  # width inside an expert; None: as config.model.d_ff
    shared_experts: Optional[int] = None  # more, that every token passes through (DeepSeekMoE, section 3.2); None: none
    scores: Literal["softmax", "sigmoid"] = "softmax"  # what becomes of a token's logits (DeepSeek-V3: sigmoid)
    # the weights of a token's experts add up to 1 (Mixtral); False: they are its scores of them (OLMoE)
    normalized: bool = True
    scale: Optional[float] = None  # that weights are multiplied by in the end (DeepSeek-V3: 2.5); None: 1
    groups: Optional[int] = None  # of as many experts each (DeepSeek-V2, section 2.2.2: of a device); None: none
    top_groups: Optional[int] = None  # groups that all experts of a token are from; set where `groups` is
    group_score: Literal["best", "best_two"] = "best"  # of its experts; the sum of the best two's (DeepSeek-V3)
    # first layers of a stack that have one feed-forward, of width config.model.d_ff, and no experts (DeepSeek); None: 0
    first_dense: Optional[int] = None
    # experts are in the last layer of each so many, and in the others one feed-forward (Switch Transformer: 2); None: 1
    every: Optional[int] = None
    # width of one more feed-forward for all tokens, behind the experts of each layer, with a norm of its own (ST-MoE:
    # Zoph et al. 2022, the released st_moe_base.gin); None: there is none
    dense_after: Optional[int] = None
    # room of an expert, as a multiple of the tokens it gets where all get as many; for others it does nothing (GShard);
    # None: there is room for all, as there is in every model that is loaded
    capacity: Optional[float] = None
    balance_weight: float = 0.01  # of the loss that is 1 where all experts get as many (Fedus et al. 2021, section 2.2)
    balance_over: Literal["batch", "row"] = "batch"  # what should be even: all tokens, or each row (DeepSeek-V2, V3)
    # by which, after each step, a bias goes down for experts that got more than the mean, and up for others. It is
    # added to the scores that choose experts, not to weights (DeepSeek-V3, section 2.1.2; 0.001); None: there is none
    bias_rate: Optional[float] = None
    z_weight: float = 0.0  # of the router's squared log-normaliser (ST-MoE: Zoph et al. 2022, section 3.3; 0.001)

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path = "config.model.experts"
        for name in (*_SIZES, "groups", "top_groups"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        if self.top_k > self.num_experts:
            yield f"{path}.top_k is {self.top_k}, it must be at most {path}.num_experts, {self.num_experts}"
        if self.capacity is not None and self.capacity < 1:
            yield (
                f"{path}.capacity is {self.capacity}, with which tokens are dropped even where all experts get as "
                "many: it must be at least 1, as 1.25; None drops none"
            )
        for name in ("balance_weight", "z_weight", "bias_rate"):
            if (value := getattr(self, name)) is not None and value < 0:
                yield f"{path}.{name} is {value}, it must be at least 0"
        if self.scale is not None and self.scale <= 0:
            yield f"{path}.scale is {self.scale}, it must be above 0"
        if self.bias_rate is not None and experiment.optimizer.moves_the_gradient:
            yield (
                f"{path}.bias_rate is {self.bias_rate}, and {type(experiment.optimizer).__name__} keeps parameters "
                "twice, of which a bias would be one: set it to None, or take another config.optimizer"
            )
        yield from self._problems_of_groups(path)
        model = experiment.model
        layers = min(stack.num_layers for stack in model.stacks.values())
        if self.first_dense and self.first_dense >= layers:
            yield f"{path}.first_dense is {self.first_dense}: it must leave a layer of {layers}"
        if self.first_dense and model.share_layers:
            yield f"{path}.first_dense is {self.first_dense}, and config.model.share_layers makes all layers one"
        if self.dense_after and model.parallel:
            yield (
                f"{path}.dense_after is {self.dense_after}, and with config.model.parallel nothing of a block is after "
                "its feed-forward: set one of them to its default"
            )
        yield from self._problems_of_turns(path, model)

    def _problems_of_turns(self, path: str, model: "ModelConfig") -> Iterator[str]:
        if self.every is None:
            return
        name = f"{path}.every is {self.every}"
        if self.every < 2:
            yield f"{name}, it must be at least 2; None puts experts in all layers"
            return
        for side, stack in model.stacks.items():
            if (layers := stack.num_layers) % self.every:
                yield f"{name}, which does not divide the {layers} layers of the {side}: set it to a divisor, or None"
        if self.first_dense:
            yield f"{name} and {path}.first_dense {self.first_dense}, which both say where experts are: set one to None"
        for field in ("share_layers", "enhanced_mask_decoder"):
            if getattr(model, field):
                yield f"{name}, and config.model.{field} is for layers that are alike: set one of them to its default"

    def _problems_of_groups(self, path: str) -> Iterator[str]:
        if self.groups is None or self.top_groups is None:
            if self.groups != self.top_groups:
                yield f"{path}.groups is {self.groups} and {path}.top_groups {self.top_groups}: set both, or none"
            return
        if min(self.groups, self.top_groups) < 1:
            return
        each, rest = divmod(self.num_experts, self.groups)
        if rest:
            yield f"{path}.num_experts {self.num_experts} is not a multiple of {path}.groups {self.groups}"
        elif self.top_groups > self.groups:
            yield f"{path}.top_groups is {self.top_groups}, it must be at most {path}.groups, {self.groups}"
        elif self.top_k > self.top_groups * each:
            yield f"{path}.top_k is {self.top_k}: {self.top_groups} groups have {self.top_groups * each} experts"
        elif self.group_score == "best_two" and each < 2:
            yield f"{path}.group_score is 'best_two', and a group has one expert: set {path}.groups to a smaller number"
