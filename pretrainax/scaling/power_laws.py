"""Published scaling laws: the loss of a Transformer by parameters N, tokens D and training FLOPs C.

Sources: Kaplan et al. 2020 (arXiv 2001.08361), Hoffmann et al. 2022 (arXiv 2203.15556, "Chinchilla"), Besiroglu et al.
2024 (arXiv 2404.10102), Bi et al. 2024 (arXiv 2401.02954, "DeepSeek LLM"), Muennighoff et al. 2023 (arXiv 2305.16264).
Losses are in nats per token. All papers measured causal decoders, but each paper used a different corpus and tokenizer.
Losses are therefore not comparable between papers, but differences between losses are comparable.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError, nearest
from pretrainax.files.json_files import JsonObject, read_object

PF_DAY = 8.64e19  # FLOPs per petaflop/s-day
CONSTANTS = ("E", "A", "alpha", "B", "beta")  # constants of LossLaw
NATS = "nats per token"  # unit of a loss
REPETITION = "repetition"  # name of the optional sixth constant
LAW_JSON = "law.json"  # the file in which --fit and ladders write a law


class Run(NamedTuple):
    """A finished run: its workdir, its numbers of parameters and tokens, and its last validation loss."""

    workdir: str
    parameters: int  # number of parameters without embeddings
    tokens: float  # number of tokens of text that all steps train on; repeated text counts each time
    loss: float  # value of the fitted metric in the last validation
    epochs: float = 1.0  # passes over the text; below 1: a part of the text
    trunk: str = ""  # runs with the same trunk share a part of their training and of their errors; "": independent


def effective_tokens(tokens, epochs, repetition):
    """Computes the number of new tokens that are worth as much as `tokens` tokens of repeated text.

    The result is D' = U + U R* (1 - exp(-R / R*)). U = `tokens` / `epochs` is the amount of different text. R =
    `epochs` - 1 is the number of repetitions. After R* = `repetition` repetitions, further repetitions have little
    value (Muennighoff et al. 2023, arXiv 2305.16264, equation 5; recalled).
    """
    repetitions = np.maximum(epochs, 1.0) - 1
    return tokens / (repetitions + 1) * (1 + repetition * -np.expm1(-repetitions / repetition))


@dataclasses.dataclass(frozen=True)
class LossLaw:
    """A scaling law for the loss: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2).

    N is the number of parameters, D the number of training tokens, and L the loss in `unit`.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    source: str
    with_embeddings: bool = True  # whether N includes the embedding tables (Hoffmann et al. 2022, appendix F)
    family: str = "decoder"  # model family of the runs to which the law was fitted
    metric: str = "loss"  # name of the validation metric L
    repetition: Optional[float] = None  # R* of `effective_tokens`; None: repeated text counts as new text
    correlation: float = 0.0  # correlation of the errors of two runs with the same trunk
    runs: tuple[Run, ...] = ()  # the runs to which --fit or a ladder fitted the law; (): a published law
    unidentified: tuple[str, ...] = ()  # one line per term that these runs do not determine
    config: Optional[JsonObject] = None  # config of one of these runs; None: unknown

    @property
    def unit(self) -> str:
        """Returns the unit of L: "nats per token", or for a metric in bits for example "bits per byte"."""
        bits = re.search(r"bits_per_\w+", self.metric)
        return bits[0].replace("_", " ") if bits else NATS

    def loss(self, parameters, tokens, epochs=1.0):
        """Computes the loss L(parameters, tokens) in `unit`, for numbers or for arrays that broadcast.

        Args:
          epochs: passes over the text; `tokens` counts each pass.
        """
        if self.repetition is not None:
            tokens = effective_tokens(tokens, epochs, self.repetition)
        return self.E + self.A / np.power(parameters, self.alpha) + self.B / np.power(tokens, self.beta)

    @property
    def exponent(self) -> float:
        """Returns the exponent a of the optimal number of parameters: N_opt ∝ C^a for C = 6 N D FLOPs (equation 4)."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Computes the (parameters N, tokens D) that give the lowest loss subject to 6 N D = `flops` (equation 4)."""
        log_parameters, log_tokens = self.log_optimum(flops)
        return math.exp(log_parameters), math.exp(log_tokens)

    def log_optimum(self, flops):
        """Computes the logs of `optimum`, which are finite for all exponents, for a number or an array of FLOPs."""
        log_ratio = math.log(self.alpha * self.A) - math.log(self.beta * self.B)
        log_parameters = log_ratio / (self.alpha + self.beta) + self.exponent * np.log(flops / 6)
        return log_parameters, np.log(flops / 6) - log_parameters


