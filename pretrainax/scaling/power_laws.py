"""The loss of a Transformer falls with parameters N, tokens D and training FLOPs C, as papers measured it.

Sources: Kaplan et al. 2020 (arXiv 2001.08361), Hoffmann et al. 2022 (arXiv 2203.15556, "Chinchilla"), Besiroglu et al.
2024 (arXiv 2404.10102), Bi et al. 2024 (arXiv 2401.02954, "DeepSeek LLM"). Losses are in nats a token. All were
measured on causal decoders, each on its own text and tokenizer: across papers, only differences of losses mean much.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from pretrainax.config import UserError, nearest
from pretrainax.files.json_files import read_object

PF_DAY = 8.64e19  # FLOPs of a petaflop/s-day


@dataclasses.dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2)."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    source: str
    with_embeddings: bool = True  # N counts the embedding tables (Hoffmann et al. 2022, appendix F)
    family: str = "decoder"  # of the models that were measured

    def loss(self, parameters, tokens):
        """Returns nats a token; numbers or arrays that broadcast."""
        return self.E + self.A / np.power(parameters, self.alpha) + self.B / np.power(tokens, self.beta)

    @property
    def exponent(self) -> float:
        """Returns a of N_opt ∝ C^a, where FLOPs = 6 N D (equation 4)."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Returns (N, D) of the least loss with 6 N D = flops (equation 4)."""
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = g * (flops / 6) ** self.exponent
        return parameters, flops / (6 * parameters)


@dataclasses.dataclass(frozen=True)
class Frontier:
    """N_opt = coefficient * C^exponent, and D_opt = C / (6 N_opt): a law that gives no loss."""

    coefficient: float
    exponent: float
    source: str

    @classmethod
    def through(cls, first: tuple[float, float], last: tuple[float, float], source: str) -> "Frontier":
        """Returns the straight line, in logarithms, through two rows (FLOPs, parameters)."""
        exponent = math.log(last[1] / first[1]) / math.log(last[0] / first[0])
        return cls(first[1] / first[0] ** exponent, exponent, source)

    def optimum(self, flops: float) -> tuple[float, float]:
        parameters = self.coefficient * flops**self.exponent
        return parameters, flops / (6 * parameters)


# NOTE Equation 10 of Hoffmann et al. rounds alpha and beta to 0.34 and 0.28, with which the optimum has 1.6 times the
# tokens of their own table A3 (at 10^9 parameters); these are the digits that Besiroglu et al. (table 1) found in the
# paper's TeX. Besiroglu et al. fitted the same runs anew: the first fit had stopped early, and its frontier
# contradicted approaches 1 and 2, which the new one agrees with.
# NOTE Of approaches 1 and 2 the paper gives exponents (0.50 and 0.49, table 2) and no coefficients: here they are the
# lines through the first and the last row of the tables that project them.
LAWS: Mapping[str, LossLaw | Frontier] = {
    "besiroglu": LossLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658, "Besiroglu et al. 2024, table 1"),
    "hoffmann": LossLaw(1.6934, 406.4, 0.3392, 410.7, 0.2849, "Hoffmann et al. 2022, approach 3"),
    "hoffmann1": Frontier.through((1.92e19, 4e8), (1.30e28, 1e13), "Hoffmann et al. 2022, approach 1 (table 3)"),
    "hoffmann2": Frontier.through((1.84e19, 4e8), (1.75e28, 1e13), "Hoffmann et al. 2022, approach 2 (table A3)"),
    # without embeddings, FLOPs in PF-days at a batch far below the critical one
    "kaplan": Frontier(1.3e9 / PF_DAY**0.73, 0.73, "Kaplan et al. 2020, table 6"),
}


def law_of(name: str) -> LossLaw:
    """Returns a law with a loss by its name in LAWS, or from the JSON that `--fit` writes.

    Raises:
      UserError: no such name or file, or a file that is no such law.
    """
    known = {key for key, law in LAWS.items() if isinstance(law, LossLaw)}
    if name in known:
        return LAWS[name]
    if not name.endswith(".json"):
        raise UserError(f"--law={name}: {nearest(name, known)}; or the .json that --fit writes")
    try:
        return _law(read_object(name))
    except UserError as e:
        raise UserError(f"--law={name} cannot be read: {e}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"--law={name} is no law that --fit writes: {type(e).__name__}: {e}") from e


def _law(values: dict) -> LossLaw:
    constants = {key: float(values["constants"][key]) for key in ("E", "A", "alpha", "B", "beta")}
    if not all(math.isfinite(x) and x > 0 for x in constants.values()):
        raise ValueError(f"constants must be positive, they are {constants}")
    return LossLaw(**constants, **{key: values[key] for key in ("source", "with_embeddings", "family")})


# --- Kaplan et al. 2020 --------------------------------------------------------------------------------------------
# N without embeddings, on WebText2 with GPT-2's tokenizer.


def kaplan_loss_by_parameters(parameters: float) -> float:
    """Returns the loss of a model that is trained on enough text, to convergence (equation 1.1)."""
    return (8.8e13 / parameters) ** 0.076


def kaplan_loss_by_tokens(tokens: float) -> float:
    """Returns the loss of a model that is large enough, stopped early (equation 1.2)."""
    return (5.4e13 / tokens) ** 0.095


def kaplan_loss_by_flops(flops: float) -> float:
    """Returns the loss of the best model for this compute, at a batch far below the critical one (equation 1.3)."""
    return (3.1e8 * PF_DAY / flops) ** 0.050


def kaplan_loss(parameters: float, tokens: float) -> float:
    """Returns the loss on a text of so many tokens, read until it rises (equation 1.5, the constants of table 2)."""
    return ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103


def critical_batch_size(loss: float) -> float:
    """Returns the critical tokens of an update, B_crit (equation 1.4, table 5).

    With it as many examples and as many steps are lost as could be: a batch B takes 1 + B / B_crit times the tokens
    that small ones take to the same loss (equation 5.5).
    """
    return 2.1e8 / loss ** (1 / 0.21)


# of the largest model there; the rule for rates is theirs for "most" models, and fails above 1e10 parameters
LARGEST_KAPLAN = 1.5e9


def kaplan_learning_rate(parameters: float) -> float:
    """Returns the peak rate of Adam (equation D.1); it falls to zero at 1.2e10 parameters."""
    return max(0.003239 - 0.0001395 * math.log(parameters), 0.0)


def deepseek_learning_rate(flops: float) -> float:
    """Returns the peak rate of AdamW (Bi et al. 2024, equation 1).

    Fitted from 1e17 to 2e19 FLOPs, used up to 67e9 parameters.
    """
    return 0.3118 * flops**-0.1250


def learning_rate(parameters: float) -> float:
    """Returns the peak rate, of parameters without embeddings: Kaplan's up to the largest of their models.

    From there it falls as Bi's does with the FLOPs of the best runs, which are as N^2.

    NOTE Bi's own rate is about three times this, at batches of twice the tokens (their equation 1).
    """
    beyond = max(parameters / LARGEST_KAPLAN, 1.0)
    return kaplan_learning_rate(parameters / beyond) * beyond ** (2 * -0.1250)
