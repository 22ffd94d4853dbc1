"""Defines the config of a recurrent model with character-based word embeddings (ELMo)."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Optional

from pretrainax.config.heads import Classify, Kind
from pretrainax.config.kinds import ModelPart, Use
from pretrainax.config.positions import NoPositions

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment
    from pretrainax.config.model import ModelConfig

WORD_LENGTH = 50  # maximum UTF-8 bytes of a word, including its begin and end markers (bilm-tf)
# Size of the character vocabulary of bilm-tf: an id for positions without a word (0), 256 bytes, the begin and end of a
# document, the begin and end of a word, and the padding after a word.
NUM_CHARACTERS = 262

# Fields of config.model that a recurrent model does not support -> their required values.
_UNSUPPORTED = {
    "tie_embeddings": False,
    "embedding_dim": None,
    "embedding_norm": False,
    "scale_embeddings": False,
    "num_token_types": 0,
    "latent_attention": None,
    "experts": None,
    "input_convolution": None,
    "masked_lm_head": False,
    "enhanced_mask_decoder": False,
    "generator": None,
}


@dataclasses.dataclass
class Recurrent(ModelPart):
    """Config of a model of bidirectional LSTMs over words (ELMo: Peters et al. 2018, arXiv 1802.05365, section 3).

    Word embeddings are computed from characters (Jozefowicz et al. 2016, arXiv 1602.02410, section 3.1), so only the
    softmax has parameters for each word. An LSTM's cell state has width config.model.d_ff, and its output is
    projected to width config.model.d_model.
    """

    character_dim: int = 16  # width of the embedding of a character
    # number of filters of each convolution over characters; the convolutions have the widths 1, 2, …
    filters: tuple[int, ...] = (32, 32, 64, 128, 256, 512, 1024)
    highways: int = 2  # highway layers after the convolutions (Srivastava et al. 2015, arXiv 1505.00387)
    clip: Optional[float] = 3.0  # limit of the absolute values of cell state and output; None: no limit

    family: ClassVar[str] = "recurrent"
    objective: ClassVar[str] = "BidirectionalLM"
    unsupported: ClassVar[Mapping[Use, str]] = {
        "generation": "is a recurrent model, which does not support generation: use it for embeddings and fine-tuning",
        "distillation": "is recurrent",
        "virtual tokens": "is recurrent and has no token embedding table",
        "sequence parallelism": "is an LSTM, which reads a document word by word",
    }
    task_modules: ClassVar[tuple[str, ...]] = ("scalar_mix",)

    def stream_width(self, model: "ModelConfig") -> int:
        return 2 * model.d_model  # both directions, concatenated

    def default_classifier(self, num_labels: int, kind: "Kind") -> Classify:
        # "mean", because the two directions end at opposite ends of a document
        return Classify(num_labels, kind, pooling="mean", hidden="none")

    def scaled(self, numerator: int, denominator: int) -> "Recurrent":
        return dataclasses.replace(self, filters=tuple(n * numerator // denominator for n in self.filters))

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.parts: Recurrent", experiment.model
        if self.character_dim < 1 or self.highways < 0:
            yield f"{path}.character_dim is {self.character_dim} (at least 1), highways is {self.highways} (at least 0)"
        if not 0 < len(self.filters) <= WORD_LENGTH or min(self.filters) < 1:
            yield f"{path}.filters is {self.filters}, it must have 1 to {WORD_LENGTH} numbers, each at least 1"
        if self.clip is not None and self.clip <= 0:
            yield f"{path}.clip is {self.clip}, it must be greater than 0; None disables clipping"
        if not isinstance(model.position, NoPositions):
            yield (
                f"config.model.position is {type(model.position).__name__}, and a recurrent model does not use "
                "positions: set it to NoPositions()"
            )
        for name, value in _UNSUPPORTED.items():
            if getattr(model, name) != value:
                yield f"config.model.{name} is {getattr(model, name)!r}, a recurrent model requires {value}"