@dataclasses.dataclass(frozen=True)
class Frontier:
    """A scaling law for the optimal size, but not the loss: N_opt = coefficient * C^exponent, D_opt = C / (6 N_opt).

    C is the number of training FLOPs, N_opt the optimal number of parameters, and D_opt the optimal number of tokens.
    """

    coefficient: float
    exponent: float
    source: str

    @classmethod
    def through(cls, first: tuple[float, float], last: tuple[float, float], source: str) -> "Frontier":
        """Builds the law whose N_opt passes through two points (FLOPs, parameters)."""
        exponent = math.log(last[1] / first[1]) / math.log(last[0] / first[0])
        return cls(first[1] / first[0] ** exponent, exponent, source)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Computes the (parameters N, tokens D) of the optimal run subject to 6 N D = `flops`."""
        parameters = self.coefficient * flops**self.exponent
        return parameters, flops / (6 * parameters)


# NOTE Equation 10 of Hoffmann et al. rounds alpha and beta to 0.34 and 0.28. With the rounded values, the optimum has
# 1.6 times the tokens of the paper's own table A3 (at 10^9 parameters). The digits below come from the paper's TeX, as
# quoted by Besiroglu et al. (table 1). Besiroglu et al. refitted the runs of Hoffmann et al.: the original fit had
# stopped early, and its optimal sizes contradicted approaches 1 and 2. The new fit agrees with both approaches.
# NOTE The constants of Muennighoff et al. 2023 are in huggingface/datablations@1370131:README.md, line 301. Their law
# (line 323) also discounts parameters in excess of what the different text supports. This package leaves this term out:
# with a tuned weight decay, larger models remained better (Kim et al. 2025, arXiv 2509.14786, abstract).
# NOTE For approaches 1 and 2 the paper gives exponents (0.50 and 0.49, table 2) but no coefficients. The laws below
# pass through the first and the last row of the paper's tables of projected optimal sizes.
LAWS: Mapping[str, LossLaw | Frontier] = {
    "besiroglu": LossLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658, "Besiroglu et al. 2024, table 1"),
    "hoffmann": LossLaw(1.6934, 406.4, 0.3392, 410.7, 0.2849, "Hoffmann et al. 2022, approach 3"),
    "muennighoff": LossLaw(
        *(math.exp(0.6254804), math.exp(6.255414), 0.3526596, math.exp(7.3049974), 0.3526596),
        source="Muennighoff et al. 2023",
        repetition=15.387756,
    ),
    "hoffmann1": Frontier.through((1.92e19, 4e8), (1.30e28, 1e13), "Hoffmann et al. 2022, approach 1 (table 3)"),
    "hoffmann2": Frontier.through((1.84e19, 4e8), (1.75e28, 1e13), "Hoffmann et al. 2022, approach 2 (table A3)"),
    # N without embeddings; FLOPs in PF-days, at batch sizes far below the critical batch size
    "kaplan": Frontier(1.3e9 / PF_DAY**0.73, 0.73, "Kaplan et al. 2020, table 6"),
}


def law_of(name: str) -> LossLaw:
    """Loads a law for the loss, by its name in LAWS or from a JSON file that `--fit` or a ladder wrote.

    Args:
      name: a key of LAWS ("besiroglu"), a path that ends in ".json", or a folder that contains law.json.

    Raises:
      UserError: the name or the file does not exist, or the file does not contain a law.
    """
    law_names = {key for key, law in LAWS.items() if isinstance(law, LossLaw)}
    if name in law_names:
        return LAWS[name]
    path = os.path.join(name, LAW_JSON) if os.path.isdir(name) else name
    if not path.endswith(".json"):
        raise UserError(f"--law={name}: {nearest(name, law_names)}; or a .json file that --fit writes")
    try:
        return _law(read_object(path))
    except UserError as e:
        raise UserError(f"--law={name} cannot be read: {e}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"--law={name} is not a law that --fit writes: {type(e).__name__}: {e}") from e


def _law(values: dict) -> LossLaw:
    """Parses the contents of a JSON file that `--fit` or a ladder wrote."""
    names = [*CONSTANTS, *([REPETITION] if REPETITION in values["constants"] else [])]
    constants = {key: float(values["constants"][key]) for key in names}
    runs = tuple(Run(**run) for run in values.get("runs", ()))
    numbers = [*constants.values(), *(x for run in runs for x in (run.parameters, run.tokens, run.loss, run.epochs))]
    if not all(math.isfinite(x) and x > 0 for x in numbers):
        raise ValueError(f"constants and runs must be positive and finite, but are {numbers}")
    fields = {key: values[key] for key in ("source", "with_embeddings", "family")}
    fields["metric"] = str(values.get("metric", LossLaw.metric))
    fields["correlation"] = float(values.get("correlation", 0.0))
    fields["unidentified"], fields["config"] = tuple(values.get("unidentified", ())), values.get("config")
    return LossLaw(**constants, **fields, runs=runs)


# --- Kaplan et al. 2020 --------------------------------------------------------------------------------------------
# N is without embeddings. The corpus is WebText2, with GPT-2's tokenizer.


def kaplan_loss_by_parameters(parameters: float) -> float:
    """Computes the loss of a model with N = `parameters`, trained to convergence on enough text (equation 1.1)."""
    return (8.8e13 / parameters) ** 0.076


def kaplan_loss_by_tokens(tokens: float) -> float:
    """Computes the loss of a sufficiently large model trained on `tokens` tokens with early stopping (equation 1.2)."""
    return (5.4e13 / tokens) ** 0.095


def kaplan_loss_by_flops(flops: float) -> float:
    """Computes the compute-optimal loss for `flops`, at batch sizes far below `critical_batch_size` (equation 1.3)."""
    return (3.1e8 * PF_DAY / flops) ** 0.050


def kaplan_loss(parameters: float, tokens: float) -> float:
    """Computes the loss for N = `parameters` after early-stopped training on `tokens` tokens (equation 1.5).

    The constants come from table 2.
    """
    return ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103


def critical_batch_size(loss: float) -> float:
    """Computes the critical batch size B_crit for reaching a loss, in tokens per update (equation 1.4, table 5).

    With a batch size B, a run needs 1 + B / B_crit times as many tokens as with small batches to reach the same loss
    (equation 5.5). At B_crit, a run therefore needs twice the minimum number of tokens, and also twice the minimum
    number of steps.
    """
    return 2.1e8 / loss ** (1 / 0.21)


# Number of parameters of the largest model of Kaplan et al. Their learning-rate rule is for "most" models and fails
# above 1e10 parameters.
LARGEST_KAPLAN = 1.5e9


def kaplan_learning_rate(parameters: float) -> float:
    """Computes Adam's peak learning rate for N = `parameters` (equation D.1); 0 for 1.2e10 parameters or more."""
    return max(0.003239 - 0.0001395 * math.log(parameters), 0.0)


def learning_rate(parameters: float) -> float:
    """Computes the peak learning rate in the command that `plan` prints, from the number of parameters.

    `parameters` does not count embeddings. Up to the size of Kaplan's largest model, the result is
    `kaplan_learning_rate`. For larger models, the learning rate falls with the exponent that Bi et al. measured for
    FLOPs, -0.1250 (2024, equation 1), given that the FLOPs of optimal runs are proportional to N^2.

    NOTE The learning rate of Bi et al. is about three times as high, with batches of twice as many tokens (their
    equation 1).
    """
    excess = max(parameters / LARGEST_KAPLAN, 1.0)
    return kaplan_learning_rate(parameters / excess) * excess ** (2 * -0.1250)
