"""Replaced token detection: a discriminator detects the tokens that a generator replaced."""

import dataclasses
from typing import ClassVar

from pretrainax.data.objectives.masked import MaskedLM


@dataclasses.dataclass
class ReplacedTokenDetection(MaskedLM):
    """The task of ELECTRA (Clark et al. 2020, arXiv 2003.10555, section 2, figure 2) and DeBERTa v3 (He et al. 2021).

    The examples are the same as in `MaskedLM`. The generator predicts the masked tokens, and the masks are replaced
    with tokens sampled from its predictions. The discriminator classifies each token as original or replaced. Sampling
    and both losses are computed on the device (`models.electra`, `losses.objective`). The weight of the discriminator
    loss is `config.model.generator.loss_weight`. With a rate of 0.4, `the chef cooked the meal` may become

        tokens             [CLS] [MASK] chef [MASK] the meal [SEP]
        masked_positions   1      3
        targets            the    cooked

    On the device, if the generator samples `the` and `ate`:

        discriminator      [CLS] the chef ate the meal [SEP]
        replaced           0     0   0    1   0   0    0

    In the generator input, 15 % of the predicted tokens stay unchanged and none are replaced with random ones, as in
    ELECTRA's released code. Each step reports the generator's loss and accuracy. For the discriminator, each step
    reports `replaced_loss`, `replaced_accuracy`, `replaced_precision` and `replaced_recall`.
    """

    mask_fraction: float = 0.85  # fraction of the predicted tokens that are replaced with [MASK]
    random_fraction: float = 0.0  # fraction of the predicted tokens that are replaced with a random token

    replaced_tokens: ClassVar[bool] = True
    select_by: ClassVar[str] = "replaced_loss"  # the discriminator is the model that users fine-tune

    @property
    def head_metrics(self):
        own_metrics = ("replaced_loss", "replaced_accuracy", "replaced_precision", "replaced_recall")
        return *own_metrics, *super().head_metrics
