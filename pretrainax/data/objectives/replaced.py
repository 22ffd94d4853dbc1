"""Replaced token detection: which of the tokens did another model write?"""

import dataclasses
from typing import ClassVar

from pretrainax.data.objectives.masked import MaskedLM


@dataclasses.dataclass
class ReplacedTokenDetection(MaskedLM):
    """ELECTRA's task (Clark et al. 2020, arXiv 2003.10555, section 2 and figure 2), and DeBERTa v3's (He et al. 2021).

    The examples are those of a masked LM. The model has two parts: its generator predicts the masked tokens, a draw of
    its predictions takes their place, and its discriminator says of every token whether it is the original. The draw
    and both losses are on the device (`models.electra`, `losses.objective`); that of the discriminator has the weight
    `config.model.generator.loss_weight`. `the chef cooked the meal` with a rate of 0.4 may become

        tokens             [CLS] [MASK] chef [MASK] the meal [SEP]
        masked_positions   1      3
        targets            the    cooked

    and on the device, where the generator says `the` and `ate`,

        discriminator      [CLS] the chef ate the meal [SEP]
        replaced           0     0   0    1   0   0    0

    As in ELECTRA's released code, 15 % of the predicted tokens are seen as they are, and none are random. A step
    reports the generator's loss and accuracy and, for the discriminator, `replaced_loss`, `replaced_accuracy`,
    `replaced_precision` and `replaced_recall`.
    """

    mask_fraction: float = 0.85  # of these are replaced by [MASK]
    random_fraction: float = 0.0  # of these are replaced by a random token

    replaced_tokens: ClassVar[bool] = True
    select_by: ClassVar[str] = "replaced_loss"  # the discriminator is the model; the generator's loss says little of it
    head_figures: ClassVar[tuple[str, ...]] = (
        *("replaced_loss", "replaced_accuracy", "replaced_precision", "replaced_recall"),
    )
