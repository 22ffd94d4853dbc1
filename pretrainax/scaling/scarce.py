"""Plans a run on little text: size, epochs, weight decay and dropout, `python -m pretrainax.plan --corpus=38MB`.

The loss law counts repeated text as less new text (`power_laws.effective_tokens`). It does not model overfitting, for
any number of epochs. Therefore the plan limits the epochs to the number that was best for models with the same ratio of
parameters to tokens. This ratio also determines the weight decay. The source is Kim et al. 2025 (arXiv 2509.14786), who
tuned learning rate, epochs and weight decay together, without a limit of FLOPs. Their models have 150 M to 1.4 B
parameters, and their text has 200 M to 1.6 B tokens. The 16 best settings are in
marin-community/marin@0b383ae64cfc:experiments/data_efficiency/convex_certificate_scaling.py, lines 33 to 48. The
constants below are the least-squares lines through their logs.

With a limit of FLOPs, a run may end long before these epochs. It then overfits less, so weight decay and dropout are
smaller (docs/studies/index.md, "Little text").
"""

import math
import re
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.scaling.compute_optimal import Plan, Space, run_of
from pretrainax.scaling.power_laws import LossLaw

# (factor, exponent) of the ratio of parameters to different tokens. The settings differ from the lines by a factor of
# 1.4 (root mean square); the factor between neighbors in their grid is 2.
EPOCHS = 14.0, -0.535
WEIGHT_DECAY = 1.05, 0.747
WEIGHT_DECAYS = 0.1, 3.2  # the smallest and the largest weight decay of the 16 settings
# The runs of Muennighoff et al. 2023 lose little in the first four epochs (recalled). With more epochs, dropout helps
# (Xue et al. 2023, arXiv 2305.13230; recalled); the settings of Kim et al. have no dropout. Dropout is 0 for runs with
# less than DROPOUT_SHARE of the epochs that are best without a limit of FLOPs: in the grid of `benchmarks/scarce.py`,
# dropout increases the loss of such short runs.
FEW_EPOCHS, DROPOUT, DROPOUT_SHARE = 4.0, 0.1, 0.5
MIN_TEXT = 2e8  # tokens of the smallest text of Kim et al.
# Bytes of text per token, by size of the BPE vocabulary, measured on English books with `python -m pretrainax.tokenizer
# report`. A larger vocabulary has the value of the largest size.
BYTES_PER_TOKEN = {512: 1.98, 1024: 2.59, 8192: 3.76, 32_000: 4.21}
_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


class ScarcePlan(NamedTuple):
    """The run with the lowest expected loss on a given text."""

    run: Plan
    text: float  # tokens of different text
    epochs: float
    flops: Optional[float]  # limit of the training FLOPs; None: no limit

    @property
    def share(self) -> float:
        """Returns the epochs as a share of the epochs that are best without a limit of FLOPs."""
        return self.epochs / _line(EPOCHS, self.run.size / self.text)

    @property
    def weight_decay(self) -> float:
        """Returns AdamW's weight decay: the conventional 0.1 at a share of 0, the line's value at a share of 1."""
        longest = float(np.clip(_line(WEIGHT_DECAY, self.run.size / self.text), *WEIGHT_DECAYS))
        return WEIGHT_DECAYS[0] * (longest / WEIGHT_DECAYS[0]) ** self.share if self.epochs > 1 else WEIGHT_DECAYS[0]

    @property
    def dropout_rate(self) -> float:
        """Returns the dropout rate."""
        return DROPOUT if self.epochs > FEW_EPOCHS and self.share >= DROPOUT_SHARE else 0.0

    def values(self) -> JsonObject:
        """Returns the numbers that `plan --json` prints in addition to the numbers of the run."""
        return {
            "text_tokens": self.text,
            "epochs": self.epochs,
            "weight_decay": self.weight_decay,
            "dropout_rate": self.dropout_rate,
        }


def parse_bytes(text: str) -> float:
    """Parses an amount of text with a unit: "38MB".

    Raises:
      UserError: the string has a different format, or the amount is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]?B)", text, re.ASCII | re.IGNORECASE)
    amount = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 0 < amount < math.inf:
        raise UserError(f"--corpus={text}: it must be a number and a unit (B, KB, MB, GB or TB), such as 38MB")
    return amount


def tokens_of(num_bytes: float, vocab_size: int) -> float:
    """Estimates the number of tokens of a text in English from its bytes."""
    sizes, bytes_per_token = zip(*BYTES_PER_TOKEN.items(), strict=True)
    return num_bytes / float(np.interp(math.log(vocab_size), np.log(sizes), bytes_per_token))


def epochs_of(size, flops_per_token, text: float, flops: Optional[float]):
    """Computes the epochs of models with N = `size` parameters: a number, or an array like `size`.

    Args:
      flops_per_token: training FLOPs per token of each model.
      text: tokens of different text.
      flops: training FLOPs of the run. None: no limit.
    """
    longest = _line(EPOCHS, size / text)
    return longest if flops is None else np.minimum(longest, flops / flops_per_token / text)


def best_size(space: Space, law: LossLaw, text: float, flops: Optional[float]) -> float:
    """Finds the number of parameters N, as `law` defines it, with the lowest loss; see `epochs_of`."""
    sizes = np.geomspace(space.ladder[0].size(law), space.ladder[-1].size(law), 20_000)
    epochs = epochs_of(sizes, space.cost(law, sizes), text, flops)
    return float(sizes[np.argmin(law.loss(sizes, epochs * text, epochs))])


def make_scarce_plan(
    space: Space, law: LossLaw, text: float, flops: Optional[float] = None, factor: float = 1.0
) -> ScarcePlan:
    """Computes the best run on `text` tokens of different text.

    Args:
      flops: training FLOPs of the run. None: no limit.
      factor: number of parameters, as a multiple of the best number.

    Raises:
      UserError: the law has no term for repeated text, or the best model is out of range.
    """
    if law.repetition is None:
        raise UserError(
            f"the law of {law.source} has no term for repeated text, which --corpus needs: leave --law out, or set it "
            "to the law of a ladder whose runs repeat their text"
        )
    shape = space.nearest(law, factor * best_size(space, law, text, flops))
    epochs = float(epochs_of(shape.size(law), shape.flops_per_token, text, flops))
    return ScarcePlan(run_of(space, shape, law, epochs * text, text), text, epochs, flops)


def _line(constants: tuple[float, float], ratio):
    return constants[0] * ratio ** constants[1]
